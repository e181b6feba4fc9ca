"""What requests ask to become of their blocks when they end: a priority, a time to live, a pin.

priority   how much more they are worth than others
ttl_s      after so many seconds they are evicted before all others
pin        they stay until their time is over, or until a reset, within a share of the memory
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import InvalidSetting
from .eviction import Tier
from .ids import BlockId, RequestId
from .plan import MemoryPlan
from .pool import BlockPool


@dataclass(frozen=True, slots=True)
class Retain:
    """What a request asks for.

    priority  above 0: each step multiplies what they are worth; below 0: evicted first
    ttl_s     seconds after which the blocks are evicted first; None: no limit
    pin       keep them until `ttl_s` or a reset, as far as the share of the memory for pins allows
    """

    priority: int = 0
    ttl_s: float | None = None
    pin: bool = False

    def __post_init__(self):
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise InvalidSetting(f"ttl must be a positive number of seconds, got {self.ttl_s}", field="ttl")

    @property
    def tier(self) -> Tier:
        return Tier.LOW if self.priority < 0 else Tier.USUAL

    @property
    def is_lasting(self) -> bool:
        """Is there something to remember after the request has ended?"""
        return self.pin or self.ttl_s is not None


USUAL_RETENTION = Retain()


class _Pin(NamedTuple):
    until: float | None  # of the clock
    blocks: list[list[BlockId]]  # [group][block]
    large_pages: int


class _Expiry(NamedTuple):
    at: float  # of the clock
    request: RequestId
    blocks: list[list[tuple[BlockId, bytes]]]  # [group][block]


class Hints:
    """Pins and times to live. Invariant: a pin holds each of its blocks once, and pins take up at most their share."""

    def __init__(self, pool: BlockPool, plan: MemoryPlan, pinned_share: float, clock: Callable[[], float]):
        """pinned_share: of the memory. clock: seconds."""
        self._groups = pool.groups
        self._per_page = [group.pages_per_large for group in plan.groups]
        self._most_pinned = int(plan.usable_blocks * pinned_share)
        self._clock = clock
        self._pins: list[_Pin] = []
        self._expiries: list[_Expiry] = []  # a heap
        self.are_any = False  # pins, or times that are not over

    @property
    def num_pinned(self) -> int:
        """Large pages' worth of blocks that are pinned."""
        return sum(pin.large_pages for pin in self._pins)

    @property
    def pinned(self) -> list[tuple[int, BlockId]]:
        """(group, block) of each."""
        return [(g, block) for pin in self._pins for g, blocks in enumerate(pin.blocks) for block in blocks]

    def retain(self, request: RequestId, blocks: Sequence[Sequence[BlockId]], retain: Retain) -> None:
        """Pin what a request leaves, or note when it may go. What does not fit the share for pins is cached as usual.

        blocks: [group][block] that it still holds
        """
        left = [
            [(block, name) for block in each if (name := group.name_of(block)) is not None]
            for group, each in zip(self._groups, blocks, strict=True)
        ]
        until = self._clock() + retain.ttl_s if retain.ttl_s is not None else None
        if retain.pin:
            self.expire()
            pin = _Pin(until, [[block for block, _ in each] for each in left], self._large_pages(left))
            if self.num_pinned + pin.large_pages <= self._most_pinned:
                self._pin(pin)
                return
        if until is not None:
            heapq.heappush(self._expiries, _Expiry(until, request, left))
            self.are_any = True

    def expire(self) -> None:
        """Blocks whose time is over are evicted first."""
        now = self._clock()
        for pin in [pin for pin in self._pins if pin.until is not None and pin.until <= now]:
            self._pins.remove(pin)
            self._unpin(pin)
        while self._expiries and self._expiries[0].at <= now:
            for group, blocks in zip(self._groups, heapq.heappop(self._expiries).blocks, strict=True):
                group.make_low([block for block, name in blocks if group.name_of(block) == name])
        self.are_any = bool(self._pins or self._expiries)

    def forget_all(self) -> None:
        for pin in self._pins:
            self._unpin(pin)
        self._pins, self._expiries, self.are_any = [], [], False

    def _pin(self, pin: _Pin) -> None:
        for group, blocks in zip(self._groups, pin.blocks, strict=True):
            group.share(blocks)
        self._pins.append(pin)
        assert self.num_pinned <= self._most_pinned, f"{self.num_pinned} large pages are pinned"
        self.are_any = True

    def _unpin(self, pin: _Pin) -> None:
        for group, blocks in zip(self._groups, pin.blocks, strict=True):
            group.give_back(reversed(blocks), Tier.LOW)

    def _large_pages(self, blocks: Sequence[Sequence[object]]) -> int:
        return sum(-(-len(each) // per_page) for each, per_page in zip(blocks, self._per_page, strict=True))
