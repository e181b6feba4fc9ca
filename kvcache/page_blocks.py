"""A group with one block in each large page: a block and its page are the same thing, of the same number."""

from collections.abc import Iterable

from .eviction import Tier
from .group_blocks import GroupBlocks
from .ids import RequestId
from .pool_map import either, states_of_held


class PageBlocks(GroupBlocks):
    """Invariant: a held block's page is in use, a cached block's page is cached. There are no free blocks, since their
    pages are free, and none is ever reserved."""

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_blank_in_use(self) -> int:
        return 0

    def pages_to_open(self, count: int, request: RequestId) -> int:
        return count

    def least_pages(self, count: int, without: RequestId | None = None) -> int:
        return count

    def pages_freed_without(self, request: RequestId) -> int:
        return 0

    def states(self, cached: bytes) -> bytes:
        assert len(cached) == len(self.holders), f"group {self.group} has {len(self.holders)} pages, not {len(cached)}"
        return either(states_of_held(self.holders), cached)

    # -- acting ------------------------------------------------------------------------------------------------------

    def take_one(self, request: RequestId) -> int:
        block = self._pages.adopt(self.group)
        assert not self.holders[block], f"block {block} of group {self.group} is held and its page was free"
        self.holders[block] = 1
        self.num_held += 1
        return block

    def take(self, count: int, request: RequestId, most_pages: int) -> tuple[list[int], int]:
        assert count <= most_pages, f"{count} blocks take more than {most_pages} large pages"
        blocks: list[int] = []
        while (lacking := count - len(blocks)) > 0:
            if self._pages.free:
                blocks += self._pages.adopt_many(self.group, min(lacking, len(self._pages.free)))
            else:
                self._pages.evict()
        holders = self.holders
        for block in blocks:
            holders[block] = 1
        self.num_held += count
        return blocks, count

    def share(self, blocks: Iterable[int]) -> None:
        holders = self.holders
        for block in blocks:
            if holders[block] == 0:
                assert self._name_of[block] is not None, f"block {block} of group {self.group} is shared and free"
                self._pages.reuse(block)
                self.num_held += 1
            holders[block] += 1

    def give_back(self, blocks: Iterable[int], tier: Tier = Tier.USUAL) -> None:
        holders, name_of = self.holders, self._name_of
        named: list[int] = []
        blank: list[int] = []
        for block in blocks:
            count = holders[block] - 1
            assert count >= 0, f"block {block} of group {self.group} was given back twice"
            holders[block] = count
            if count == 0:
                (blank if name_of[block] is None else named).append(block)
        self.num_held -= len(named) + len(blank)
        assert self.num_held >= 0, f"group {self.group} counts less than no held blocks"
        if blank:
            self._pages.give_back_many(blank)
        if named:
            self._pages.cache_many(named, tier)

    def give_back_one(self, block: int, tier: Tier) -> None:
        if self.holders[block] != 1 or self._name_of[block] is None:
            self.give_back((block,), tier)
            return
        self.holders[block] = 0
        self.num_held -= 1
        self._pages.cache(block, tier)

    def free_reserved(self, request: RequestId) -> None:
        pass

    def make_low(self, blocks: Iterable[int]) -> None:
        self._pages.make_low([block for block in blocks if self.is_cached(block)])

    def evicted_page(self, page: int) -> None:
        assert not self.holders[page], f"block {page} of group {self.group} is held and was evicted"
        self._drop_name(page)
        self.num_evicted += 1

    def _free_cached(self, block: int) -> None:
        assert not self.holders[block], f"block {block} of group {self.group} is held and becomes free"
        self._pages.forget(block)
