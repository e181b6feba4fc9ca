"""In which order cached blocks are evicted.

A queue holds items (blocks, or whole large pages) that no request uses and that still hold a known prefix. Its `first`
is evicted next. There are three ways to order it:

    TieredLru    unproven before proven, and the one that was released longest ago first. Blocks that a window has
                 passed, which a later prompt seldom needs, are evicted before all others.
    PlainLru     the one that was released longest ago first
    GreedyDual   by the prefill work that a hit would save per byte; what enters later counts more (Cao and Irani 1997)

An engine uses the first one. `intarsia replay --policy` compares it with the others.

Plain LRU falls from all hits to none when a cycle is one session longer than the cache. `TieredLru` does not: an item
that was evicted and computed again becomes proven, if the proven share has room, and then survives the cycle.
"""

import enum
import heapq
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

from ..errors import InvalidSetting


class Tier(enum.IntEnum):
    """How likely a block is wanted again. Lower ones are evicted first."""

    LOW = 0  # a window has passed it in the middle of a prompt
    USUAL = 1
    PROVEN = 2  # was found by a later request, or asked for again after its eviction


class History(enum.IntEnum):
    """What happened to a block since it got its name. The values are those of a byte array."""

    NEW = 0
    AGAIN = 1  # its content had been evicted and was computed again
    FOUND = 2  # a later request has used it


FOUND = int(History.FOUND)

Rank = tuple[float, int]
"""Order of eviction, lowest first. Comparable between the queues of one policy."""

WORK_DOUBLES_AT_TOKENS = 32_768
"""Length at which attention costs as much again as everything else: how `score` weighs long prefixes."""

LOW_RANK = 0
"""First part of the rank of items that are hardly missed."""


class Queue(Protocol):
    """Items with a known content that no request uses, in order of eviction."""

    def push(self, item: int, tier: Tier, history: int) -> None:
        """Add an item that is not in the queue."""
        ...

    def push_many(self, items: Sequence[int], tier: Tier, histories: bytearray) -> None:
        """Add several, in this order. histories: of every item there is."""
        ...

    def discard(self, item: int) -> None:
        """Take an item out: it is used again, or its content is forgotten."""
        ...

    def first(self) -> tuple[Rank, int] | None:
        """The next item to evict."""
        ...

    def evicted(self, item: int) -> None:
        """`first` has been evicted: take it out, and learn from it."""
        ...

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        """All items, by how early they are evicted."""
        ...

    @property
    def num_low(self) -> int:
        """Items that are hardly missed."""
        ...

    def __len__(self) -> int: ...


class Policy(Protocol):
    """Makes the queues of one pool."""

    @property
    def name(self) -> str: ...

    def queue(self, capacity: int) -> Queue:
        """capacity: most items that can be in the queue."""
        ...


@dataclass(slots=True)
class _Clock:
    now: int = 0

    def tick(self) -> int:
        self.now += 1
        return self.now

    def ticks(self, count: int) -> range:
        first = self.now + 1
        self.now += count
        return range(first, first + count)


class TieredLruPolicy:
    """See the top of this file.

    proven_share   of the items may be proven; more push the oldest proven ones down.
    """

    name = "lru-tiers"

    def __init__(self, proven_share: float = 0.25):
        if not 0 <= proven_share <= 1:
            raise InvalidSetting(f"proven_share must be between 0 and 1, got {proven_share}", field="proven_share")
        self._proven_share = proven_share
        self._clock = _Clock()

    def queue(self, capacity: int) -> Queue:
        return TieredLru(self._clock, max(1, int(capacity * self._proven_share)), capacity)


class LruPolicy:
    """The item that was released longest ago is evicted first, whatever it is."""

    name = "lru"

    def __init__(self) -> None:
        self._clock = _Clock()

    def queue(self, capacity: int) -> Queue:
        return PlainLru(self._clock)


class GreedyDualPolicy:
    """Saved prefill work per byte, with ageing. All blocks that one request releases have the same value."""

    name = "score"

    def __init__(self) -> None:
        self.value = 0.0  # of what is released now; 0: no request ends now
        self._clock = _Clock()
        self._age = _Age()

    def queue(self, capacity: int) -> Queue:
        return GreedyDual(self, self._clock, self._age)

    def begin_release(self, length: int, bytes_held: int) -> None:
        """A request of `length` tokens ends: what enters the queues until `end_release` is what it held."""
        work = length * (1 + length / (2 * WORK_DOUBLES_AT_TOKENS))
        self.value = work / max(1, bytes_held)

    def end_release(self) -> None:
        self.value = 0.0


POLICIES = {"lru-tiers": TieredLruPolicy, "lru": LruPolicy, "score": GreedyDualPolicy}


