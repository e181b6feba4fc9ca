"""Which requests take part in the next step, and why.

A step holds at most `max_num_batched_tokens` tokens: one for each request that decodes, and then prompts, in chunks, as
many as is fair to requests that decode (`prefill_budget.py`). When the pool runs out of blocks, the most junior running
request gives way (`preemption.py`). Which waiting request is next, `fair_queue.py` says.

This file has the decisions. Most steps need few of them: requests that decode and need no block go on.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from ...kvcache.ids import RequestId
from ...kvcache.manager import CacheManager
from ...proto.step import Step, StepResult
from ..request import Request
from .chunks import Chunks
from .deadlines import Deadlines
from .fair_queue import FairQueue
from .live_requests import LiveRequests
from .outcome import Outcome, Progress, StepUnderWay
from .preemption import Preemption
from .prefill_budget import MOST_WAITING, PrefillBudget, StepBudget
from .prefixes import lookup
from .preparation import Preparation
from .quarantine import Quarantine
from .seats import Seats
from .settings import SchedulerSettings
from .sharing import MOST_DEFERRED, MOST_KEPT_FOR, Sharing
from .step_draft import StepDraft
from .step_times import MOST_UNLEARNT, StepTimes


class Scheduler:
    """Plans steps, and enters what they brought. Single-threaded; knows neither Ray nor torch."""

    def __init__(self, settings: SchedulerSettings, manager: CacheManager, clock: Callable[[], float] = time.monotonic):
        """clock: seconds; for ageing and deadlines."""
        self._settings = settings
        self._manager = manager
        self._clock = clock
        self._times = StepTimes()
        self._budget = PrefillBudget(settings, manager.plan.block_tokens, self._times)
        self._queue = FairQueue(settings.ageing_s)
        self._sharing = Sharing(manager)
        self.preemption = Preemption(settings, manager, self._times)
        self._chunks = Chunks(settings, manager)
        self._seats = Seats(settings, manager, self._chunks, self.preemption)
        self.preparation = Preparation(manager, self._seats, self._chunks, self._budget)
        self._deadlines = Deadlines()
        self._live = LiveRequests(manager, self._queue, self._seats, self._sharing, self.preemption, self._deadlines)
        self._quarantine = Quarantine()
        self._held_up: Request | None = None  # it was its turn, and there was no room
        self._made_room_for: Request | None = None  # another one gave way to it in this plan
        self.is_full = False  # there was a request that the last step had no room for
        self._lacks_blocks = False  # and a larger step would have had none either
        self._draft = StepDraft()  # of the next step
        self._under_way: deque[StepUnderWay] = deque()  # oldest first
        self._epoch = 1
        self._steps = 0

    # -- requests ----------------------------------------------------------------------------------------------------

    def add(self, request: Request, forks: Sequence[Request] = ()) -> None:
        """Queue a request, and others that ask the same and differ in what is drawn."""
        self._live.add(request, forks, self._clock())

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request at the next plan: a step under way may still write to its blocks. False if unknown."""
        return self._live.abort(request_id)

    def take_expired(self) -> list[Request]:
        """Requests that were given up since the last call, because their time was over."""
        return self._live.take_expired() if self._live.expired else []

    @property
    def has_work(self) -> bool:
        return bool(self._seats.running or self._queue.waiting or self._live.aborted or self.preparation.wanted)

    @property
    def num_running(self) -> int:
        return self._live.num_running

    @property
    def num_waiting(self) -> int:
        return self._live.num_waiting

    @property
    def num_seated(self) -> int:
        """Requests that have a slot, those given up since the last plan among them."""
        return len(self._seats.running)

    @property
    def num_seats(self) -> int:
        """Requests that can run at once: as many as there are slots, or as run now if there are no blocks for more."""
        return max(1, len(self._seats.running)) if self._lacks_blocks else self._settings.max_num_seqs

    @property
    def queued_tokens(self) -> int:
        """Tokens of all requests that wait."""
        return sum(len(request.tokens) for request in self._queue)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan_step(self) -> Step | None:
        """The next step, or None when there is nothing to compute. Steps before it may still be under way. Workers run
        steps in order, so it may use what those write, and give away blocks that those still read."""
        now_s, draft = self._clock(), self._draft
        # 1. Requests that have ended make room.
        if self._live.aborted or self._deadlines.next_s <= now_s:
            self._live.drop_aborted(draft)
            self._live.expire(now_s, draft)
        if self.preparation.wanted and (self._queue.waiting or self._sharing.parents):
            self.preparation.stop(draft)
        # 2. So does a suspect that is cleared while others are to run alone, and a request of low priority.
        if self._quarantine.suspects:
            for cleared in self._quarantine.clear():
                self._live.put_back(cleared, draft)
        if self._held_up is not None and self._held_up.is_live and self._seats.running:
            self._make_room(self._held_up, now_s)
        # 3. Forks go on from a prompt that is computed.
        if self._sharing.parents:
            self._live.fork(draft)
        # 4. Requests that decode and need no block go on. Mostly these are all.
        others = self._sort_running()
        if others or self._queue.waiting:
            self._plan_others(others, now_s)
        else:
            self._held_up, self.is_full, self._lacks_blocks = None, False, False
        # 5. What no client has asked for yet is computed where there is room.
        if self.preparation.wanted and not (self._queue.waiting or draft.has_prompts):
            self.preparation.plan(draft, self._steps, self._under_way, len(draft.decode) + len(draft.work))
        return self._seal()

    def commit(self, result: StepResult) -> Outcome:
        """The oldest step under way has run: enter its tokens, give back blocks that are passed, end what has ended.
        A request that ends with one of its stop tokens may have one more step under way. What that draws is dropped."""
        step = self._under_way.popleft()
        self._times.ran.append((step.decoding, step.prompt_tokens, result.run_us))
        if len(self._times.ran) >= MOST_UNLEARNT:
            self._times.learn()
        if step.prompts:
            self._chunks.commit(step.prompts)
        for entry in result.prompt_logprobs:
            next(request for request, slot in step.prompts if slot == entry.slot).enter_prompt_logprobs(entry)
        assert len(result.tokens) == len(step.drawing), "a step must bring one token to each request that draws"
        # 1. Answers that cannot go on end without the token.
        failed = [(request, why) for place, why in result.failures if (request := step.drawing[place]).is_live]
        for request, _ in failed:
            self._live.end(request, self._draft)
        # 2. The others get their token, and some end with it. Most have nothing more to say.
        logprobs = {step.drawing[place].id: row for place, row in result.logprobs}
        requests, plain, notable = [], [], []
        for request, token in zip(step.drawing, result.tokens, strict=True):
            if not request.is_live:
                continue  # aborted or ended while the step ran
            tokens = request.tokens
            tokens.append(token)
            request.pending -= 1
            known = len(tokens)
            if token in request.stop_token_ids or known >= request.max_total_tokens:
                notable.append(Progress(request, token, request.finish_reason(token), logprobs.get(request.id)))
                self._live.end(request, self._draft)
            elif logprobs or known == request.prompt_tokens + 1:
                notable.append(Progress(request, token, None, logprobs.get(request.id)))
            else:
                requests.append(request)
                plain.append(token)
        return Outcome(requests, plain, notable, failed)

    def start_anew(self) -> list[Request]:
        """The workers have lost all that they had: requests that ran wait again, with their known tokens. Returns them.

        Steps under way are forgotten. What they would have brought is drawn again, and is the same: sampling is keyed
        by seed and position. Requests that the workers may have died of are tried alone first, one after another.
        """
        self._live.drop_aborted(self._draft)
        ran = self._live.lose_workers(self._draft)
        self._quarantine.note_loss(ran)
        self.preparation.forget_all(self._draft)
        self._manager.reset_prefix_cache()
        self._draft = StepDraft()  # the new workers know of no slot and no ticket
        self._under_way.clear()
        self._held_up = None
        self._epoch += 1
        return ran

    def shrink(self) -> None:
        """A step did not fit in memory: the next ones hold fewer tokens of prompts, and more again after a while."""
        self._budget.shrink(self._steps)

    # -- parts of a plan ---------------------------------------------------------------------------------------------

    def _sort_running(self) -> list[Request]:
        """Plan one token for each request that decodes and needs no block. Returns the others, most senior first."""
        decode, others = self._draft.decode, []
        assert not decode and not self._draft.work, "a draft that computes something was not sealed"
        for request in self._seats.running:
            known = len(request.tokens) + request.pending
            if request.computed_tokens + 1 != known or known <= request.prompt_tokens:
                others.append(request)  # it is in prefill
            elif known >= request.max_total_tokens:
                continue  # its last token is under way, and we have not heard of it yet
            elif known < request.quiet_until:
                decode.append(request)
            else:
                others.append(request)  # it needs a block
        return others

    def _plan_others(self, others: Sequence[Request], now_s: float) -> None:
        """Plan all but quiet decoding: requests that need blocks, prompts, and requests that wait."""
        budget = self._open_budget(others)
        is_short = self._advance(others, budget)
        # Blocks that running requests lack are not given to others.
        admitted = 0 if is_short and self._seats.running else self._admit_waiting(budget, now_s)
        self.is_full = bool(self._queue.waiting)
        if self.is_full and not self._manager.pool.num_free_pages and (admitted or self._draft.has_prompts):
            self._sharing.keep_for(self._queue.next_few(MOST_KEPT_FOR))
        lacks_room = self._held_up is not None and bool(self._seats.free_slots)
        self._lacks_blocks = self.is_full and (is_short or lacks_room or bool(self._quarantine.suspects))

    def _open_budget(self, others: Sequence[Request]) -> StepBudget:
        """Tokens of prompts that the step may hold. others: running requests that do more than decode quietly."""
        prompts = [each for each in others if not each.is_decoding]
        decoding = len(self._draft.decode) + len(others) - len(prompts)
        beginning = min(len(self._queue.waiting), len(self._seats.free_slots))
        budget = self._budget.open(self._steps, decoding, len(prompts) + beginning)
        if prompts and len(self._queue.tenants) > 1:
            may_begin = self._seats.free_slots and self._held_up is None and not self._quarantine.suspects
            budget.share(prompts, self._queue.next_few(MOST_WAITING) if may_begin else ())
        return budget

    def _advance(self, others: Sequence[Request], budget: StepBudget) -> bool:
        """A token for each of `others` that decodes, a chunk for each in prefill. True if the pool ran short."""
        is_short = False
        for request in others:
            if request.slot is None:
                continue  # preempted by a more senior one just now
            is_decoding = request.is_decoding
            tokens = 1 if is_decoding else self._chunks.tokens(request, budget.left_for(request.options.tenant))
            if tokens and not self._chunks.advance(request, tokens, self._draft):
                is_short = True
                tokens = self._advance_under_pressure(request, tokens)
            if not is_decoding:
                budget.spend(request.options.tenant, tokens)
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
                self._live.preempt(most_junior, self._draft)
            # 2. It is the most junior one itself, and computes what there is room for.
            elif shorter := self._chunks.fitting(request, tokens - 1):
                tokens = shorter
            # 3. It waits for a more senior one to end. If there is none, it starts over on an empty pool.
            else:
                if len(self._seats.running) == 1:
                    self._live.start_over(request, self._draft)
                return 0
            if self._chunks.advance(request, tokens, self._draft):
                return tokens

    def _admit_waiting(self, budget: StepBudget, now_s: float) -> int:
        """Admit requests while there are tokens, slots and blocks for them. Returns how many."""
        admitted, self._held_up = 0, None
        # 1. While there are suspects, the first of them runs alone.
        if suspects := self._quarantine.suspects:
            return int(not self._seats.running and self._admit(suspects[0], budget, now_s))
        deferred: list[Request] = []
        while budget.left > 0 and len(deferred) <= MOST_DEFERRED:
            request = self._queue.after(deferred) if deferred else self._next_waiting(now_s)
            # 2. A request that was preempted just now, with a token of it under way, goes on when that is known.
            if request is None or request.pending:
                break
            # 3. If another one computes most of its prompt, it waits for that, and the next one has its turn.
            if self._seats.free_slots and self._sharing.defer(request, self._seats.running):
                deferred.append(request)
                continue
            # 4. If there is no room for it, none is admitted before it.
            if not self._seats.free_slots or not self._admit(request, budget, now_s):
                self._held_up = request
                break
            admitted += 1
        return admitted

    def _admit(self, request: Request, budget: StepBudget, now_s: float) -> bool:
        tokens = self._live.admit(request, budget.left_for_waiting, now_s, self._draft)
        budget.spend(request.options.tenant, tokens)
        return tokens > 0

    def _next_waiting(self, now_s: float) -> Request | None:
        room_for, self._made_room_for = self._made_room_for, None
        if room_for is not None and room_for.id in self._queue.waiting:
            return room_for  # or another one with a longer cached prefix would take the room
        if self._settings.longest_prefix_first and self._seats.free_slots:
            return self._queue.best_head(lambda request: lookup(request, self._manager).tokens, now_s)
        return self._queue.head()

    def _make_room(self, waiting: Request, now_s: float) -> None:
        """A request that was held up may take the place of a running one of lower priority."""
        most_junior = self._seats.running[-1]
        # The one that gives way comes behind in the queue, or it would take its own place again.
        if self._queue.is_behind(most_junior, waiting) and self.preemption.gives_way(most_junior, waiting, now_s):
            self._live.preempt(most_junior, self._draft)
            self._made_room_for = waiting

    def _seal(self) -> Step | None:
        """The step as it was drafted. None, and the draft is left to the next plan, if it computes nothing."""
        draft = self._draft
        if not draft.decode and not draft.work:
            return None
        assert len({admit.slot for admit in draft.admits}) == len(draft.admits), "a slot is admitted twice"
        if len(self._queue.tenants) > 1:
            self._queue.count(draft.decode, draft.work)
        # 1. Requests that decode compute one token and draw the next.
        slots: Any = [request.slot for request in draft.decode]
        for request in draft.decode:
            request.pending += 1
            request.computed_tokens += 1
        # 2. All others draw a token if they compute up to their last known one.
        drawing, prompts = [*draft.decode], []
        decoding, prompt_tokens = len(draft.decode), 0
        for request, advance in draft.work:
            assert request.slot == advance.slot, f"request {request.id} lost its slot within the plan"
            if request.is_decoding:
                decoding += 1
            else:
                prompt_tokens += advance.tokens
                prompts.append((request, advance.slot))
            if advance.tokens == request.remaining_tokens:
                request.pending += 1
                drawing.append(request)
            request.computed_tokens += advance.tokens
        self._under_way.append(StepUnderWay(drawing, prompts, decoding, prompt_tokens))
        # 3. The next draft begins. The workers learn of this one in the order in which they apply it.
        self._draft = StepDraft()
        self._steps += 1
        return Step(
            epoch=self._epoch,
            number=self._steps,
            retire=tuple(draft.retired),
            swap_out=tuple(draft.swap_out),
            swap_in=tuple(draft.swap_in),
            forget=tuple(draft.forget),
            copies=tuple(draft.copies),
            saves=tuple(draft.saves),
            admit=tuple(draft.admits),
            advance=tuple([advance for _, advance in draft.work]),
            decode=tuple(slots),
            traces=tuple([trace for request, _ in prompts if (trace := request.options.trace)]),
        )
