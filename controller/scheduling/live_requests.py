"""Every live request: where it is, and how it gets from one place to another.

    add ──► waits in the queue ── admit ──► runs in a slot ── end ──►
               ▲                                │       ▲
               └────── preempt, put back ───────┘       │
    add ──► waits as a fork for its parent's prompt ── fork

The scheduler decides which request moves. The moves are made here.
"""

from collections.abc import Sequence

from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager
from ..leases.leases import Leases
from ..request import Request
from .deadlines import Deadlines
from .fair_queue import FairQueue
from .preemption import Preemption
from .prefill_budget import Allowance
from .prefixes import named
from .seats import Seats
from .sharing import Sharing
from .step_draft import StepDraft


class LiveRequests:
    """Requests from their arrival to their end. What the workers have to hear of a move is written into a draft.

    Invariant: a live request is in exactly one place: in the queue, with the parent that it is a fork of, or in a slot.
    """

    def __init__(
        self,
        manager: CacheManager,
        queue: FairQueue,
        seats: Seats,
        sharing: Sharing,
        preemption: Preemption,
        deadlines: Deadlines,
    ):
        self._manager = manager
        self._queue = queue
        self._seats = seats
        self._sharing = sharing
        self._preemption = preemption
        self._deadlines = deadlines
        self._live: dict[RequestId, Request] = {}
        self.aborted: list[Request] = []  # until the next plan
        self.expired: list[Request] = []  # until the engine asks

    @property
    def _leases(self) -> Leases | None:
        """Those that hear which requests come and leave; None: there are none."""
        return self._manager.leased.keeper

    # -- they come and go --------------------------------------------------------------------------------------------

    def add(self, request: Request, forks: Sequence[Request], now_s: float) -> None:
        """Queue a request that has just arrived. Its forks wait for its prompt."""
        for each in (request, *forks):
            assert each.id not in self._live, f"request {each.id} is here already"
            each.arrival_s = now_s
            self._live[each.id] = each
            self._queue.enter(each)
            self._deadlines.add(each)
            if (leases := self._leases) is not None:
                leases.arrived(each, named(each, self._manager)[0])
        if forks:
            self._sharing.add(request, forks)
        self._queue.add(request)

    def abort(self, request_id: RequestId) -> bool:
        """Give a request up: it is dropped with the next plan. False if it is unknown."""
        request = self._live.get(request_id)
        if request is None:
            return False
        self._forget(request)
        self.aborted.append(request)
        return True

    def drop_aborted(self, draft: StepDraft) -> None:
        for request in self.aborted:
            self._drop(request, draft)
        self.aborted.clear()

    def expire(self, now_s: float, draft: StepDraft) -> None:
        """End the requests whose deadlines have passed, and leases whose time is over."""
        if (leases := self._leases) is not None:
            leases.expire()
        for request_id in self._deadlines.pass_by(now_s):
            if (request := self._live.get(request_id)) is not None:
                self.end(request, draft)
                self.expired.append(request)

    def take_expired(self) -> list[Request]:
        """The requests that have expired since the last call."""
        expired, self.expired = self.expired, []
        return expired

    def end(self, request: Request, draft: StepDraft) -> None:
        """A request has its last token, or will not get another one."""
        self._forget(request)
        self._drop(request, draft)

    @property
    def num_running(self) -> int:
        return sum(request.id in self._live for request in self._seats.running)  # else: aborted, until the next plan

    @property
    def num_waiting(self) -> int:
        return len(self._live) - self.num_running

    # -- they move ---------------------------------------------------------------------------------------------------

    def admit(self, request: Request, left: Allowance, now_s: float, draft: StepDraft) -> int:
        """Have a waiting request run, and compute of what is `left`. Returns how many; 0, with nothing changed, for
        lack of blocks."""
        tokens = self._seats.admit(request, left, now_s, draft)
        if tokens:
            self._queue.remove(request)
            if request.is_at_fork:  # its forks find in the cache what they would share
                self._release_forks(request)
        return tokens

    def fork(self, draft: StepDraft) -> None:
        """Have forks run that can go on from their parents. Those without a slot or a block wait for their turn."""
        for parent in self._sharing.ready():
            while self._seats.free_slots and (fork := self._sharing.fork(parent, draft)) is not None:
                self._seats.fork(fork, parent, draft)
            self._release_forks(parent)

    def preempt(self, request: Request, draft: StepDraft) -> None:
        """Take the slot and the blocks of a running request. It waits again, with its tokens."""
        self._preemption.take_blocks(request, draft)
        self._requeue(request, draft)

    def start_over(self, request: Request, draft: StepDraft) -> None:
        """Compute a request anew that has the pool to itself, and still not one block more: it sits on large pages that
        it uses in part. On a pool that is empty but for leases, a block at a time, it fits, or it would not have been
        taken."""
        assert not request.is_cautious, f"request {request.id} does not fit alone, and was taken"
        request.is_cautious = True
        self.preempt(request, draft)
        self._preemption.forget(request, draft)
        self._manager.leased.evict_others()

    def put_back(self, request: Request, draft: StepDraft) -> None:
        """Have a running request wait again, but for no lack of blocks."""
        self._manager.release(request.id, request.computed_tokens)
        self._requeue(request, draft)

    def lose_workers(self, draft: StepDraft) -> list[Request]:
        """Nothing is computed of any request any more. Those that ran wait again; returns them."""
        ran = list(self._seats.running)
        for request in ran:
            self.put_back(request, draft)
        for request in self._live.values():
            request.computed_tokens = request.pending = 0
            self._preemption.forget(request, draft)
        return ran

    def _requeue(self, request: Request, draft: StepDraft) -> None:
        self._seats.leave(request, draft)
        request.computed_tokens = 0
        self._queue.add(request)

    def _release_forks(self, parent: Request) -> None:
        """Forks that wait for the prompt of `parent` wait for their turn instead."""
        for fork in self._sharing.release(parent):
            self._queue.add(fork)

    def _forget(self, request: Request) -> None:
        request.is_live = False
        del self._live[request.id]

    def _drop(self, request: Request, draft: StepDraft) -> None:
        """Take a request that is forgotten off wherever it is. Its forks go on without it."""
        assert not request.is_live, f"request {request.id} is dropped and still live"
        if request.slot is not None:
            self._manager.release(request.id, request.computed_tokens)
            self._seats.leave(request, draft)
        elif request.parent is not None:
            self._sharing.leave(request)
        else:
            self._queue.remove(request)
        self._settle_lease(request)  # before anything takes what it has just given back
        self._release_forks(request)
        self._preemption.forget(request, draft)
        self._queue.leave(request)

    def _settle_lease(self, request: Request) -> None:
        """Keep what the request asked to be kept, and let go of what was kept for it."""
        if (leases := self._leases) is not None:
            has_begun = len(request.tokens) > request.prompt_tokens
            has_ended = has_begun and request.finish_reason(request.tokens[-1]) is not None
            until_s = leases.left(request, *named(request, self._manager), has_ended=has_ended)
            if until_s is not None:
                self._deadlines.wake(until_s)
