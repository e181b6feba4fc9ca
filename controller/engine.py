"""The engine: plan a step, run it on the workers, commit it, hand out the tokens; repeat.

A plain class on an event loop. `actor.py` puts it into the Ray actor that users meet; tests run it as it is.
"""

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple, Protocol

from ..errors import (
    ContextTooLong,
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    OutOfMemory,
    Overloaded,
    RequestTooLarge,
)
from ..kvcache.check import Recount, recount
from ..kvcache.events import Cleared, Event, EventLog, of_owner
from ..kvcache.group_table import SALT
from ..kvcache.ids import RequestId
from ..kvcache.manager import CacheManager
from ..proto.step import Step, StepResult
from ..proto.tracing import Tracer
from ..proto.worker import WorkerStatus
from .accounts import Accounts
from .admission.overload import Gate, GateSettings
from .deltas import Rows, TokenDelta, TokenLogprobs
from .images import Gallery, Image, lay_out
from .info import CacheState, EngineInfo, EngineLoad, GroupState, Probe
from .losses import GIVE_UP_AFTER_S, Losses, NoRoom
from .metrics import Meter, Metrics
from .request import SUSPICIOUS_LOSSES, USUAL_TERMS, Request, SamplingParams, Terms
from .scheduling.scheduler import Outcome, Progress, Scheduler
from .snapshot import EngineView, Journal, Look, StepView, counted, request_views

logger = logging.getLogger(__name__)


MOST_LOSSES = SUSPICIOUS_LOSSES + 2
"""Times that a request goes on after the workers were lost while it ran, without a token of it in between. At the last
three of them it runs alone: one of those may be chance, where somebody kills workers as soon as they are back."""

SUSPECT_FOR_S = 5.0
"""The same in time, since the first of them: whatever kills workers beside their steps may be done then."""

LOOK_AGAIN_S = 0.2

PRESSED_INTERVAL_S = 0.05
"""From one piece of an answer to its next, under pressure: what is saved on messages goes into answers."""

FORM_TIMEOUT_S = 5.0
"""For compiling the form of an answer. Usual ones take milliseconds, the first one of a model a second more."""


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


class Delivery(NamedTuple):
    """What one step brought to one front end. Most of it is a token each, so those are columns."""

    handles: list[int]
    tokens: list[int]
    others: list[tuple[int, TokenDelta | IntarsiaError]]  # first and last tokens, log-probabilities, errors


Outlet = Callable[[Delivery], None]
"""Takes what one step brought to the requests of one front end, by the handles that it gave them."""


Watcher = Callable[[list[Event]], None]
"""Takes what changed in the prefix cache since it was last called."""


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


