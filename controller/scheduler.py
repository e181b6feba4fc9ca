"""Who takes part in the next step, and why.

Requests run first come, first served. A step holds at most `max_num_batched_tokens` tokens: one for each request that
decodes, and what is left goes to prompts, in chunks. When the pool runs out of blocks the youngest running request is
preempted: it gives back its blocks, goes to the head of the queue with the tokens it has, and is computed again later
(often out of the prefix cache). The oldest request can therefore always go on, and since no request is taken that
would not fit alone, every request ends.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidSetting, PoolExhausted
from ..kvcache.manager import CacheManager, RequestId
from ..kvcache.tables import Copy
from ..proto.step import Admit, Advance, Sampled, Sampling, Step, StepResult
from .request import FinishReason, Request


@dataclass(frozen=True, slots=True)
class SchedulerSettings:
    """How large a step may be."""

    max_num_seqs: int = 64  # requests that run at once; slots on the workers
    max_num_batched_tokens: int = 2048  # tokens of one step, over all requests
    max_prefill_chunk_tokens: int | None = None  # prompt tokens of one request in one step; None: what the step holds

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


class Progress(NamedTuple):
    """What a step brought to one request."""

    request: Request
    sampled: Sampled
    finish_reason: FinishReason | None


class _Planned(NamedTuple):
    request: Request
    advance: Advance


class Scheduler:
    """Queues, slots and the plan of each step. Single-threaded; knows neither Ray nor torch.

    Invariant: a running request has a slot and an open row in the manager; a waiting one has neither.
    """

    def __init__(self, settings: SchedulerSettings, manager: CacheManager):
        self._settings = settings
        self._manager = manager
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []  # oldest admission first
        self._requests: dict[RequestId, Request] = {}
        self._free_slots = list(range(settings.max_num_seqs - 1, -1, -1))
        self._copies: list[Copy] = []  # of blocks, for the step being planned
        self._saves: list[tuple[int, int, int, int]] = []  # of states: (slot, group, tokens, block)
        self._retired_slots: list[int] = []  # the workers have not heard of these yet
        self._aborted: list[Request] = []
        self._in_flight: deque[list[_Planned]] = deque()  # of the steps under way, oldest first
        self._epoch = 1
        self._steps = 0
        self.preemptions = 0

    # -- requests come and go ----------------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        self._requests[request.id] = request
        self._waiting.append(request)

    def abort(self, request_id: RequestId) -> bool:
        """Forget a request at the next plan: a step in flight may still write to its blocks. False if unknown."""
        request = self._requests.pop(request_id, None)
        if request is None:
            return False
        self._aborted.append(request)
        return True

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting or self._aborted)

    # -- one step ----------------------------------------------------------------------------------------------------

    def plan_step(self) -> Step | None:
        """The next step, or None when there is nothing to compute.

        Steps before it may still be under way. Workers run steps in order, so it may use what those write, and give
        away blocks that those still read.
        """
        self._drop_aborted()
        planned, short_of_blocks = self._advance_running()
        admitted = [] if short_of_blocks and self._running else self._admit_waiting(self._tokens_left(planned))
        return self._seal(planned, admitted)

    def commit(self, result: StepResult) -> list[Progress]:
        """The oldest step under way has run: enter its tokens, give back blocks nobody needs, finish what is finished.

        A request that ends with a token of its stops may have one more step under way: what that draws is dropped.
        """
        planned = self._in_flight.popleft()
        by_slot = {advance.slot: request for request, advance in planned}
        for request, advance in planned:
            if advance.tokens > 1 and request.slot == advance.slot:
                self._manager.commit(request.id)
        progress = []
        for sampled in result.sampled:
            request = by_slot[sampled.slot]
            if request.id not in self._requests:
                continue  # aborted or finished while the step ran
            request.tokens.append(sampled.token)
            request.pending -= 1
            reason = request.finish_reason(sampled.token)
            if reason is not None:
                self._finish(request)
            progress.append(Progress(request, sampled, reason))
        return progress

    # -- the parts of a plan -----------------------------------------------------------------------------------------

    def _finish(self, request: Request) -> None:
        del self._requests[request.id]
        if request.slot is not None:
            self._retire(request)
        else:
            self._waiting.remove(request)  # preempted while its last token was under way

    def _drop_aborted(self) -> None:
        for request in self._aborted:
            if request.slot is not None:
                self._retire(request)
            else:
                self._waiting.remove(request)
        self._aborted.clear()

    def _advance_running(self) -> tuple[list[_Planned], bool]:
        """One token for those who decode, chunks for those in prefill; oldest first. Did the pool run short?"""
        prefill_budget = self._settings.max_num_batched_tokens - sum(r.is_decoding for r in self._running)
        planned: list[_Planned] = []
        short = False
        for request in list(self._running):
            if request.slot is None or request.is_ending:
                continue  # preempted by an older one just now; or done, and we have not heard yet
            tokens = 1 if request.is_decoding else self._chunk(request, prefill_budget)
            if tokens == 0:
                continue
            while (advance := self._try_advance(request, tokens)) is None:
                short = True
                youngest = self._running[-1]
                if youngest is not request:
                    self._preempt(youngest)
                elif shorter := self._fitting_chunk(request, tokens - 1):
                    tokens = shorter
                else:
                    if len(self._running) == 1:
                        self._start_over(request)
                    break  # wait for an older one to end
            if advance is not None:
                planned.append(_Planned(request, advance))
                prefill_budget -= 0 if request.is_decoding else tokens
        return planned, short

    def _admit_waiting(self, budget: int) -> list[tuple[Admit, _Planned]]:
        admitted = []
        while self._waiting and self._free_slots and budget > 0:
            request = self._waiting[0]
            if request.pending:
                break  # preempted just now, and a token of it is under way
            entry = self._try_admit(request, budget, alone=not self._running)
            if entry is None:
                break
            self._waiting.popleft()
            self._running.append(request)
            admitted.append(entry)
            budget -= entry[1].advance.tokens
        return admitted

    def _seal(self, planned: list[_Planned], admitted: list[tuple[Admit, _Planned]]) -> Step | None:
        work = planned + [entry for _, entry in admitted]
        if not work:
            return None
        self._in_flight.append(work)
        for request, advance in work:
            request.pending += advance.tokens == request.remaining_tokens
            request.computed_tokens += advance.tokens
        self._steps += 1
        retired, self._retired_slots = self._retired_slots, []
        copies, self._copies = self._copies, []
        saves, self._saves = self._saves, []
        return Step(
            self._epoch,
            self._steps,
            tuple(retired),
            tuple(copies),
            tuple(saves),
            tuple(admit for admit, _ in admitted),
            tuple(entry.advance for entry in work),
        )

    # -- one request -------------------------------------------------------------------------------------------------

    def _chunk(self, request: Request, budget: int) -> int:
        limit = self._settings.max_prefill_chunk_tokens or budget
        if request.is_cautious:
            limit = min(limit, self._manager.plan.block_tokens)
        tokens = max(0, min(request.remaining_tokens, budget, limit))
        if tokens == 0:
            return 0
        return self._manager.chunk_end(request.id, request.computed_tokens + tokens) - request.computed_tokens

    def _fitting_chunk(self, request: Request, tokens: int) -> int:
        """The most of `tokens` that there are blocks for now. A shorter chunk needs fewer at once."""
        longest = self._manager.room_to_grow(request.id, request.computed_tokens + tokens)
        return max(0, longest - request.computed_tokens)

    def _tokens_left(self, planned: Iterable[_Planned]) -> int:
        return self._settings.max_num_batched_tokens - sum(entry.advance.tokens for entry in planned)

    def _try_advance(self, request: Request, tokens: int) -> Advance | None:
        """None, with nothing taken, when the pool has too few blocks."""
        assert request.slot is not None
        try:
            growth = self._manager.extend(request.id, request.computed_tokens + tokens, written=request.computed_tokens)
        except PoolExhausted:
            return None
        self._copies += growth.copies
        self._saves += [(request.slot, save.group, save.length, save.block) for save in growth.saves]
        return Advance(request.slot, tokens, tuple(map(tuple, growth.blocks)) if growth else ())

    def _try_admit(self, request: Request, budget: int, *, alone: bool) -> tuple[Admit, _Planned] | None:
        """A slot and the first chunk's blocks for a waiting request. None, with nothing taken, if that can not be."""
        gallery = request.gallery
        encoder = gallery.encoder if gallery is not None else None
        if request.chain is None:
            request.chain = self._manager.chain(request.tokens, encoder=encoder)
        hit = self._manager.lookup(request.chain, encoder=encoder)
        self._manager.open(request.id, hit)
        request.computed_tokens = hit.tokens
        request.slot = self._free_slots[-1]
        tokens = self._chunk(request, budget)
        advance = self._try_advance(request, tokens)
        if advance is None and alone and (shorter := self._fitting_chunk(request, tokens - 1)):
            tokens = shorter
            advance = self._try_advance(request, tokens)
        if advance is None:
            assert not alone, f"request {request.id} does not fit an empty pool, and was taken"
            self._manager.release(request.id, hit.tokens)
            request.computed_tokens, request.slot = 0, None
            return None
        self._free_slots.pop()
        if not request.preemptions:
            request.cached_tokens, request.lost_tokens = hit.tokens, hit.lost
        admit = Admit(
            request.slot,
            tuple(request.tokens),
            hit.tokens,
            tuple(map(tuple, self._manager.table(request.id))),
            request.max_total_tokens,
            _sampling(request),
            gallery.views if gallery is not None else (),
            gallery.inputs if gallery is not None and not hit.encoder_tokens else (),
        )
        return admit, _Planned(request, advance._replace(blocks=()))  # its blocks came with the table

    def _preempt(self, request: Request) -> None:
        """Back to the head of the queue, with the tokens it has and without its blocks."""
        self._retire(request)
        request.computed_tokens = 0
        request.preemptions += 1
        self.preemptions += 1
        self._waiting.appendleft(request)

    def _start_over(self, request: Request) -> None:
        """A request that has the pool to itself, and still not one block more, sits on large pages it uses in part.

        On an empty pool, a block at a time, it fits, or it would not have been taken.
        """
        assert not request.is_cautious, f"request {request.id} does not fit alone, and was taken"
        request.is_cautious = True
        self._preempt(request)
        self._manager.reset_prefix_cache()

    def _retire(self, request: Request) -> None:
        """Take a running request off its slot and give back its blocks."""
        assert request.slot is not None
        self._manager.release(request.id, request.computed_tokens)
        self._running.remove(request)
        self._retired_slots.append(request.slot)
        self._free_slots.append(request.slot)
        request.slot = None


def _sampling(request: Request) -> Sampling:
    params = request.sampling
    return Sampling(
        params.temperature,
        max(params.top_k, 0),
        params.top_p,
        request.seed,
        -1 if params.logprobs is None else params.logprobs,
        params.min_p,
        request.prompt_tokens,
        params.presence_penalty,
        params.frequency_penalty,
        params.repetition_penalty,
        params.biases,
        tuple(request.stop_token_ids) if params.min_tokens else (),
        params.min_tokens,
    )
