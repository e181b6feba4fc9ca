"""Slots, the requests that run in them, and the three ways to get one.

A waiting request is admitted behind its cached prefix. A preempted one whose blocks went to host memory gets them back.
A fork goes on from where its parent is.
"""

from bisect import insort

from ...kvcache.manager import CacheManager
from ..request import Request
from .chunks import Chunks
from .preemption import Preemption
from .prefill_budget import Allowance
from .prefixes import lookup
from .settings import SchedulerSettings
from .step_draft import StepDraft


class Seats:
    """Free slots, and requests that run in the others.

    Invariant: every slot is free, of one running request, or lent. A running request has an open row in the manager,
    and none that waits has one.
    """

    def __init__(self, settings: SchedulerSettings, manager: CacheManager, chunks: Chunks, preemption: Preemption):
        self._manager = manager
        self._chunks = chunks
        self._preemption = preemption
        self.running: list[Request] = []  # most senior first
        self.free_slots = list(range(settings.max_num_seqs - 1, -1, -1))

    # -- ways to a slot ----------------------------------------------------------------------------------------------

    def admit(self, request: Request, left: Allowance, now_s: float, draft: StepDraft) -> int:
        """A slot, and the blocks of a first chunk of what is `left`, for a request that waits. Returns the tokens
        of that chunk; 0, with nothing taken, for lack of blocks."""
        is_alone = not self.running
        # 1. Blocks that wait in host memory come back. If even an empty pool has no room for them and the next chunk,
        #    the request is computed anew, where a shorter chunk may do.
        if request.swapped is not None:
            tokens = self._swap_in(request, left, draft)
            if tokens or not is_alone:
                return tokens
            self._preemption.forget(request, draft)
        # 2. Otherwise it begins behind its cached prefix. A request that is alone takes the room that there is.
        hit = lookup(request, self._manager)
        self._manager.open(request.id, hit, request.options.borders)
        self._seat(request, hit.tokens)
        tokens = self._chunks.tokens(request, left)
        has_room = self._chunks.advance(request, tokens, draft, is_new=True)
        if not has_room and is_alone and (tokens := self._chunks.fitting(request, tokens - 1)):
            has_room = self._chunks.advance(request, tokens, draft, is_new=True)
        # 3. Without room it waits. If it is alone, its cached prefix and a copy of that prefix's end are too much for a
        #    pool that just fits the request: it begins without them.
        if not has_room:
            self._manager.release(request.id, hit.tokens)
            self._unseat(request)
            if not is_alone:
                return 0
            evicted = self._manager.leased.evict_others()
            assert evicted, f"request {request.id} does not fit a pool that is empty but for leases, and was taken"
            return self.admit(request, left, now_s, draft)
        # 4. It runs.
        if request.seniority is None:
            request.seniority = self._preemption.seniority(request, now_s)
            request.admitted_s = now_s
        if not request.preemptions:
            request.cached_tokens, request.misses = hit.tokens, hit.misses
        self._begin(request, draft, has_encoded=bool(hit.encoder_tokens))
        return tokens

    def fork(self, fork: Request, parent: Request, draft: StepDraft) -> None:
        """A slot for a fork whose blocks are open: it goes on from where `parent` is."""
        self._seat(fork, parent.computed_tokens)
        self._begin(fork, draft, has_encoded=True)

    def _swap_in(self, request: Request, left: Allowance, draft: StepDraft) -> int:
        """As `admit`, for a request whose blocks wait in host memory."""
        assert request.swapped is not None, f"request {request.id} has nothing in host memory"
        blocks = self._preemption.reopen(request)
        if blocks is None:
            return 0
        self._seat(request, request.swapped.tokens)
        tokens = self._chunks.tokens(request, left)
        if not self._chunks.advance(request, tokens, draft, is_new=True):
            self._manager.abandon(request.id)
            self._unseat(request)
            return 0
        self._preemption.swap_in(request, blocks, draft)
        self._begin(request, draft, has_encoded=True)
        return tokens

    # -- slots -------------------------------------------------------------------------------------------------------

    def leave(self, request: Request, draft: StepDraft) -> None:
        """Take a running request off its slot. Its blocks are gone already."""
        assert request.slot is not None, f"request {request.id} has no slot to leave"
        self.running.remove(request)
        self.free_slots.append(request.slot)
        draft.retire(request.slot)
        request.slot = None

    def lend(self, request: Request, computed_tokens: int) -> None:
        """Give a slot to what is prepared: it has its blocks, and is not among the requests that run."""
        self._seat(request, computed_tokens)

    def unlend(self, request: Request) -> None:
        """It had no room. The workers never hear of it."""
        self._unseat(request)

    def take_back(self, request: Request, draft: StepDraft) -> None:
        """Take its slot. Its blocks are gone already."""
        assert request.slot is not None, f"request {request.id} was lent no slot"
        draft.retire(request.slot)
        self._unseat(request)

    def _seat(self, request: Request, computed_tokens: int) -> None:
        """Give a request a slot, behind `computed_tokens` whose blocks it has. `_begin` or `_unseat` follows."""
        assert request.slot is None, f"request {request.id} has slot {request.slot} already"
        request.slot = self.free_slots.pop()
        request.computed_tokens = computed_tokens

    def _unseat(self, request: Request) -> None:
        """Free the slot of a request that has nothing computed any more."""
        assert request.slot is not None, f"request {request.id} has no slot"
        self.free_slots.append(request.slot)
        request.slot, request.computed_tokens = None, 0

    def _begin(self, request: Request, draft: StepDraft, *, has_encoded: bool) -> None:
        """A request that has its slot and its blocks runs from now on, and the workers learn of it."""
        insort(self.running, request, key=_seniority)
        draft.admit(request, self._manager.table(request.id), has_encoded=has_encoded)


def _seniority(request: Request) -> tuple[float, int]:
    assert request.seniority is not None, f"request {request.id} runs without seniority"
    return request.seniority
