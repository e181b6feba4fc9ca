"""The engine: plan a step, run it on the workers, commit it, send the tokens; repeat.

A plain class on an event loop; `actor.py` makes the Ray actor of it that users meet. What else an engine does is done
by objects beside the loop: admission, delivery, telemetry, status, watchers of the cache.
"""

import asyncio
import logging
import time
from collections import deque
from functools import partial
from typing import NamedTuple

from ..errors import EngineUnavailable, IntarsiaError, OutOfMemory, Overloaded
from ..kvcache.check import Recount, recount
from ..kvcache.ids import RequestId
from ..kvcache.manager import CacheManager
from ..proto.request import GenerateRequest
from ..proto.status import EngineInfo
from ..proto.step import Step, StepResult
from ..proto.tracing import Tracer
from .admission.admission import Admission
from .admission.overload import OverloadGuard, OverloadSettings
from .admission.structured_output import StructuredOutput, too_complex
from .cache_watchers import CacheWatchers
from .delivery import Sink, Subscribers
from .losses import GIVE_UP_AFTER_S, Losses, given_up_with, is_the_cause
from .preparing import Preparing
from .request import Request
from .scheduling.deadlines import exceeded
from .scheduling.outcome import Outcome
from .scheduling.scheduler import Scheduler
from .status import Status
from .step_runner import StepRunner
from .telemetry import LoopTimes, Telemetry

logger = logging.getLogger(__name__)


class _SentStep(NamedTuple):
    """A step that the workers have not answered yet."""

    step: Step
    answer: asyncio.Future[StepResult]
    plan_us: float


