"""Who takes part in the next step, and why.

A step holds at most `max_num_batched_tokens` tokens: one for each request that decodes, and then prompts, in chunks,
for as much of the step's time as is fair to those who decode (`prefill_budget.py`). `fair_queue.py` says whose turn it
is among those who wait.

When the pool runs out of blocks, the most junior running request is preempted (`preemption.py`).
"""

import time
from collections import deque
from collections.abc import Callable, Sequence

from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager
from ...proto.step import PromptLogprobs, Step, StepResult
from ..request import Request
from .chunks import Chunks
from .deadlines import Deadlines
from .fair_queue import DECODE_WEIGHT, WaitingQueue
from .outcome import Outcome, Progress
from .preemption import Preemption
from .prefill_budget import PrefillBudget, StepBudget
from .prefixes import lookup
from .quarantine import Quarantine
from .seats import Seats
from .settings import SchedulerSettings
from .sharing import Sharing
from .step_draft import StepDraft, StepUnderWay
from .step_times import StepTimes

MOST_PATIENT = 8
"""Requests that may be passed by in one step because somebody else computes their prompt."""

OTHERS = 16
"""Waiting requests that room is kept for beside another tenant's prompts."""

TOUCHED = 4
"""Waiting requests whose cached prefixes are kept for them while prompts are computed."""


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
        self._times = StepTimes()
        self._budget = PrefillBudget(settings, manager.plan.block_tokens, self._times)
        self._queue = WaitingQueue(settings.ageing_s)
        self._sharing = Sharing(manager)
        self._preemption = Preemption(settings, manager)
        self._chunks = Chunks(settings, manager)
        self._seats = Seats(settings, manager, self._chunks, self._preemption)
        self._requests: dict[RequestId, Request] = {}
        self._draft = StepDraft()  # of the next step
        self._under_way: deque[StepUnderWay] = deque()  # steps, oldest first
        self._aborted: list[Request] = []
        self._deadlines = Deadlines()
        self._expired: list[Request] = []
        self._quarantine = Quarantine()
        self._held_up: Request | None = None  # it was its turn, and there was no room
        self.is_full = False  # the last step had no room for somebody
        self._lacks_blocks = False  # and would not have had any if it had held more
        self._epoch = 1
        self._steps = 0

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queue a request, and others that ask the same and differ in what is drawn."""
        request.arrival_s = self._clock()
        for each in (request, *forks):
            each.arrival_s = request.arrival_s
            self._requests[each.id] = each
            self._queue.enter(each)
            self._deadlines.add(each)
        if forks:
            self._sharing.add(request, forks)
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
        return bool(self._seats.running or self._queue or self._aborted)

    @property
    def num_running(self) -> int:
        return sum(
            request.id in self._requests for request in self._seats.running
        )  # else: aborted, until the next plan

    @property
    def num_seated(self) -> int:
        """Requests that have a slot, those given up since the last plan among them."""
        return len(self._seats.running)

    @property
    def num_seats(self) -> int:
        """Requests that can run at once: as many as there are slots, or as run now if there are no blocks for more."""
        return max(1, len(self._seats.running)) if self._lacks_blocks else self._settings.max_num_seqs

    @property
    def num_waiting(self) -> int:
        return len(self._requests) - self.num_running

    @property
    def preemptions(self) -> int:
        return self._preemption.preemptions

    @property
    def swaps(self) -> int:
        """Of the preemptions, those whose blocks went to host memory."""
        return self._preemption.swaps

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
        self._drop_aborted()
        if self._deadlines.next_s <= now_s:
            self._expire(now_s)
        for cleared in self._quarantine.clear():
            self._put_back(cleared)
        if self._held_up is not None:
            self._make_room(self._held_up, now_s)
        if self._sharing.parents:
            self._fork()
        others = self._sort_running()
        budget = self._open_budget(others)
        is_short = self._advance(others, budget)
        admitted = 0 if is_short and self._seats.running else self._admit_waiting(budget, now_s)
        if self._queue and self._manager.is_full and (admitted or self._draft.has_prompts):
            self._sharing.keep_for(self._queue.next_few(TOUCHED))
        self.is_full = bool(self._queue)
        is_held_up = self._held_up is not None and bool(self._seats.free_slots)
        self._lacks_blocks = self.is_full and (is_short or is_held_up or bool(self._quarantine.suspects))
        return self._seal()

    def commit(self, result: StepResult) -> Outcome:
        """The oldest step under way has run: enter its tokens, give back blocks nobody needs, finish what is finished.

        A request that ends with a token of its stops may have one more step under way: what that draws is dropped.
        """
        step = self._under_way.popleft()
        self._times.learn(step.decoding, step.prompt_tokens, result.run_us)
        by_slot: dict[int, Request] = {}
        for request, slot in step.prompts:
            by_slot[slot] = request
            if request.slot == slot:
                self._manager.commit(request.id)
                request.quiet_until = self._manager.quiet_until(request.id)
        for entry in result.prompt_logprobs:
            _enter_prompt_logprobs(by_slot[entry.slot], entry)
        assert len(result.tokens) == len(step.drawing), "a step must bring one token to each request that draws"
        logprobs = {step.drawing[place].id: row for place, row in result.logprobs}
        requests, plain, notable = [], [], []
        failed = [(request, why) for place, why in result.failures if (request := step.drawing[place]).is_live]
        for request, _ in failed:
            self._forget(request)
            self._drop(request)
        for request, token in zip(step.drawing, result.tokens, strict=True):
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
        ran = list(self._seats.running)
        for request in ran:
            self._put_back(request)
        self._quarantine.note_loss(ran)
        for request in self._requests.values():
            request.computed_tokens = request.pending = 0
            self._preemption.forget(request, self._draft)
        self._manager.reset_prefix_cache()
        self._draft = StepDraft()  # the new workers know of no slot and no ticket
        self._under_way.clear()
        self._held_up = None
        self._epoch += 1
        return ran

    def shrink(self) -> None:
        """A step did not fit in memory: the next ones hold fewer tokens of prompts, and more again after a while."""
        self._budget.shrink(self._steps)

    # -- ends --------------------------------------------------------------------------------------------------------

    def _forget(self, request: Request) -> None:
        """It is nobody's concern any more; `_drop` takes what it has."""
        request.is_live = False
        del self._requests[request.id]

    def _drop(self, request: Request) -> None:
        """Take a request off wherever it is. Forks that wait for its prompt go on by themselves."""
        if request.slot is not None:
            self._manager.release(request.id, request.computed_tokens)
            self._seats.leave(request, self._draft)
        elif request.parent is not None:
            self._sharing.leave(request)
        else:
            self._queue.remove(request)
        self._release_forks(request)
        self._preemption.forget(request, self._draft)
        self._queue.leave(request)

    def _drop_aborted(self) -> None:
        for request in self._aborted:
            self._drop(request)
        self._aborted.clear()

    def _expire(self, now_s: float) -> None:
        """Give up requests whose answers have become worthless."""
        for request_id in self._deadlines.pass_by(now_s):
            request = self._requests.get(request_id)
            if request is not None:
                self._forget(request)
                self._drop(request)
                self._expired.append(request)

    # -- the parts of a plan -----------------------------------------------------------------------------------------

    def _make_room(self, waiting: Request, now_s: float) -> None:
        """A request that could not be admitted may take the place of a running one of lower priority."""
        if not waiting.is_live or not self._seats.running:
            return
        most_junior = self._seats.running[-1]
        # The one that gives way comes behind in the queue, or it would take its own place again.
        if self._queue.is_behind(most_junior, waiting) and self._preemption.gives_way(most_junior, waiting, now_s):
            self._preempt(most_junior)

    def _fork(self) -> None:
        """Requests whose prompt is computed but for its last token share it with their forks."""
        for parent in self._sharing.ready():
            while self._seats.free_slots and (fork := self._sharing.fork(parent, self._draft)) is not None:
                self._seats.fork(fork, parent, self._draft)
            self._release_forks(parent)

    def _sort_running(self) -> list[Request]:
        """Plan one token for each request that decodes and needs no block. Returns the others, most senior first."""
        draft = self._draft
        assert not draft.decode and not draft.work, "a draft that computes something was not sealed"
        others: list[Request] = []
        for request in self._seats.running:
            known = len(request.tokens) + request.pending
            if request.computed_tokens + 1 != known or known <= request.prompt_tokens:
                others.append(request)
            elif known >= request.max_total_tokens:
                continue  # its last token is under way, and we have not heard of it yet
            elif known < request.quiet_until:
                draft.decode.append(request)
            else:
                others.append(request)
        return others

    def _advance(self, others: Sequence[Request], budget: StepBudget) -> bool:
        """A token for each of `others` that decodes, a chunk for each in prefill. True if the pool ran short."""
        is_short = False
        for request in others:
            if request.slot is None:
                continue  # preempted by a more senior one just now
            is_decoding = request.is_decoding
            tokens = 1 if is_decoding else self._chunks.tokens(request, budget.left_for(request.terms.tenant))
            if tokens and not self._chunks.advance(request, tokens, self._draft):
                is_short = True
                tokens = self._advance_under_pressure(request, tokens)
            if not is_decoding:
                budget.spend(request.terms.tenant, tokens)
        if is_short:
            self._draft.leave_out_preempted()
        return is_short

    def _advance_under_pressure(self, request: Request, tokens: int) -> int:
        """The pool has too few blocks for so many tokens of a request: junior ones give way. Returns how many tokens it
        computes at last; 0: it has to wait."""
        while True:
            # 1. A more junior request gives its blocks back.
            most_junior = self._seats.running[-1]
            if most_junior is not request:
                self._preempt(most_junior)
            # 2. It is the most junior one itself, and computes what there is room for.
            elif shorter := self._chunks.fitting(request, tokens - 1):
                tokens = shorter
            # 3. It waits for a more senior one to end. If there is none, it begins again, on an empty pool.
            else:
                if len(self._seats.running) == 1:
                    self._start_over(request)
                return 0
            if self._chunks.advance(request, tokens, self._draft):
                return tokens

    def _open_budget(self, others: Sequence[Request]) -> StepBudget:
        """Tokens of prompts that the step may hold. others: those that run and do not just decode."""
        prompts = [each for each in others if not each.is_decoding]
        decoding = len(self._draft.decode) + len(others) - len(prompts)
        beginning = min(len(self._queue), len(self._seats.free_slots))
        budget = self._budget.open(self._steps, decoding, len(prompts) + beginning)
        if prompts and self._queue.num_tenants > 1:
            may_begin = self._seats.free_slots and self._held_up is None and not self._quarantine.suspects
            budget.share(prompts, self._queue.next_few(OTHERS) if may_begin else ())
        return budget

    def _admit_waiting(self, budget: StepBudget, now_s: float) -> int:
        """Admit requests while there are tokens, slots and blocks for them. Returns how many."""
        admitted = 0
        self._held_up = None
        # 1. While there are suspects, the first of them runs alone.
        if suspects := self._quarantine.suspects:
            return int(not self._seats.running and self._admit(suspects[0], budget, now_s))
        patient: list[Request] = []  # those whose turn it is, and who had better wait
        while budget.left > 0 and len(patient) <= MOST_PATIENT:
            request = self._queue.after(patient) if patient else self._next_waiting(now_s)
            # 2. A request that was preempted just now, with a token of it under way, goes on when the token is known.
            if request is None or request.pending:
                break
            # 3. If another one computes most of its prompt, it waits, and the next one in turn is looked at.
            if self._seats.free_slots and self._sharing.defer(request, self._seats.running):
                patient.append(request)
                continue
            # 4. If there is no room for it, later ones do not overtake it.
            if not self._seats.free_slots or not self._admit(request, budget, now_s):
                self._held_up = request
                break
            admitted += 1
        return admitted

    def _admit(self, request: Request, budget: StepBudget, now_s: float) -> bool:
        """Have a waiting request run. False, with nothing changed, for lack of blocks."""
        tokens = self._seats.admit(request, budget.left, now_s, self._draft)
        if not tokens:
            return False
        self._queue.remove(request)
        budget.spend(request.terms.tenant, tokens)
        if request.is_at_fork:  # its forks find in the cache what they would share
            self._release_forks(request)
        return True

    def _next_waiting(self, now_s: float) -> Request | None:
        if self._settings.longest_prefix_first and self._seats.free_slots:
            return self._queue.best_head(lambda request: lookup(request, self._manager).tokens, now_s)
        return self._queue.head()

    def _seal(self) -> Step | None:
        """The step as it was drafted; None, and the draft waits for more, if it computes nothing."""
        draft = self._draft
        if not draft.decode and not draft.work:
            return None
        if self._queue.num_tenants > 1:
            self._count_served(draft)
        self._steps += 1
        step, under_way = draft.seal(self._epoch, self._steps)
        self._under_way.append(under_way)
        self._draft = StepDraft()
        return step

    def _count_served(self, draft: StepDraft) -> None:
        for request in draft.decode:
            self._queue.served(request.terms.tenant, DECODE_WEIGHT)
        for request, advance in draft.work:
            self._queue.served(request.terms.tenant, DECODE_WEIGHT if request.is_decoding else advance.tokens)

    # -- one request -------------------------------------------------------------------------------------------------

    def _release_forks(self, request: Request) -> None:
        """Forks that wait for the prompt of `request` wait for their turn instead."""
        if request.forks:
            for fork in self._sharing.release(request):
                self._queue.add(fork)

    def _preempt(self, request: Request) -> None:
        """Take the slot and the blocks of a request; it waits again, with its tokens."""
        self._preemption.take_blocks(request, self._draft, self._times.prefill_us(request.computed_tokens))
        self._requeue(request)

    def _start_over(self, request: Request) -> None:
        """A request that has the pool to itself, and still not one block more, sits on large pages it uses in part.

        On an empty pool, a block at a time, it fits, or it would not have been taken.
        """
        assert not request.is_cautious, f"request {request.id} does not fit alone, and was taken"
        request.is_cautious = True
        self._preempt(request)
        self._preemption.forget(request, self._draft)
        self._manager.reset_prefix_cache()

    def _put_back(self, request: Request) -> None:
        """Have a running request wait again, through no lack of blocks."""
        self._manager.release(request.id, request.computed_tokens)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """Back to its place in the queue, when its blocks are gone."""
        self._seats.leave(request, self._draft)
        request.computed_tokens = 0
        self._queue.add(request)


def _enter_prompt_logprobs(request: Request, entry: PromptLogprobs) -> None:
    """What is new of it: a request that was preempted computes the beginning of its prompt again."""
    known = request.prompt_logprobs
    if known is not None and entry.start <= len(known) + 1:
        known += entry.rows[len(known) + 1 - entry.start :]
