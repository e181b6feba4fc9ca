"""Host memory for the blocks of preempted requests: how much of it each has, and under which tickets.

The bytes are on the workers. They keep a block under its ticket from the step that takes it out to the step that puts
it back or forgets it. Every worker keeps its share of the same blocks, so one account serves for all.
"""

from collections.abc import Sequence
from itertools import count

from ..request import Swapped


class SwapSpace:
    """The account, in bytes of one worker. Tickets are never used twice.

    Invariant: what is free and what requests have there add up to the capacity.
    """

    def __init__(self, capacity_bytes: int):
        self._capacity_bytes = capacity_bytes
        self.free_bytes = capacity_bytes
        self._tickets = count(1)

    def put(self, tokens: int, places: Sequence[tuple[int, int]], block_bytes: Sequence[int]) -> Swapped:
        """Take a ticket for each block. block_bytes: of a block of each group."""
        size = sum(block_bytes[group] for group, _ in places)
        assert size <= self.free_bytes, f"{size} bytes are to be put aside, and {self.free_bytes} are free"
        self.free_bytes -= size
        return Swapped(tokens, tuple(places), tuple(next(self._tickets) for _ in places), size)

    def give_back(self, swapped: Swapped) -> None:
        """The blocks have been put back, or never will be."""
        self.free_bytes += swapped.bytes
        assert self.free_bytes <= self._capacity_bytes, "host memory was given back twice"
