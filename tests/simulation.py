"""The real scheduler and the real cache manager under a virtual clock: no Ray, no torch, no waiting.

A scenario is made of nothing but its seed: the model's kinds of layers, the size of the pool and of a step, which
requests come when, and which are given up. A simulated worker computes every token from what the pages hold, so a
wrong block is found by the token that reads it. What must hold is checked on the way:

- every token is the one an undisturbed request would get; nothing is lost, doubled or told after the end;
- the tables, counted anew, name every block exactly once where they must, and at the end none is held;
- no step is larger than it may be; a request that decodes gets a token in every step, unless the pool runs short;
- a request is preempted only for a more senior one, and every request ends;
- prompts that are prepared leave requests alone: none is given up for them, and each is told of once;
- a request that is given up is out of the tables with the next plan; a deadline is neither missed nor early;
- in half of the scenarios conversations are leased, pause and go on: see `simulated_leases.py`.
"""

import random
from collections import deque
from dataclasses import dataclass

from intarsia.controller.request import Request
from intarsia.controller.scheduling.preparation import Wanted
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import Group
from intarsia.kvcache.reach import Chunked, Full, Sliding, State
from intarsia.kvcache.settings import CacheSettings
from intarsia.proto.request import FinishReason, RequestOptions, SamplingParams
from intarsia.proto.status import PreparedEnd, PreparedPrompt
from intarsia.proto.step import StepResult
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.simulated import VOCAB, SimulatedWorker, continuation
from intarsia.tests.simulated_leases import LeasedConversations, with_leasable

KINDS = (Full(), Sliding(1), Sliding(3), Sliding(6), Sliding(11), Chunked(4), Chunked(7), State())

LONGEST = 26
"""Tokens of a request."""


@dataclass
class Outcome:
    """What a scenario came to."""

    requests: int = 0
    tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    expired: int = 0
    aborted: int = 0
    forked: int = 0
    swapped: int = 0
    lost: int = 0  # times that the workers were
    leased: int = 0  # conversations, after an answer
    lease_refused: int = 0
    turns_kept: int = 0  # turns that found what was leased for them
    prepared: int = 0  # prompts that were computed before anybody asked
    prepared_held: int = 0  # by leases
    virtual_s: float = 0.0

    def add(self, other: "Outcome") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, getattr(self, name) + getattr(other, name))


class Violation(AssertionError):
    """An invariant did not hold."""


