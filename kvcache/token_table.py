"""Block tables of layers that keep an entry per token: full attention, sliding windows, chunks, latent attention.

block of the sequence      0     1     2     3     4
in the table               null  null  [17]  [4]   [9]
                                       ^first      ^may be filled in part
"""

from collections.abc import Container, Sequence

from .eviction import Tier
from .group_table import Copy, GroupRow, GroupTable, Row
from .ids import NULL_BLOCK, BlockId, RequestId
from .misses import ALIGNMENT, EVICTED
from .plan import Group
from .pool import BlockPool
from .prefix import Chain
from .reach import moves_on

STRIDE = 512
"""Names that are looked up at once."""


class TokenRow(GroupRow):
    """Beside the blocks: which of them a request that goes on at one of the marks would need."""

    __slots__ = ("marks", "spans")

    def __init__(self) -> None:
        super().__init__()
        self.marks: tuple[int, ...] = ()  # those that `spans` was made of
        self.spans: list[tuple[int, int]] = []  # of blocks, from first to end


def count_leading(names: Sequence[bytes], index: Container[bytes]) -> int:
    """How many names from the first one on are in the index."""
    contains = index.__contains__
    for start in range(0, len(names), STRIDE):
        part = names[start : start + STRIDE]
        if not all(map(contains, part)):  # in C, as long as all goes well
            return start + next(n for n, name in enumerate(part) if name not in index)
    return len(names)


