"""Host memory for the blocks of preempted requests: who has how much of it, under which tickets.

The bytes are on the workers, which keep a block under its ticket from the step that takes it out to the step that puts
it back, or that forgets it. Every worker keeps its share of the same blocks, so one account serves for all.
"""

from collections.abc import Sequence
from itertools import count

from ..request import Swapped


class SwapSpace:
    """The account. Tickets are never used twice."""

    def __init__(self, capacity_bytes: int):
        self.free_bytes = capacity_bytes
        self._tickets = count(1)

    def put(self, tokens: int, places: Sequence[tuple[int, int]], block_bytes: Sequence[int]) -> Swapped:
        """Take a ticket for each block. block_bytes: of a block of each group."""
        size = sum(block_bytes[group] for group, _ in places)
        self.free_bytes -= size
        return Swapped(tokens, tuple(places), tuple(next(self._tickets) for _ in places), size)

    def give_back(self, swapped: Swapped) -> None:
        """It has been put back, or will never be."""
        self.free_bytes += swapped.bytes
