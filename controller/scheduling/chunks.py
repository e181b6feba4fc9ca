"""How far a request goes in one step, and the blocks that it needs for that."""

from collections.abc import Callable, Sequence

from ...errors import PoolExhausted
from ...kvcache.manager import CacheManager
from ..request import Request
from .prefill_budget import Allowance
from .settings import SchedulerSettings
from .step_draft import StepDraft


class Chunks:
    """Chunks of requests that have their slot and an open row in the manager."""

    def __init__(self, settings: SchedulerSettings, manager: CacheManager):
        self._manager = manager
        self._most_tokens = settings.max_prefill_chunk_tokens
        self._gives_way: Callable[[StepDraft], bool] | None = None

    def ask_before_refusals(self, gives_way: Callable[[StepDraft], bool]) -> None:
        """gives_way: makes room for a request that lacks blocks; False if there is nothing to make it of."""
        self._gives_way = gives_way

    def tokens(self, request: Request, left: Allowance) -> int:
        """How many tokens a request had better compute in a step that has so many left for prompts; 0: none."""
        # 1. What the step and the settings allow; a request that did not fit otherwise goes a block at a time.
        most = left.of(request.remaining_tokens)
        most = min(most, self._most_tokens or most)
        if request.is_cautious:
            most = min(most, self._manager.plan.block_tokens)
        # 2. A prompt stops before its last token once: forks go on from there.
        if request.forks and request.computed_tokens < request.prompt_tokens - 1:
            most = min(most, request.prompt_tokens - 1 - request.computed_tokens)
        if most <= 0:
            return 0
        # 3. A long chunk may cost cached prefixes; then a shorter one is better.
        return self._manager.chunk_end(request.id, request.computed_tokens + most) - request.computed_tokens

    def fitting(self, request: Request, most: int) -> int:
        """How many of `most` tokens there are blocks for now. A shorter chunk needs fewer at once."""
        longest = self._manager.room_to_grow(request.id, request.computed_tokens + most)
        return max(0, longest - request.computed_tokens)

    def commit(self, prompts: Sequence[tuple[Request, int]]) -> None:
        """Chunks of prompts have run: name the blocks that they filled, and give back those that they passed.

        prompts: with the slots they had. A request that has lost its slot since has given all its blocks back.
        """
        for request, slot in prompts:
            if request.slot == slot:
                self._manager.commit(request.id)
                request.quiet_until = self._manager.quiet_until(request.id)

    def advance(self, request: Request, tokens: int, draft: StepDraft, *, is_new: bool = False) -> bool:
        """Take the blocks for so many tokens, and have them computed. False, with nothing taken, for lack of blocks.

        is_new: the request is admitted in this step
        """
        assert tokens > 0, f"request {request.id} is to compute nothing"
        try:
            growth = self._manager.extend(request.id, request.computed_tokens + tokens, written=request.computed_tokens)
        except PoolExhausted:
            if request.is_prepared or self._gives_way is None or not self._gives_way(draft):
                return False
            return self.advance(request, tokens, draft, is_new=is_new)
        request.quiet_until = self._manager.quiet_until(request.id)
        draft.advance(request, tokens, growth, is_new=is_new)
        return True
