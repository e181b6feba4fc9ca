"""What all block tables have in common. A table holds the blocks of one group of layers, for every open request.

There is one class for each way a layer keeps things:

    TokenTable    an entry per token: blocks along the sequence; those that no later token reads are given back
    DraftTable    the same for a drafter's layers, whose entries also depend on the next token
    StateTable    one block, overwritten by every step; snapshots of it are saved on the way
    EncoderTable  blocks for an encoder's tokens, written once, shared by all requests with the same content

A table owns its rows: only it changes them. What a request is, over all groups, is a `Row`, which only the manager
changes.
"""

import enum
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

from .eviction import Tier
from .ids import NULL_BLOCK, BlockId, RequestId
from .misses import EVICTED, RESET
from .plan import Group
from .pool import BlockPool
from .prefix import Chain, Encoder, name_at


class Copy(NamedTuple):
    """Before a step: copy a block. What a request writes next is its own."""

    group: int
    source: BlockId
    target: BlockId


class Save(NamedTuple):
    """During a step: the state after `length` tokens also goes to `block`."""

    group: int
    length: int
    block: BlockId


class Growth(NamedTuple):
    """What a request got for a step."""

    blocks: Sequence[Sequence[BlockId]]  # [group][new block]
    copies: Sequence[Copy] = ()
    saves: Sequence[Save] = ()

    def __bool__(self) -> bool:
        return bool(self.copies or self.saves or any(self.blocks))


NOTHING = Growth(())


class Sources(enum.Enum):
    """A prefix that ends inside a block, or in a state, goes on in a copy. Its source is held until it is copied."""

    HELD = enum.auto()  # the first step that it takes part in copies them
    COPIED = enum.auto()  # that step has been planned
    DROPPED = enum.auto()  # there are none, or none any more


HELD, COPIED, DROPPED = Sources  # an enum's attributes cost more than a module's


class Row:
    """One open request, as its tables see it.

    Below `quiet_until` tokens nothing happens to it: no group needs a block. Blocks that became full or were passed in
    the meantime are named or given back when a block is needed, which is when a decode step may cost something anyway.
    """

    __slots__ = ("chain", "encoder", "extent", "longest_step", "marks", "quiet_until", "request", "sources")

    def __init__(self, request: RequestId, chain: Chain, encoder: Encoder | None, extent: int = 0):
        self.request = request
        self.chain = chain
        self.encoder = encoder
        self.extent = extent  # tokens that are written, or will be by the step under way
        self.longest_step = 0  # the most tokens that one step appended
        self.marks: tuple[int, ...] = ()  # lengths at which another request may want to go on, in order
        self.sources = DROPPED
        self.quiet_until = 0

    def expect(self, length: int) -> None:
        """Another request may want to go on at a length that is still to come."""
        if self.extent < length and length not in self.marks:
            self.marks = tuple(sorted((*self.marks, length)))
            self.quiet_until = min(self.quiet_until, length)


class GroupRow:
    """The blocks of one request in one group. Invariant: those from `first` on are held, those before are null."""

    __slots__ = ("awaits_copy", "blocks", "first", "named", "source")

    def __init__(self) -> None:
        self.blocks: list[BlockId] = []
        self.first = 0
        self.named = 0  # blocks at the front that have a name, or never will
        self.source: BlockId | None = None  # of a copy; held until that is made
        self.awaits_copy = False  # no step is planned yet that makes it


