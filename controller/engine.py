"""The engine: plan a step, run it on the workers, commit it, hand out the tokens; repeat.

A plain class on an event loop. `actor.py` puts it into the Ray actor that users meet; tests run it as it is.
"""

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from ..errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    OutOfMemory,
    Overloaded,
)
from ..kvcache.check import Recount, recount
from ..kvcache.manager import CacheManager, RequestId
from ..kvcache.tables import SALT
from ..proto.request import USUAL_TERMS, Image, SamplingParams, Terms
from ..proto.step import Step, StepResult
from ..proto.tracing import Tracer
from ..proto.worker import WorkerStatus
from .accounts import Accounts
from .admission.overload import Gate, GateSettings
from .admission.structured_output import StructuredOutput, too_complex
from .admission.validation import check, lay_out_images
from .cache_watchers import CacheWatchers
from .delivery import Sink, Subscribers
from .info import CacheState, EngineInfo, EngineLoad, GroupState, Probe
from .losses import GIVE_UP_AFTER_S, Losses, NoRoom
from .metrics import Meter, Metrics
from .request import SUSPICIOUS_LOSSES, Request
from .scheduling.scheduler import Outcome, Scheduler
from .snapshot import EngineView, Journal, Look, StepView, counted, request_views

logger = logging.getLogger(__name__)


MOST_LOSSES = SUSPICIOUS_LOSSES + 2
"""Times that a request goes on after the workers were lost while it ran, without a token of it in between. At the last
three of them it runs alone: one of those may be chance, where somebody kills workers as soon as they are back."""

SUSPECT_FOR_S = 5.0
"""The same in time, since the first of them: whatever kills workers beside their steps may be done then."""


class StepRunner(Protocol):
    """Whoever runs steps: the worker group, or one worker in this process."""

    def start_step(self, step: Step) -> Awaitable[StepResult]:
        """Send a step on its way at once; its answer comes later. Answers are awaited in the order of steps."""
        ...

    async def prepare_form(self, kind: str, text: str) -> None:
        """Compile the form of an answer, beside the steps. Raises `InvalidRequest`, naming the field."""
        ...

    async def lost(self) -> IntarsiaError:
        """Wait until nothing can run any more; why that is."""
        ...

    async def rebuild(self) -> None:
        """Something is lost: begin again, with empty pages. Raises `EngineUnavailable` when that did not succeed, and
        `NoRoom` when it can not."""
        ...

    async def status(self) -> Sequence[WorkerStatus]:
        """How each rank is, asked beside the steps."""
        ...


@dataclass(slots=True)
class EngineStats:
    """Counters since the start. Times are of the controller process, in microseconds."""

    steps: int = 0
    prompt_tokens: int = 0  # of answers that have begun
    cached_tokens: int = 0  # of them, found in the prefix cache
    generated_tokens: int = 0
    computed_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    expired_requests: int = 0
    refused_requests: int = 0  # because more came than can be served
    preemptions: int = 0
    swaps: int = 0  # of them, those whose blocks went to host memory
    plan_us: float = 0.0  # choosing the work of a step, and its blocks
    commit_us: float = 0.0  # entering its tokens, naming and giving back blocks, handing out
    wait_us: float = 0.0  # with nothing to do but wait for a worker's answer
    run_us: float = 0.0  # that rank 0 spent on steps
    rebuilds: int = 0  # times that the workers were lost and came back


