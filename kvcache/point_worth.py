"""What a point is worth: the chance that it is used, times the tokens that this would save, for each byte it takes.

chance   of a use per request that comes in, for points of its sort and age (`reuse_times.py`)
tokens   from the next point before it, at which a request could go on instead, to its own length
bytes    of an end: the blocks that only it leads to, and what else it takes to go on just there (the blocks of
         windows, states); of a point within a path only the latter, since the path is needed by those beyond it
"""

from typing import TYPE_CHECKING

from .point_blocks import PointSizes
from .points import Point
from .sorts import Kind, Sort, gap_bucket, uses_bucket
from .visits import Visit

if TYPE_CHECKING:
    from .reuse_times import ReuseTimes  # numpy takes a moment to load, and a refusal at the start need not wait


class PointWorth:
    """Tokens saved per request that comes in and byte that giving a point up would free."""

    def __init__(self, reuse: "ReuseTimes", blocks: PointSizes, block_tokens: int):
        self._reuse = reuse
        self._blocks = blocks
        self._size = block_tokens

    def of_point(self, point: Point, now: int) -> float:
        """now: requests that have come"""
        blocks, is_end = self._blocks, not point.kept_children
        if is_end:
            chance = self._reuse.chance(point.sort, now - point.last) * point.weight
        else:
            chance = self._reuse.chance(point.stop_sort, now - point.stopped) * point.weight
        if point.encoder is not None:
            return chance * point.encoder[1] / blocks.encoder_bytes(point)
        if not blocks.has_places:
            return chance * self._size / max(1, blocks.path_block_bytes)
        length = max(point.lengths)
        before, start = _what_stays(point)
        freed = blocks.place_bytes(length)
        if is_end:
            freed += (point.kept - start) * blocks.path_block_bytes
        return chance * (length - before) / max(1, freed)

    def of_place(self, visit: Visit, length: int) -> float:
        """Where there is no point yet: for a place that was used just now."""
        parting = Sort(Kind.STOP_AT_PARTING, gap_bucket(visit.gap), uses_bucket(2), 0)
        chance = self._reuse.chance(parting if length <= visit.known_tokens else visit.sort(Kind.END), 0)
        return chance * max(0, length - visit.ready_tokens) / max(1, self._blocks.place_bytes(length))

    def of_end(self, visit: Visit, length: int) -> float:
        """Likewise, with all blocks that lead there and are not known yet."""
        more = max(0, length - visit.known_tokens) // self._size * self._blocks.path_block_bytes
        freed = self._blocks.place_bytes(length) * self._blocks.has_places + more
        return self._reuse.chance(visit.sort(Kind.END), 0) * max(0, length - visit.ready_tokens) / max(1, freed)


def _what_stays(point: Point) -> tuple[int, int]:
    """Without this point: the length at which one could go on instead, and the block up to which the path stays."""
    before, start, leads_here_only = point.parent, point.start, True
    while before is not None and before.parent is not None and not before.is_ready:
        leads_here_only = leads_here_only and before.kept_children == 1
        if leads_here_only:
            start = before.start
        before = before.parent
    return (max(before.lengths) if before is not None and before.is_ready and before.lengths else 0), start
