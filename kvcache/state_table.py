"""Block tables of layers that keep one state for the whole sequence: Mamba, linear attention, short convolution.

A row has one block, which every step overwrites, so no other request can go on from it. A later request goes on from a
*snapshot*: during a step the state at a chosen length is also written to a block of its own, which then gets a name.
"""

from collections import Counter
from collections.abc import Sequence

from .eviction import Tier
from .group_table import Copy, GroupRow, GroupTable, Row, Save
from .ids import BlockId
from .misses import NO_SNAPSHOT
from .plan import Group
from .pool import BlockPool
from .prefix import Chain
from .reach import NEVER


class StateRow(GroupRow):
    """Beside the state: the snapshots under way."""

    __slots__ = ("saves",)

    def __init__(self) -> None:
        super().__init__()
        self.saves: list[Save] = []


class StateTable(GroupTable[StateRow]):
    """Snapshots are saved where the next request is likely to go on: where this prompt left a known path, where others
    may part from it, at the last block border before its end, at its very end, and every `_every` tokens between.
    """

    LEAST_EVERY, MOST_EVERY = 512, 4096
    """Tokens between the snapshots on the way: the larger a state, the rarer they are."""

    def __init__(self, g: int, group: Group, pool: BlockPool, *, caching: bool, token_bytes: int):
        """token_bytes: what all other groups keep per token."""
        super().__init__(g, group, pool, caching=caching)
        self._pool = pool
        every = self.LEAST_EVERY
        while every < self.MOST_EVERY and every * token_bytes < group.block_bytes:
            every *= 2
        self._every = max(every, self._size) // self._size * self._size

    # -- asking for a prefix -----------------------------------------------------------------------------------------

    def reaches(self, chain: Chain, length: int) -> int:
        if self._name_at(chain, length) in self._index:
            return length
        size, names, index = self._size, chain.names, self._index
        # From long to short: the ends inside a block, and then its border.
        for blocks in range(min((length - 1) // size, len(names)), 0, -1):
            tails = self._ends.after(names[blocks - 1])
            if tails:
                for tail in sorted(tails, reverse=True):
                    if blocks * size + tail < length and chain.end(blocks * size + tail) in index:
                        return blocks * size + tail
            if names[blocks - 1] in index:
                return blocks * size
        return 0

    def cause(self, chain: Chain, length: int) -> str:
        name = self._name_at(chain, length)
        return self._why_gone(name, NO_SNAPSHOT)

    def needed(self, chain: Chain, length: int) -> list[int]:
        name = self._name_at(chain, length)
        return [self._index[name]] if name in self._index else []

    # -- asking for a row --------------------------------------------------------------------------------------------

    def missing(self, row: Row, length: int) -> int:
        return 0 if self._rows[row.request].blocks else 1

    def next_event(self, row: Row) -> int:
        if not self._rows[row.request].blocks:
            return row.extent + 1
        if not self._caching:
            return NEVER
        regular = row.extent - row.extent % self._every + self._every
        if not row.marks or row.extent >= row.marks[-1]:
            return regular
        return min(regular, next(mark for mark in row.marks if mark > row.extent))

    def copies_at_fork(self, row: Row) -> int:
        return len(self._rows[row.request].blocks)

    # -- acting ------------------------------------------------------------------------------------------------------

    def open(self, row: Row, length: int) -> None:
        own = self._begin(row.request, StateRow())
        if length:
            name = self._name_at(row.chain, length)
            assert name is not None, f"a hit of {length} tokens has no name"
            self._await_copy(own, BlockId(self._index[name]))

    def fork(self, row: Row, child: Row, new: Sequence[BlockId]) -> Copy | None:
        own, other = self._rows[row.request], self._begin(child.request, StateRow())
        assert len(new) == len(own.blocks), f"request {child.request} needs a state of its own"
        other.blocks = list(new)
        return self._copy_at_fork(own, other, own.blocks, new)

    def take_saves(self, row: Row, length: int) -> list[Save]:
        """Blocks for snapshots on the way to `length`. They are worth having, never worth failing for. For those
        at marks, something that is worth less is given up."""
        own, made = self._rows[row.request], list[Save]()
        for at in self._save_lengths(row, length):
            block = self._pool.take_spare(self._g, row.request, at if at in row.marks else None)
            if block is None:
                continue
            assert not own.saves or own.saves[-1].length < at, f"the snapshot at {at} is saved twice"
            made.append(Save(self._g, at, block))
        own.saves += made
        return made

    def settle(self, row: Row) -> None:
        own = self._rows[row.request]
        if not own.saves or own.saves[0].length > row.extent:
            return
        due = [save for save in own.saves if save.length <= row.extent]
        own.saves = [save for save in own.saves if save.length > row.extent]
        for save in due:
            self._name_end(row.chain, save.length, save.block)
            self._blocks.give_back_one(save.block, Tier.USUAL if save.length in row.marks else Tier.LOW)

    def finish(self, row: Row, tier: Tier) -> None:
        own = self._end(row.request)
        assert len(own.blocks) <= 1, f"request {row.request} has {len(own.blocks)} states"
        self._blocks.give_back([save.block for save in own.saves], tier)
        for block in own.blocks:
            if self._caching and row.extent:
                self._name_end(row.chain, row.extent, block)
            self._blocks.give_back_one(block, tier)

    def restore(self, row: Row, places: Sequence[int], new: Sequence[BlockId]) -> None:
        assert len(new) <= 1, f"request {row.request} is given {len(new)} states"
        self._begin(row.request, StateRow()).blocks = list(new)

    def count_held(self) -> Counter[int]:
        count = super().count_held()
        count.update(save.block for own in self._rows.values() for save in own.saves)
        return count

    # -- parts of the verbs ------------------------------------------------------------------------------------------

    def _save_lengths(self, row: Row, length: int) -> list[int]:
        """Lengths on the way to `length` at which a snapshot is worth its block."""
        if not self._caching:
            return []
        first = row.extent - row.extent % self._every + self._every
        if length < first and (not row.marks or length < row.marks[0] or row.extent >= row.marks[-1]):
            return []  # as in most decode steps
        lengths = {*range(first, length + 1, self._every), *(m for m in row.marks if row.extent < m <= length)}
        named = {length: self._name_at(row.chain, length) for length in lengths}
        return sorted(length for length, name in named.items() if name is not None and name not in self._index)
