"""What of a request is copied to host memory when it gives its blocks back, and where it goes when it comes back."""

from collections.abc import Sequence

from .group_table import Row
from .ids import BlockId, RequestId
from .plan import MemoryPlan
from .pool import BlockPool
from .tables import Tables


class Swapping:
    """A place is (group, place in the request's table of that group)."""

    def __init__(self, tables: Tables, pool: BlockPool, plan: MemoryPlan):
        self._tables = tables.each
        self._pool = pool
        self._block_bytes = [group.block_bytes for group in plan.groups]

    def num_bytes(self, request: RequestId) -> int:
        """Of the blocks that a request holds."""
        groups = zip(self._tables, self._block_bytes, strict=True)
        return sum(len(table.held(request)) * block_bytes for table, block_bytes in groups)

    def to_move(self, row: Row, length: int) -> list[tuple[int, int, BlockId]] | None:
        """What must be copied for a request to go on at `length` later: (group, place, block) each. None when its
        blocks wait to be filled from others first."""
        if any(table.has_source(row.request) for table in self._tables):
            return None
        row.extent = length
        for table in self._tables:
            table.settle(row)  # what windows have passed need not be copied
        return [
            (g, place, block)
            for g, table in enumerate(self._tables)
            for place, block in table.to_keep(row.request, length)
        ]

    def restore(self, row: Row, places: Sequence[tuple[int, int]]) -> list[BlockId]:
        """Take blocks for what was copied from `places`, which are in order within each group. Returns them in the
        order of `places`. Raises `PoolExhausted`, with nothing taken."""
        by_group = [[place for g, place in places if g == group] for group in range(len(self._tables))]
        taken = self._pool.take(list(map(len, by_group)), row.request)
        row.chain.grow()
        for table, own, new in zip(self._tables, by_group, taken, strict=True):
            table.restore(row, own, new)
        unused = [iter(blocks) for blocks in taken]
        return [next(unused[g]) for g, _ in places]

    def abandon(self, row: Row) -> None:
        """The copies are not made: give the blocks back without a name."""
        for table in self._tables:
            table.abandon(row)
        self._pool.end(row.request)
