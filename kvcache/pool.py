"""The block pool: who holds which block, and which free blocks still carry a known prefix.

Memory is dealt out in two levels. A large page belongs to one group at a time; its blocks are, each, in one of these
states:

    loose      blank, for any request of the group
    spare      blank, set aside for the one request that took the large page
    held       in use by `holders(block)` requests, with or without a name
    kept       free, but its content is known by name: a later request may take it up again

A large page none of whose blocks is held or spare is *idle* when it keeps something, and otherwise *free*: any group
may have it. Blank blocks of an idle large page rest with it, until it is busy again. Because a request fills large
pages of its own, its blocks become free together, and whole large pages with them.

A block for a request is looked for in this order: its own spare ones, loose ones, a free large page, what retention
ranks lowest among idle large pages and kept blocks of the group, spare ones of other requests.
"""

from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import NewType

from ..errors import PoolExhausted
from .events import EventLog
from .plan import NULL_BLOCK, Arena, MemoryPlan
from .pool_map import (
    NOBODY,
    STATE_OF_TIER,
    ArenaMap,
    BlockState,
    GroupMap,
    PoolMap,
    either,
    states_of_held,
    states_of_kept,
    where,
)
from .retention import LOW_RANK, Born, Policy, Queue, Rank, Tier, TieredLruPolicy

BlockId = NewType("BlockId", int)
"""Counts within a group: block 5 of one group and block 5 of another may lie in different large pages."""

RequestId = NewType("RequestId", int)

MOST_SPARE = 16
"""Blocks set aside for one request at a time: enough to keep neighbours together, few enough to lie idle."""

REMEMBERED_EVICTIONS = 1 << 20
"""Names of evicted blocks remembered per group, at most, to tell an evicted prefix from one never seen."""

FREE = -1


class _Large:
    """The large pages of one arena."""

    __slots__ = ("born", "busy", "free", "idle", "kept", "num_pages", "owner", "tier", "worth")

    def __init__(self, arena: Arena, policy: Policy):
        self.num_pages = arena.num_pages
        self.free: list[int] = list(range(arena.num_pages - 1, NULL_BLOCK, -1))
        self.idle: Queue = policy.queue(arena.usable)
        self.owner = [FREE] * arena.num_pages
        self.busy = [0] * arena.num_pages  # held and spare blocks in each
        self.kept = [0] * arena.num_pages  # kept blocks in each
        self.tier = [Tier.LOW] * arena.num_pages  # highest of what it keeps
        self.born = [0] * arena.num_pages
        self.worth = [0.0] * arena.num_pages


class _Blocks:
    """The blocks of one group."""

    __slots__ = (
        "arena", "born", "dormant", "gone", "holders", "index", "kept", "kept_busy", "loose", "max_gone", "name_of",
        "num_evicted", "num_held", "num_loose", "num_spare", "per_large", "resting", "spare",
    )  # fmt: skip

    def __init__(self, arena: int, per_large: int, num_blocks: int, policy: Policy):
        self.arena = arena
        self.per_large = per_large
        self.holders = [0] * num_blocks
        self.name_of: list[bytes | None] = [None] * num_blocks
        self.born = bytearray(num_blocks)
        self.index: dict[bytes, int] = {}  # name -> block
        self.loose: dict[int, list[int]] = {}  # busy large page -> its loose blocks
        self.resting: dict[int, list[int]] = {}  # idle large page -> its loose blocks
        self.spare: dict[RequestId, list[int]] = {}  # next one last
        # Kept blocks, when a large page holds more than one. Those of an idle large page are evicted with it, so they
        # step aside when they come to the front: `dormant` until their large page is busy again.
        self.kept: Queue = policy.queue(num_blocks)
        self.dormant: dict[int, list[int]] = {}  # large page -> blocks
        self.gone: OrderedDict[bytes, None] = OrderedDict()  # names of evicted blocks, latest last
        self.max_gone = min(REMEMBERED_EVICTIONS, 4 * num_blocks)
        self.num_held = self.num_loose = self.num_spare = 0
        self.num_evicted = 0
        self.kept_busy = 0  # kept blocks in large pages that are busy


