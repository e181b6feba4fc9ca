"""The blocks of one group of layers: which of them requests hold, and which still hold a known prefix.

    free      holds nothing; any request of the group may have it
    reserved  holds nothing; set aside for the one request that took its large page
    held      in use by `holders[block]` requests, with or without a name
    cached    in use by none, but its content is known by name: a later request may take it up again

        free, reserved ── take ──► held ── give_back ──► cached (or free, if it has no name)
                                    ▲                       │
                                    └──────── share ────────┘

What is common to all groups is here. The rest depends on whether a large page holds one block of the group
(`page_blocks.py`) or several (`packed_blocks.py`), which is decided once, when the pool is made.
"""

from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Iterable, Sequence

from .events import EventLog
from .eviction import Tier
from .ids import NULL_BLOCK, RequestId
from .large_pages import LargePages
from .prefix import Ends

REMEMBERED_NAMES = 1 << 20
"""Names remembered per group after they are gone, at most, to tell an evicted prefix from one never seen."""


class Known:
    """What the groups of a pool tell together of the names that they know."""

    __slots__ = ("_indices", "ends", "log", "version")

    def __init__(self) -> None:
        self.version = 0  # counts up whenever a name appears or disappears
        self.ends = Ends()  # of the names, those of prefixes that end inside a block
        self.log: EventLog | None = None  # None while there is no listener
        self._indices: list[dict[bytes, int]] = []  # of all groups

    def add_index(self) -> dict[bytes, int]:
        """Of a group: name -> block."""
        self._indices.append({})
        return self._indices[-1]

    def dropped(self, name: bytes) -> None:
        """One group knows it no longer."""
        self.version += 1
        if not self.ends.concerns(name):
            return
        self.ends.remove(name)
        if not any(name in index for index in self._indices):
            self.ends.remove_holder(name)


