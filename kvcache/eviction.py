"""In which order cached blocks are evicted.

A queue holds items (blocks, or whole large pages) that no request uses and that still hold a known prefix. Its `first`
is evicted next: what is low before what is usual, and of each the one that was released longest ago.

What is low is hardly missed: blocks that a window has passed in the middle of a prompt, and all that `retention.py` has
given up. When memory is needed and nothing is low, retention is asked to give up more. So the order among usual items
counts only where it knows of none: in a pool without retention, as under the policy `lru`, where nothing is low.
"""

import enum
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..errors import InvalidSetting


class Tier(enum.IntEnum):
    """How likely a block is wanted again. Lower ones are evicted first."""

    LOW = 0
    USUAL = 1


LOW, USUAL = Tier  # an enum's attributes cost more than a module's

Rank = tuple[Tier, int]
"""Order of eviction, lowest first. Comparable between the queues of one pool."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How victims are chosen.

    keeps_by_worth  by what points are worth; else the one that was released longest ago, whatever it is
    """

    name: str
    keeps_by_worth: bool


POLICIES = {policy.name: policy for policy in (Policy("worth", True), Policy("lru", False))}

USUAL_POLICY = POLICIES["worth"]
"""An engine uses this one. `intarsia replay --policy` compares it with the other."""


def policy_named(name: str) -> Policy:
    """Raises `InvalidSetting` for an unknown name."""
    if name not in POLICIES:
        raise InvalidSetting(f"policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]


class Clock:
    """Stamps for what enters the queues of one pool."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0

    def ticks(self, count: int) -> range:
        first = self.now + 1
        self.now += count
        return range(first, first + count)


class Queue:
    """Two LRU lists. Invariant: each item is in one of them only."""

    __slots__ = ("_clock", "_has_tiers", "_low", "_usual")

    def __init__(self, clock: Clock, *, has_tiers: bool):
        self._clock = clock
        self._has_tiers = has_tiers
        self._low: OrderedDict[int, int] = OrderedDict()  # item -> stamp
        self._usual: OrderedDict[int, int] = OrderedDict()

    # -- asking ------------------------------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self._low) + len(self._usual)

    @property
    def num_low(self) -> int:
        return len(self._low)

    def first(self) -> tuple[Rank, int] | None:
        """The next item to evict."""
        for item, stamp in self._low.items():
            return (LOW, stamp), item
        for item, stamp in self._usual.items():
            return (USUAL, stamp), item
        return None

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        """All items, by how early they are evicted."""
        return (LOW, self._low.keys()), (USUAL, self._usual.keys())

    # -- acting ------------------------------------------------------------------------------------------------------

    def push(self, item: int, tier: Tier) -> None:
        """Add an item that is not in the queue."""
        self._clock.now += 1
        (self._usual if tier or not self._has_tiers else self._low)[item] = self._clock.now

    def push_many(self, items: Sequence[int], tier: Tier) -> None:
        """Add several, in this order."""
        target = self._usual if tier or not self._has_tiers else self._low
        target.update(zip(items, self._clock.ticks(len(items)), strict=True))

    def make_low(self, items: Iterable[int]) -> None:
        """Of the queue's items, have these evicted before usual ones, in this order."""
        usual, low, clock = self._usual, self._low, self._clock
        for item in items:
            if usual.pop(item, None) is not None:
                clock.now += 1
                low[item] = clock.now

    def pop_first(self) -> int:
        """Take the next item to evict out of the queue, which is not empty."""
        items = self._low or self._usual
        assert items, "there is nothing to evict"
        return items.popitem(last=False)[0]

    def discard(self, item: int) -> None:
        """Take an item out: it is used again, it is evicted, or its content is forgotten."""
        if self._usual.pop(item, None) is None:
            self._low.pop(item, None)
