"""How far a request could grow with the blocks that there are. Asking changes nothing."""

from collections.abc import Callable

from .group_table import Row
from .pool import BlockPool
from .tables import Tables

LEAST_CHUNK_TOKENS = 512
"""A shorter chunk of prefill makes worse use of the workers than what it saves is worth."""


class Room:
    def __init__(self, tables: Tables, pool: BlockPool):
        self._tables = tables
        self._pool = pool

    def to_grow(self, row: Row, length: int, *, at_no_loss: bool) -> int:
        """The longest up to `length` that the pool has blocks for now; what the request has already if none."""
        has_room = self._pool.room_at_no_loss if at_no_loss else self._pool.room_for
        return _longest(row.extent, length, lambda end: has_room(self._tables.missing(row, end), row.request))

    def chunk_end(self, row: Row, length: int) -> int:
        """Where a chunk of prefill up to `length` had better end.

        A long chunk holds blocks of windows that it passes itself. If cached prefixes had to be evicted for those,
        chunks are shorter, but not shorter than `LEAST_CHUNK_TOKENS`.
        """
        least = row.extent + LEAST_CHUNK_TOKENS
        if length <= least or not self._tables.has_windows:
            return length
        return _longest(
            least, length, lambda end: self._pool.room_at_no_loss(self._tables.missing(row, end), row.request)
        )


def _longest(least: int, most: int, has_room: Callable[[int], bool]) -> int:
    """The longest length up to `most` for which there is room; `least` if there is none."""
    if least < most and has_room(most):
        return most
    low, high = least, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if has_room(middle):
            low = middle
        else:
            high = middle - 1
    return low
