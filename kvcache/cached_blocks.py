"""The cached blocks of a group with several blocks in each large page: their order of eviction, and what each page has
of them.
"""

from collections.abc import Iterable, Sequence

from .eviction import LOW, USUAL, Queue, Rank, Tier


class CachedBlocks:
    """Those of a cached page are evicted with it. So when one of them comes to the front, it is passed over: it leaves
    the queue until its page is in use again.

    Invariant: a cached block is in the queue or passed over, not both; and its page counts it once.
    """

    def __init__(self, queue: Queue, num_pages: int, per_page: int):
        """queue: an empty one."""
        self.queue = queue
        self.in_page = [0] * num_pages  # cached blocks in each page
        self.mixed: dict[int, None] = {}  # cached pages with blocks that are low and blocks that are not
        self._per_page = per_page
        self._tier_of = bytearray(num_pages * per_page)  # of each cached block; LOW of all others
        self._usual_in = [0] * num_pages  # cached blocks in each page that are not low
        self._passed_over: dict[int, list[int]] = {}  # cached page -> blocks

    # -- asking ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.queue) + sum(map(len, self._passed_over.values()))

    def first(self, used: Sequence[int]) -> tuple[Rank, int] | None:
        """The one that is evicted first, of pages in use. used: blocks in use in each page."""
        while (first := self.queue.first()) is not None:
            page = first[1] // self._per_page
            if used[page]:
                return first
            self.queue.discard(first[1])
            self._passed_over.setdefault(page, []).append(first[1])
        return None

    def is_low(self, block: int) -> bool:
        """Of a cached block."""
        return not self._tier_of[block]

    def page_tier(self, page: int) -> Tier:
        """A page is worth something as long as one of its blocks is."""
        return USUAL if self._usual_in[page] else LOW

    # -- acting ------------------------------------------------------------------------------------------------------

    def count(self, block: int, tier: Tier) -> None:
        """A block is cached from now on. The caller puts it into the queue, many at once."""
        page = block // self._per_page
        self.in_page[page] += 1
        if tier:
            self._tier_of[block] = tier
            self._usual_in[page] += 1

    def remove(self, block: int) -> None:
        """The block is held again, or has lost its name."""
        page = block // self._per_page
        self._unqueue(block, page)
        self.in_page[page] -= 1
        assert self.in_page[page] >= 0, f"large page {page} caches less than no blocks"
        self._forget_tier(block, page)

    def make_low(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._forget_tier(block, block // self._per_page)
        self.queue.make_low(blocks)  # those that are passed over are not in it

    def left(self, page: int) -> None:
        """Is a cached page mixed? Asked whenever it may have become so."""
        if 0 < self._usual_in[page] < self.in_page[page]:
            self.mixed[page] = None
        else:
            self.mixed.pop(page, None)

    def reuse(self, page: int) -> None:
        """A cached page is in use again: its blocks can be evicted one by one."""
        self.mixed.pop(page, None)
        for block in self._passed_over.pop(page, ()):
            self.queue.push(block, Tier(self._tier_of[block]))

    def evicted_page(self, page: int, blocks: Iterable[int]) -> None:
        """blocks: all of the page that were cached"""
        self._passed_over.pop(page, None)
        self.mixed.pop(page, None)
        for block in blocks:
            self.queue.discard(block)
            self._forget_tier(block, page)
        self.in_page[page] = 0

    def _unqueue(self, block: int, page: int) -> None:
        self.queue.discard(block)
        if page in self._passed_over and block in self._passed_over[page]:
            self._passed_over[page].remove(block)
            if not self._passed_over[page]:
                del self._passed_over[page]

    def _forget_tier(self, block: int, page: int) -> None:
        if self._tier_of[block]:
            self._tier_of[block] = LOW
            self._usual_in[page] -= 1
