"""What more memory would bring, and what less would cost: pools that are only thought of, beside the real one.

Each serves the same requests with half, as much, twice and four times the memory, under the same policy, in bytes and
names alone. What they find is the forecast. A thought pool knows what a request takes while it runs and gives back, and
which blocks hold an end alone. It does not know where blocks lie, so it finds a little more than a real one that has
only a few large pages.
"""

from collections.abc import Mapping

from .group_table import Row, marks_of
from .hints import USUAL_RETENTION
from .ids import RequestId
from .plan import MemoryPlan
from .point_blocks import PointSizes
from .points import Point
from .prefix import Chain
from .retention import Retention
from .visits import Arrival

SCALES = (0.5, 1.0, 2.0, 4.0)

DRAWN = 16
"""Candidates for each choice of a pool that is only thought of."""


class ThoughtBlocks(PointSizes):
    """Counts bytes."""

    used_bytes = 0

    def peak_bytes(self, new_tokens: int, tokens: int, step_tokens: int) -> int:
        """The most that a request of so many tokens takes while it runs, beside the blocks in which it found some.

        step_tokens: of its longest step. All of them are in windows at once.
        """
        size = -(-new_tokens // self._size) * self.path_block_bytes
        size += sum(group.block_bytes for _, group in self._states)
        return size + sum(group.blocks_spanning(tokens, step_tokens) * group.block_bytes for _, group in self._windows)

    def keep(self, point: Point, first: int) -> None:
        self.used_bytes += (point.end - first) * self.path_block_bytes

    def _can_go_on(self, point: Point, chain: Chain, length: int, end_name: bytes | None) -> bool:
        return True

    def _add_length(self, point: Point, length: int) -> None:
        self.used_bytes += self._length_bytes(point, length)

    def drop_length(self, point: Point, length: int, least: int = 0) -> None:
        del point.lengths[length]
        self.used_bytes -= self._length_bytes(point, length)

    def demote_path(self, point: Point, first: int) -> None:
        self.used_bytes -= (point.kept - first) * self.path_block_bytes

    def _length_bytes(self, point: Point, length: int) -> int:
        """Of this length alone, beside what the point has already and what serves its neighbours, too."""
        size = sum(group.block_bytes for _, group in self._states)
        if length % self._size:  # a block of its own holds what comes after the last full one
            size += sum(group.block_bytes for _, group in (*self._whole, *self._windows))
        if not point.lengths:
            for _, group in self._windows:
                first, stop = self._own_window(point, group, length)
                size += max(0, stop - first) * group.block_bytes
        return size


class ThoughtPool:
    """Requests one after another, in so many bytes."""

    def __init__(self, plan: MemoryPlan, memory_bytes: int, one_in: int = 1):
        """one_in: of so many conversations, this pool is told of one, and has that share of the memory."""
        self.memory_bytes = memory_bytes
        self._one_in = one_in
        self._size = plan.block_tokens
        self._blocks = ThoughtBlocks(plan)
        self._arrivals: list[Arrival] = []
        self._retention = Retention(plan, self._blocks, self._arrivals, DRAWN)

    def serve(self, arrival: Arrival, row: Row) -> int:
        """Tokens of its prompt that are found."""
        names = arrival.chain.names[: arrival.blocks]
        path, within, blocks = self._retention.tree.walk(names)
        found = self._found(path, within, blocks, arrival)
        left = Row(RequestId(0), row.chain, None, row.extent)
        branch = min(blocks, (arrival.tokens - 1) // self._size) * self._size
        left.marks = marks_of(found, branch, arrival.tokens, arrival.borders, self._size)
        # While it runs, others give way. If its longest step takes all there is, and so would the rest of it, only its
        # end stays.
        new_tokens = arrival.tokens - found
        step_tokens = min(row.longest_step, new_tokens)
        peak = self._peak_bytes(arrival, new_tokens, step_tokens)
        if peak > self.memory_bytes:
            rest_tokens = step_tokens - step_tokens * self.memory_bytes // peak
            if self._peak_bytes(arrival, new_tokens, rest_tokens) > self.memory_bytes:
                left.marks = ()
        self._shrink_to(self.memory_bytes - peak)
        self._arrivals.append(arrival._replace(request=RequestId(0)))
        self._retention.released(left, USUAL_RETENTION)
        self._shrink_to(self.memory_bytes)
        return found

    def _peak_bytes(self, arrival: Arrival, new_tokens: int, step_tokens: int) -> int:
        return self._blocks.peak_bytes(new_tokens, arrival.tokens, step_tokens) // self._one_in

    def _shrink_to(self, num_bytes: int) -> None:
        while self._blocks.used_bytes > num_bytes and self._retention.give_up():
            pass

    def _found(self, path: list[Point], within: Point | None, blocks: int, arrival: Arrival) -> int:
        whole = kept = 0
        if not self._blocks.has_places:
            for point in (*path, *((within,) if within is not None else ())):
                kept = point.kept
                if kept < point.end:
                    break
            whole = min(kept, blocks, (arrival.tokens - 1) // self._size) * self._size
        ends = (length for point in path for length in point.lengths if _leads_on(point, length, arrival))
        return max(whole, max(ends, default=0))


def _leads_on(point: Point, length: int, arrival: Arrival) -> bool:
    """Could this request go on at that length of a point on its path?"""
    end_name = point.lengths[length]
    return length < arrival.tokens and (end_name is None or end_name == arrival.chain.end(length))


def room_bytes(plan: MemoryPlan, scale: float) -> int:
    """For blocks of requests in a pool of so many times the memory: whole large pages, without the null blocks."""
    room = 0
    for n, arena in enumerate(plan.arenas):
        beside = plan.beside_null(n)
        beside_bytes = (beside.end - beside.first) * plan.groups[beside.group].block_bytes if beside is not None else 0
        room += (int(arena.num_pages * scale) - 1) * arena.page_bytes + beside_bytes
    return room


class MemoryWorth:
    """Counts since the start."""

    def __init__(self, plan: MemoryPlan, one_in: int = 1):
        """one_in: see `ThoughtPool`"""
        self._pools = {scale: ThoughtPool(plan, room_bytes(plan, scale) // one_in, one_in) for scale in SCALES}
        self.asked_tokens = 0
        self.found_tokens = dict.fromkeys(SCALES, 0)

    def served(self, arrival: Arrival, row: Row) -> None:
        """A request has left."""
        self.asked_tokens += arrival.tokens
        for scale, found in self.serve(arrival, row).items():
            self.found_tokens[scale] += found

    def serve(self, arrival: Arrival, row: Row) -> dict[float, int]:
        """Tokens of its prompt that each pool finds."""
        return {scale: pool.serve(arrival, row) for scale, pool in self._pools.items()}

    def resize(self, scale: float, memory_bytes: int) -> None:
        """From the next request on."""
        self._pools[scale].memory_bytes = memory_bytes

    def forecast(self, really_found: int, since: Mapping[float, int] | None = None) -> dict[float, int]:
        """Tokens that so many times the memory would have found.

        No less with more memory than was really found, and no more with less.

        really_found: with the memory that there is. since: `found_tokens` when counting began; None: at the start.
        """
        found = {scale: tokens - (since or {}).get(scale, 0) for scale, tokens in self.found_tokens.items()}
        less = {scale: min(tokens, really_found) for scale, tokens in found.items() if scale < 1}
        return less | {scale: max(tokens, really_found) for scale, tokens in found.items() if scale > 1}


def with_forecasts(retention: Retention, plan: MemoryPlan) -> MemoryWorth:
    """Have a retention's requests served by thought pools, too."""
    worth = MemoryWorth(plan)
    retention.after = worth.served
    return worth
