"""Which running request gives way to another, and what becomes of its blocks.

Seniority is given at the first admission and kept for good: by time, where one level of priority is worth `ageing_s`
seconds. A request is only ever preempted for a more senior one. So the most senior one can always go on, and since no
request is taken that would not fit alone, every request ends.

A preempted request gives its blocks back, and is computed again later, often out of the prefix cache. If that would
take longer than to copy its blocks to host memory and back, they are copied.
"""

from collections.abc import Sequence

from ...errors import PoolExhausted
from ...kvcache.ids import BlockId
from ...kvcache.manager import CacheManager
from ..request import Request
from .prefixes import named
from .settings import SchedulerSettings
from .step_draft import StepDraft
from .step_times import StepTimes
from .swap import SwapSpace

HOST_BYTES_PER_US = 8_000
"""8 GB/s between a worker's memory and the host's, each way: what PCIe 4 brings at least, and a CPU's own memory."""


class Preemption:
    """Seniority, and the blocks of requests that give way. Slots and queues are not its concern."""

    def __init__(self, settings: SchedulerSettings, manager: CacheManager, times: StepTimes):
        self._manager = manager
        self._times = times
        self._ageing_s = settings.ageing_s
        self._swap_bytes = settings.swap_bytes
        self._swap = SwapSpace(settings.swap_bytes)
        self.preemptions = 0
        self.swaps = 0  # of them, those whose blocks went to host memory

    # -- seniority ---------------------------------------------------------------------------------------------------

    def seniority(self, request: Request, now_s: float) -> tuple[float, int]:
        """What it was given at its first admission, or what it would be given now. The smaller, the more senior."""
        return request.seniority or (now_s + request.options.priority * self._ageing_s, request.id)

    def gives_way(self, running: Request, waiting: Request, now_s: float) -> bool:
        """Is there reason to preempt `running` for a request that waits, apart from a lack of blocks?"""
        assert running.seniority is not None, f"request {running.id} runs without seniority"
        is_lower = running.options.priority > waiting.options.priority
        return is_lower and running.seniority > self.seniority(waiting, now_s)

    # -- blocks ------------------------------------------------------------------------------------------------------

    def take_blocks(self, request: Request, draft: StepDraft) -> None:
        """Take the blocks of a running request; it still has its slot."""
        assert request.slot is not None and request.swapped is None, f"request {request.id} does not run"
        self.preemptions += 1
        request.preemptions += 1
        moved = None
        # Blocks that the workers have not heard of are not copied.
        if self._is_worth_swapping(request) and not draft.is_admitting(request.slot):
            moved = self._manager.swap_out(request.id, request.computed_tokens)
        if moved is None:
            self._manager.release(request.id, request.computed_tokens)
        else:
            self._put_aside(request, moved, draft)

    def reopen(self, request: Request) -> list[BlockId] | None:
        """Open the blocks of a request again that wait in host memory. Returns the blocks to copy them to. None, with
        nothing taken, for lack of blocks."""
        swapped = request.swapped
        assert swapped is not None, f"request {request.id} has nothing in host memory"
        chain, encoder = named(request, self._manager)
        try:
            return self._manager.swap_in(request.id, chain, swapped.tokens, swapped.places, encoder)
        except PoolExhausted:
            return None

    def swap_in(self, request: Request, blocks: Sequence[BlockId], draft: StepDraft) -> None:
        """Have the workers copy to `blocks`, from `reopen`, what a request has in host memory."""
        swapped = request.swapped
        assert swapped is not None, f"request {request.id} has nothing in host memory"
        for (group, _), ticket, block in zip(swapped.places, swapped.tickets, blocks, strict=True):
            draft.swap_in.append((group, ticket, block))
        self._swap.give_back(swapped)
        request.swapped = None

    def forget(self, request: Request, draft: StepDraft) -> None:
        """What a request has in host memory, if anything, is not needed any more."""
        if request.swapped is not None:
            draft.forget += request.swapped.tickets
            self._swap.give_back(request.swapped)
            request.swapped = None

    def _is_worth_swapping(self, request: Request) -> bool:
        """Is it cheaper to copy its blocks to host memory and back than to compute them again?"""
        if not self._swap_bytes or not request.computed_tokens:
            return False
        copied = self._manager.swap_bytes(request.id)
        copy_us = 2 * copied / HOST_BYTES_PER_US
        return copied <= self._swap.free_bytes and copy_us < self._times.prefill_us(request.computed_tokens)

    def _put_aside(self, request: Request, moved: Sequence[tuple[int, int, BlockId]], draft: StepDraft) -> None:
        """Have the workers copy blocks to host memory. moved: (group, place in its table, block) of each."""
        self.swaps += 1
        sizes = [group.block_bytes for group in self._manager.plan.groups]
        places = [(group, place) for group, place, _ in moved]
        request.swapped = self._swap.put(request.computed_tokens, places, sizes)
        for (group, _, block), ticket in zip(moved, request.swapped.tickets, strict=True):
            draft.swap_out.append((group, block, ticket))