def marks_of(found: int, branch: int, prompt_tokens: int, borders: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """Lengths at which another request may want to go on, in order, of a prompt that has just begun: where it goes on
    itself, where it leaves what is known, at its last block border, and at the borders that it tells. Of those before
    `found`, only what lies inside the same block: it goes on in a copy of that one."""
    size = block_tokens
    marks = {branch, (prompt_tokens - 1) // size * size, *borders}
    return tuple(sorted({mark for mark in marks if found // size * size < mark < prompt_tokens} | {found} - {0}))


RowT = TypeVar("RowT", bound=GroupRow)


class GroupTable(ABC, Generic[RowT]):
    """One group of layers. Lengths count tokens of the sequence.

    Invariant: each block in a row is held once for it, and so is its source.
    """

    def __init__(self, g: int, group: Group, pool: BlockPool, *, caching: bool):
        self._g = g
        self._size = group.block_tokens
        self._reach = group.reach
        self.layers = group.reach.name  # the kind of its layers, in a word
        self._blocks = pool.groups[g]
        self._index = self._blocks.index
        self._known = pool.known
        self._ends = pool.known.ends
        self._caching = caching
        self._rows: dict[RequestId, RowT] = {}

    # -- asking for a prefix -----------------------------------------------------------------------------------------

    @abstractmethod
    def reaches(self, chain: Chain, length: int) -> int:
        """`length` if this group can go on there; else a shorter one, and between the two it can go on nowhere."""

    @abstractmethod
    def cause(self, chain: Chain, length: int) -> str:
        """Why it cannot go on there."""

    def _why_gone(self, name: bytes | None, unknown: str) -> str:
        """The cause why a name is known no longer. unknown: the cause if it never was, as far as is remembered."""
        if name is None or not self._blocks.was_known(name):
            return unknown
        return RESET if self._blocks.was_reset(name) else EVICTED

    @abstractmethod
    def needed(self, chain: Chain, length: int) -> list[int]:
        """The cached blocks with which this group can go on at `length`, in order."""

    def leading_run(self, chain: Chain) -> int:
        """Blocks at the front of a prompt that are cached, as far as this group keeps the front."""
        return 0

    def encoder_tokens(self, encoder: Encoder | None) -> int:
        """Of the encoder's tokens, how many are cached."""
        return 0

    def names(self, chain: Chain) -> list[bytes]:
        """The names of full blocks, as this group has them."""
        return chain.names

    # -- asking for a row --------------------------------------------------------------------------------------------

    @abstractmethod
    def missing(self, row: Row, length: int) -> int:
        """Blocks to add before `length` tokens are written."""

    @abstractmethod
    def copies_at_fork(self, row: Row) -> int:
        """Blocks that a fork cannot share with its parent, and gets a copy of: 1 or 0."""

    @abstractmethod
    def next_event(self, row: Row) -> int:
        """Shortest length beyond the present one at which something has to be done."""

    def blocks(self, request: RequestId) -> list[BlockId]:
        """Its blocks; null where they were given back."""
        return self._rows[request].blocks

    def held(self, request: RequestId) -> list[BlockId]:
        """Its blocks that were not given back."""
        own = self._rows[request]
        return own.blocks[own.first :]

    def has_source(self, request: RequestId) -> bool:
        return self._rows[request].source is not None

    def to_keep(self, request: RequestId, length: int) -> list[tuple[int, BlockId]]:
        """(place, block) of what `length` tokens have written, or of what they need to go on."""
        own = self._rows[request]
        return list(enumerate(own.blocks))[own.first :]

    # -- acting ------------------------------------------------------------------------------------------------------

    @abstractmethod
    def open(self, row: Row, length: int) -> None:
        """Begin a request with the blocks of a cached prefix on which this group can go on. length: of the prefix."""

    @abstractmethod
    def fork(self, row: Row, child: Row, new: Sequence[BlockId]) -> Copy | None:
        """Begin `child` where `row` is. new: as many blocks as `copies_at_fork` says."""

    @abstractmethod
    def settle(self, row: Row) -> None:
        """`row.extent` tokens are written: name what is full, give back what no later token reads."""

    def append(self, row: Row, new: Sequence[BlockId]) -> None:
        """Add blocks at the end."""
        assert NULL_BLOCK not in new, f"request {row.request} is given the null block"
        self._rows[row.request].blocks += new

    @abstractmethod
    def finish(self, row: Row, tier: Tier) -> None:
        """Name what is worth a name, and give back everything."""

    @abstractmethod
    def restore(self, row: Row, places: Sequence[int], new: Sequence[BlockId]) -> None:
        """Begin a request whose blocks are copied back: `new` to `places` of its table."""

    def copy(self, row: Row, new: Sequence[BlockId]) -> Copy | None:
        """The copy that the row waits for, to the first new block: the coming step makes it."""
        own = self._rows[row.request]
        if not own.awaits_copy:
            return None
        own.awaits_copy = False
        assert own.source is not None, f"request {row.request} waits for a copy of nothing"
        assert new, f"request {row.request} has no block to copy to"
        return Copy(self._g, own.source, new[0])

    def drop_source(self, row: Row) -> None:
        """It has been copied, or will not be."""
        own = self._rows[row.request]
        if own.source is not None:
            self._blocks.give_back([own.source])
            own.source = None

    def abandon(self, row: Row) -> None:
        """End a request whose blocks hold nothing."""
        own = self._end(row.request)
        self._blocks.give_back(own.blocks[own.first :])

    # -- the recount -------------------------------------------------------------------------------------------------

    def count_held(self) -> Counter[int]:
        """How often the rows name each block."""
        count: Counter[int] = Counter()
        for own in self._rows.values():
            count.update(block for block in own.blocks if block != NULL_BLOCK)
            if own.source is not None:
                count[own.source] += 1
        return count

    # -- for all kinds -----------------------------------------------------------------------------------------------

    def _begin(self, request: RequestId, own: RowT) -> RowT:
        assert request not in self._rows, f"request {request} is open already"
        self._rows[request] = own
        return own

    def _end(self, request: RequestId) -> RowT:
        own = self._rows.pop(request)
        assert own.source is None, f"request {request} ends and holds the source of a copy"
        assert not any(own.blocks[: own.first]) and all(own.blocks[own.first :]), f"request {request} has a hole"
        return own

    def _await_copy(self, own: RowT, source: BlockId) -> None:
        """No request may have this block before it is copied."""
        assert own.source is None, f"block {own.source} of group {self._g} is not copied yet"
        self._blocks.share([source])
        own.source, own.awaits_copy = source, True

    def _copy_at_fork(self, own: RowT, other: RowT, written: Sequence[BlockId], new: Sequence[BlockId]) -> Copy | None:
        """A fork goes on in a copy of the block that its parent has written in part, or waits for the same copy as its
        parent. written: that block, if there is one; new: the fork's own."""
        assert len(new) <= 1, f"a fork writes to one block of group {self._g} at first, not to {len(new)}"
        if own.awaits_copy:
            assert own.source is not None and not new, f"a parent that has written waits for block {own.source}"
            self._await_copy(other, own.source)
        if not new:
            return None
        self._await_copy(other, written[0])
        other.awaits_copy = False  # it is made now
        return Copy(self._g, written[0], new[0])

    def _name_at(self, chain: Chain, length: int) -> bytes | None:
        """The name of the first `length` tokens."""
        return name_at(chain, length, self._size)

    def _name_end(self, chain: Chain, length: int, block: BlockId) -> None:
        """Name a block whose content ends with the first `length` tokens, wherever that is."""
        blocks, tail = divmod(length, self._size)
        name = self._name_at(chain, length)
        if name is None or name in self._index or self._blocks.name_of(block) is not None:
            return
        assert block != NULL_BLOCK, f"the null block of group {self._g} is given a name"
        self._blocks.name([block], [name])
        if tail:
            self._ends.add(name, chain.names[blocks - 1], tail)

    def _name_marks(self, row: Row, first: int, written: int) -> None:
        """Of the blocks from `first` on, which have their names, those that hold a mark are found by it, too: another
        prompt may go on from there with other tokens. written: tokens of the sequence, up to the end of these blocks"""
        size, chain = self._size, row.chain
        if not row.marks or row.marks[-1] < first * size:
            return  # as in most decode steps
        for mark in row.marks:
            blocks, tail = divmod(mark, size)
            if tail and first <= blocks and mark < written:
                name, end = self._name_at(chain, min(written, (blocks + 1) * size)), chain.end(mark)
                if end is not None and name is not None and name in self._index:
                    self._known.version += self._ends.add_within(end, chain.names[blocks - 1], tail, name)