class TokenTable(GroupTable[TokenRow]):
    """Invariant: a row has blocks for every token up to its length, and holds those that a later token reads: `first`
    never moves back."""

    def __init__(self, g: int, group: Group, pool: BlockPool, *, caching: bool):
        super().__init__(g, group, pool, caching=caching)
        self._moves_on = moves_on(group.reach)
        self._run: tuple[list[bytes], tuple[int, int], int] = ([], (0, 0), 0)  # of which names, when, how long

    # -- asking for a prefix -----------------------------------------------------------------------------------------

    def reaches(self, chain: Chain, length: int) -> int:
        if length == 0:
            return 0
        size, names, index = self._size, self.names(chain), self._index
        blocks, tail = divmod(length, size)
        first = self._reach.oldest_needed(length) // size
        if first == 0:
            run = self.leading_run(chain)
            if run < blocks:
                return (run + 1) * size - 1
        else:
            # The oldest lacking block is lacking for every length from here down to it.
            for n in range(first, blocks):
                if n >= len(names) or names[n] not in index:
                    return (n + 1) * size - 1
        # All full blocks are there. What is left is the tail, which is the beginning of a full block, or an end.
        if not tail or first > blocks or (blocks < len(names) and names[blocks] in index):
            return length
        return length if self._ends.holder(chain.end(length), index) else length - 1  # another may end before

    def cause(self, chain: Chain, length: int) -> str:
        """An end that is lacking is a matter of alignment."""
        return self._why_gone(lacking, EVICTED) if (lacking := self._first_lacking(chain, length)) else ALIGNMENT

    def needed(self, chain: Chain, length: int) -> list[int]:
        names, index = self.names(chain), self._index
        first = self._reach.oldest_needed(length) // self._size
        found = [index[name] for name in names[first : length // self._size] if name in index]
        holder = self._ends.holder(chain.end(length), index) if length % self._size else None
        return found if holder is None else [*found, index[holder]]

    def leading_run(self, chain: Chain) -> int:
        names = self.names(chain)
        at = len(names), self._known.version
        counted, counted_at, run = self._run
        if counted is not names or counted_at != at:
            run = count_leading(names, self._index)
            assert run <= len(names), f"{run} blocks of {len(names)} are cached"
            self._run = names, at, run
        return run

    def _first_lacking(self, chain: Chain, length: int) -> bytes | None:
        """The name of the first full block that a request which goes on at `length` needs and that is not cached."""
        needed = self.names(chain)[self._reach.oldest_needed(length) // self._size : length // self._size]
        return next((name for name in needed if name not in self._index), None)

    # -- asking for a row --------------------------------------------------------------------------------------------

    def missing(self, row: Row, length: int) -> int:
        return max(0, -(-length // self._size) - len(self._rows[row.request].blocks))

    def next_event(self, row: Row) -> int:
        return len(self._rows[row.request].blocks) * self._size + 1

    def copies_at_fork(self, row: Row) -> int:
        own, (full, is_written) = self._rows[row.request], self._fork_point(row)
        return int(is_written and own.first <= full < len(own.blocks))

    def to_keep(self, request: RequestId, length: int) -> list[tuple[int, BlockId]]:
        return [(n, block) for n, block in super().to_keep(request, length) if n * self._size < length]

    # -- acting ------------------------------------------------------------------------------------------------------

    def open(self, row: Row, length: int) -> None:
        own = self._begin(row.request, TokenRow())
        if length == 0:
            return
        names, index = self.names(row.chain), self._index
        blocks, tail = divmod(length, self._size)
        oldest = self._reach.oldest_needed(length)
        # Where a chunk begins inside a block, what lies before in it is never there: that block gets no name.
        own.first, own.named = min(oldest // self._size, blocks), blocks + (tail > 0 and oldest == length)
        held = [BlockId(index[name]) for name in names[own.first : blocks]]
        assert NULL_BLOCK not in held, f"request {row.request} finds the null block"
        self._blocks.share(held)
        own.blocks = [NULL_BLOCK] * own.first + held
        if tail and oldest < length:
            name = self._ends.holder(row.chain.end(length), index) or names[blocks]
            assert name in index, f"a hit of {length} tokens ends inside a block, and no block holds its end"
            self._await_copy(own, BlockId(index[name]))

    def fork(self, row: Row, child: Row, new: Sequence[BlockId]) -> Copy | None:
        own, other = self._rows[row.request], self._begin(child.request, TokenRow())
        full, _ = self._fork_point(row)
        shared = own.blocks[: full if new else max(full, own.first)]
        self._blocks.share(shared[own.first :])
        other.blocks = [*shared, *new]
        is_partly_there = own.named * self._size > row.extent
        other.first, other.named = own.first, own.named if is_partly_there else min(own.named, len(shared))
        assert other.first <= len(shared), f"request {child.request} shares no block that its parent holds"
        return self._copy_at_fork(own, other, own.blocks[full : full + 1], new)

    def settle(self, row: Row) -> None:
        self._settle(row, self._rows[row.request], row.chain.names, row.extent)

    def finish(self, row: Row, tier: Tier) -> None:
        own = self._end(row.request)
        full, tail = divmod(row.extent, self._size)
        if self._caching and tail and own.first <= full < len(own.blocks):
            self._name_end(row.chain, row.extent, own.blocks[full])
            self._name_marks(row, full, row.extent)
        # The front of a sequence outlives its tail: it is the likelier prefix.
        self._blocks.give_back(reversed(own.blocks[own.first :]), tier)

    def restore(self, row: Row, places: Sequence[int], new: Sequence[BlockId]) -> None:
        own = self._begin(row.request, TokenRow())
        full = row.extent // self._size
        is_partly_there = self._reach.oldest_needed(row.extent) > full * self._size  # it may be
        own.first, own.named = min([full, *places]), full + is_partly_there  # full blocks had their names before
        for n, block in zip(places, new, strict=True):
            own.blocks += [NULL_BLOCK] * (n - len(own.blocks))
            own.blocks.append(block)
        own.blocks += [NULL_BLOCK] * (full - len(own.blocks))
        assert own.first == len(own.blocks) or len(own.blocks) * self._size >= row.extent, "a block is not copied back"

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    def _fork_point(self, row: Row) -> tuple[int, bool]:
        """Blocks that parent and child have in common, and whether both will write to the next one."""
        full, tail = divmod(row.extent, self._size)
        return full, tail > 0

    def _settle(self, row: Row, own: TokenRow, names: Sequence[bytes], written: int) -> None:
        """names: of full blocks. written: tokens whose entries are written."""
        if self._caching:
            full = min(written // self._size, len(names))
            if own.named < full:
                first = max(own.named, own.first)
                if first < full:
                    self._blocks.name(own.blocks[first:full], names[first:full])
                    self._name_marks(row, first, full * self._size)
                own.named = full
                assert full <= len(own.blocks), f"request {row.request} names more blocks than it has"
        if self._moves_on:
            passed = self._reach.oldest_needed(row.extent) // self._size
            if passed > own.first:
                self._pass(row, own, min(passed, len(own.blocks)))

    def _pass(self, row: Row, own: TokenRow, stop: int) -> None:
        """Give back the blocks before `stop`. Those that another request could go on with at a mark are worth more."""
        start, blocks = own.first, own.blocks
        assert start < stop, f"request {row.request}: the window moved back from block {start} to {stop}"
        if own.marks is not row.marks:
            own.marks = row.marks
            own.spans = [(self._reach.oldest_needed(m) // self._size, -(-m // self._size)) for m in row.marks]
        own.first = stop
        if stop - start == 1:  # as decode has it
            tier = Tier.USUAL if any([low <= start < high for low, high in own.spans]) else Tier.LOW
            self._blocks.give_back_one(blocks[start], tier)
            blocks[start] = NULL_BLOCK
            return
        at = start
        for low, high in own.spans:
            if low < stop and at < high:
                if at < low:
                    self._blocks.give_back(blocks[at:low], Tier.LOW)
                self._blocks.give_back(blocks[max(at, low) : min(stop, high)], Tier.USUAL)
                at = min(stop, high)
        if at < stop:
            self._blocks.give_back(blocks[at:stop], Tier.LOW)
        blocks[start:stop] = [NULL_BLOCK] * (stop - start)