class Scenario:
    """One run, from its seed alone."""

    def __init__(self, seed: int):
        self.seed = seed
        self._rng = rng = random.Random(seed)
        reaches = rng.sample(KINDS, rng.randint(1, 3))
        size = rng.choice([2, 3, 4])
        alone = sum(Group(reach, (0,), size).blocks_spanning(LONGEST, chunk_tokens=1) for reach in reaches)
        plan = plan_of(
            *reaches,
            blocks=1 + alone + rng.choice([0, 0, 3, 10, 30]),
            block_tokens=size,
            per_large=[rng.choice([1, 1, 2, 3]) for _ in reaches],
        )
        leasable = random.Random(f"leasable {seed}").choice([0, 0, 0, 2, 5, 20])
        plan = with_leasable(plan, leasable)
        self._manager = CacheManager(
            plan, CacheSettings(prefix_caching=rng.random() < 0.7), hash_key=rng.randbytes(32), clock=self._clock
        )
        seats = rng.randint(1, 6)
        self._settings = SchedulerSettings(
            max_num_seqs=seats,
            max_num_batched_tokens=rng.randint(seats, 40),
            max_prefill_chunk_tokens=rng.choice([None, None, 1, 7]),
            prefill_share=rng.choice([0.1, 0.5, 1.0]),
            ageing_s=rng.choice([0.001, 0.1, 30.0]),
            longest_prefix_first=rng.random() < 0.3,
            swap_bytes=rng.choice([0, 0, 300, 5000]),
        )
        self._leased = LeasedConversations(seed, self._manager, self._clock, _check) if leasable else None
        self._scheduler = Scheduler(self._settings, self._manager, self._clock)
        self._worker = SimulatedWorker(plan)
        self._plan_of_memory = plan
        self._losses = rng.choice([0.0, 0.0, 0.02, 0.2])  # of workers, per step
        self._depth = rng.choice([1, 2, 2, 3])
        self._step_s = rng.choice([0.001, 0.02])
        self._token_s = rng.choice([0.0, 0.0001, 0.002])
        self._now_s = 0.0
        self._under_way: deque[StepResult] = deque()
        self._requests: dict[RequestId, Request] = {}
        self._prompts: dict[RequestId, tuple[list[int], int]] = {}
        self._generated: dict[RequestId, list[int]] = {}
        self._ended: dict[RequestId, FinishReason | str] = {}
        self._prepares = random.Random(seed + 1) if seed % 2 else None
        self._wanted, self._told = 0, list[PreparedPrompt]()
        self._outcome = Outcome()

    def _clock(self) -> float:
        return self._now_s

    def run(self) -> Outcome:
        """Play it to its end. Raises `Violation`, or whatever assertion failed, naming the seed."""
        try:
            self._play()
        except Exception as error:
            raise Violation(f"seed {self.seed}: {type(error).__name__}: {error}") from error
        return self._outcome

    def _play(self) -> None:
        rng = self._rng
        for _ in range(rng.randint(1, 12) + (8 if self._leased is not None else 0)):
            self._submit()
            for _ in range(rng.choice([0, 0, 1, 2, 6])):
                self._step()
            if rng.random() < 0.15:
                self._give_up(rng.choice(list(self._requests)))
            if self._prepares is not None and self._prepares.random() < 0.5:
                self._prepare(self._prepares)
            self._now_s += rng.choice([0.0, 0.0, 0.05, 1.0])
            if self._leased is not None and rng.random() < 0.1:
                self._now_s += 30.0  # people think, and tools take their time
        idle = 0
        while self._scheduler.has_work or self._under_way:
            idle = 0 if self._step() else idle + 1
            _check(idle < 3, "nothing is computed, and a request waits")
            _check(self._outcome.steps < 20_000, "it does not come to an end")
        self._check_end()

    # -- what happens ------------------------------------------------------------------------------------------------

    def _submit(self) -> None:
        rng = self._rng
        prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, LONGEST - 8))]
        count = rng.randint(1, 8)
        stops = rng.choice([(), (), tuple(range(0, VOCAB, 9))])
        options = RequestOptions(
            priority=rng.choice([0, 0, 0, 1, -1, 5]),
            tenant=rng.choice(["", "", "a", "b"]),
            timeout_s=rng.choice([None, None, None, 0.001, 0.05, 0.5]),
            borders=tuple(rng.randint(1, LONGEST) for _ in range(rng.choice([0, 1, 1, 3]))),
        )
        if self._leased is not None:
            prompt, options = self._leased.next_turn(LONGEST - 8) or (prompt, options)
            options = self._leased.options(options)
        family = []
        for _ in range(rng.choice([1, 1, 1, 2, 4])):
            request = Request(
                id=RequestId(len(self._requests) + 1),
                tokens=list(prompt),
                prompt_tokens=len(prompt),
                sampling=SamplingParams(max_tokens=count),
                seed=0,
                stop_token_ids=frozenset(stops),
                max_total_tokens=len(prompt) + count,
                options=options,
            )
            _check(self._manager.plan.fits(request.max_total_tokens), "the pool is too small for the scenario")
            self._requests[request.id] = request
            self._prompts[request.id] = list(prompt), count
            self._generated[request.id] = []
            family.append(request)
        self._scheduler.add(family[0], family[1:])
        if self._leased is not None:
            self._leased.submitted(family[0], family[1:])
        self._outcome.requests += len(family)
        self._outcome.forked += len(family) - 1

    def _prepare(self, rng: random.Random) -> None:
        """The next turn of a request that was here, or that is."""
        leased = self._leased.held_of(rng) if self._leased is not None else None
        before, lease = leased or (rng.choice(list(self._requests)), "")
        earlier, tenant = self._requests[before].tokens, self._requests[before].options.tenant
        kept = rng.randint(0, len(earlier))
        new = [*earlier[:kept], *(rng.randint(0, 1) for _ in range(rng.randint(1, LONGEST)))][: LONGEST - 1]
        self._wanted += 1
        request = Request(
            id=RequestId(10**6 + self._wanted),
            tokens=new,
            prompt_tokens=len(new),
            sampling=SamplingParams(max_tokens=1),
            seed=0,
            stop_token_ids=frozenset(),
            max_total_tokens=len(new) + 1,
            options=RequestOptions(tenant=tenant if lease else rng.choice(["", "a", "c"]), lease=lease),
            is_prepared=True,
        )
        passed = earlier[kept:] if rng.random() < 0.7 else []

        def told(prepared: PreparedPrompt) -> None:
            self._told.append(prepared)
            if self._leased is not None:
                self._leased.told(new)

        self._scheduler.preparation.add(Wanted(request, min(kept, len(new)), passed, told))

    def _give_up(self, request_id: RequestId) -> None:
        known = request_id not in self._ended
        _check(self._scheduler.abort(request_id) == known, "a request that ended is still known, or the reverse")
        if known:
            self._ended[request_id] = "aborted"
            self._outcome.aborted += 1

    def _step(self) -> bool:
        """Plan until `depth` steps are under way, then the oldest comes back. False if there was none."""
        while len(self._under_way) < self._depth:
            result = self._plan()
            if result is None:
                break
            self._under_way.append(result)
        if not self._under_way:
            return False
        result = self._under_way.popleft()
        self._now_s += result.run_us / 1e6
        for request, token, reason, _ in self._scheduler.commit(result).each():
            _check(request.id not in self._ended, f"request {request.id} hears of a token after its end")
            self._generated[request.id].append(token)
            if reason is not None:
                self._ended[request.id] = reason
                if self._leased is not None:
                    self._leased.ended(request)
        self._outcome.steps += 1
        if self._rng.random() < 0.1:
            recount(self._manager)
        if self._rng.random() < self._losses and self._outcome.steps < 10_000:
            self._lose_workers()
        return True

    def _lose_workers(self) -> None:
        """Steps under way bring nothing, pages are empty, and all requests go on from what is known."""
        self._under_way.clear()
        self._worker = SimulatedWorker(self._plan_of_memory)
        self._scheduler.start_anew()
        count = recount(self._manager)
        _check(count.all_free and not count.kept, "something is held or known although the workers are new")
        _check(not self._seated(), "a request has a slot on workers that are lost")
        if self._leased is not None:
            self._leased.lost()
        self._outcome.lost += 1

    def _plan(self) -> StepResult | None:
        running = {each.id: each for each in self._requests.values() if each.slot is not None}
        decoding = [each for each in running.values() if each.is_live and each.is_decoding and _may_grow(each)]
        preempted = {each.id: each.preemptions for each in running.values()}
        promises = self._leased.before_plan() if self._leased is not None else []
        step = self._scheduler.plan_step()
        if self._leased is not None:
            self._leased.after_plan(promises)
            self._leased.release_one()
        self._check_expired()
        victims = [each for each in running.values() if each.preemptions > preempted[each.id]]
        self._outcome.preemptions += len(victims)
        stayed = [each for each in running.values() if each.slot is not None and each not in victims]
        for victim in victims:
            most_junior = all(victim.seniority > other.seniority for other in stayed)  # type: ignore[operator]
            _check(most_junior, f"request {victim.id} gave way, and a more junior one stays")
        if self._rng.random() < 0.1:
            recount(self._manager)
        if step is None:
            return None
        computed = len(step.decode) + sum(advance.tokens for advance in step.advance)
        _check(computed <= self._settings.step_tokens, "a step is larger than it may be")
        slots = {*step.decode, *(advance.slot for advance in step.advance)}
        _check(len(slots) == len(step.decode) + len(step.advance), "a slot takes part twice")
        if not victims:
            for each in decoding:
                waits = each.is_live and each.slot is not None and each.slot not in slots
                _check(not waits or len(self._seated()) > 1, f"request {each.id} decodes, and got no token")
        for each in self._seated():
            _check(len(each.tokens) + each.pending <= each.max_total_tokens, f"request {each.id} goes on after its end")
        self._outcome.swapped += bool(step.swap_in)
        result = self._worker.run(step)
        seconds = self._step_s + computed * self._token_s
        return result._replace(run_us=int(seconds * 1e6))

    def _seated(self) -> list[Request]:
        return [each for each in self._requests.values() if each.slot is not None]

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _check_expired(self) -> None:
        for request in self._scheduler.take_expired():
            _check(request.deadline_s <= self._now_s, f"request {request.id} was given up too early")
            _check(request.id not in self._ended, f"request {request.id} ends twice")
            _check(request.slot is None, f"request {request.id} was given up and keeps its slot")
            self._ended[request.id] = "expired"
            self._outcome.expired += 1
        for request in self._requests.values():
            late = request.deadline_s <= self._now_s and request.id not in self._ended
            _check(not late, f"request {request.id} is over its deadline, and goes on")

    def _check_end(self) -> None:
        self._outcome.virtual_s = self._now_s
        for request_id, (prompt, count) in self._prompts.items():
            request, generated = self._requests[request_id], self._generated[request_id]
            _check(request_id in self._ended, f"request {request_id} never ended")
            expected = continuation(prompt, count)
            stop = next((n + 1 for n, token in enumerate(expected) if token in request.stop_token_ids), count)
            if self._ended[request_id] in ("aborted", "expired"):
                stop = min(stop, len(generated))
            _check(generated == expected[:stop], f"request {request_id} got {generated}, not {expected[:stop]}")
            self._outcome.tokens += len(generated)
        if self._leased is not None:
            self._now_s += 1e7
            self._leased.end()
            self._outcome.leased, self._outcome.lease_refused = self._leased.granted, self._leased.refused
            self._outcome.turns_kept, self._outcome.prepared_held = self._leased.kept, self._leased.prepared_held
        _check(recount(self._manager).all_free, "blocks are held at the end")
        _check(len(self._told) == self._wanted, "a prepared prompt is told to no client, or twice")
        _check(len(self._scheduler._seats.free_slots) == self._settings.max_num_seqs, "a slot is lent at the end")
        self._outcome.prepared = sum(each.end == PreparedEnd.COMPUTED for each in self._told)
        _check(
            self._scheduler.preemption._swap.free_bytes == self._settings.swap_bytes, "host memory is held at the end"
        )
        _check(len(self._worker.swapped) <= len(self._scheduler._draft.forget), "workers keep what is not asked for")
        _check(self._scheduler.num_running == self._scheduler.num_waiting == 0, "a request is left")


def _may_grow(request: Request) -> bool:
    """The token under way, if there is one, is not its last."""
    return len(request.tokens) + request.pending < request.max_total_tokens


def _check(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Violation(otherwise)