class _Caller:
    """Who asked for an answer, and what it has not been told yet because it wants several tokens at once."""

    __slots__ = ("handle", "interval_s", "kept", "next_s", "outlet", "told")

    def __init__(self, outlet: Outlet, handle: int, interval_s: float, told: int):
        self.outlet = outlet
        self.handle = handle
        self.interval_s = interval_s
        self.told = told  # tokens of the sequence, the prompt among them
        self.next_s = 0.0 if interval_s != math.inf else math.inf  # when to tell what is untold
        self.kept: list[TokenDelta] = []  # of the untold, those with more to say than a token

    def tell(self, request: Request, now_s: float) -> TokenDelta:
        """All that is untold, in one."""
        tokens, kept = tuple(request.tokens[self.told :]), self.kept
        self.told, self.kept, self.next_s = len(request.tokens), [], now_s + self.interval_s
        if not kept:
            return TokenDelta(tokens, num_cached_tokens=request.cached_tokens, queue_s=request.queue_s)
        logprobs = None
        if kept[-1].logprobs is not None:
            logprobs = Rows(packed for delta in kept for packed in Rows.of(delta.logprobs or ()).packed)
        return kept[-1]._replace(token_ids=tokens, logprobs=logprobs, prompt_logprobs=kept[0].prompt_logprobs)


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
        self._journal = Journal(manager)
        self._wake = asyncio.Event()
        self._preparing: set[asyncio.Future[None]] = set()
        self._lost: IntarsiaError | None = None  # why the workers can not go on
        self._failure: IntarsiaError | None = None  # why nothing can go on
        self.is_broken = False  # by a bug: what it knows is not to be trusted, and another one in its place may go on
        self._watchers: list[tuple[Watcher, bytes | None]] = []  # with the mark of what they are told of; None: all
        self._events: EventLog | None = None  # while there are watchers
        self._is_pressed = False  # when a request came last
        self.is_leaving = False  # whoever asks where to send requests is told to look elsewhere

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        handle: int,
        outlet: Outlet,
        images: Sequence[Image] = (),
        terms: Terms = USUAL_TERMS,
        stream_interval_s: float = 0.0,
        prompt_tokens: int | None = None,
        is_known: bool = False,
    ) -> list[RequestId]:
        """Queue a request; its tokens go to `outlet`. One id per answer, whose handles are `handle` and those after it.

        prompt_tokens: of `tokens`, where an answer goes on that began elsewhere; None: all of them
        stream_interval_s: from one delta of an answer to its next; 0: each token at once; infinite: all at its end.
            At least `PRESSED_INTERVAL_S` while more requests come than can be served
        is_known: it was taken before, by an engine that has gone

        Raises `InvalidRequest` if it can not be served as asked, `Overloaded` if it can not be in time.
        """
        if self._failure is not None:
            raise self._failure
        prompt = len(tokens) if prompt_tokens is None else prompt_tokens
        max_total_tokens = self._check(tokens, prompt, sampling)
        gallery = self._lay_out(tokens[:prompt], images)
        if not is_known:
            image_bytes = sum(len(image.data) for image in images)
            try:
                self._gate.check(terms.tenant, prompt, image_bytes, sampling.n, terms.timeout_s)
            except Overloaded:
                self.refused(1)
                self._accounts.add(terms.salt, refused_requests=1)
                self._feel_pressure()
                raise
        if self._feel_pressure():
            stream_interval_s = max(stream_interval_s, PRESSED_INTERVAL_S)
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
                    caller=_Caller(outlet, handle + index, stream_interval_s, told=len(tokens)),
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
            task = asyncio.ensure_future(self._queue_with_form(requests, *sampling.form))
            self._preparing.add(task)
            task.add_done_callback(self._preparing.discard)
        return [request.id for request in requests]

    def refused(self, requests: int) -> None:
        """So many more, here or by a front end that knew."""
        self.stats.refused_requests += requests

    def _feel_pressure(self) -> bool:
        """Whether more come than can be served. Whoever came before that is told less often from then on, too: hundreds
        may wait still, and would be told each token by itself."""
        was_pressed, self._is_pressed = self._is_pressed, self._gate.is_pressed
        if self._is_pressed and not was_pressed:
            self._tell_less_often()
        return self._is_pressed

    def _tell_less_often(self) -> None:
        for request in self._live.values():
            caller = request.caller
            if not caller.interval_s:
                caller.told = len(request.tokens)  # so far each token was told at once
            caller.interval_s = max(caller.interval_s, PRESSED_INTERVAL_S)

    def _queue(self, requests: list[Request]) -> None:
        self._scheduler.add(requests[0], requests[1:])
        self._wake.set()

    async def _queue_with_form(self, requests: list[Request], kind: str, text: str) -> None:
        """Queue a request when the form of its answers is compiled; whoever is running does not wait for that."""
        error = await self._prepare_form(kind, text)
        live = [request for request in requests if request.id in self._live]  # some may have been given up meanwhile
        if error is None and live:
            self._queue(live)
        elif error is not None:
            for request in live:
                self._forget(request)
                self._tell(request, error)

    async def _prepare_form(self, kind: str, text: str) -> IntarsiaError | None:
        """Compile it. Returns why it can not be. Workers that are lost meanwhile are waited for."""
        while True:
            try:
                await asyncio.wait_for(self._workers.prepare_form(kind, text), FORM_TIMEOUT_S)
                return None
            except TimeoutError:
                return InvalidRequest(
                    f"{kind} could not be compiled within {FORM_TIMEOUT_S:g} s; make it simpler", field=kind
                )
            except EngineUnavailable:
                if self._failure is not None:
                    return self._failure
                await asyncio.sleep(LOOK_AGAIN_S)
            except IntarsiaError as refusal:
                return refusal

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
        self._tell_watchers()

    def load(self, viewer: str | None = None) -> EngineLoad:
        """viewer: whose salt the figures are of; None: of all."""
        if viewer is not None:
            return self._accounts.load(viewer, self._live.values(), self.stats.rebuilds)
        pool, stats = self._manager.pool, self.stats
        return EngineLoad(
            self._scheduler.num_running,
            self._scheduler.num_waiting,
            pool.num_available_pages,
            pool.num_cached_pages,
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
            GroupState(group.kind, group.block_tokens, blocks.num_held, len(blocks.index))
            for group, blocks in zip(self.info.groups, pool.groups, strict=False)
        )
        held = self.info.num_blocks - pool.num_available_pages
        return CacheState(held, pool.num_cached_pages, pool.num_free_pages, self._manager.num_open, groups)

    def watch_cache(self, watcher: Watcher, viewer: str | None = None) -> list[Event]:
        """Tell `watcher` what changes in the prefix cache from now on. Returns what is known now. viewer: whose salt's
        blocks it is told of; None: of all."""
        self._events = self._manager.listen()
        self._tell_watchers()  # what the others have not heard yet is part of what is known now
        mark = None if viewer is None else self._manager.mark(viewer.encode())
        self._watchers.append((watcher, mark))
        known: list[Event] = [Cleared(), *self._manager.known()]
        return known if mark is None else of_owner(known, mark)

    def unwatch_cache(self, watcher: Watcher) -> None:
        self._watchers = [(each, mark) for each, mark in self._watchers if each is not watcher]
        if not self._watchers:
            self._events = None
            self._manager.stop_listening()

    def _tell_watchers(self) -> None:
        if self._events is not None and (events := self._events.take()):
            for watcher, mark in self._watchers:
                if told := events if mark is None else of_owner(events, mark):
                    watcher(told)

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
        self._tell_watchers()
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
            self._tell(request, EngineUnavailable(message))
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
        self._deliver(outcome)
        self._tell_failed(outcome)
        self._tell_watchers()
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

    def _deliver(self, outcome: Outcome) -> None:
        """One call per front end and step, whatever the number of its requests."""
        deliveries: dict[Outlet, Delivery] = {}
        outlet, handles, tokens = None, [], []
        now_s = time.monotonic()
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            caller = request.caller
            if caller.interval_s:  # the request knows its tokens
                if now_s >= caller.next_s:
                    others = deliveries.setdefault(caller.outlet, Delivery([], [], [])).others
                    others.append((caller.handle, caller.tell(request, now_s)))
                continue
            if caller.outlet is not outlet:
                outlet = caller.outlet
                handles, tokens, _ = deliveries.setdefault(outlet, Delivery([], [], []))
            handles.append(caller.handle)
            tokens.append(token)
        for entry in outcome.notable:
            caller = entry.request.caller
            if len(entry.request.tokens) == entry.request.prompt_tokens + 1:
                self.stats.prompt_tokens += entry.request.prompt_tokens
                self.stats.cached_tokens += entry.request.cached_tokens
                self._accounts.add(
                    entry.request.terms.salt,
                    prompt_tokens=entry.request.prompt_tokens,
                    cached_tokens=entry.request.cached_tokens,
                )
                self._meter.began(entry.request, now_s)
                self._gate.began(entry.request)
            delta: TokenDelta | None = _delta(entry)
            if caller.interval_s:
                caller.kept.append(delta)
                is_due = entry.finish_reason is not None or now_s >= caller.next_s
                delta = caller.tell(entry.request, now_s) if is_due else None
            if delta is not None:
                deliveries.setdefault(caller.outlet, Delivery([], [], [])).others.append((caller.handle, delta))
            if entry.finish_reason is not None:
                self._forget(entry.request)
                self.stats.finished_requests += 1
                self._accounts.add(entry.request.terms.salt, finished_requests=1)
                self._meter.finished(entry.request, entry.finish_reason.value, now_s)
                self._journal.ended(entry.request, entry.finish_reason.value, now_s)
                if self.tracer is not None and entry.request.terms.trace:
                    self._trace(self.tracer, entry.request, now_s)
        for outlet, delivery in deliveries.items():
            outlet(delivery)

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
            self._tell(
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
            form = request.sampling.form
            generated = len(request.tokens) - request.prompt_tokens
            message = f"the answer's form became too complex after {generated} tokens: {why}; give a simpler one"
            self._tell(request, InvalidRequest(message, field=form[0] if form else None, generated_tokens=generated))
            self._end_early(request, "error")

    def _tell(self, request: Request, error: IntarsiaError) -> None:
        request.caller.outlet(Delivery([], [], [(request.caller.handle, error)]))

    def _fail(self, error: IntarsiaError) -> None:
        self._failure = error
        for request in list(self._live.values()):
            self._forget(request)
            self._tell(request, error)
            self._end_early(request, "error")

    def _count(
        self, step: Step, result: StepResult, outcome: Outcome, *, plan_us: float, wait_us: float, commit_us: float
    ) -> None:
        stats, now_s = self.stats, time.monotonic()
        began = ended = 0
        for entry in outcome.notable:
            began += len(entry.request.tokens) == entry.request.prompt_tokens + 1
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

    # -- at the door -------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], prompt: int, sampling: SamplingParams) -> int:
        """Refuse what can never be served. Returns the length at which the sequence ends at the latest."""
        info = self.info
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least 1 token", field="prompt")
        if len(tokens) >= info.max_model_len:
            what, limit = f"it has {len(tokens)} tokens", info.max_model_len - 1
            raise ContextTooLong.of(what, info.max_model_len, field="prompt", asked=len(tokens), limit=limit)
        if set(map(type, tokens)) != {int}:
            position, token = next((n, t) for n, t in enumerate(tokens) if type(t) is not int)
            raise InvalidRequest(f"prompt token {token!r} at position {position} is no whole number", field="prompt")
        if min(tokens) < 0 or max(tokens) >= info.vocab_size:
            position, token = next((n, t) for n, t in enumerate(tokens) if not 0 <= t < info.vocab_size)
            raise InvalidRequest(
                f"prompt token {token} at position {position} is not in the vocabulary of {info.vocab_size} tokens",
                field="prompt",
                asked=token,
                limit=info.vocab_size - 1,
            )
        if sampling.form is not None and not info.eos_token_ids:
            kind, _ = sampling.form
            raise InvalidRequest(
                f"{info.model} has no end token, so an answer of a given form could not end", field=kind
            )
        for field, named in (("logit_bias", dict(sampling.biases)), ("bad_token_ids", chain(*sampling.bad_token_ids))):
            strange = next((token for token in named if token >= info.vocab_size), None)
            if strange is not None:
                raise InvalidRequest(
                    f"{field} names token {strange}, which is not in the vocabulary of {info.vocab_size} tokens",
                    field=field,
                    asked=strange,
                    limit=info.vocab_size - 1,
                )
        sampling.check_all_logprobs(prompt, info.vocab_size)
        total_tokens = min(prompt + sampling.max_tokens, info.max_model_len)
        if not 0 < prompt <= len(tokens) < max(total_tokens, prompt + 1):
            raise InvalidRequest(
                f"an answer to a prompt of {prompt} tokens can not go on from {len(tokens)} of {total_tokens} tokens",
                field="prompt",
            )
        if not self._manager.fits(total_tokens):
            raise RequestTooLarge(
                f"{prompt} prompt tokens + {sampling.max_tokens} new ones need "
                f"{self._manager.plan.blocks_alone(total_tokens)} blocks; the whole pool has {info.num_blocks}. "
                "Ask for fewer tokens, or start the engine with a larger kv_cache_memory.",
                field="max_tokens",
                asked=self._manager.plan.blocks_alone(total_tokens),
                limit=info.num_blocks,
            )
        return total_tokens

    def _lay_out(self, tokens: Sequence[int], images: Sequence[Image]) -> Gallery | None:
        info = self.info
        if not images and (info.image_token_id is None or info.image_token_id not in tokens):
            return None
        if info.image_token_id is None:
            raise InvalidRequest(f"{info.model} takes no images, and the request has {len(images)}", field="images")
        if len(images) > info.max_images_per_request:
            raise InvalidRequest(
                f"the request has {len(images)} images; max_images_per_request is {info.max_images_per_request}. Send "
                "fewer, or start the engine with a larger one.",
                field="images",
                asked=len(images),
                limit=info.max_images_per_request,
            )
        places = tokens.count(info.image_token_id)
        if places != len(images):
            raise InvalidRequest(
                f"the prompt has {places} image tokens (id {info.image_token_id}) and the request {len(images)} "
                "images. Put one image token where each image belongs.",
                field="images",
                asked=len(images),
                limit=places,
            )
        return lay_out(tokens, info.image_token_id, images, self._manager.plan.block_tokens)


def _delta(entry: Progress) -> TokenDelta:
    request, token, reason, logprobs = entry
    about_prompt = None
    if request.prompt_logprobs is not None and len(request.tokens) == request.prompt_tokens + 1:
        prompt = request.tokens[1 : request.prompt_tokens]
        rows = zip(prompt, request.prompt_logprobs, strict=True)
        about_prompt = Rows.of(TokenLogprobs(token, *row) for token, row in rows)
    return TokenDelta(
        (token,),
        Rows.of((TokenLogprobs(token, *logprobs),)) if logprobs is not None else None,
        reason.value if reason else None,
        request.cached_tokens,
        about_prompt,
        queue_s=request.queue_s,
    )
