"""The block pool: memory dealt out in two levels, all or nothing over all groups of layers.

    large_pages.py    which group a large page belongs to, and which page is evicted next; one object per arena
    group_blocks.py   what each block of a group is for; one object per group

The pool only asks whether all groups have room at once, and takes for all of them or for none.
"""

from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import PoolExhausted
from .events import EventLog, Stored
from .eviction import USUAL_POLICY, Clock, Policy, Queue
from .group_blocks import GroupBlocks, Known
from .ids import BlockId, RequestId
from .large_pages import LargePages
from .packed_blocks import PackedBlocks
from .page_blocks import PageBlocks
from .plan import MemoryPlan
from .pool_map import GroupMap, PoolMap, where


class BlockPool:
    """All blocks of one engine. Single-threaded.

    Invariant: what is asked of `take` is given to all groups or to none, and a refusal changes nothing.
    """

    def __init__(self, plan: MemoryPlan, policy: Policy | None = None):
        clock, has_tiers = Clock(), (policy or USUAL_POLICY).keeps_by_worth

        def queue() -> Queue:
            return Queue(clock, has_tiers=has_tiers)

        self.known = Known()
        self._kinds = [(group.reach.name, group.block_tokens) for group in plan.groups]
        self._arenas = [LargePages(arena, queue()) for arena in plan.arenas]
        self._free = [pages.free for pages in self._arenas]
        self.groups: list[GroupBlocks] = [self._group(plan, g, queue()) for g in range(len(plan.groups))]
        assert self.groups, "a model without layers needs no pool"
        self._give_up_for: Callable[[RequestId, int], bool] | None = None

    def _group(self, plan: MemoryPlan, g: int, cached: Queue) -> GroupBlocks:
        """One block in a large page, or several: the only place that asks."""
        arena, per_page = plan.groups[g].arena, plan.groups[g].pages_per_large
        if per_page == 1:
            return PageBlocks(g, arena, self._arenas[arena], per_page, self.known)
        group = PackedBlocks(g, arena, self._arenas[arena], per_page, self.known, cached)
        beside = plan.beside_null(arena)
        if beside is not None and beside.group == g:
            group.use_null_page(beside.first, beside.end)
        return group

    def ask_before_evictions(self, give_up: Callable[[], bool], give_up_for: Callable[[RequestId, int], bool]) -> None:
        """give_up: makes blocks that are worth least low, a few at a time; False when there are none.
        give_up_for: does so if they are worth less than that a later request can go on where this one has that length.
        """
        self._give_up_for = give_up_for
        for pages in self._arenas:
            pages.give_up = give_up

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_free_pages(self) -> int:
        """Large pages in which nothing is held or cached."""
        return sum(len(pages.free) for pages in self._arenas)

    @property
    def num_cached_pages(self) -> int:
        """Large pages that hold nothing but known prefixes that no request uses now."""
        return sum(pages.num_cached for pages in self._arenas)

    @property
    def num_available_pages(self) -> int:
        """Large pages that any group could have."""
        return self.num_free_pages + self.num_cached_pages

    @property
    def num_evicted(self) -> int:
        """Blocks that lost their name to make room, since the start."""
        return sum(group.num_evicted for group in self.groups)

    def room_for(self, wants: Sequence[int], request: RequestId) -> bool:
        """Would `take` succeed?"""
        return self._has_room(wants) or self._has_room(wants, without=request)

    def room_at_no_loss(self, wants: Sequence[int], request: RequestId) -> bool:
        """Would `take` succeed without the eviction of a prefix that is likely to be wanted again?"""
        return self._fits([pages.num_at_no_loss for pages in self._arenas], self._pages_to_open(wants, request))

    def map(self) -> PoolMap:
        """Where every block is now."""
        arenas = [pages.map() for pages in self._arenas]
        return PoolMap(
            tuple(owners for owners, _ in arenas),
            tuple(
                GroupMap(group.arena, group.per_page, group.states(where(owners.owners, group.group, cached)))
                for group, (owners, cached) in ((group, arenas[group.arena]) for group in self.groups)
            ),
        )

    def _has_room(self, wants: Sequence[int], without: RequestId | None = None) -> bool:
        """Are there as many large pages as `wants` takes at least? without: that request gives up what is reserved for
        it."""
        return min(self._dealt_out(wants, without)[1]) >= 0

    def _pages_to_open(self, wants: Sequence[int], request: RequestId) -> list[int]:
        return [group.pages_to_open(count, request) for group, count in zip(self.groups, wants, strict=True)]

    def _fits(self, room: list[int], pages: Sequence[int]) -> bool:
        """pages: what each group takes. room: large pages in each arena; it is used up here."""
        for group, count in zip(self.groups, pages, strict=True):
            room[group.arena] -= count
        return min(room) >= 0

    # -- acting ------------------------------------------------------------------------------------------------------

    def take(self, wants: Sequence[int], request: RequestId) -> list[list[BlockId]]:
        """`wants[g]` blocks of each group, each held once. All or nothing: raises `PoolExhausted` and takes none."""
        groups, arenas = self.groups, self._arenas
        # One block of each at most, and a free page for each: nothing has to be weighed.
        if max(wants) == 1 and min(map(len, self._free)) >= len(wants):
            return [[group.take_one(request)] if n else [] for group, n in zip(groups, wants, strict=True)]  # type: ignore[return-value]
        # Free pages for all that they open: no group takes any from another one.
        if self._fits([len(pages.free) for pages in arenas], self._pages_to_open(wants, request)):
            most = [arenas[group.arena].num_pages for group in groups]
            return [group.take(n, request, m)[0] for group, n, m in zip(groups, wants, most, strict=True)]  # type: ignore[return-value]
        # Each group may take the least that it needs, and what is left beyond the least of all.
        least, beyond = self._least_and_beyond(wants, request)
        taken: list[list[int]] = []
        for group, count, own in zip(groups, wants, least, strict=True):
            blocks, pages = group.take(count, request, own + beyond[group.arena])
            beyond[group.arena] += own - pages
            assert beyond[group.arena] >= 0, f"group {group.group} took large pages that others need"
            taken.append(blocks)
        return taken  # type: ignore[return-value]

    def take_one(self, group: int, request: RequestId) -> BlockId | None:
        """A block of one group, held once; None if there is no room."""
        blocks = self.groups[group]
        if self._arenas[blocks.arena].free:
            return blocks.take_one(request)  # type: ignore[return-value]
        wants = [int(g == group) for g in range(len(self.groups))]
        return self.take(wants, request)[group][0] if self.room_for(wants, request) else None

    def take_spare(self, group: int, request: RequestId, length: int | None) -> BlockId | None:
        """`take_one` of a block that is good to have, and not worth the eviction of anything that is worth more; None
        without one. length: of the sequence, at which later requests can go on thanks to it; None: take idle ones only.
        """
        if self._give_up_for is not None:
            one = [int(g == group) for g in range(len(self.groups))]
            while not self.room_at_no_loss(one, request):
                if length is None or not self._give_up_for(request, length):
                    return None
        return self.take_one(group, request)

    def end(self, request: RequestId) -> None:
        """What is reserved for the request is free: it holds nothing any more, or it needs other blocks."""
        for group in self.groups:
            group.free_reserved(request)

    def forget_all(self) -> None:
        """Drop every name."""
        for group in self.groups:
            group.forget_all()
        assert not self.known.ends, "all names are forgotten, and some prefix still ends inside a block"
        if self.known.log is not None:
            self.known.log.cleared()

    def evict_all(self) -> int:
        """Evict all that is cached and that no request holds. Returns how many blocks that are."""
        return sum(group.evict_all() for group in self.groups)

    def _least_and_beyond(self, wants: Sequence[int], request: RequestId) -> tuple[list[int], list[int]]:
        """Large pages that each group needs at least, and those of each arena that are left then.

        Raises `PoolExhausted` when there are too few.
        """
        least, beyond = self._dealt_out(wants)
        if min(beyond) < 0:
            if not self._has_room(wants, without=request):
                raise self._exhausted(wants)
            self.end(request)  # a large page becomes free by it
            least, beyond = self._dealt_out(wants)
            assert min(beyond) >= 0, "there was room, and now there is none"
        return least, beyond

    def _dealt_out(self, wants: Sequence[int], without: RequestId | None = None) -> tuple[list[int], list[int]]:
        """Large pages that each group needs at least, and those of each arena that are left then; below 0: lacking.
        without: that request gives up what is reserved for it."""
        least = [group.least_pages(count, without) for group, count in zip(self.groups, wants, strict=True)]
        beyond = [pages.num_available for pages in self._arenas]
        for group, pages in zip(self.groups, least, strict=True):
            beyond[group.arena] -= pages
            if without is not None:
                beyond[group.arena] += group.pages_freed_without(without)
        return least, beyond

    def _exhausted(self, wants: Sequence[int]) -> PoolExhausted:
        total = sum(pages.num_pages - 1 for pages in self._arenas)
        return PoolExhausted(
            f"{sum(wants)} blocks are wanted; the pool has {self.num_free_pages} free + {self.num_cached_pages} cached "
            f"large pages of {total}. Preempt a request, lower max_num_seqs, or give the pool more memory.",
            asked=sum(wants),
            free=self.num_available_pages,
            total=total,
        )

    # -- events of the names -----------------------------------------------------------------------------------------

    def listen(self) -> EventLog:
        """Collect events from now on."""
        if self.known.log is None:
            self.known.log = EventLog(self._kinds)
        return self.known.log

    def stop_listening(self) -> None:
        self.known.log = None

    def stored(self) -> list[Stored]:
        """All that is known now, as if it had just become known; the blocks of a group in no order."""
        return [
            Stored(group.group, *kind, tuple(group.index))
            for group, kind in zip(self.groups, self._kinds, strict=True)
            if group.index
        ]

    # -- the recount -------------------------------------------------------------------------------------------------

    def faults(self, held: Sequence[Counter[int]]) -> list[str]:
        """What contradicts the invariants of groups and large pages. held: how often the tables name each block of each
        group. Empty: all is well."""
        counts = [group.recount(blocks) for group, blocks in zip(self.groups, held, strict=True)]
        found = [fault for count in counts for fault in count.faults]
        for a, pages in enumerate(self._arenas):
            of_arena = [count for count, group in zip(counts, self.groups, strict=True) if group.arena == a]
            used = [sum(each) for each in zip(*(count.used for count in of_arena), strict=True)]
            cached = [sum(each) for each in zip(*(count.cached for count in of_arena), strict=True)]
            found += [f"arena {a}: {fault}" for fault in pages.faults(used, cached)]
        return found
