"""The large pages of one arena: the unit in which memory moves between groups of layers.

free      belongs to no group
cached    belongs to a group; no request uses its blocks, and at least one of them holds a known prefix
in use    belongs to a group, which knows what each of its blocks is for

    free ── adopt ──► in use ── cache ──► cached
     ▲                 │   ◄── reuse ──────┘ │
     ├──── give_back ──┘                     │
     └──────────── evict, give_back ─────────┘
"""

from collections.abc import Sequence
from typing import Protocol

from .eviction import Queue, Rank, Tier
from .ids import NULL_BLOCK
from .plan import Arena
from .pool_map import NO_OWNER, ArenaMap, states_of_cached

NO_GROUP = -1
"""Owner of a free page."""


def nothing_to_give_up() -> bool:
    """What a pool asks that has no retention."""
    return False


class PageOwner(Protocol):
    """A group of layers, as its arena sees it."""

    def evicted_page(self, page: int) -> None:
        """This cached page is evicted: forget what its blocks hold. The arena has taken it out of its queue."""
        ...


class LargePages:
    """Invariant: each page but the null page is free, cached or in use, and has an owner unless it is free.

    The null page belongs to the group that uses what the null blocks leave of it, or to none; it is never free.
    """

    __slots__ = ("_cached", "_groups", "_owner", "free", "give_up", "num_pages")

    def __init__(self, arena: Arena, cached: Queue):
        """cached: an empty queue."""
        self.num_pages = arena.num_pages
        self.free: list[int] = list(range(arena.num_pages - 1, NULL_BLOCK, -1))  # the next one last
        self._cached = cached
        self._owner = [NO_GROUP] * arena.num_pages
        self._groups: dict[int, PageOwner] = {}
        self.give_up = nothing_to_give_up

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def num_available(self) -> int:
        """Pages that any group could have: free ones, and those that an eviction would free."""
        return len(self.free) + len(self._cached)

    @property
    def num_low(self) -> int:
        """Cached pages that are hardly missed."""
        return self._cached.num_low

    @property
    def num_at_no_loss(self) -> int:
        """Pages that any group could have without the eviction of a prefix that is likely to be wanted again."""
        return len(self.free) + self._cached.num_low

    def owner(self, page: int) -> int:
        """The group that the page belongs to; `NO_GROUP` if it is free."""
        return self._owner[page]

    def first_cached(self) -> tuple[Rank, int] | None:
        """The page that is evicted next, and how much it is worth."""
        return self._cached.first()

    def map(self) -> tuple[ArenaMap, bytes]:
        """The owner of each page; and for each cached page the state of its blocks, 0 for all others."""
        owners = bytes([NO_OWNER if group == NO_GROUP else group for group in self._owner])
        return ArenaMap(owners), states_of_cached(self._cached.tiers(), self.num_pages)

    # -- acting ------------------------------------------------------------------------------------------------------

    def enter(self, group: int, owner: PageOwner) -> None:
        """A group of this arena, before it takes any page."""
        assert group not in self._groups, f"group {group} enters its arena twice"
        self._groups[group] = owner

    def take_null_page(self, group: int) -> None:
        """The group uses the blocks beside the null blocks for good."""
        assert self._owner[NULL_BLOCK] == NO_GROUP, "the null page has two owners"
        self._owner[NULL_BLOCK] = group

    def adopt(self, group: int) -> int:
        """A free page, which the group uses from now on."""
        page = self.free.pop()
        assert self._owner[page] == NO_GROUP, f"large page {page} is free and belongs to group {self._owner[page]}"
        self._owner[page] = group
        return page

    def adopt_many(self, group: int, count: int) -> list[int]:
        """`count` free pages; there must be so many."""
        assert 0 < count <= len(self.free), f"{count} large pages are wanted, {len(self.free)} are free"
        pages = self.free[: -count - 1 : -1]
        del self.free[-count:]
        for page in pages:
            self._owner[page] = group
        return pages

    def give_back(self, page: int) -> None:
        """The page is free: nothing in it is used, or known."""
        assert self._owner[page] != NO_GROUP and page != NULL_BLOCK, f"large page {page} was given back twice"
        self._owner[page] = NO_GROUP
        self.free.append(page)

    def give_back_many(self, pages: Sequence[int]) -> None:
        for page in pages:
            self.give_back(page)

    def cache(self, page: int, tier: Tier) -> None:
        """No request uses the page any more, and it holds a known prefix. Of equal ones the latest is evicted last."""
        assert self._owner[page] != NO_GROUP, f"large page {page} is free and cannot be cached"
        self._cached.push(page, tier)

    def cache_many(self, pages: Sequence[int], tier: Tier) -> None:
        assert self._owner[pages[0]] != NO_GROUP, f"large page {pages[0]} is free and cannot be cached"
        self._cached.push_many(pages, tier)

    def reuse(self, page: int) -> None:
        """A cached page is in use again."""
        assert self._owner[page] != NO_GROUP, f"large page {page} is free and cannot be reused"
        self._cached.discard(page)

    def make_low(self, pages: Sequence[int]) -> None:
        """These cached pages are evicted before usual ones, in this order."""
        self._cached.make_low(pages)

    def forget(self, page: int) -> None:
        """A cached page holds nothing known any more: it is free."""
        self._cached.discard(page)
        self.give_back(page)

    def evict(self) -> None:
        """The first cached page becomes free, whichever group it belongs to."""
        cached = self._cached
        while not cached.num_low and self.give_up():
            pass
        page = cached.pop_first()
        self._groups[self._owner[page]].evicted_page(page)
        self.give_back(page)

    # -- the recount -------------------------------------------------------------------------------------------------

    def faults(self, used: Sequence[int], cached: Sequence[int]) -> list[str]:
        """What contradicts the invariant. used, cached: blocks in each page, as its group counts them."""
        free = set(self.free)
        queued = {page for _, pages in self._cached.tiers() for page in pages}
        found = []
        if len(self.free) != len(free) or NULL_BLOCK in free:
            found.append("a large page is free twice, or the null page is free")
        for page in range(1, self.num_pages):
            there = f"large page {page} has {used[page]} blocks in use and {cached[page]} cached ones"
            if (page in free) != (not used[page] and not cached[page]):
                found.append(f"{there} and is free or is lost")
            if (page in queued) != (cached[page] > 0 and not used[page]):
                found.append(f"{there} and waits for its eviction or does not")
            if (page in free) != (self._owner[page] == NO_GROUP):
                found.append(f"{there} and belongs to group {self._owner[page]}")
        return found
