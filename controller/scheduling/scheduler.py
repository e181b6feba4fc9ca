"""Who takes part in the next step, and why.

A step holds at most `max_num_batched_tokens` tokens: one for each request that decodes, and then prompts, in chunks,
for as much of the step's time as is fair to those who decode (`prefill_budget.py`). `fair_queue.py` says whose turn it
is among those who wait.

When the pool runs out of blocks the most junior running request is preempted: it gives back its blocks, waits with the
tokens it has, and is computed again later (often out of the prefix cache). Seniority is given at the first admission
and kept for good: by time, where one level of priority is worth `ageing_s` seconds. A request is only ever preempted
for a more senior one. So the most senior one can always go on, and since no request is taken that would not fit alone,
every request ends.
"""

import heapq
import logging
import time
from bisect import insort
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any, NamedTuple

from ...errors import InvalidSetting, PoolExhausted
from ...kvcache.group_table import Copy
from ...kvcache.ids import BlockId, RequestId
from ...kvcache.lookup import Hit
from ...kvcache.manager import CacheManager
from ...kvcache.prefix import Encoder, TokenChain, shared_blocks
from ...proto.step import ALL, Admit, Advance, Logprobs, PromptLogprobs, Sampling, Step, StepResult
from ..request import FinishReason, Request
from .fair_queue import DECODE_WEIGHT, WaitingQueue
from .prefill_budget import Pace
from .swap import SwapSpace

HOST_BYTES_PER_US = 8_000
"""8 GB/s between a worker's memory and the host's, each way: what PCIe 4 brings at least, and a CPU's own memory."""

MOST_PATIENT = 8
"""Requests that may be passed by in one step because somebody else computes their prompt."""

OTHERS = 16
"""Waiting requests that room is kept for beside another tenant's prompts."""

TOUCHED = 4
"""Waiting requests whose cached prefixes are kept for them while prompts are computed."""


logger = logging.getLogger(__name__)

SHRINK = 4
"""By how much steps get smaller after one that did not fit in memory."""

