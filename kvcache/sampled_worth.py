"""What more memory would bring, while requests are served: thought pools for a sample of the conversations.

All requests of one conversation are followed, or none: the name of the first block in which it differs from many others
says which. With one conversation in eight, a thought pool has an eighth of the memory, beside what many share. It costs
at most a hundredth of the time: if it takes longer, half as many are followed, and counting begins anew.
"""

import time
from collections.abc import Callable
from typing import NamedTuple
from zlib import crc32

from .group_table import Row
from .memory_worth import SCALES, MemoryWorth, ThoughtBlocks
from .plan import MemoryPlan
from .points import Point
from .retention import Retention
from .visits import Arrival

MOST_TIME_SHARE, FREE_S = 0.01, 0.25
"""Of the time that passes, what it may take; and seconds that it may take before."""

MOST_BLOCKS = 1 << 16
"""Blocks of the largest thought pool, about. A name of each is kept, of 75 bytes."""

MANY = 16
"""Paths that lead on from a point which many conversations share."""

COUNTED_REQUESTS = 512
"""A forecast is made from so many of the latest requests that were followed, and at most twice as many."""


class Forecast(NamedTuple):
    """What other sizes of a memory would have found, of the same requests."""

    kind: str  # of memory
    requests: int  # the latest ones that were followed
    one_in: int  # of so many conversations, one is followed
    found: tuple[tuple[float, float], ...]  # (times the memory, share of prompts' tokens); 1.0: what really was found


class _Counts:
    """Since some moment."""

    def __init__(self) -> None:
        self.asked_tokens = self.found_tokens = 0  # of all requests
        self.followed = self.followed_tokens = 0  # those followed, and what they asked
        self.thought_tokens = dict.fromkeys(SCALES, 0)  # found by thought pools
        self.shared_blocks: dict[bytes, int] = {}  # first name of a path that many share -> its blocks


class SampledWorth:
    """Told of each request that has left; asked for a forecast now and then."""

    def __init__(self, plan: MemoryPlan, retention: Retention, clock: Callable[[], float] = time.perf_counter):
        """clock: seconds"""
        self._plan = plan
        self._retention = retention
        self._clock = clock
        self._path_block_bytes = ThoughtBlocks(plan).path_block_bytes
        smallest = self._path_block_bytes or min(group.block_bytes for group in plan.groups)
        self._one_in = 1
        while plan.memory_bytes * max(SCALES) > MOST_BLOCKS * smallest * self._one_in:
            self._one_in *= 2
        self._begin()

    def _begin(self) -> None:
        self._pools = MemoryWorth(self._plan, self._one_in)
        self._earlier, self._latest = _Counts(), _Counts()
        self._began_s, self._spent_s = self._clock(), 0.0
        self._fit_pools()

    def forecast(self) -> Forecast | None:
        """What was really found of all requests, and what the thought pools found more or less of those followed. None,
        while none has been followed."""
        parts = self._earlier, self._latest
        followed = sum(part.followed_tokens for part in parts)
        if not followed:
            return None
        really = sum(part.found_tokens for part in parts) / sum(part.asked_tokens for part in parts)
        thought = {scale: sum(part.thought_tokens[scale] for part in parts) / followed for scale in SCALES}
        found = tuple((scale, min(1.0, max(0.0, really + thought[scale] - thought[1.0]))) for scale in SCALES)
        return Forecast("device", sum(part.followed for part in parts), self._one_in, found)

    def served(self, arrival: Arrival, row: Row) -> None:
        """A request has left."""
        if not arrival.blocks:
            return  # it has no name, and nothing of it can be found
        self._latest.asked_tokens += arrival.tokens
        self._latest.found_tokens += arrival.found
        names = arrival.chain.names
        path, within, _ = self._retention.tree.walk(names[: arrival.blocks])
        points = [*path, *((within,) if within is not None else ())]
        own = next((n for n, point in enumerate(points) if len(point.children) < MANY), len(points) - 1)
        key = names[points[own].start] if points else names[0]
        if crc32(key) % self._one_in:
            return
        began_s = self._clock()
        self._count(arrival, row, points[: max(0, own)])
        now_s = self._clock()
        self._spent_s += now_s - began_s
        if self._spent_s > FREE_S + MOST_TIME_SHARE * (now_s - self._began_s):
            self._one_in *= 2
            self._begin()

    def _count(self, arrival: Arrival, row: Row, shared: list[Point]) -> None:
        counts = self._latest
        for point in shared:
            counts.shared_blocks[point.names[0]] = point.end - point.start
        counts.followed += 1
        counts.followed_tokens += arrival.tokens
        for scale, found in self._pools.serve(arrival, row).items():
            counts.thought_tokens[scale] += found
        if counts.followed >= COUNTED_REQUESTS:
            self._earlier, self._latest = counts, _Counts()
            self._fit_pools()

    def _fit_pools(self) -> None:
        """What many conversations share takes as much of a sample's pool as of a whole one."""
        blocks = self._earlier.shared_blocks | self._latest.shared_blocks
        shared = sum(blocks.values()) * self._path_block_bytes
        for scale in SCALES:
            whole = int(self._plan.memory_bytes * scale)
            self._pools.resize(scale, min(whole, shared + (whole - shared) // self._one_in))


def follow(retention: Retention, plan: MemoryPlan) -> SampledWorth:
    """Have a sample of a retention's requests followed."""
    worth = SampledWorth(plan, retention)
    retention.after = worth.served
    return worth