class GroupBlocks(ABC):
    """Invariant: `index` and `name_of` say the same, and every block that is held or has a name lies in a large page of
    this group."""

    def __init__(self, group: int, arena: int, pages: LargePages, per_page: int, known: Known):
        self.group = group
        self.arena = arena
        self.per_page = per_page  # block b lies in large page b // per_page
        self._pages = pages
        self._known = known
        assert per_page > 0, f"a large page has no room for a block of group {group}"
        num_blocks = pages.num_pages * per_page
        self.holders = [0] * num_blocks
        self.num_held = 0  # blocks with at least one holder
        self.index = known.add_index()  # name -> block, held or cached
        self.num_evicted = 0  # blocks that lost their name to make room, since the start
        self._name_of: list[bytes | None] = [None] * num_blocks
        self._gone: OrderedDict[bytes, bool] = OrderedDict()  # names that are known no longer: by a reset? Latest last
        self._max_gone = min(REMEMBERED_NAMES, 4 * num_blocks)
        pages.enter(group, self)

    # -- asking ------------------------------------------------------------------------------------------------------

    def name_of(self, block: int) -> bytes | None:
        return self._name_of[block]

    def is_cached(self, block: int) -> bool:
        return not self.holders[block] and self._name_of[block] is not None

    def was_known(self, name: bytes) -> bool:
        """Was the name known once, and is it no longer? The latest ones are remembered."""
        return name in self._gone

    def was_reset(self, name: bytes) -> bool:
        """Is it known no longer because everything was forgotten?"""
        return self._gone.get(name, False)

    @property
    @abstractmethod
    def num_blank_in_use(self) -> int:
        """Free and reserved blocks in large pages that are in use."""

    @abstractmethod
    def pages_to_open(self, count: int, request: RequestId) -> int:
        """Large pages that `count` blocks take if no cached block of a page in use is evicted for them."""

    @abstractmethod
    def least_pages(self, count: int, without: RequestId | None = None) -> int:
        """The least large pages that `count` blocks take. without: this request gives up what is reserved for it."""

    @abstractmethod
    def pages_freed_without(self, request: RequestId) -> int:
        """Large pages that are in use only because their blocks are reserved for this request."""

    @abstractmethod
    def states(self, cached: bytes) -> bytes:
        """A `BlockState` for each block. cached: for each large page of the group that is cached, how it is; else 0."""

    # -- acting: blocks ----------------------------------------------------------------------------------------------

    @abstractmethod
    def take_one(self, request: RequestId) -> int:
        """`take` of a single block while there are free large pages, as most decode steps have it."""

    @abstractmethod
    def take(self, count: int, request: RequestId, most_pages: int) -> tuple[list[int], int]:
        """`count` blocks, each held once, and the number of large pages that they took. The caller has made sure that
        there is room for them within `most_pages`."""

    @abstractmethod
    def share(self, blocks: Iterable[int]) -> None:
        """One more holder for each of `blocks`, which are held or cached."""

    @abstractmethod
    def give_back(self, blocks: Iterable[int], tier: Tier = Tier.USUAL) -> None:
        """One holder less for each of `blocks`. Of equal ones those given back last are evicted last."""

    def give_back_one(self, block: int, tier: Tier) -> None:
        """`give_back` of a single block."""
        self.give_back((block,), tier)

    @abstractmethod
    def free_reserved(self, request: RequestId) -> None:
        """The request needs what is reserved for it no longer: any request may have it."""

    @abstractmethod
    def make_low(self, blocks: Iterable[int]) -> None:
        """Of these blocks, those that are cached are evicted first from now on, in this order."""

    @abstractmethod
    def evicted_page(self, page: int) -> None:
        """This cached page of the group is evicted: forget what its blocks hold."""

    # -- acting: names -----------------------------------------------------------------------------------------------

    def name(self, blocks: Sequence[int], names: Sequence[bytes]) -> None:
        """Remember what held blocks hold. The first block of a name stays the known one."""
        assert self.holders[blocks[0]], f"block {blocks[0]} of group {self.group} is named and not held"
        index, name_of, gone, known = self.index, self._name_of, self._gone, self._known
        known.version += 1
        # One block that is new, as most decode steps have it.
        if len(names) == 1 and not gone and known.log is None and name_of[blocks[0]] is None:
            if names[0] not in index:
                index[names[0]] = blocks[0]
                name_of[blocks[0]] = names[0]
            return
        new: Sequence[bytes]
        if index.keys().isdisjoint(names) and not any(map(name_of.__getitem__, blocks)):
            index.update(zip(names, blocks, strict=True))
            new = names
            for block, name in zip(blocks, names, strict=True):
                name_of[block] = name
        else:
            new = [name for block, name in zip(blocks, names, strict=True) if self._name_if_new(block, name)]
        if gone and not gone.keys().isdisjoint(new):
            self._note_return(new)
        if known.log is not None and new:
            known.log.stored(self.group, new)

    def forget(self, block: int) -> None:
        """Drop the name of a block, held or cached."""
        if self._name_of[block] is None:
            return
        self._drop_name(block)
        if not self.holders[block]:
            self._free_cached(block)

    def forget_all(self) -> None:
        """Drop every name: cached blocks become free, held ones lose their name."""
        for block in list(self.index.values()):
            self.forget(block)
        assert not self.index, f"group {self.group} has forgotten all and knows {len(self.index)} names"
        self._gone = OrderedDict.fromkeys(self._gone, True)

    def evict_all(self) -> int:
        """Drop the names of all blocks that none holds, which become free. Returns how many these are."""
        cached = [block for block in self.index.values() if not self.holders[block]]
        for block in cached:
            self.forget(block)
        return len(cached)

    def _name_if_new(self, block: int, name: bytes) -> bool:
        if name in self.index or self._name_of[block] is not None:
            return False
        assert self.holders[block], f"block {block} of group {self.group} is named and not held"
        self.index[name] = block
        self._name_of[block] = name
        return True

    def _note_return(self, names: Sequence[bytes]) -> None:
        """Of these names, those that were evicted once have been computed again."""
        for name in names:
            if name in self._gone:
                assert name in self.index, f"a name of group {self.group} comes back and has no block"
                del self._gone[name]

    def _drop_name(self, block: int) -> None:
        name = self._name_of[block]
        assert name is not None, f"block {block} of group {self.group} has no name to lose"
        assert self.index[name] == block, f"the name of block {block} of group {self.group} is that of another block"
        self._name_of[block] = None
        del self.index[name]
        self._known.dropped(name)
        self._gone[name] = False
        if len(self._gone) > self._max_gone:
            self._gone.popitem(last=False)
        if self._known.log is not None:
            self._known.log.removed(self.group, name)

    @abstractmethod
    def _free_cached(self, block: int) -> None:
        """A cached block has lost its name: it is free."""

    # -- the recount -------------------------------------------------------------------------------------------------

    def recount(self, held: Counter[int]) -> "GroupCount":
        """Count all blocks anew. held: how often the tables name each block."""
        count = GroupCount(self.group, self._pages.num_pages)
        for block in range(1, len(self.holders)):
            page, holders, name = block // self.per_page, self.holders[block], self._name_of[block]
            if holders != held[block]:
                count.found(f"block {block} counts {holders} holders, the tables name it {held[block]}x")
            if name is not None and self.index.get(name) != block:
                count.found(f"the name of block {block} leads to block {self.index.get(name)}")
            if (holders or name is not None) and self._pages.owner(page) != self.group:
                count.found(f"block {block} is in use in a large page of group {self._pages.owner(page)}")
            count.held += holders > 0
            count.names += name is not None
            count.used[page] += holders > 0
            count.cached[page] += holders == 0 and name is not None
        if held[NULL_BLOCK]:
            count.found("the null block is held")
        count.equal("held blocks", self.num_held, count.held)
        count.equal("names", len(self.index), count.names)
        return count


class GroupCount:
    """What a recount finds in a group."""

    def __init__(self, group: int, num_pages: int):
        self.group = group
        self.faults: list[str] = []
        self.held = self.names = 0
        self.used = [0] * num_pages  # blocks in each large page that are held or reserved
        self.cached = [0] * num_pages  # cached blocks in each

    def found(self, fault: str) -> None:
        self.faults.append(f"group {self.group}: {fault}")

    def equal(self, what: str, counted: int, there: int) -> None:
        if counted != there:
            self.found(f"counts {counted} {what}, there are {there}")
