"""A group with several blocks in each large page.

A request fills large pages of its own: what it does not need yet of one is reserved for it. So its blocks become free
together, and whole large pages with them. A page is in use while at least one block in it is held or reserved. When
none is, the page is cached if it holds a known prefix, and else free.

A block for a request is looked for in this order:

    1. those reserved for it
    2. free ones, in pages in use
    3. a free large page
    4. free ones in a cached page, which is then in use again; then low ones in a page that also caches better ones
    5. an eviction: of a cached block in a page in use, or of a cached page of any group, whichever is worth less
    6. those reserved for other requests
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import chain

from .cached_blocks import CachedBlocks
from .eviction import LOW, Queue, Rank, Tier
from .group_blocks import GroupBlocks, GroupCount, Known
from .ids import NULL_BLOCK, RequestId
from .large_pages import LargePages
from .pool_map import STATE_OF_TIER, BlockState, states_of_held

MOST_RESERVED = 16
"""Blocks reserved for one request at a time: enough to keep neighbours together, few enough to lie unused."""


class PackedBlocks(GroupBlocks):
    """Invariant: each block of a large page of the group is held, reserved, free or cached, and only one of them. The
    blocks reserved for one request lie in one page.
    """

    def __init__(self, group: int, arena: int, pages: LargePages, per_page: int, known: Known, cached: Queue):
        """cached: an empty queue."""
        super().__init__(group, arena, pages, per_page, known)
        self._free: dict[int, list[int]] = {}  # page in use -> its free blocks
        self._free_in_cached: dict[int, list[int]] = {}  # cached page -> its free blocks
        self._reserved: dict[RequestId, list[int]] = {}  # next one last
        self._cached = CachedBlocks(cached, pages.num_pages, per_page)
        self._num_free = self._num_reserved = self._num_cached = 0  # in pages in use
        self._first_block = per_page  # the lower ones lie in the null page, under a null block
        self._used = [0] * pages.num_pages  # held and reserved blocks in each page

    def use_null_page(self, first: int, end: int) -> None:
        """Blocks first .. end - 1 of the null page are this group's. The page is in use for good, by the null block."""
        assert 0 < first < end == self.per_page, f"blocks {first} to {end} do not lie beside a null block"
        self._pages.take_null_page(self.group)
        self._first_block = first
        self._free[NULL_BLOCK] = list(range(end - 1, first - 1, -1))
        self._num_free = end - first
        self._used[NULL_BLOCK] = 1

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_blank_in_use(self) -> int:
        return self._num_free + self._num_reserved

    def pages_to_open(self, count: int, request: RequestId) -> int:
        lacking = count - self._num_free - len(self._reserved.get(request, ()))
        return max(0, -(-lacking // self.per_page))

    def least_pages(self, count: int, without: RequestId | None = None) -> int:
        lacking = count - self._num_free - self._num_reserved - self._num_cached
        if without is not None:
            lacking += self.pages_freed_without(without) * self.per_page
        return max(0, -(-lacking // self.per_page))

    def pages_freed_without(self, request: RequestId) -> int:
        reserved = self._reserved.get(request)
        return int(bool(reserved) and self._used[reserved[0] // self.per_page] == len(reserved))

    def states(self, cached: bytes) -> bytes:
        states = states_of_held(self.holders)
        for block in chain(*self._free.values(), *self._free_in_cached.values()):
            states[block] = BlockState.FREE
        for block in chain(*self._reserved.values()):
            states[block] = BlockState.RESERVED
        for tier, blocks in self._cached.queue.tiers():
            for block in blocks:
                states[block] = STATE_OF_TIER[tier]
        for page, state in enumerate(cached):
            if state:
                for block in self._blocks_of(page):
                    if self._name_of[block] is not None:
                        states[block] = state  # it is evicted with its page, whatever it was worth by itself
        assert len(states) == len(self.holders), f"group {self.group} tells the states of {len(states)} blocks"
        return bytes(states)

    # -- taking ------------------------------------------------------------------------------------------------------

    def take_one(self, request: RequestId) -> int:
        if reserved := self._reserved.get(request):
            block = reserved.pop()
            self._num_reserved -= 1
        elif self._free:
            block = self._take_free(1)[0]
        else:
            block = self._open(1, request, 1)[0]
        assert not self.holders[block], f"block {block} of group {self.group} is held and was dealt out"
        self.holders[block] = 1
        self.num_held += 1
        return block

    def take(self, count: int, request: RequestId, most_pages: int) -> tuple[list[int], int]:
        blocks: list[int] = []
        pages_left = most_pages
        # In the order that the top of this file tells.
        while (lacking := count - len(blocks)) > 0:
            if reserved := self._reserved.get(request):
                part = _last(reserved, lacking)
                self._num_reserved -= len(part)
            elif self._free:
                part = self._take_free(lacking)
            elif pages_left > 0 and self._pages.free:
                part = self._open(lacking, request, pages_left)
                pages_left -= -(-len(part) // self.per_page)
            elif pages_left > 0 and (self._free_in_cached or self._cached.mixed):
                if not self._free_in_cached:
                    self._evict_low(next(iter(self._cached.mixed)))
                self._reuse_page(next(iter(self._free_in_cached)))
                part = self._take_free(lacking)
                pages_left -= 1
            else:
                part = self._make_room(pages_left)
            blocks += part
        assert len(blocks) == count, f"group {self.group} takes {len(blocks)} blocks instead of {count}"
        holders = self.holders
        for block in blocks:
            holders[block] = 1
        self.num_held += count
        return blocks, most_pages - pages_left

    def _take_free(self, most: int) -> list[int]:
        page = next(iter(self._free))
        part = _last(self._free[page], most)
        if not self._free[page]:
            del self._free[page]
        assert part, f"large page {page} of group {self.group} has no free block"
        self._num_free -= len(part)
        self._used[page] += len(part)
        return part

    def _open(self, lacking: int, request: RequestId, most_pages: int) -> list[int]:
        """Blocks of up to `most_pages` free large pages. What is left of the last one is reserved, or free."""
        if lacking > self.per_page:  # several whole pages; the last one, which may be used in part, comes next round
            whole = min((lacking - 1) // self.per_page, most_pages, len(self._pages.free))
            part: list[int] = []
            for page in self._pages.adopt_many(self.group, whole):
                self._used[page] = self.per_page
                part += self._blocks_of(page)
            return part
        page = self._pages.adopt(self.group)
        blocks = self._blocks_of(page)
        used = min(self.per_page, lacking + MOST_RESERVED)
        assert not self._reserved.get(request), f"request {request} has reserved blocks and opens a large page"
        self._reserve(request, blocks[lacking:used])
        if used < self.per_page:
            self._free[page] = list(reversed(blocks[used:]))
            self._num_free += self.per_page - used
        self._used[page] = used
        return list(blocks[:lacking])

    def _reserve(self, request: RequestId, blocks: Sequence[int]) -> None:
        assert len(blocks) <= MOST_RESERVED, f"{len(blocks)} blocks are reserved for request {request}"
        if blocks:
            self._reserved[request] = list(reversed(blocks))
            self._num_reserved += len(blocks)

    def _make_room(self, most_pages: int) -> list[int]:
        """Make room by one eviction, or take a block that is reserved for another request.

        Returns the blocks won, whose page is in use; none when a large page became free instead.
        """
        block = self._first_cached()
        # If all that is cached is worth something, what is worth least is given up first.
        while not self._is_low(block) and not (most_pages > 0 and self._pages.num_low) and self._pages.give_up():
            block = self._first_cached()
        page = self._pages.first_cached() if most_pages > 0 else None
        # A block that is hardly missed is evicted before any large page: that leaves more of those whole.
        if block is not None and (page is None or block[0] < page[0] or self._is_low(block)):
            self._evict(block[1])
            return [block[1]]
        if page is not None:
            self._pages.evict()
            return []
        assert self._num_reserved, f"there was room in group {self.group}, and there is none"
        other, reserved = next((request, blocks) for request, blocks in self._reserved.items() if blocks)
        taken = reserved.pop()
        if not reserved:
            del self._reserved[other]
        self._num_reserved -= 1
        return [taken]

    def _evict_low(self, page: int) -> None:
        """Of a cached page, the blocks that are hardly missed."""
        for block in self._blocks_of(page):
            if self._name_of[block] is not None and self._cached.is_low(block):
                self._drop_name(block)
                self.num_evicted += 1
                self._free_cached(block)

    def _first_cached(self) -> tuple[Rank, int] | None:
        return self._cached.first(self._used) if self._num_cached else None

    def _is_low(self, first: tuple[Rank, int] | None) -> bool:
        return first is not None and first[0][0] == LOW

    def _evict(self, block: int) -> None:
        """A cached block of a page in use is evicted and used."""
        page = block // self.per_page
        assert self._used[page] and not self.holders[block], f"block {block} of group {self.group} cannot be evicted"
        self._cached.remove(block)
        self._drop_name(block)
        self.num_evicted += 1
        self._num_cached -= 1
        self._used[page] += 1

    # -- sharing and giving back -------------------------------------------------------------------------------------

    def share(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            if self.holders[block] == 0:
                self._hold_cached(block)
            self.holders[block] += 1

    def _hold_cached(self, block: int) -> None:
        assert self._name_of[block] is not None, f"block {block} of group {self.group} is shared and free"
        page = block // self.per_page
        if self._used[page] == 0:
            self._reuse_page(page)
        self._cached.remove(block)
        self._num_cached -= 1
        self._used[page] += 1
        self.num_held += 1

    def give_back(self, blocks: Iterable[int], tier: Tier = Tier.USUAL) -> None:
        holders, name_of = self.holders, self._name_of
        named: list[int] = []
        for block in blocks:
            count = holders[block] - 1
            assert count >= 0, f"block {block} of group {self.group} was given back twice"
            holders[block] = count
            if count == 0:
                self.num_held -= 1
                if name_of[block] is not None:
                    named.append(block)
                self._release(block, tier)
        if named:
            self._cached.queue.push_many(named, tier)

    def _release(self, block: int, tier: Tier) -> None:
        """No request holds this block any more: it is free, or cached."""
        page = block // self.per_page
        if self._name_of[block] is None:
            self._free.setdefault(page, []).append(block)
            self._num_free += 1
        else:
            self._cached.count(block, tier)
            self._num_cached += 1
        self._used[page] -= 1
        assert self._used[page] >= 0, f"large page {page} of group {self.group} has less than no blocks in use"
        if self._used[page] == 0:
            self._leave(page)

    def free_reserved(self, request: RequestId) -> None:
        reserved = self._reserved.pop(request, None)
        if not reserved:
            return
        self._num_reserved -= len(reserved)
        assert self._num_reserved >= 0, f"group {self.group} counts less than no reserved blocks"
        self._num_free += len(reserved)
        page = reserved[0] // self.per_page
        assert page == reserved[-1] // self.per_page, f"blocks in two large pages are reserved for request {request}"
        self._free.setdefault(page, []).extend(reserved)
        self._used[page] -= len(reserved)
        assert self._used[page] >= 0, f"large page {page} of group {self.group} has less than no blocks in use"
        if self._used[page] == 0:
            self._leave(page)

    # -- states of large pages ---------------------------------------------------------------------------------------

    def _blocks_of(self, page: int) -> range:
        return range(page * self.per_page, (page + 1) * self.per_page)

    def _leave(self, page: int) -> None:
        """The last block of a page in use is no longer held or reserved: the page is cached, or free."""
        assert self._used[page] == 0, f"large page {page} of group {self.group} has {self._used[page]} blocks in use"
        free = self._free.pop(page, [])
        self._num_free -= len(free)
        if cached := self._cached.in_page[page]:
            self._num_cached -= cached
            if free:
                self._free_in_cached[page] = free
            self._pages.cache(page, self._cached.page_tier(page))
            self._cached.left(page)
        else:
            self._forget_page(page)
            self._pages.give_back(page)

    def _reuse_page(self, page: int) -> None:
        """A cached page is in use again. The caller counts what makes it so."""
        assert not self._used[page] and self._cached.in_page[page], (
            f"large page {page} of group {self.group} is not cached"
        )
        self._pages.reuse(page)
        self._num_cached += self._cached.in_page[page]
        self._cached.reuse(page)
        if free := self._free_in_cached.pop(page, None):
            self._free[page] = free
            self._num_free += len(free)

    def _forget_page(self, page: int) -> None:
        """No block of the page is used, or cached: it leaves the group."""
        assert not self._used[page] and not self._cached.in_page[page], f"page {page} of group {self.group} is needed"
        self._free_in_cached.pop(page, None)

    def evicted_page(self, page: int) -> None:
        assert not self._used[page], f"large page {page} of group {self.group} is in use and was evicted"
        names = [block for block in self._blocks_of(page) if self._name_of[block] is not None]
        for block in names:
            self._drop_name(block)
        self.num_evicted += len(names)
        self._cached.evicted_page(page, names)
        self._forget_page(page)

    def make_low(self, blocks: Iterable[int]) -> None:
        lower = [block for block in blocks if self.is_cached(block)]
        self._cached.make_low(lower)
        pages = [page for page in dict.fromkeys(block // self.per_page for block in lower) if not self._used[page]]
        for page in pages:
            self._cached.left(page)
        self._pages.make_low([page for page in pages if not self._cached.page_tier(page)])

    def _free_cached(self, block: int) -> None:
        page = block // self.per_page
        self._cached.remove(block)
        if self._used[page]:
            self._free.setdefault(page, []).append(block)
            self._num_free += 1
            self._num_cached -= 1
        elif self._cached.in_page[page]:
            self._free_in_cached.setdefault(page, []).append(block)
            self._cached.left(page)
        else:
            self._forget_page(page)
            self._pages.forget(page)

    # -- the recount -------------------------------------------------------------------------------------------------

    def recount(self, held: Counter[int]) -> GroupCount:
        count = super().recount(held)
        states = [int(holders > 0) for holders in self.holders]
        for block in chain(*self._free.values(), *self._free_in_cached.values(), *self._reserved.values()):
            states[block] += 1
        for block in chain(*self._reserved.values()):
            count.used[block // self.per_page] += 1
        cached_in_use = 0
        for block in range(1, len(self.holders)):
            page, is_cached = block // self.per_page, self.is_cached(block)
            if states[block] + is_cached != (self._pages.owner(page) == self.group and block >= self._first_block):
                count.found(f"block {block} is in {states[block] + is_cached} states")
            cached_in_use += is_cached and (page == NULL_BLOCK or count.used[page] > 0)
        count.equal("free blocks", self._num_free, sum(map(len, self._free.values())))
        count.equal("reserved blocks", self._num_reserved, sum(map(len, self._reserved.values())))
        count.equal("cached blocks", len(self._cached), sum(count.cached))
        count.equal("cached blocks in pages in use", self._num_cached, cached_in_use)
        for page in range(1, self._pages.num_pages):
            count.equal(f"blocks in use in large page {page}", self._used[page], count.used[page])
            count.equal(f"cached blocks in large page {page}", self._cached.in_page[page], count.cached[page])
        return count


def _last(blocks: list[int], most: int) -> list[int]:
    """Take up to `most` blocks off the end of a list, the last one first."""
    part = blocks[: -most - 1 : -1]
    del blocks[-most:]
    assert 0 < len(part) <= most, f"{len(part)} blocks are taken instead of up to {most}"
    return part