class BlockPool:
    """All blocks of one engine. Single-threaded. Invariant: the states above, recounted by `faults`."""

    def __init__(self, plan: MemoryPlan, policy: Policy | None = None):
        policy = policy or TieredLruPolicy()
        self.policy = policy
        self._plan = plan
        self._arenas = [_Large(arena, policy) for arena in plan.arenas]
        self._groups = [
            _Blocks(group.arena, group.pages_per_large, plan.blocks_of(group), policy) for group in plan.groups
        ]
        for a, arena in enumerate(self._arenas):
            beside = plan.beside_null(a)
            if beside is not None:  # large page 0 is never free: it counts as busy with its null blocks
                mine = self._groups[beside.group]
                mine.loose[NULL_BLOCK] = list(range(beside.end - 1, beside.first - 1, -1))
                mine.num_loose = beside.end - beside.first
                arena.owner[NULL_BLOCK], arena.busy[NULL_BLOCK] = beside.group, 1
        self.log: EventLog | None = None
        self.on_forget: Callable[[bytes], None] = lambda name: None
        self.version = 0  # counts up whenever a name appears or disappears

    # -- asking ------------------------------------------------------------------------------------------------------

    @property
    def num_blank(self) -> int:
        """Large pages in which nothing is held or kept."""
        return sum(len(arena.free) for arena in self._arenas)

    @property
    def num_kept(self) -> int:
        """Large pages that hold nothing but known prefixes nobody uses now."""
        return sum(len(arena.idle) for arena in self._arenas)

    @property
    def num_free(self) -> int:
        """Large pages that any group could have."""
        return self.num_blank + self.num_kept

    def num_held(self, group: int) -> int:
        """Blocks of a group that requests hold."""
        return self._groups[group].num_held

    def num_blank_in_use(self, group: int) -> int:
        """Blank blocks of a group in large pages that are in use."""
        return self._groups[group].num_loose + self._groups[group].num_spare

    def holders(self, group: int, block: BlockId) -> int:
        return self._groups[group].holders[block]

    def index(self, group: int) -> dict[bytes, int]:
        """Name -> block of a group, free or not. To read only."""
        return self._groups[group].index

    def num_evicted(self, group: int) -> int:
        """Blocks of a group that lost their name to make room, since the start."""
        return self._groups[group].num_evicted

    @property
    def evictions(self) -> int:
        """Blocks that lost their name to make room, since the start."""
        return sum(mine.num_evicted for mine in self._groups)

    def map(self) -> PoolMap:
        """Where every block is now."""
        arenas = [bytes([NOBODY if owner == FREE else owner for owner in arena.owner]) for arena in self._arenas]
        kept = [states_of_kept(arena.idle.tiers(), arena.num_pages) for arena in self._arenas]
        return PoolMap(
            tuple(map(ArenaMap, arenas)),
            tuple(
                GroupMap(mine.arena, mine.per_large, self._states(mine, where(arenas[mine.arena], g, kept[mine.arena])))
                for g, mine in enumerate(self._groups)
            ),
        )

    def _states(self, mine: _Blocks, idle: bytes) -> bytes:
        """idle: what each large page of the group that is idle keeps; 0 for all others."""
        states = states_of_held(mine.holders)
        if mine.per_large == 1:
            return either(states, idle)
        for blanks, state in (
            (mine.loose, BlockState.BLANK),
            (mine.resting, BlockState.BLANK),
            (mine.spare, BlockState.SPARE),
        ):
            for blocks in blanks.values():
                for block in blocks:
                    states[block] = state
        for tier, kept in mine.kept.tiers():
            for block in kept:
                states[block] = STATE_OF_TIER[tier]
        name_of, per_large = mine.name_of, mine.per_large
        for large, state in enumerate(idle):
            if state:
                for block in range(large * per_large, (large + 1) * per_large):
                    if name_of[block] is not None:
                        states[block] = state  # goes with its large page, whatever it was worth by itself
        return bytes(states)

    def was_evicted(self, group: int, name: bytes) -> bool:
        return name in self._groups[group].gone

    def name_of(self, group: int, block: BlockId) -> bytes | None:
        return self._groups[group].name_of[block]

    # -- acting ------------------------------------------------------------------------------------------------------

    def take(self, wants: Sequence[int], request: RequestId) -> list[list[BlockId]]:
        """`wants[g]` blocks of each group, each held once. All or nothing: raises `PoolExhausted` and takes none."""
        if max(wants) == 1 and all(len(arena.free) >= len(wants) for arena in self._arenas):
            return [[self._take_one(g, request)] if count else [] for g, count in enumerate(wants)]
        budget = self._large_budget(wants, request)
        return [self._take(g, count, request, budget) if count else [] for g, count in enumerate(wants)]

    def room_for(self, wants: Sequence[int], request: RequestId) -> bool:
        """Would `take` succeed?"""
        return self._needed_at_last(wants, request)[1]

    def room_at_no_loss(self, wants: Sequence[int], request: RequestId) -> bool:
        """Would `take` succeed without evicting a prefix that is likely to be wanted again?"""
        opened = self._opened(wants, request)
        return all(
            pages <= len(arena.free) + arena.idle.num_low for pages, arena in zip(opened, self._arenas, strict=True)
        )

    def share(self, group: int, blocks: Iterable[int], *, found: bool = False) -> None:
        """One more holder for each of `blocks`, which are held or kept. found: a later request is what holds them."""
        mine = self._groups[group]
        arena = self._arenas[mine.arena]
        holders, born, per_large = mine.holders, mine.born, mine.per_large
        for block in blocks:
            if found:
                born[block] = Born.FOUND
            if holders[block] == 0:
                mine.num_held += 1
                large = block // per_large
                if per_large > 1:
                    if arena.busy[large] == 0:
                        self._wake_large(mine, arena, large)
                    mine.kept.discard(block)
                    arena.kept[large] -= 1
                    mine.kept_busy -= 1
                    arena.busy[large] += 1
                else:
                    arena.idle.discard(large)
                    arena.kept[large], arena.busy[large] = 0, 1
            holders[block] += 1

    def give_back(self, group: int, blocks: Iterable[int], tier: Tier = Tier.USUAL, worth: float = 0.0) -> None:
        """One holder less for each of `blocks`. Of equal ones those given back last are evicted last."""
        mine = self._groups[group]
        arena = self._arenas[mine.arena]
        holders, name_of, per_large = mine.holders, mine.name_of, mine.per_large
        named: list[int] = []  # are kept from now on
        for block in blocks:
            count = holders[block] - 1
            assert count >= 0, f"block {block} of group {group} was given back twice"
            holders[block] = count
            if count:
                continue
            mine.num_held -= 1
            if name_of[block] is not None:
                named.append(block)
                if per_large == 1:
                    arena.busy[block], arena.kept[block] = 0, 1
                    continue
            elif per_large == 1:
                arena.busy[block], arena.owner[block] = 0, FREE
                arena.free.append(block)
                continue
            self._free_block(mine, arena, block, tier, worth)
        if named:
            queue = arena.idle if per_large == 1 else mine.kept
            queue.push_many(named, tier, mine.born, worth)

    def give_back_one(self, group: int, block: int, tier: Tier) -> None:
        """`give_back` of a single block."""
        mine = self._groups[group]
        if mine.per_large > 1 or mine.holders[block] != 1 or mine.name_of[block] is None:
            self.give_back(group, (block,), tier)
            return
        arena = self._arenas[mine.arena]
        mine.holders[block] = 0
        mine.num_held -= 1
        arena.busy[block], arena.kept[block] = 0, 1
        arena.idle.push(block, tier, mine.born[block], 0.0)

    def demote(self, group: int, block: int) -> None:
        """A kept block is the first to go from now on."""
        mine = self._groups[group]
        if mine.holders[block] or mine.name_of[block] is None:
            return
        mine.born[block] = Born.NEW
        arena, large = self._arenas[mine.arena], block // mine.per_large
        if mine.per_large > 1:
            mine.kept.discard(block)
            mine.kept.push(block, Tier.LOW, Born.NEW, 0.0)
            if block in (dormant := mine.dormant.get(large, [])):
                dormant.remove(block)
        arena.tier[large], arena.born[large], arena.worth[large] = Tier.LOW, Born.NEW, 0.0
        if arena.busy[large] == 0:
            arena.idle.discard(large)
            arena.idle.push(large, Tier.LOW, Born.NEW, 0.0)

    def touch(self, group: int, block: int) -> None:
        """A kept block is the last of its tier to go from now on: somebody is about to take it up."""
        mine = self._groups[group]
        if mine.holders[block] or mine.name_of[block] is None:
            return
        arena, large = self._arenas[mine.arena], block // mine.per_large
        arena.tier[large] = max(arena.tier[large], Tier.USUAL)
        if mine.per_large > 1:
            mine.kept.discard(block)
            mine.kept.push(block, Tier.USUAL, mine.born[block], 0.0)
            if block in (dormant := mine.dormant.get(large, [])):
                dormant.remove(block)
        if arena.busy[large] == 0:
            arena.idle.discard(large)
            born = mine.born[block] if mine.per_large == 1 else arena.born[large]
            arena.idle.push(large, Tier.USUAL, born, arena.worth[large])

    def _free_block(self, mine: _Blocks, arena: _Large, block: int, tier: Tier, worth: float) -> None:
        """Nobody holds this block, one of several of its large page, any more."""
        large = block // mine.per_large
        if mine.name_of[block] is None:
            loose = mine.loose.get(large)
            if loose is None:
                mine.loose[large] = [block]
            else:
                loose.append(block)
            mine.num_loose += 1
        else:
            arena.kept[large] += 1
            mine.kept_busy += 1
            if tier > arena.tier[large]:
                arena.tier[large] = tier
            if mine.born[block] > arena.born[large]:
                arena.born[large] = mine.born[block]
            if worth > arena.worth[large]:
                arena.worth[large] = worth
        arena.busy[large] -= 1
        if arena.busy[large] == 0:
            self._settle_large(mine, arena, large)

    def name(self, group: int, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Remember what held blocks hold. The first block of a name stays the known one."""
        mine = self._groups[group]
        index, name_of, gone = mine.index, mine.name_of, mine.gone
        self.version += 1
        if len(names) == 1 and not gone and self.log is None and name_of[blocks[0]] is None and names[0] not in index:
            index[names[0]] = blocks[0]
            name_of[blocks[0]] = names[0]
            return
        if index.keys().isdisjoint(names) and not any(map(name_of.__getitem__, blocks)):
            index.update(zip(names, blocks, strict=True))
            new = names
            for block, name in zip(blocks, names, strict=True):
                name_of[block] = name
        else:
            new = []
            for block, name in zip(blocks, names, strict=True):
                if name not in index and name_of[block] is None:
                    index[name] = block
                    name_of[block] = name
                    new.append(name)
        if gone and not gone.keys().isdisjoint(new):
            for name in new:
                if name in gone:
                    del gone[name]
                    mine.born[index[name]] = Born.AGAIN
        if self.log is not None and new:
            self.log.stored(group, new)

    def forget(self, group: int, block: BlockId) -> None:
        """Drop the name of a block, held or kept."""
        mine = self._groups[group]
        if mine.name_of[block] is None:
            return
        self._unname(group, block)
        if mine.holders[block] == 0:
            arena, large = self._arenas[mine.arena], block // mine.per_large
            arena.kept[large] -= 1
            if mine.per_large > 1:
                mine.kept.discard(block)
                if arena.busy[large]:
                    mine.loose.setdefault(large, []).append(block)
                    mine.num_loose += 1
                    mine.kept_busy -= 1
                else:
                    mine.resting.setdefault(large, []).append(block)
            if arena.busy[large] == 0 and arena.kept[large] == 0:
                arena.idle.discard(large)
                self._free_large(mine, arena, large)

    def forget_all(self) -> None:
        """Drop every name: kept blocks become blank, held ones lose their name."""
        for g, mine in enumerate(self._groups):
            for block in list(mine.index.values()):
                self.forget(g, BlockId(block))
            mine.gone.clear()
        if self.log is not None:
            self.log.cleared()

    def end(self, request: RequestId) -> None:
        """What was set aside for a request is for all: it holds nothing any more, or it needs something else."""
        for mine in self._groups:
            spare = mine.spare.pop(request, None)
            if spare:
                self._unspare(mine, spare)

    # -- finding blocks ----------------------------------------------------------------------------------------------

    def _at_hand(self, group: int, request: RequestId) -> int:
        """Blank blocks of a group that need no large page."""
        mine = self._groups[group]
        spare = mine.spare.get(request)
        return mine.num_loose + (len(spare) if spare else 0)

    def _large_budget(self, wants: Sequence[int], request: RequestId) -> list[int] | None:
        """Large pages per arena that may be taken beyond the least; None: no eviction is needed at all."""
        opened = self._opened(wants, request)
        if all(pages <= len(arena.free) for pages, arena in zip(opened, self._arenas, strict=True)):
            return None
        needed, enough = self._needed_at_last(wants, request)
        if not enough:
            self._refuse(wants)
        return [len(arena.free) + len(arena.idle) - pages for pages, arena in zip(needed, self._arenas, strict=True)]

    def _opened(self, wants: Sequence[int], request: RequestId) -> list[int]:
        """Large pages per arena that `wants` takes when nothing kept in busy ones is evicted."""
        opened = [0] * len(self._arenas)
        for g, count in enumerate(wants):
            lacking = count - self._at_hand(g, request) if count else 0
            if lacking > 0:
                mine = self._groups[g]
                opened[mine.arena] -= -lacking // mine.per_large
        return opened

    def _needed_at_last(self, wants: Sequence[int], request: RequestId) -> tuple[list[int], bool]:
        """`_needed`; before it refuses, what the request set aside for itself in other groups is for all: a large page
        may become free by it."""
        needed, enough = self._needed(wants)
        if not enough and any(request in mine.spare for mine in self._groups):
            self.end(request)
            needed, enough = self._needed(wants)
        return needed, enough

    def _needed(self, wants: Sequence[int]) -> tuple[list[int], bool]:
        """The least large pages per arena that `wants` takes, and whether there are so many."""
        needed = [0] * len(self._arenas)
        for g, count in enumerate(wants):
            if count:
                mine = self._groups[g]
                lacking = count - mine.num_loose - mine.num_spare - mine.kept_busy
                if lacking > 0:
                    needed[mine.arena] -= -lacking // mine.per_large
        enough = all(
            pages <= len(arena.free) + len(arena.idle) for pages, arena in zip(needed, self._arenas, strict=True)
        )
        return needed, enough

    def _refuse(self, wants: Sequence[int]) -> None:
        total = sum(arena.num_pages - 1 for arena in self._arenas)
        raise PoolExhausted(
            f"{sum(wants)} blocks are wanted; the pool has {self.num_blank} blank + {self.num_kept} kept free ones "
            f"of {total}. Preempt a request, lower max_num_seqs, or give the pool more memory.",
            asked=sum(wants),
            free=self.num_free,
            total=total,
        )

    def _take_one(self, group: int, request: RequestId) -> BlockId:
        """What `_take` does for one block while there are free large pages, as most decode steps want it."""
        mine = self._groups[group]
        arena = self._arenas[mine.arena]
        if mine.per_large == 1:
            block = arena.free.pop()
            arena.owner[block] = group
            arena.busy[block] = 1
        elif spare := mine.spare.get(request):
            block = spare.pop()
            mine.num_spare -= 1
        elif mine.loose:
            block = self._take_loose(mine, 1)[0]
        else:
            block = self._open_large(group, mine, arena, 1, request, 1)[0]
        mine.num_held += 1
        mine.holders[block] = 1
        return block  # type: ignore[return-value]

    def _take(self, group: int, count: int, request: RequestId, budget: list[int] | None) -> list[BlockId]:
        """`count` blocks of a group, for which there is room.

        budget: as `_large_budget` has it. It is used up here; the least that later groups need stays untouched.
        """
        mine = self._groups[group]
        holders = mine.holders
        arena = self._arenas[mine.arena]
        # The large pages this group needs at least are its own; what goes beyond comes out of the budget.
        own = max(0, -(-(count - mine.num_loose - mine.num_spare - mine.kept_busy) // mine.per_large))
        allowed = arena.num_pages if budget is None else own + budget[mine.arena]
        blocks: list[int] = []
        while (lacking := count - len(blocks)) > 0:
            spare = mine.spare.get(request)
            if spare:
                part = spare[: -lacking - 1 : -1]
                del spare[-lacking:]
                mine.num_spare -= len(part)
            elif mine.loose:
                part = self._take_loose(mine, lacking)
            elif allowed > 0 and arena.free:
                part = self._open_large(group, mine, arena, lacking, request, allowed)
                allowed -= -(-len(part) // mine.per_large)
            elif allowed > 0 and mine.resting:
                large = next(iter(mine.resting))
                self._wake_large(mine, arena, large)
                part = self._take_loose(mine, lacking)
                allowed -= 1
            else:
                part = self._evict(group, mine, arena, allowed)
            blocks += part
        for block in blocks:
            holders[block] = 1
        mine.num_held += count
        if budget is not None:
            budget[mine.arena] = max(0, allowed)
        return blocks  # type: ignore[return-value]

    def _take_loose(self, mine: _Blocks, lacking: int) -> list[int]:
        large = next(iter(mine.loose))
        loose = mine.loose[large]
        part = loose[: -lacking - 1 : -1]
        del loose[-lacking:]
        if not loose:
            del mine.loose[large]
        mine.num_loose -= len(part)
        self._arenas[mine.arena].busy[large] += len(part)
        return part

    def _open_large(
        self, group: int, mine: _Blocks, arena: _Large, lacking: int, request: RequestId, most: int
    ) -> list[int]:
        """Blocks of up to `most` free large pages; what is left of the last one becomes spare, or loose."""
        per_large = mine.per_large
        if per_large == 1:
            lacking = min(lacking, most)
            part = arena.free[: -lacking - 1 : -1]
            del arena.free[-lacking:]
            for large in part:
                arena.owner[large] = group
                arena.busy[large] = 1
            return part
        if lacking > per_large:  # all of some: the last one is for the next round
            whole = min((lacking - 1) // per_large, most, len(arena.free))
            part = []
            for large in arena.free[: -whole - 1 : -1]:
                arena.owner[large] = group
                arena.busy[large] = per_large
                part += range(large * per_large, (large + 1) * per_large)
            del arena.free[-whole:]
            return part
        large = arena.free.pop()
        arena.owner[large] = group
        first, end = large * per_large, (large + 1) * per_large
        taken = lacking
        spared = min(per_large - taken, MOST_SPARE)
        if spared:
            mine.spare[request] = list(range(first + taken + spared - 1, first + taken - 1, -1))
            mine.num_spare += spared
        if taken + spared < per_large:
            mine.loose[large] = list(range(end - 1, first + taken + spared - 1, -1))
            mine.num_loose += per_large - taken - spared
        arena.busy[large] = taken + spared
        return list(range(first, first + taken))

    def _evict(self, group: int, mine: _Blocks, arena: _Large, allowed: int) -> list[int]:
        """Make room by one eviction, or by taking over what another request has set aside.

        Returns the blocks won, which are busy; none when a large page became free instead.
        """
        idle = arena.idle.first() if allowed > 0 else None
        kept = self._first_kept(mine, arena) if mine.kept_busy else None
        # A block that is hardly missed goes before any large page: that leaves more of those whole.
        if kept is not None and (idle is None or kept[0] < idle[0] or kept[0][0] == LOW_RANK):
            self._take_kept(group, mine, arena, kept[1])
            return [kept[1]]
        if idle is not None:
            self._evict_large(arena, idle[1])
            return []
        other, spare = next((request, spare) for request, spare in mine.spare.items() if spare)
        block = spare.pop()
        if not spare:
            del mine.spare[other]
        mine.num_spare -= 1
        return [block]

    def _first_kept(self, mine: _Blocks, arena: _Large) -> tuple[Rank, int] | None:
        """The kept block of a busy large page that goes first."""
        while (first := mine.kept.first()) is not None:
            large = first[1] // mine.per_large
            if arena.busy[large]:
                return first
            mine.kept.discard(first[1])
            mine.dormant.setdefault(large, []).append(first[1])
        return None

    def _take_kept(self, group: int, mine: _Blocks, arena: _Large, block: int) -> None:
        """Evict one kept block of a busy large page."""
        large = block // mine.per_large
        mine.kept.evicted(block)
        self._unname(group, block, evicted=True)
        arena.kept[large] -= 1
        mine.kept_busy -= 1
        arena.busy[large] += 1

    def _evict_large(self, arena: _Large, large: int) -> None:
        """Forget all an idle large page keeps; it becomes free."""
        owner = arena.owner[large]
        mine = self._groups[owner]
        arena.idle.evicted(large)
        for block in range(large * mine.per_large, (large + 1) * mine.per_large):
            if mine.name_of[block] is not None:
                self._unname(owner, block, evicted=True)
                if mine.per_large > 1:
                    mine.kept.discard(block)
        arena.kept[large] = 0
        self._free_large(mine, arena, large)

    # -- states of blocks and large pages ----------------------------------------------------------------------------

    def _unname(self, group: int, block: int, *, evicted: bool = False) -> None:
        mine = self._groups[group]
        name = mine.name_of[block]
        assert name is not None
        mine.name_of[block] = None
        mine.born[block] = Born.NEW
        del mine.index[name]
        self.on_forget(name)
        self.version += 1
        if evicted:
            mine.num_evicted += 1
        mine.gone[name] = None
        if len(mine.gone) > mine.max_gone:
            mine.gone.popitem(last=False)
        if self.log is not None:
            self.log.removed(group, name)

    def _unspare(self, mine: _Blocks, blocks: Sequence[int]) -> None:
        """Spare blocks become loose."""
        arena = self._arenas[mine.arena]
        mine.num_spare -= len(blocks)
        mine.num_loose += len(blocks)
        for block in blocks:
            large = block // mine.per_large
            mine.loose.setdefault(large, []).append(block)
            arena.busy[large] -= 1
            if arena.busy[large] == 0:
                self._settle_large(mine, arena, large)

    def _settle_large(self, mine: _Blocks, arena: _Large, large: int) -> None:
        """A large page is no longer busy: it is idle, or free."""
        if arena.kept[large]:
            mine.kept_busy -= arena.kept[large]
            if loose := mine.loose.pop(large, None):
                mine.num_loose -= len(loose)
                mine.resting[large] = loose
            arena.idle.push(large, arena.tier[large], arena.born[large], arena.worth[large])
        else:
            self._free_large(mine, arena, large)

    def _wake_large(self, mine: _Blocks, arena: _Large, large: int) -> None:
        """An idle large page becomes busy. The caller counts what makes it so."""
        arena.idle.discard(large)
        mine.kept_busy += arena.kept[large]
        for block in mine.dormant.pop(large, ()):
            if mine.holders[block] == 0 and mine.name_of[block] is not None:
                mine.kept.push(block, arena.tier[large], mine.born[block], arena.worth[large])
        if loose := mine.resting.pop(large, None):
            mine.loose[large] = loose
            mine.num_loose += len(loose)

    def _free_large(self, mine: _Blocks, arena: _Large, large: int) -> None:
        mine.num_loose -= len(mine.loose.pop(large, ()))
        mine.resting.pop(large, None)
        mine.dormant.pop(large, None)
        arena.owner[large] = FREE
        arena.tier[large], arena.born[large], arena.worth[large] = Tier.LOW, 0, 0.0
        arena.free.append(large)

    # -- for check.py ------------------------------------------------------------------------------------------------

    def faults(self, held: Counter[tuple[int, int]]) -> list[str]:
        """What contradicts the invariant, given how often the tables name each (group, block). Empty: all is well."""
        found = [f"the null block of group {g} is held" for g, block in held if block == NULL_BLOCK]
        blank_large = [set(arena.free) for arena in self._arenas]
        for a, arena in enumerate(self._arenas):
            if len(arena.free) != len(blank_large[a]) or NULL_BLOCK in blank_large[a]:
                found.append(f"arena {a}: a large page is free twice, or the null page is free")
        counted_busy = [[0] * arena.num_pages for arena in self._arenas]
        counted_kept = [[0] * arena.num_pages for arena in self._arenas]
        for g, mine in enumerate(self._groups):
            found += self._block_faults(g, mine, held, counted_busy[mine.arena], counted_kept[mine.arena])
        for a, arena in enumerate(self._arenas):
            found += self._large_faults(a, arena, counted_busy[a], counted_kept[a])
        return found

    def _block_faults(
        self, g: int, mine: _Blocks, held: Counter[tuple[int, int]], busy: list[int], kept: list[int]
    ) -> list[str]:
        found = []
        arena = self._arenas[mine.arena]
        beside = self._plan.beside_null(mine.arena)
        usable_from = beside.first if beside is not None and beside.group == g else mine.per_large
        blanks = Counter(block for blocks in mine.loose.values() for block in blocks)
        resting = Counter(block for blocks in mine.resting.values() for block in blocks)
        spares = Counter(block for blocks in mine.spare.values() for block in blocks)
        num_held = kept_busy = 0
        for block in range(1, len(mine.holders)):
            large, holders = block // mine.per_large, mine.holders[block]
            name = mine.name_of[block]
            if holders != held[g, block]:
                found.append(f"block {block} of group {g} counts {holders} holders, the tables name it "
                             f"{held[g, block]}x")  # fmt: skip
            states = (
                (holders > 0) + blanks[block] + resting[block] + spares[block] + (holders == 0 and name is not None)
            )
            if states != (arena.owner[large] == g and block >= usable_from) and mine.per_large > 1:
                found.append(f"block {block} of group {g} is in {states} states")
            if name is not None and mine.index.get(name) != block:
                found.append(f"the name of block {block} of group {g} leads to block {mine.index.get(name)}")
            if (holders or name is not None) and arena.owner[large] != g:
                found.append(f"block {block} of group {g} is in use in a large page of group {arena.owner[large]}")
            busy[large] += (holders > 0) + spares[block]
            if holders == 0 and name is not None:
                kept[large] += 1
            num_held += holders > 0
        for block in range(1, len(mine.holders)):
            if mine.holders[block] == 0 and mine.name_of[block] is not None:
                large = block // mine.per_large
                kept_busy += mine.per_large > 1 and (large == NULL_BLOCK or busy[large] > 0)
        counts = {
            "held": (mine.num_held, num_held),
            "loose": (mine.num_loose, blanks.total()),
            "spare": (mine.num_spare, spares.total()),
            "names": (len(mine.index), sum(name is not None for name in mine.name_of)),
        }
        if mine.per_large > 1:
            counts["kept in busy large pages"] = (mine.kept_busy, kept_busy)
            dormant = sum(
                mine.name_of[block] is not None and not mine.holders[block]
                for blocks in mine.dormant.values()
                for block in blocks
            )
            counts["kept"] = (len(mine.kept) + dormant, sum(
                name is not None and not holders for name, holders in zip(mine.name_of, mine.holders, strict=True)
            ))  # fmt: skip
        found += [f"group {g} counts {a} {what} blocks, there are {b}" for what, (a, b) in counts.items() if a != b]
        return found

    def _large_faults(self, a: int, arena: _Large, busy: list[int], kept: list[int]) -> list[str]:
        found = []
        free = set(arena.free)
        idle = 0
        for large in range(1, arena.num_pages):
            if (busy[large], kept[large]) != (arena.busy[large], arena.kept[large]):
                found.append(
                    f"large page {large} of arena {a} counts {arena.busy[large]} busy and {arena.kept[large]} kept "
                    f"blocks, there are {busy[large]} and {kept[large]}"
                )
            if (large in free) != (busy[large] == 0 and kept[large] == 0):
                found.append(f"large page {large} of arena {a} has {busy[large]} busy blocks and is free or is lost")
            idle += busy[large] == 0 and kept[large] > 0
        if idle != len(arena.idle):
            found.append(f"arena {a} counts {len(arena.idle)} idle large pages, there are {idle}")
        return found