def policy_named(name: str) -> Policy:
    """Raises `InvalidSetting` for an unknown name."""
    if name not in POLICIES:
        raise InvalidSetting(f"policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]()


class TieredLru:
    """One LRU list per tier. Invariant: at most `max_proven` items are proven, and each item is in one list only."""

    STALE_AFTER = 8
    """A proven item that was not found during so many turnovers of the whole queue is proven no longer."""

    def __init__(self, clock: _Clock, max_proven: int, capacity: int):
        self._clock = clock
        self._max_proven = max_proven
        self._stale_after = capacity * self.STALE_AFTER
        self._evictions = 0
        self._low: OrderedDict[int, int] = OrderedDict()
        self._usual: OrderedDict[int, int] = OrderedDict()
        self._proven: OrderedDict[int, tuple[int, int]] = OrderedDict()  # stamp, and evictions so far

    def push(self, item: int, tier: Tier, history: int) -> None:
        if history == FOUND or tier is Tier.PROVEN:
            self._proven[item] = self._clock.tick(), self._evictions
            if len(self._proven) > self._max_proven:
                self._demote()
        elif tier is Tier.LOW:
            self._low[item] = self._clock.tick()
        elif history == History.AGAIN and len(self._proven) < self._max_proven:
            self._proven[item] = self._clock.tick(), self._evictions
        else:
            self._usual[item] = self._clock.tick()

    def push_many(self, items: Sequence[int], tier: Tier, histories: bytearray) -> None:
        if tier != Tier.PROVEN and not any(map(histories.__getitem__, items)):
            target = self._low if tier == Tier.LOW else self._usual
            target.update(zip(items, self._clock.ticks(len(items)), strict=True))
        else:
            for item in items:
                self.push(item, tier, histories[item])

    def discard(self, item: int) -> None:
        if self._usual.pop(item, None) is None and self._low.pop(item, None) is None:
            self._proven.pop(item, None)

    def first(self) -> tuple[Rank, int] | None:
        for tier, items in enumerate((self._low, self._usual)):
            for item, stamp in items.items():
                return (tier, stamp), item
        for item, (stamp, _) in self._proven.items():
            return (Tier.PROVEN, stamp), item
        return None

    def evicted(self, item: int) -> None:
        self.discard(item)
        self._evictions += 1
        if self._proven and self._evictions - next(iter(self._proven.values()))[1] > self._stale_after:
            self._demote()

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        return (Tier.LOW, self._low.keys()), (Tier.USUAL, self._usual.keys()), (Tier.PROVEN, self._proven.keys())

    @property
    def num_low(self) -> int:
        return len(self._low)

    def __len__(self) -> int:
        return len(self._low) + len(self._usual) + len(self._proven)

    def _demote(self) -> None:
        item, _ = self._proven.popitem(last=False)
        assert len(self._proven) <= self._max_proven, "more items are proven than may be"
        self._usual[item] = self._clock.tick()


class PlainLru:
    def __init__(self, clock: _Clock):
        self._clock = clock
        self._items: OrderedDict[int, int] = OrderedDict()

    def push(self, item: int, tier: Tier, history: int) -> None:
        self._items[item] = self._clock.tick()

    def push_many(self, items: Sequence[int], tier: Tier, histories: bytearray) -> None:
        self._items.update(zip(items, self._clock.ticks(len(items)), strict=True))

    def discard(self, item: int) -> None:
        self._items.pop(item, None)

    def first(self) -> tuple[Rank, int] | None:
        for item, stamp in self._items.items():
            return (1, stamp), item
        return None

    def evicted(self, item: int) -> None:
        del self._items[item]

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        return ((Tier.USUAL, self._items.keys()),)

    @property
    def num_low(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self._items)


@dataclass(slots=True)
class _Age:
    """Rank of the last evicted item: what enters now is worth that much more."""

    value: float = 0.0


class GreedyDual:
    """A heap with lazy deletion."""

    def __init__(self, policy: GreedyDualPolicy, clock: _Clock, age: _Age):
        self._policy = policy
        self._clock = clock
        self._age = age
        self._heap: list[tuple[float, int, int]] = []  # (score, stamp, item)
        self._stamps: dict[int, int] = {}  # of the entry that counts
        self._values: dict[int, float] = {}  # of each item when a request last released it

    def push(self, item: int, tier: Tier, history: int) -> None:
        stamp = self._clock.tick()
        value = self._values[item] = self._policy.value or self._values.get(item, 0.0)
        is_low = tier == Tier.LOW and history != History.FOUND
        score = LOW_RANK if is_low else self._age.value + max(value, 1e-9)
        self._stamps[item] = stamp
        heapq.heappush(self._heap, (score, stamp, item))

    def push_many(self, items: Sequence[int], tier: Tier, histories: bytearray) -> None:
        for item in items:
            self.push(item, tier, histories[item])

    def discard(self, item: int) -> None:
        self._stamps.pop(item, None)
        if len(self._heap) > 64 + 4 * len(self._stamps):
            self._heap = [entry for entry in self._heap if self._stamps.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def first(self) -> tuple[Rank, int] | None:
        while self._heap:
            score, stamp, item = self._heap[0]
            if self._stamps.get(item) == stamp:
                return (score, stamp), item
            heapq.heappop(self._heap)
        return None

    def evicted(self, item: int) -> None:
        found = self.first()
        assert found is not None and found[1] == item
        self._age.value = max(self._age.value, found[0][0])
        heapq.heappop(self._heap)
        del self._stamps[item], self._values[item]

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        counts = [(score, item) for score, stamp, item in self._heap if self._stamps.get(item) == stamp]
        return (
            (Tier.LOW, [item for score, item in counts if score == LOW_RANK]),
            (Tier.USUAL, [item for score, item in counts if score != LOW_RANK]),
        )

    @property
    def num_low(self) -> int:
        return 0

    def __len__(self) -> int:
        return len(self._stamps)