class _UnderWay(NamedTuple):
    """A step that was sent."""

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
        gate: GateSettings | None = None,
        losses: Losses | None = None,
    ):
        """losses: when workers are given up
        depth: steps under way at once. 2: one runs while the next is planned; 1: each waits for the one before."""
        self.tracer = tracer
        self._gate = Gate(gate or GateSettings(), lambda: scheduler.is_full, lambda: scheduler.num_seats)
        self.info = info
        self.stats = EngineStats()
        self._scheduler = scheduler
        self._manager = manager
        self._workers = workers
        self._losses = losses or Losses(GIVE_UP_AFTER_S)
        self._live: dict[RequestId, Request] = {}
        self._next_id = 0
        self._depth = depth
        self._under_way: deque[_UnderWay] = deque()  # oldest first
        self._meter = Meter()
        self._accounts = Accounts(info, manager)
        self._journal = Journal()
        self._wake = asyncio.Event()
        self._structured_output = StructuredOutput(workers)
        self._lost: IntarsiaError | None = None  # why the workers can not go on
        self._failure: IntarsiaError | None = None  # why nothing can go on
        self.is_broken = False  # by a bug: what it knows is not to be trusted, and another one in its place may go on
        self.cache_watchers = CacheWatchers(manager)
        self._subscribers = Subscribers()
        self.is_leaving = False  # whoever asks where to send requests is told to look elsewhere

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        handle: int,
        sink: Sink,
        images: Sequence[Image] = (),
        terms: Terms = USUAL_TERMS,
        stream_interval_s: float = 0.0,
        prompt_tokens: int | None = None,
        is_known: bool = False,
    ) -> list[RequestId]:
        """Queue a request; its tokens go to `sink`. One id per answer, whose handles are `handle` and those after it.

        prompt_tokens: of `tokens`, where an answer goes on that began elsewhere; None: all of them
        stream_interval_s: from one delta of an answer to its next; 0: each token at once; infinite: all at its end.
            At least `PRESSED_INTERVAL_S` while more requests come than can be served
        is_known: it was taken before, by an engine that has gone

        Raises `InvalidRequest` if it can not be served as asked, `Overloaded` if it can not be in time.
        """
        if self._failure is not None:
            raise self._failure
        prompt = len(tokens) if prompt_tokens is None else prompt_tokens
        max_total_tokens = check(tokens, prompt, sampling, self.info, self._manager.plan)
        gallery = lay_out_images(tokens[:prompt], images, self.info, self._manager.plan)
        if not is_known:
            image_bytes = sum(len(image.data) for image in images)
            try:
                self._gate.check(terms.tenant, prompt, image_bytes, sampling.n, terms.timeout_s)
            except Overloaded:
                self.refused(1)
                self._accounts.add(terms.salt, refused_requests=1)
                self._feel_pressure()
                raise
        self._feel_pressure()
        seed = secrets.randbits(63) if sampling.seed is None else sampling.seed
        ends = frozenset(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= frozenset(self.info.eos_token_ids)
        requests = []
        for index in range(sampling.n):
            self._next_id += 1
            requests.append(
                Request(
                    id=RequestId(self._next_id),
                    tokens=list(tokens),
                    prompt_tokens=prompt,
                    sampling=sampling,
                    seed=(seed + index) % 2**63,
                    stop_token_ids=ends,
                    max_total_tokens=max_total_tokens,
                    terms=terms,
                    subscriber=self._subscribers.add(sink, handle + index, stream_interval_s, sent=len(tokens)),
                    gallery=gallery,
                    prompt_logprobs=[] if sampling.prompt_logprobs is not None and not index else None,
                )
            )
        self._meter.submitted(sampling.n, sampling.max_tokens)
        self._live.update((request.id, request) for request in requests)
        self._gate.entered(requests, is_known=is_known)
        if sampling.form is None:
            self._queue(requests)
        else:
            self._structured_output.compile(sampling.form, partial(self._queue_compiled, requests))
        return [request.id for request in requests]

    def refused(self, requests: int) -> None:
        """So many more, here or by a front end that knew."""
        self.stats.refused_requests += requests

    def _feel_pressure(self) -> None:
        self._subscribers.press(self._gate.is_pressed, self._live.values())

    def _queue(self, requests: list[Request]) -> None:
        self._scheduler.add(requests[0], requests[1:])
        self._wake.set()

    def _queue_compiled(self, requests: list[Request], refusal: IntarsiaError | None) -> None:
        """The form of their answers is compiled, or cannot be. Some may have been aborted meanwhile."""
        live = [request for request in requests if request.id in self._live]
        if refusal is None and live:
            self._queue(live)
        elif refusal is not None:
            for request in live:
                self._forget(request)
                self._subscribers.send_error(request, refusal)

    def abort(self, request_id: RequestId) -> None:
        """Stop an answer and free its blocks. Unknown or finished ones are left alone."""
        request = self._live.get(request_id)
        if request is None:
            return
        self._forget(request)
        if self._scheduler.abort(request_id):
            self.stats.aborted_requests += 1
            self._accounts.add(request.terms.salt, aborted_requests=1)
            self._end_early(request, "abort")
            self._wake.set()

    def _forget(self, request: Request) -> None:
        del self._live[request.id]
        self._gate.left(request)
        self._accounts.left(request)

    def _end_early(self, request: Request, how: str) -> None:
        self._meter.ended(how)
        self._journal.ended(request, how, time.monotonic())

    @property
    def failure(self) -> IntarsiaError | None:
        """Why nothing can go on; None while it can."""
        return self._failure

    def recount(self) -> Recount:
        """Count every block from the tables. Raises `AssertionError` on any contradiction."""
        return recount(self._manager)

    def reset_prefix_cache(self) -> None:
        self._manager.reset_prefix_cache()
        self.cache_watchers.send()

    def load(self, viewer: str | None = None) -> EngineLoad:
        """viewer: whose salt the figures are of; None: of all."""
        if viewer is not None:
            return self._accounts.load(viewer, self._live.values(), self.stats.rebuilds)
        pool, stats = self._manager.pool, self.stats
        return EngineLoad(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            pool.num_free,
            pool.num_kept,
            self.info.num_blocks,
            stats.steps,
            stats.prompt_tokens,
            stats.cached_tokens,
            stats.generated_tokens,
            stats.finished_requests,
            stats.aborted_requests,
            stats.expired_requests,
            stats.preemptions,
            stats.rebuilds,
            stats.refused_requests,
        )

    def metrics(self) -> Metrics:
        return self._meter.read(self._manager)

    async def view(self, look: Look) -> EngineView:
        """All there is to see, at one moment between two steps."""
        try:
            workers = tuple(await self._workers.status())
        except IntarsiaError:  # lost: the requests are told by the loop
            workers = ()
        now_s = time.monotonic()
        count, faults = counted(self._manager) if look.with_recount else (None, "")
        return EngineView(
            now_s,
            self.load(),
            self.cache_state(),
            request_views(
                self._live.values(),
                self._manager,
                now_s,
                with_blocks=look.with_pool,
                with_tokens=look.with_tokens,
            ),
            self._journal.all_ended(look.with_tokens),
            self._journal.steps(look.since_step),
            workers,
            self._manager.pool.map() if look.with_pool else None,
            count,
            faults,
            self._meter.latencies(now_s),
        )

    def probe(self, tokens: Sequence[int], salt: str = "") -> Probe:
        """What a request with this prompt would meet. Nothing is touched."""
        cached_tokens = self._manager.lookup(tokens, salt.encode()).tokens if tokens else 0
        return Probe(cached_tokens, self._scheduler.queued_tokens, self._scheduler.num_running, self.is_leaving)

    def cache_state(self, viewer: str | None = None) -> CacheState:
        """viewer: whose salt the figures are of; None: of all."""
        if viewer is not None:
            return self._accounts.cache_state(viewer, self._live.values())
        pool = self._manager.pool
        groups = tuple(
            GroupState(group.kind, group.block_tokens, pool.num_held(number), len(pool.index(number)))
            for number, group in enumerate(self.info.groups)
        )
        held = self.info.num_blocks - pool.num_free
        return CacheState(held, pool.num_kept, pool.num_blank, self._manager.num_open, groups)

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. Workers that are lost are built again, and requests go on where they were; when that
        fails, or on a bug of ours, every request is told, and new ones are refused."""
        try:
            while True:
                try:
                    await self._serve()
                except EngineUnavailable as error:
                    await self._recover(error)
        except IntarsiaError as error:
            logger.error("the engine stops: %s", error)
            self._fail(error)
        except Exception as error:  # a bug of ours must still reach every waiting caller
            logger.exception("the engine stops on an internal error")
            self.is_broken = True
            self._fail(
                EngineUnavailable(f"the engine stopped on an internal error: {error!r}. See the controller's log.")
            )
        finally:
            self._give_up_steps()

    async def _serve(self) -> None:
        """Run steps until the workers are lost: raises `EngineUnavailable` then."""
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
        """A worker that dies while nothing runs is found out by no step."""
        self._lost = await self._workers.lost()
        self._wake.set()

    async def _recover(self, error: IntarsiaError) -> None:
        """Begin again with new workers: epoch + 1, an empty cache, and everybody waits with the tokens they have."""
        started = time.monotonic()
        logger.warning("the workers are lost (%s); building them again", error)
        self._give_up_steps()
        if isinstance(error, OutOfMemory):
            self._scheduler.shrink()
        for request in self._scheduler.start_anew():
            if request.losses > MOST_LOSSES and started - request.first_loss_s >= SUSPECT_FOR_S:
                self._give_up(request, error)
        self.cache_watchers.send()
        await self._losses.bear(error)
        while not await self._rebuilt(error):
            pass
        self._losses.back()
        self._lost = None
        self.stats.rebuilds += 1
        took_s = time.monotonic() - started
        logger.warning("the workers are back after %.1f s; %d requests go on", took_s, len(self._live))

    async def _rebuilt(self, error: IntarsiaError) -> bool:
        """False when it did not succeed, and may the next time. error: why the workers were lost at first."""
        try:
            await self._workers.rebuild()
        except NoRoom as failure:
            raise EngineUnavailable(f"{error}, and {failure}") from failure
        except EngineUnavailable as failure:
            logger.warning("%s", failure)
            await self._losses.bear(failure)
            return False
        return True

    def _give_up(self, request: Request, error: IntarsiaError) -> None:
        """It may be what the workers die of: others are not to suffer from it for ever."""
        if request.id in self._live and self._scheduler.abort(request.id):
            self._forget(request)
            message = (
                f"the workers were lost {request.losses} times while this request ran, in the end alone, and it got no "
                f"token in between: they seem to die of it; last: {error}"
            )
            self._subscribers.send_error(request, EngineUnavailable(message))
            self._end_early(request, "error")

    def _give_up_steps(self) -> None:
        for sent in self._under_way:
            sent.answer.cancel()
        self._under_way.clear()

    def _send_steps(self) -> None:
        """Keep the workers busy: while one step runs, the next one waits at their door."""
        while len(self._under_way) < self._depth and self._scheduler.has_work:
            started = time.perf_counter()
            step = self._scheduler.plan_step()
            self._tell_expired()
            plan_us = (time.perf_counter() - started) * 1e6
            self.stats.plan_us += plan_us
            if step is None:
                return
            self._under_way.append(_UnderWay(step, asyncio.ensure_future(self._workers.start_step(step)), plan_us))

    async def _finish_oldest(self) -> None:
        """Wait for the answer to the oldest step; new requests need not wait for it if there is room for a step."""
        step, answer, plan_us = self._under_way[0]
        started = time.perf_counter()
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
        self._losses.progress()
        outcome = self._scheduler.commit(result)
        self._enter(outcome, time.monotonic())
        self._tell_failed(outcome)
        if self.cache_watchers.is_watched:
            self.cache_watchers.send()
        commit_us = (time.perf_counter() - answered) * 1e6
        self._count(step, result, outcome, plan_us=plan_us, wait_us=(answered - started) * 1e6, commit_us=commit_us)
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
        """Enter what a step brought: answers that begin and end, and what is to be sent."""
        for entry in outcome.notable:
            request = entry.request
            if request.has_just_begun:
                self.stats.prompt_tokens += request.prompt_tokens
                self.stats.cached_tokens += request.cached_tokens
                self._accounts.add(
                    request.terms.salt, prompt_tokens=request.prompt_tokens, cached_tokens=request.cached_tokens
                )
                self._meter.began(request, now_s)
                self._gate.began(request)
            if entry.finish_reason is not None:
                self._forget(request)
                self.stats.finished_requests += 1
                self._accounts.add(request.terms.salt, finished_requests=1)
                self._meter.finished(request, entry.finish_reason.value, now_s)
                self._journal.ended(request, entry.finish_reason.value, now_s)
                if self.tracer is not None and request.terms.trace:
                    self._trace(self.tracer, request, now_s)
        self._subscribers.send(outcome, now_s)

    def _trace(self, tracer: Tracer, request: Request, ended_s: float) -> None:
        """Where the time of a request went that has come to its end."""
        prompt = {
            "gen_ai.usage.input_tokens": request.prompt_tokens,
            "intarsia.cached_tokens": request.cached_tokens,
            # Not what another salt has: a tenant's own traces would tell what others asked.
            **{
                f"intarsia.lost_tokens.{cause}": tokens
                for cause, tokens in request.lost_tokens.items()
                if cause != SALT
            },
        }
        answer = {
            "gen_ai.usage.output_tokens": len(request.tokens) - request.prompt_tokens,
            "intarsia.preemptions": request.preemptions,
        }
        first_s = request.first_token_s or request.admitted_s  # it may have had tokens when it came
        for name, start_s, end_s, about in (
            ("queue", request.arrival_s, request.admitted_s, {"intarsia.priority": request.terms.priority}),
            ("prefill", request.admitted_s, first_s, prompt),
            ("decode", first_s, ended_s, answer),
        ):
            tracer.record(name, [request.terms.trace], start_s, end_s, about)

    def _tell_expired(self) -> None:
        for request in self._scheduler.take_expired():
            self._forget(request)
            generated = len(request.tokens) - request.prompt_tokens
            state = f"{generated} tokens of at most {request.max_total_tokens - request.prompt_tokens} were generated"
            self._subscribers.send_error(
                request,
                DeadlineExceeded(
                    f"the request's {request.terms.timeout_s:g} s are over; {state}. Give it more time, or ask less.",
                    field="timeout_s",
                    generated_tokens=generated,
                ),
            )
            self.stats.expired_requests += 1
            self._accounts.add(request.terms.salt, expired_requests=1)
            self._end_early(request, "deadline")

    def _tell_failed(self, outcome: Outcome) -> None:
        for request, why in outcome.failed:
            self._forget(request)
            generated = len(request.tokens) - request.prompt_tokens
            self._subscribers.send_error(request, too_complex(request.sampling.form, generated, why))
            self._end_early(request, "error")

    def _fail(self, error: IntarsiaError) -> None:
        self._failure = error
        self._structured_output.close()
        for request in list(self._live.values()):
            self._forget(request)
            self._subscribers.send_error(request, error)
            self._end_early(request, "error")

    def _count(
        self, step: Step, result: StepResult, outcome: Outcome, *, plan_us: float, wait_us: float, commit_us: float
    ) -> None:
        stats, now_s = self.stats, time.monotonic()
        began = ended = 0
        for entry in outcome.notable:
            began += entry.request.has_just_begun
            ended += entry.finish_reason is not None
        generated = len(outcome.tokens) + len(outcome.notable)
        computed = len(step.decode) + sum(advance.tokens for advance in step.advance)
        running = self._scheduler.num_seated
        self._meter.stepped(computed + began, generated - began, now_s)
        self._journal.stepped(
            StepView(
                step.number,
                now_s,
                int(plan_us),
                int(wait_us),
                int(commit_us),
                result.run_us,
                generated - began,
                computed - (generated - began),
                began,
                ended,
                running,
                max(0, len(self._live) - running),
                self._scheduler.preemptions - stats.preemptions,
            )
        )
        stats.steps += 1
        stats.generated_tokens += generated
        stats.computed_tokens += computed
        stats.preemptions = self._scheduler.preemptions
        stats.swaps = self._scheduler.swaps
        stats.wait_us += wait_us
        stats.commit_us += commit_us
        stats.run_us += result.run_us