GROW_AFTER_STEPS = 1000
"""Steps without such a fault before twice as much is tried."""


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How large a step may be, and who is served first."""

    max_num_seqs: int = 64  # requests that run at once; slots on the workers
    max_num_batched_tokens: int = 2048  # tokens of one step, over all requests
    max_prefill_chunk_tokens: int | None = None  # prompt tokens of one request in one step; None: what the step holds
    prefill_share: float = 0.5  # of a step's time, which prompts get at least while others decode; 1: all they need
    ageing_s: float = 30.0  # seconds of waiting that make up for one level of priority
    longest_prefix_first: bool = False  # among those whose turn it is, the one with most in the cache
    swap_bytes: int = 0  # of host memory per worker, for preempted requests that are dear to compute anew

    def __post_init__(self):
        for field in ("max_num_seqs", "max_num_batched_tokens"):
            if getattr(self, field) < 1:
                raise InvalidSetting(f"{field} must be at least 1, got {getattr(self, field)}", field=field)
        if self.max_prefill_chunk_tokens is not None and self.max_prefill_chunk_tokens < 1:
            raise InvalidSetting(
                f"max_prefill_chunk_tokens must be at least 1, got {self.max_prefill_chunk_tokens}",
                field="max_prefill_chunk_tokens",
            )
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise InvalidSetting(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}), so that every running request can decode one token in a step",
                field="max_num_batched_tokens",
            )
        if not 0 < self.prefill_share <= 1:
            raise InvalidSetting(f"prefill_share must lie in (0, 1], got {self.prefill_share}", field="prefill_share")
        if self.swap_bytes < 0:
            raise InvalidSetting(f"swap_space must be at least 0 bytes, got {self.swap_bytes}", field="swap_space")
        if not self.ageing_s > 0:
            raise InvalidSetting(
                f"priority_ageing_s must be more than 0 seconds, got {self.ageing_s}", field="priority_ageing_s"
            )


class Progress(NamedTuple):
    """What a step brought to one request."""

    request: Request
    token: int
    finish_reason: FinishReason | None
    logprobs: Logprobs | None = None


class Outcome(NamedTuple):
    """What a step brought. Mostly that is a token for each of many, with nothing more to say: those are columns."""

    requests: list[Request]
    tokens: list[int]
    notable: list[Progress]  # first and last tokens, and those with log-probabilities
    failed: Sequence[tuple[Request, str]] = ()  # and why; what the step drew for them is dropped

    def each(self) -> Iterator[Progress]:
        for request, token in zip(self.requests, self.tokens, strict=True):
            yield Progress(request, token, None)
        yield from self.notable


class _Flight(NamedTuple):
    """A step under way."""

    drawing: Sequence[Request]  # who gets a token by it, in the order of the result
    prompts: Sequence[tuple[Request, int]]  # those of more than one token, and the slot they had
    decoding: int
    prompt_tokens: int


class Scheduler:
    """Queues, slots and the plan of each step. Single-threaded; knows neither Ray nor torch.

    Invariant: a running request has a slot and an open row in the manager; a waiting one has neither, nor has a fork
    that waits for its parent's prompt.
    """

    def __init__(self, settings: SchedulerSettings, manager: CacheManager, clock: Callable[[], float] = time.monotonic):
        """clock: seconds; for ageing and deadlines."""
        self._settings = settings
        self._manager = manager
        self._clock = clock
        self._pace = Pace(settings.prefill_share)
        self._queue = WaitingQueue(settings.ageing_s)
        self._running: list[Request] = []  # most senior first
        self._parents: list[Request] = []  # of forks that wait for a prompt
        self._requests: dict[RequestId, Request] = {}
        self._free_slots = list(range(settings.max_num_seqs - 1, -1, -1))
        self._copies: list[Copy] = []  # of blocks, for the step being planned
        self._saves: list[tuple[int, int, int, int]] = []  # of states: (slot, group, tokens, block)
        self._forked: list[Admit] = []  # who takes a slot in the step being planned, beside those admitted
        self._retired_slots: list[int] = []  # the workers have not heard of these yet
        self._aborted: list[Request] = []
        self._deadlines: list[tuple[float, RequestId]] = []  # a heap
        self._expired: list[Request] = []
        self._suspects: deque[Request] = deque()  # to run alone, until each has got a token
        self._held_up: Request | None = None  # it was its turn, and there was no room
        self.is_full = False  # the last step had no room for somebody
        self._lacks_blocks = False  # and would not have had any if it had held more
        self._swap = SwapSpace(settings.swap_bytes)
        self._swap_out: list[tuple[int, int, int]] = []  # for the step being planned: (group, block, ticket)
        self._swap_in: list[tuple[int, int, int]] = []  # (group, ticket, block)
        self._in_flight: deque[_Flight] = deque()  # oldest first
        self._max_tokens = settings.max_num_batched_tokens  # less, after a step that did not fit in memory
        self._grow_at = 0  # the step from which more is tried again
        self._epoch = 1
        self._steps = 0
        self.preemptions = 0
        self.swaps = 0  # of them, those whose blocks went to host memory

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queue a request, and others that ask the same and differ in what is drawn."""
        request.arrival_s = self._clock()
        for each in (request, *forks):
            each.arrival_s = request.arrival_s
            self._requests[each.id] = each
            self._queue.enter(each)
            if request.terms.timeout_s is not None:
                each.deadline_s = each.arrival_s + request.terms.timeout_s
                heapq.heappush(self._deadlines, (each.deadline_s, each.id))
        for fork in forks:
            fork.parent = request
        if forks:
            request.forks = list(forks)
            self._parents.append(request)
        self._queue.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request at the next plan: a step in flight may still write to its blocks. False if unknown."""
        request = self._requests.get(request_id)
        if request is None:
            return False
        self._forget(request)
        self._aborted.append(request)
        return True

    def take_expired(self) -> list[Request]:
        """Requests that were given up since the last call, because their time was over."""
        expired, self._expired = self._expired, []
        return expired

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._queue or self._aborted)

    @property
    def num_running(self) -> int:
        return sum(request.id in self._requests for request in self._running)  # else: aborted, until the next plan

    @property
    def num_seated(self) -> int:
        """Requests that have a slot, those given up since the last plan among them."""
        return len(self._running)

    @property
    def num_seats(self) -> int:
        """Requests that can run at once: as many as there are slots, or as run now if there are no blocks for more."""
        return max(1, len(self._running)) if self._lacks_blocks else self._settings.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def queued_tokens(self) -> int:
        """Of those that wait, all that they bring."""
        return sum(len(request.tokens) for request in self._queue)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan_step(self) -> Step | None:
        """The next step, or None when there is nothing to compute.

        Steps before it may still be under way. Workers run steps in order, so it may use what those write, and give
        away blocks that those still read.
        """
        now_s = self._clock()
        self._grow()
        self._drop_aborted()
        self._expire(now_s)
        self._clear_suspects()
        self._make_room(now_s)
        self._fork()
        decode, planned, budget, is_short = self._advance_running()
        admitted = [] if is_short and self._running else self._admit_waiting(budget, now_s)
        if self._queue and self._manager.is_full and (admitted or any(not each.is_decoding for each, _ in planned)):
            self._touch_waiting()
        self.is_full = bool(self._queue)
        is_held_up = self._held_up is not None and bool(self._free_slots)
        self._lacks_blocks = self.is_full and (is_short or is_held_up or bool(self._suspects))
        return self._seal(decode, planned, admitted)

    def commit(self, result: StepResult) -> Outcome:
        """The oldest step under way has run: enter its tokens, give back blocks nobody needs, finish what is finished.

        A request that ends with a token of its stops may have one more step under way: what that draws is dropped.
        """
        flight = self._in_flight.popleft()
        self._pace.learn(flight.decoding, flight.prompt_tokens, result.run_us)
        by_slot: dict[int, Request] = {}
        for request, slot in flight.prompts:
            by_slot[slot] = request
            if request.slot == slot:
                self._manager.commit(request.id)
                request.quiet_until = self._manager.quiet_until(request.id)
        for entry in result.prompt_logprobs:
            _enter_prompt_logprobs(by_slot[entry.slot], entry)
        assert len(result.tokens) == len(flight.drawing), "a step must bring one token to each who draws"
        logprobs = {flight.drawing[place].id: row for place, row in result.logprobs}
        requests, plain, notable = [], [], []
        failed = [(request, why) for place, why in result.failures if (request := flight.drawing[place]).is_live]
        for request, _ in failed:
            self._forget(request)
            self._drop(request)
        for request, token in zip(flight.drawing, result.tokens, strict=True):
            if not request.is_live:
                continue  # aborted or finished while the step ran
            tokens = request.tokens
            tokens.append(token)
            request.pending -= 1
            known = len(tokens)
            if token in request.stop_token_ids or known >= request.max_total_tokens:
                notable.append(Progress(request, token, request.finish_reason(token), logprobs.get(request.id)))
                self._forget(request)
                self._drop(request)
            elif logprobs or known == request.prompt_tokens + 1:
                notable.append(Progress(request, token, None, logprobs.get(request.id)))
            else:
                requests.append(request)
                plain.append(token)
        return Outcome(requests, plain, notable, failed)

    def start_anew(self) -> list[Request]:
        """The workers have lost all that they had: who ran waits again, with the tokens that are known. Returns those.

        Steps under way are forgotten. What they would have brought is drawn again, and is the same: sampling is keyed
        by seed and position. Who may be what the workers die of is tried alone first, one after another.
        """
        self._drop_aborted()
        ran = list(self._running)
        for request in ran:
            self._put_back(request)
            request.note_loss()
            if request.is_suspect:
                self._suspects.append(request)
        for request in self._requests.values():
            request.computed_tokens = request.pending = 0
            self._forget_swapped(request)
        self._manager.reset_prefix_cache()
        self._swap.take_forgotten()  # nobody is there who would keep them
        for told in (self._copies, self._saves, self._swap_out, self._swap_in, self._forked, self._retired_slots):
            told.clear()
        self._in_flight.clear()
        self._held_up = None
        self._epoch += 1
        return ran

    def shrink(self) -> None:
        """A step did not fit in memory: the next ones hold fewer tokens of prompts, and more again after a while."""
        self._max_tokens = max(self._manager.plan.block_tokens, self._max_tokens // SHRINK)
        self._grow_at = self._steps + GROW_AFTER_STEPS
        logger.warning("steps hold at most %d tokens of prompts for a while", self._max_tokens)

    def _grow(self) -> None:
        if self._max_tokens < self._settings.max_num_batched_tokens and self._steps >= self._grow_at:
            self._max_tokens = min(self._settings.max_num_batched_tokens, 2 * self._max_tokens)
            self._grow_at = self._steps + GROW_AFTER_STEPS

    # -- ends --------------------------------------------------------------------------------------------------------

    def _forget(self, request: Request) -> None:
        """It is nobody's concern any more; `_drop` takes what it has."""
        request.is_live = False
        del self._requests[request.id]

    def _drop(self, request: Request) -> None:
        """Take a request off wherever it is. Forks that wait for its prompt go on by themselves."""
        if request.slot is not None:
            self._retire(request)
        elif request.parent is not None:
            request.parent.forks.remove(request)
        else:
            self._queue.remove(request)
        self._release_forks(request)
        self._forget_swapped(request)
        self._queue.leave(request)

    def _drop_aborted(self) -> None:
        for request in self._aborted:
            self._drop(request)
        self._aborted.clear()

    def _expire(self, now_s: float) -> None:
        """Give up what has become worthless."""
        while self._deadlines and self._deadlines[0][0] <= now_s:
            _, request_id = heapq.heappop(self._deadlines)
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)
                self._drop(request)
                self._expired.append(request)

    # -- the parts of a plan -----------------------------------------------------------------------------------------

    def _make_room(self, now_s: float) -> None:
        """Somebody could not be admitted in the last step: a running request of lower priority makes room for it."""
        waiting = self._held_up
        if waiting is None or not waiting.is_live or not self._running:
            return
        victim = self._running[-1]
        assert victim.seniority is not None
        is_lower = victim.terms.priority > waiting.terms.priority
        # Behind it in the queue, too, or the victim's place would be taken by the victim.
        is_behind = self._queue.due_s(victim) > self._queue.due_s(waiting)
        is_behind |= victim.terms.tenant != waiting.terms.tenant
        if is_lower and is_behind and victim.seniority > self._seniority(waiting, now_s):
            self._preempt(victim)

    def _fork(self) -> None:
        """Those whose prompt is computed but for its last token share it with their forks."""
        for request in [each for each in self._parents if each.slot is not None and each.is_at_fork]:
            while request.forks and self._try_fork(request, request.forks[0]):
                pass
            self._release_forks(request)

    def _advance_running(self) -> tuple[list[Request], list[tuple[Request, Advance]], int, bool]:
        """One token for those who decode, chunks for those in prefill; most senior first.

        Returns who decodes without needing a block, everybody else, the tokens left for prompts, and whether the pool
        ran short.
        """
        decode: list[Request] = []
        others: list[Request] = []
        prompts = 0
        for request in self._running:
            known = len(request.tokens) + request.pending
            if request.computed_tokens + 1 != known or known <= request.prompt_tokens:
                prompts += 1
                others.append(request)
            elif known >= request.max_total_tokens:
                continue  # its last token is under way, and we have not heard of it yet
            elif known < request.quiet_until:
                decode.append(request)
            else:
                others.append(request)
        budget = self._prompt_budget(len(decode) + len(others) - prompts, prompts)
        first_tenant, its_budget = self._share_of_first(budget, others)
        planned: list[tuple[Request, Advance]] = []
        preempted = self.preemptions
        short = False
        for request in others:
            if request.slot is None:
                continue  # preempted by a more senior one just now
            is_decoding = request.is_decoding
            is_first = request.terms.tenant == first_tenant
            tokens = 1 if is_decoding else self._chunk(request, min(budget, its_budget) if is_first else budget)
            if tokens == 0:
                continue
            while (advance := self._try_advance(request, tokens)) is None:
                short = True
                most_junior = self._running[-1]
                if most_junior is not request:
                    self._preempt(most_junior)
                elif shorter := self._fitting_chunk(request, tokens - 1):
                    tokens = shorter
                else:
                    if len(self._running) == 1:
                        self._start_over(request)
                    break  # wait for a more senior one to end
            if advance is not None:
                planned.append((request, advance))
                budget -= 0 if is_decoding else tokens
                its_budget -= tokens if is_first and not is_decoding else 0
        if self.preemptions > preempted:
            decode = [request for request in decode if request.slot is not None]
        return decode, planned, budget, short

    def _share_of_first(self, budget: int, running: Sequence[Request]) -> tuple[str, int]:
        """The tenant of the most senior prompt under way, and what it may take of the step: half is left to prompts of
        other tenants, if they need so much, since short ones would else wait until all its long ones are computed."""
        prompts = [each for each in running if not each.is_decoding]
        if not prompts or self._queue.num_tenants == 1:
            return "", budget
        first = prompts[0].terms.tenant
        needed = sum(each.remaining_tokens for each in prompts if each.terms.tenant != first)
        if self._free_slots and self._held_up is None and not self._suspects:
            needed += sum(len(each.tokens) for each in self._queue.next_few(OTHERS) if each.terms.tenant != first)
        return first, budget - min(budget // 2, needed)

    def _prompt_budget(self, decoding: int, prompts: int) -> int:
        """Tokens of prompts that the step may hold: what is left of it, and what is fair to those who decode."""
        left = max(0, self._max_tokens - decoding)
        prompts += min(len(self._queue), len(self._free_slots))
        if not decoding or not prompts:
            return left
        fair = max(self._pace.prompt_tokens(decoding, prompts), self._manager.plan.block_tokens)
        return int(min(left, fair))

    def _admit_waiting(self, budget: int, now_s: float) -> list[tuple[Admit, Request, Advance]]:
        admitted = []
        self._held_up = None
        if self._suspects:
            entry = self._try_admit(self._suspects[0], budget, now_s) if not self._running else None
            return [entry] if entry is not None else []
        patient: list[Request] = []  # whose turn it is, and who had better wait
        while budget > 0 and len(patient) <= MOST_PATIENT:
            request = self._queue.after(patient) if patient else self._next_waiting(now_s)
            if request is None or request.pending:
                break  # preempted just now, and a token of it is under way
            if self._free_slots and self._is_being_computed(request):
                patient.append(request)
                continue
            entry = self._try_admit(request, budget, now_s) if self._free_slots else None
            if entry is None:
                self._held_up = request
                break
            admitted.append(entry)
            budget -= entry[2].tokens
        return admitted

    def _clear_suspects(self) -> None:
        """Who has got a token meanwhile is none any more, and makes room for the next who is to run alone."""
        suspects = self._suspects
        while suspects and not (suspects[0].is_live and suspects[0].is_suspect):
            cleared = suspects.popleft()
            if cleared.slot is not None and suspects:
                self._put_back(cleared)

    def _touch_waiting(self) -> None:
        """What those next in turn will take up is not evicted for the prompts of others."""
        for request in self._queue.next_few(TOUCHED):
            if not request.lacks_prompt_logprobs:
                self._manager.touch(self._lookup(request))

    def _is_being_computed(self, request: Request) -> bool:
        """Does a running request compute what is most of this prompt? Then it is cheaper to wait for it than to compute
        it twice."""
        if not self._manager.is_caching or request.lacks_prompt_logprobs or request.preemptions:
            return False
        hit = self._lookup(request)
        assert request.chain is not None
        size = self._manager.plan.block_tokens
        lacking = len(request.tokens) - hit.tokens
        for other in self._running:
            if other.chain is None or other.computed_tokens >= other.prompt_tokens:
                continue
            common = min(shared_blocks(request.chain, other.chain) * size, other.prompt_tokens)
            if other.computed_tokens < common and common - hit.tokens >= max(lacking / 2, size):
                self._manager.expect(other.id, common)
                return True
        return False

    def _next_waiting(self, now_s: float) -> Request | None:
        if self._settings.longest_prefix_first and self._free_slots:
            return self._queue.best_head(lambda request: self._lookup(request).tokens, now_s)
        return self._queue.head()

    def _seal(
        self,
        decode: list[Request],
        planned: list[tuple[Request, Advance]],
        admitted: list[tuple[Admit, Request, Advance]],
    ) -> Step | None:
        planned += [(request, advance) for _, request, advance in admitted]
        if not decode and not planned:
            return None
        for request in decode:
            request.pending += 1
            request.computed_tokens += 1
        slots: Any = [request.slot for request in decode]
        drawing, prompts = [*decode], []
        decoding, prompt_tokens = len(decode), 0
        if self._queue.num_tenants > 1:
            self._count_served(decode, planned)
        for request, advance in planned:
            if request.is_decoding:
                decoding += 1
            else:
                prompt_tokens += advance.tokens
                prompts.append((request, advance.slot))
            if advance.tokens == request.remaining_tokens:
                request.pending += 1
                drawing.append(request)
            request.computed_tokens += advance.tokens
        self._in_flight.append(_Flight(drawing, prompts, decoding, prompt_tokens))
        self._steps += 1
        retired, self._retired_slots = self._retired_slots, []
        copies, self._copies = self._copies, []
        saves, self._saves = self._saves, []
        swap_out, self._swap_out = self._swap_out, []
        swap_in, self._swap_in = self._swap_in, []
        forked, self._forked = self._forked, []
        return Step(
            self._epoch,
            self._steps,
            tuple(retired),
            tuple(swap_out),
            tuple(swap_in),
            self._swap.take_forgotten(),
            tuple(copies),
            tuple(saves),
            (*forked, *(admit for admit, _, _ in admitted)),
            tuple(advance for _, advance in planned),
            tuple(slots),
            tuple([trace for request, _ in prompts if (trace := request.terms.trace)]),
        )

    def _count_served(self, decode: Sequence[Request], planned: Sequence[tuple[Request, Advance]]) -> None:
        for request in decode:
            self._queue.served(request.terms.tenant, DECODE_WEIGHT)
        for request, advance in planned:
            self._queue.served(request.terms.tenant, DECODE_WEIGHT if request.is_decoding else advance.tokens)

    # -- one request -------------------------------------------------------------------------------------------------

    def _chunk(self, request: Request, budget: int) -> int:
        limit = self._settings.max_prefill_chunk_tokens or budget
        if request.is_cautious:
            limit = min(limit, self._manager.plan.block_tokens)
        if request.forks and request.computed_tokens < request.prompt_tokens - 1:
            limit = min(limit, request.prompt_tokens - 1 - request.computed_tokens)
        tokens = max(0, min(request.remaining_tokens, budget, limit))
        if tokens == 0:
            return 0
        return self._manager.chunk_end(request.id, request.computed_tokens + tokens) - request.computed_tokens

    def _fitting_chunk(self, request: Request, tokens: int) -> int:
        """The most of `tokens` that there are blocks for now. A shorter chunk needs fewer at once."""
        longest = self._manager.room_to_grow(request.id, request.computed_tokens + tokens)
        return max(0, longest - request.computed_tokens)

    def _try_advance(self, request: Request, tokens: int) -> Advance | None:
        """None, with nothing taken, when the pool has too few blocks."""
        assert request.slot is not None
        try:
            growth = self._manager.extend(request.id, request.computed_tokens + tokens, written=request.computed_tokens)
        except PoolExhausted:
            return None
        request.quiet_until = self._manager.quiet_until(request.id)
        self._copies += growth.copies
        self._saves += [(request.slot, save.group, save.length, save.block) for save in growth.saves]
        return Advance(request.slot, tokens, tuple(map(tuple, growth.blocks)) if growth else ())

    def _named(self, request: Request) -> tuple[TokenChain, Encoder | None]:
        """The names of its prefixes, and what it is read beside."""
        encoder = request.gallery.encoder if request.gallery is not None else None
        salt = request.terms.salt.encode()
        if encoder is not None and salt:
            encoder = encoder._replace(content=sha256(salt).digest() + encoder.content)
        if request.chain is None:
            request.chain = self._manager.chain(request.tokens, salt, encoder)
        return request.chain, encoder

    def _lookup(self, request: Request) -> Hit:
        chain, encoder = self._named(request)
        hit = self._manager.lookup(chain, encoder=encoder)
        return hit._replace(tokens=0) if request.lacks_prompt_logprobs else hit

    def _try_admit(self, request: Request, budget: int, now_s: float) -> tuple[Admit, Request, Advance] | None:
        """A slot and the first chunk's blocks for a waiting request. None, with nothing taken, if that can not be."""
        alone = not self._running
        if request.swapped is not None:
            entry = self._try_swap_in(request, budget)
            if entry is not None or not alone:
                return entry
            self._forget_swapped(request)  # a block at a time, computed anew, it fits
        hit = self._lookup(request)
        self._manager.open(request.id, hit)
        request.computed_tokens = hit.tokens
        request.slot = self._free_slots[-1]
        tokens = self._chunk(request, budget)
        advance = self._try_advance(request, tokens)
        if advance is None and alone and (shorter := self._fitting_chunk(request, tokens - 1)):
            tokens = shorter
            advance = self._try_advance(request, tokens)
        if advance is None:
            self._manager.release(request.id, hit.tokens)
            request.computed_tokens, request.slot = 0, None
            if alone:  # what it found in the cache, and a copy of its end, are too much for a pool that just fits it
                assert hit.tokens, f"request {request.id} does not fit an empty pool, and was taken"
                self._manager.reset_prefix_cache()
                return self._try_admit(request, budget, now_s)
            return None
        self._free_slots.pop()
        self._queue.remove(request)
        if request.seniority is None:
            request.seniority = self._seniority(request, now_s)
            request.admitted_s = now_s
        self._start(request)
        if request.is_at_fork:  # they find in the cache what they would share
            self._release_forks(request)
        if not request.preemptions:
            request.cached_tokens, request.lost_tokens = hit.tokens, hit.lost
        admit = self._admit(request, has_encoded=bool(hit.encoder_tokens))
        return admit, request, advance._replace(blocks=())  # its blocks came with the table

    def _try_swap_in(self, request: Request, budget: int) -> tuple[Admit, Request, Advance] | None:
        """As `_try_admit`, for a request whose blocks wait in host memory."""
        swapped = request.swapped
        assert swapped is not None
        chain, encoder = self._named(request)
        try:
            blocks = self._manager.swap_in(request.id, chain, swapped.tokens, swapped.places, encoder)
        except PoolExhausted:
            return None
        request.computed_tokens = swapped.tokens
        request.slot = self._free_slots[-1]
        advance = self._try_advance(request, self._chunk(request, budget))
        if advance is None:
            self._manager.abandon(request.id)
            request.computed_tokens, request.slot = 0, None
            return None
        if request.is_at_fork:
            self._release_forks(request)
        self._free_slots.pop()
        self._queue.remove(request)
        self._start(request)
        for (group, _), ticket, block in zip(swapped.places, swapped.tickets, blocks, strict=True):
            self._swap_in.append((group, ticket, block))
        self._swap.give_back(swapped)
        request.swapped = None
        return self._admit(request, has_encoded=True), request, advance._replace(blocks=())

    def _try_fork(self, parent: Request, fork: Request) -> bool:
        """Let `fork` go on from where `parent` is. False, with nothing taken, for lack of a slot or of blocks."""
        if not self._free_slots:
            return False
        try:
            growth = self._manager.fork(parent.id, fork.id, fork.tokens)
        except PoolExhausted:
            return False
        parent.forks.remove(fork)
        fork.parent = None
        self._copies += growth.copies
        fork.slot = self._free_slots.pop()
        fork.computed_tokens = parent.computed_tokens
        fork.cached_tokens, fork.lost_tokens = parent.cached_tokens, parent.lost_tokens
        assert parent.seniority is not None
        fork.seniority = parent.seniority[0], fork.id
        fork.admitted_s = parent.admitted_s
        self._start(fork)
        self._forked.append(self._admit(fork, has_encoded=True))
        return True

    def _release_forks(self, request: Request) -> None:
        """Those that wait for the prompt of `request` wait like everybody else."""
        for fork in request.forks:
            fork.parent = None
            self._queue.add(fork)
        request.forks = []
        if request in self._parents:
            self._parents.remove(request)

    def _start(self, request: Request) -> None:
        insort(self._running, request, key=_by_seniority)

    def _seniority(self, request: Request, now_s: float) -> tuple[float, int]:
        """What it was given at its first admission, or what it would be given now."""
        return request.seniority or (now_s + request.terms.priority * self._settings.ageing_s, request.id)

    def _admit(self, request: Request, *, has_encoded: bool) -> Admit:
        """What the workers must know of a request that has its slot and its blocks."""
        assert request.slot is not None
        gallery = request.gallery
        return Admit(
            request.slot,
            tuple(request.tokens),
            request.computed_tokens,
            tuple(map(tuple, self._manager.table(request.id))),
            request.max_total_tokens,
            _sampling(request),
            gallery.views if gallery is not None else (),
            gallery.inputs if gallery is not None and not has_encoded else (),
        )

    def _preempt(self, request: Request) -> None:
        """Back to its place in the queue, with its tokens; its blocks are given back, or wait in host memory."""
        if self._is_worth_swapping(request):
            self._put_aside(request)
        else:
            self._retire(request)
        request.computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self._queue.add(request)

    def _is_worth_swapping(self, request: Request) -> bool:
        """Is it cheaper to copy its blocks to host memory and back than to compute them again?"""
        if not self._settings.swap_bytes or not request.computed_tokens:
            return False
        copied = self._manager.swap_bytes(request.id)
        copy_us = 2 * copied / HOST_BYTES_PER_US
        return copied <= self._swap.free_bytes and copy_us < self._pace.prefill_us(request.computed_tokens)

    def _put_aside(self, request: Request) -> None:
        """`_retire`, with a copy of its blocks in host memory."""
        tokens = request.computed_tokens
        admit_is_known = all(admit.slot != request.slot for admit in self._forked)
        moved = self._retire(request, keep=admit_is_known)
        if moved is not None:
            sizes = [group.block_bytes for group in self._manager.plan.groups]
            self.swaps += 1
            request.swapped = self._swap.put(tokens, [(g, n) for g, n, _ in moved], sizes)
            for (group, _, block), ticket in zip(moved, request.swapped.tickets, strict=True):
                self._swap_out.append((group, block, ticket))

    def _forget_swapped(self, request: Request) -> None:
        if request.swapped is not None:
            self._swap.forget(request.swapped)
            request.swapped = None

    def _start_over(self, request: Request) -> None:
        """A request that has the pool to itself, and still not one block more, sits on large pages it uses in part.

        On an empty pool, a block at a time, it fits, or it would not have been taken.
        """
        assert not request.is_cautious, f"request {request.id} does not fit alone, and was taken"
        request.is_cautious = True
        self._preempt(request)
        self._forget_swapped(request)
        self._manager.reset_prefix_cache()

    def _put_back(self, request: Request) -> None:
        """Off its slot, and back to its place in the queue."""
        self._retire(request)
        request.computed_tokens = 0
        self._queue.add(request)

    def _retire(self, request: Request, *, keep: bool = False) -> list[tuple[int, int, BlockId]] | None:
        """Take a running request off its slot and give back its blocks; with `keep`, say what to copy if it can be."""
        slot = request.slot
        assert slot is not None
        moved = self._manager.swap_out(request.id, request.computed_tokens) if keep else None
        if moved is None:
            self._manager.release(request.id, request.computed_tokens)
        self._running.remove(request)
        self._free_slots.append(slot)
        request.slot = None
        for admit in self._forked:
            if admit.slot == slot:  # the workers were not to hear of it before the step that is being planned
                self._forked.remove(admit)
                return moved
        self._retired_slots.append(slot)
        return moved


def _by_seniority(request: Request) -> tuple[float, int]:
    assert request.seniority is not None
    return request.seniority


def _enter_prompt_logprobs(request: Request, entry: PromptLogprobs) -> None:
    """What is new of it: a request that was preempted computes the beginning of its prompt again."""
    known = request.prompt_logprobs
    if known is not None and entry.start <= len(known) + 1:
        known += entry.rows[len(known) + 1 - entry.start :]


def _sampling(request: Request) -> Sampling:
    params = request.sampling
    wants_prompt = params.prompt_logprobs is not None and request.lacks_prompt_logprobs
    return Sampling(
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        request.seed,
        _count(params.logprobs),
        params.min_p,
        request.prompt_tokens,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.biases,
        tuple(request.stop_token_ids) if params.min_tokens else (),
        params.min_tokens,
        _count(params.prompt_logprobs) if wants_prompt else -1,
        params.form or (),
        params.bad_token_ids,
    )


def _count(logprobs: int | None) -> int:
    """As `Sampling` has it."""
    return -1 if logprobs is None else ALL if logprobs == -1 else logprobs