class Engine:
    """Owns the scheduler and the block pool. All methods are called on one event loop."""

    def __init__(
        self,
        info: EngineInfo,
        scheduler: Scheduler,
        manager: CacheManager,
        workers: StepRunner,
        depth: int = 2,
        tracer: Tracer | None = None,
        overload: OverloadSettings | None = None,
        losses: Losses | None = None,
    ):
        """depth: steps under way at once. 2: one runs while the next is planned; 1: each waits for the one before
        losses: when workers are given up"""
        self.info = info
        self.failure: IntarsiaError | None = None  # why nothing can go on
        self.is_broken = False  # by a bug: what it knows is not to be trusted; another engine in its place may go on
        self.cache_watchers = CacheWatchers(manager)
        self._scheduler = scheduler
        self._manager = manager
        self._workers = workers
        self._live: dict[RequestId, Request] = {}  # the requests that have not left
        self._overload = OverloadGuard(overload or OverloadSettings(), scheduler)
        self._admission = Admission(info, manager, self._overload)
        self._structured_output = StructuredOutput(workers)
        self._subscribers = Subscribers()
        self.telemetry = Telemetry(scheduler, self._live, tracer)
        self.stats = self.telemetry.stats
        self.status = Status(info, scheduler, manager, workers, self.telemetry, self._live)
        self._losses = losses or Losses(GIVE_UP_AFTER_S)
        self._lost: IntarsiaError | None = None  # why the workers cannot go on
        self._depth = depth
        self._under_way: deque[_SentStep] = deque()  # oldest first
        self._wake = asyncio.Event()
        self.preparing = Preparing(self._admission, scheduler.preparation, self._wake.set)

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(self, asked: GenerateRequest, handle: int, sink: Sink) -> list[RequestId]:
        """Queue a request; its tokens go to `sink`. One id per answer, whose handles are `handle` and those after it.
        Raises `InvalidRequest` if it cannot be served as asked, `Overloaded` if it cannot be in time."""
        if self.failure is not None:
            raise self.failure
        try:
            requests = self._admission.admit(asked)
        except Overloaded:
            self.telemetry.refused(1, asked.options.salt)
            raise
        finally:
            self._subscribers.press(self._overload.is_pressed, self._live.values())
        for place, request in enumerate(requests):
            self._subscribers.add(request, sink, handle + place, asked.stream_interval_s)
            self._live[request.id] = request
        self.telemetry.submitted(asked.sampling.n, asked.sampling.max_tokens)
        self._overload.entered(requests, is_known=asked.is_known)
        # Structured output waits until the workers have compiled its form; requests that run do not wait for that.
        if asked.sampling.form is None:
            self._queue(requests)
        else:
            self._structured_output.compile(asked.sampling.form, partial(self._queue, requests))
        return [request.id for request in requests]

    def _queue(self, requests: list[Request], refusal: IntarsiaError | None = None) -> None:
        """Answers to one prompt. refusal: why their form cannot be compiled. Some may have been aborted meanwhile."""
        live = [request for request in requests if request.id in self._live]
        if refusal is not None:
            for request in live:
                self._forget(request)
                self._subscribers.send_error(request, refusal)
        elif live:
            self._scheduler.add(live[0], live[1:])
            self._wake.set()

    def abort(self, request_id: RequestId) -> None:
        """Stop an answer and free its blocks. Unknown or finished ones are left alone."""
        request = self._live.get(request_id)
        if request is None:
            return
        if self._scheduler.abort(request_id):
            self._end(request, "abort", time.monotonic())
            self._wake.set()
        else:  # its form is being compiled
            self._forget(request)

    def end_soon(self, request_id: RequestId) -> None:
        """The text of an answer is complete: it ends as one that ends by itself."""
        if request_id in self._live:
            self._live[request_id].end_soon()

    def _forget(self, request: Request) -> None:
        del self._live[request.id]
        self._overload.left(request)
        self.telemetry.left(request)

    def _end(self, request: Request, how: str, now_s: float, error: IntarsiaError | None = None) -> None:
        """A request leaves, which is noted. error: what its subscriber is sent."""
        self._forget(request)
        self.telemetry.ended(request, how, now_s)
        if error is not None:
            self._subscribers.send_error(request, error)

    def recount(self) -> Recount:
        """Count every block from the tables. Raises `AssertionError` on any contradiction."""
        return recount(self._manager)

    def reset_prefix_cache(self) -> None:
        self._manager.reset_prefix_cache()
        self.cache_watchers.send()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Workers that are lost are built again, and requests go on where they were. When that
        fails, or on a bug of ours, every request is sent an error, and new ones are refused."""
        try:
            while True:
                try:
                    await self._serve()
                except EngineUnavailable as error:
                    await self._recover(error)
        except IntarsiaError as error:
            logger.error("the engine stops: %s", error)
            self._fail(error)
        except Exception as error:  # a bug of ours must still reach every subscriber
            logger.exception("the engine stops on an internal error")
            self.is_broken = True
            message = f"the engine stopped on an internal error: {error!r}. See the controller's log."
            self._fail(EngineUnavailable(message))
        finally:
            self._forget_steps()

    async def _serve(self) -> None:
        """Run steps until the workers are lost. Raises `EngineUnavailable` then."""
        watch = asyncio.ensure_future(self._watch())
        try:
            while True:
                self._send_steps()
                if self._under_way:
                    await self._finish_oldest()
                else:
                    await self._wait_for_work()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """When a worker dies while nothing runs, no step shows it."""
        self._lost = await self._workers.lost()
        self._wake.set()

    async def _recover(self, error: IntarsiaError) -> None:
        """Begin again with new workers and an empty cache; all requests wait with the tokens they have."""
        started_s = time.monotonic()
        logger.warning("the workers are lost (%s); building them again", error)
        self._forget_steps()
        if isinstance(error, OutOfMemory):
            self._scheduler.shrink()
        # Requests that may be what the workers die of are given up. Those that have left are unknown to the scheduler.
        for request in self._scheduler.start_anew():
            if is_the_cause(request.losses, request.first_loss_s) and self._scheduler.abort(request.id):
                self._end(request, "error", time.monotonic(), given_up_with(request.losses, error))
        self.cache_watchers.send()
        await self._losses.rebuild(self._workers.rebuild, error)
        self._lost = None
        self.telemetry.rebuilt()
        took_s = time.monotonic() - started_s
        logger.warning("the workers are back after %.1f s; %d requests go on", took_s, len(self._live))

    def _forget_steps(self) -> None:
        for sent in self._under_way:
            sent.answer.cancel()
        self._under_way.clear()

    def _send_steps(self) -> None:
        """Keep the workers busy: while one step runs, the next one waits for them."""
        while len(self._under_way) < self._depth and self._scheduler.has_work:
            started = time.perf_counter()
            step = self._scheduler.plan_step()
            for request in self._scheduler.take_expired():
                self._end(request, "deadline", time.monotonic(), exceeded(request))
            plan_us = (time.perf_counter() - started) * 1e6
            self.telemetry.planned(plan_us)
            if step is None:
                return
            self._under_way.append(_SentStep(step, asyncio.ensure_future(self._workers.start_step(step)), plan_us))

    async def _finish_oldest(self) -> None:
        """Wait for the answer to the oldest step, and enter what it brought."""
        step, answer, plan_us = self._under_way[0]
        started = time.perf_counter()
        # While there is room for another step, a new request ends the wait.
        if len(self._under_way) < self._depth:
            self._wake.clear()
            woken = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait((answer, woken), return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
            if not answer.done():
                return
        result = await answer
        answered = time.perf_counter()
        self._under_way.popleft()
        if self._losses.in_a_row:
            self._losses.progress()
        outcome = self._scheduler.commit(result)
        self._enter(outcome, time.monotonic())
        if self.cache_watchers.is_watched:
            self.cache_watchers.send()
        wait_us, commit_us = (answered - started) * 1e6, (time.perf_counter() - answered) * 1e6
        self.telemetry.stepped(step, result, outcome, LoopTimes(plan_us, wait_us, commit_us))
        # Let front ends submit, abort and receive before the next plan, even if no await above had to wait.
        await asyncio.sleep(0)

    async def _wait_for_work(self) -> None:
        await asyncio.sleep(0)
        while not self._scheduler.has_work:
            if self._lost is not None:
                raise self._lost
            self._wake.clear()
            await self._wake.wait()

    def _enter(self, outcome: Outcome, now_s: float) -> None:
        """What a step brought: requests begin and end, and subscribers are sent their tokens."""
        for request, _, finish_reason, _ in outcome.notable:
            if request.has_just_begun:
                self.telemetry.began(request, now_s)
                self._overload.began(request)
            if finish_reason is not None:
                self._end(request, finish_reason.value, now_s)
        self._subscribers.send(outcome, now_s)
        for request, why in outcome.failed:
            self._end(request, "error", now_s, too_complex(request, why))

    def _fail(self, error: IntarsiaError) -> None:
        self.failure = error
        self._structured_output.close()
        for request in list(self._live.values()):
            self._end(request, "error", time.monotonic(), error)
