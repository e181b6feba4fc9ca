"""Prompts that no client has asked for yet, computed in steps that have room: a later request finds them cached.

    a front end ─► waits ─── begin ──► has a slot, and computes a chunk in each step with room ─► ended: it is cached
                     ▲                                  │
                     └──── stop: a request waits ───────┘ or needs blocks; what is computed stays in the cache

Requests come first. While one waits or computes its prompt, nothing is prepared; beside those that decode, only
what hardly holds them up (`prefill_budget.py`). At most one step under way holds a chunk of what is prepared, so
that a request that comes waits for that one at most. Blocks are taken that are free or hold what is worth less.

A prompt is prepared up to its last token. That is not computed, and so nothing is drawn.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from ...kvcache.lookup import Hit
from ...kvcache.manager import CacheManager
from ...kvcache.reach import moves_on
from ...proto.status import PreparedEnd, PreparedMetrics, PreparedPrompt
from ..leases.leases import leases_of
from ..request import Request
from .chunks import Chunks
from .outcome import StepUnderWay
from .prefill_budget import Allowance, PrefillBudget
from .prefixes import lookup, named
from .seats import Seats
from .step_draft import StepDraft

MOST_WANTED, MOST_OF_A_TENANT = 64, 8
"""Prompts. Of more, the oldest one of the tenant is forgotten, or of the tenant that has most."""

MOST_TOKENS = 1 << 20
"""Of all prompts together; 36 MB. One may be longer when it is alone."""

LEAST_TOKENS = 8
"""If fewer are not cached, they are left to the request that asks for them."""


@dataclass(slots=True, eq=False)
class Wanted:
    """A prompt that is to be prepared."""

    request: Request
    kept: int  # tokens that an earlier sequence has in common with it
    passed: Sequence[int]  # how that one goes on, which no request will ask for; empty: that is not known
    told: Callable[[PreparedPrompt], None]  # what became of it
    found_tokens: int = -1  # in the cache, when it first began
    computed_tokens: int = 0

    @property
    def goal(self) -> int:
        """The length to which it is computed."""
        return len(self.request.tokens) - 1

    @property
    def num_tokens(self) -> int:
        """That are kept in memory for it."""
        return len(self.request.tokens) + len(self.passed)


class Preparation:
    """Knows which prompts are to be prepared. Single-threaded; called by the scheduler, last in each plan.

    Invariant: the one that has a slot, a row in the manager and blocks is the current one, the first of `wanted`, and
    known to the workers.
    """

    def __init__(self, manager: CacheManager, seats: Seats, chunks: Chunks, budget: PrefillBudget):
        self._manager = manager
        self._seats = seats
        self._chunks = chunks
        self._budget = budget
        self._gives_back = any(moves_on(group.reach) for group in manager.plan.groups)  # blocks, on its way
        self.wanted: list[Wanted] = []  # the next one first
        self._current: Wanted | None = None
        self.ends: Counter[PreparedEnd] = Counter()
        self.tokens = 0  # that were computed
        self.stops = 0  # times that one gave way to a request
        chunks.ask_before_refusals(self.stop)

    # -- verbs -------------------------------------------------------------------------------------------------------

    def add(self, wanted: Wanted) -> None:
        """Prepare it when there is room."""
        tenant = wanted.request.options.tenant
        self.wanted.append(wanted)
        if sum(each.request.options.tenant == tenant for each in self.wanted) > MOST_OF_A_TENANT:
            self._forget_oldest_of(tenant)
        while len(self.wanted) > 1 and self._are_too_many():
            [(most, _)] = Counter(each.request.options.tenant for each in self._waiting).most_common(1)
            self._forget_oldest_of(most)

    def plan(self, draft: StepDraft, step: int, under_way: Collection[StepUnderWay], decoding: int) -> None:
        """Add a chunk to a step in which nothing is computed but a token for each of `decoding` requests.

        step: how many were planned before it
        """
        # 1. One step with a chunk is under way at most.
        if any(request.is_prepared for each in under_way for request, _ in each.prompts):
            return
        left = self._budget.spare_tokens(step, decoding)
        least = self._manager.plan.block_tokens if decoding else 1  # fewer are not worth their row
        # 2. The current one goes on, or ends.
        if (current := self._current) is not None:
            lacking = current.goal - current.request.computed_tokens
            if left < min(lacking, least):
                return
            if lacking and self._advance(current, min(left, lacking), draft):
                return
            self._leave(current, draft)
            self._end(current, PreparedEnd.NO_ROOM if lacking else PreparedEnd.COMPUTED)
        # 3. The next one begins that lacks something for which there is room. It is not looked up in vain.
        while self.wanted and self._seats.free_slots and left >= min(LEAST_TOKENS, least):
            wanted = self.wanted[0]
            hit = lookup(wanted.request, self._manager)
            if wanted.found_tokens < 0:
                wanted.found_tokens = hit.tokens
            lacking = wanted.goal - hit.tokens
            if lacking < LEAST_TOKENS:
                self._end(wanted, PreparedEnd.COMPUTED if wanted.computed_tokens else PreparedEnd.FOUND)
            elif left < min(lacking, least) or self._begin(wanted, hit, min(left, lacking), draft):
                return
            else:
                self._end(wanted, PreparedEnd.NO_ROOM)

    def measured(self) -> PreparedMetrics | None:
        """None while none was ever wanted."""
        if not self.wanted and not self.ends:
            return None
        return PreparedMetrics({end.value: self.ends[end] for end in PreparedEnd}, self.tokens, self.stops)

    def stop(self, draft: StepDraft) -> bool:
        """A request needs the slot or the blocks of what is being prepared: that waits, and what it has computed is
        cached. False if nothing is being prepared."""
        if self._current is None:
            return False
        self._leave(self._current, draft)
        self.stops += 1
        return True

    def forget_all(self, draft: StepDraft) -> None:
        """The workers have lost all that they had."""
        self.stop(draft)
        for wanted in list(self.wanted):
            self._end(wanted, PreparedEnd.FORGOTTEN)

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    @property
    def _waiting(self) -> Sequence[Wanted]:
        return self.wanted[self._current is not None :]

    def _are_too_many(self) -> bool:
        return len(self.wanted) > MOST_WANTED or sum(each.num_tokens for each in self.wanted) > MOST_TOKENS

    def _forget_oldest_of(self, tenant: str) -> None:
        oldest = next(each for each in self._waiting if each.request.options.tenant == tenant)
        self._end(oldest, PreparedEnd.FORGOTTEN)

    def _begin(self, wanted: Wanted, hit: Hit, most: int, draft: StepDraft) -> bool:
        """Give it a slot, and have it compute up to `most` tokens. False, with nothing taken, for lack of room."""
        request, manager = wanted.request, self._manager
        manager.open(request.id, hit, is_asked=False)
        self._seats.lend(request, hit.tokens)
        self._supersede(wanted)
        is_hopeless = not self._gives_back and self._room(wanted, wanted.goal) < wanted.goal
        if is_hopeless or not self._advance(wanted, most, draft, is_new=True):
            manager.release(request.id, hit.tokens)
            self._seats.unlend(request)
            return False
        draft.admit(request, manager.table(request.id), has_encoded=False)
        self._current = wanted
        return True

    def _advance(self, wanted: Wanted, most: int, draft: StepDraft, *, is_new: bool = False) -> bool:
        """Plan a chunk of up to `most` tokens. False if there is no room for one."""
        request = wanted.request
        start = request.computed_tokens
        tokens = self._room(wanted, start + self._chunks.tokens(request, Allowance(most))) - start
        if tokens <= 0 or not self._chunks.advance(request, tokens, draft, is_new=is_new):
            return False
        wanted.computed_tokens += tokens
        self.tokens += tokens
        return True

    def _room(self, wanted: Wanted, length: int) -> int:
        """How long it may get, up to `length`, at no loss of what is worth more."""
        request, manager = wanted.request, self._manager
        while (longest := manager.room_to_grow(request.id, length, at_no_loss=True)) < length:
            if manager.retention is None or not manager.retention.give_up_for_end(request.id, wanted.goal):
                break
        return longest

    def _leave(self, wanted: Wanted, draft: StepDraft) -> None:
        """Give back its slot and its blocks, which are cached."""
        self._manager.release(wanted.request.id, wanted.request.computed_tokens)
        self._seats.take_back(wanted.request, draft)
        self._current = None
        self._supersede(wanted)

    def _supersede(self, wanted: Wanted) -> None:
        """Blocks that only lead to the end of the earlier sequence are evicted first."""
        retention = self._manager.retention
        if retention is not None and wanted.passed:
            request, size = wanted.request, self._manager.plan.block_tokens
            earlier = self._manager.chain(
                [*request.tokens[: wanted.kept], *wanted.passed], request.options.salt.encode()
            )
            retention.supersede(earlier.grow(), wanted.kept // size)

    def _end(self, wanted: Wanted, how: PreparedEnd) -> None:
        """It is wanted no longer."""
        self.wanted.remove(wanted)
        self.ends[how] += 1
        if (leases := leases_of(self._manager)) is not None and how in (PreparedEnd.COMPUTED, PreparedEnd.FOUND):
            leases.prepared(wanted.request, named(wanted.request, self._manager)[0], wanted.goal)
        wanted.told(PreparedPrompt(how.value, max(0, wanted.found_tokens), wanted.computed_tokens))
