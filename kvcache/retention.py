"""Which free blocks to keep longest: the order in which cached blocks are evicted.

A queue holds items (blocks, or whole large pages) that are free and still hold a known prefix; its `first` is the next
to go. Two ways to order it:

    TieredLru    never-proven before proven, least recently released first. What no plain later prompt needs (blocks a
                 window has passed) goes before all else.
    GreedyDual   by the prefill work that a hit would save, per byte, ageing as evictions go on (Cao and Irani 1997).

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


class Born(enum.IntEnum):
    """What is known of a block's past. The values are flags in a byte array."""

    NEW = 0
    AGAIN = 1  # its content had been evicted and was computed again
    FOUND = 2  # a later request has used it


FOUND = int(Born.FOUND)

Rank = tuple[float, int]
"""Order of eviction, lowest first. Comparable between the queues of one policy."""


LOW_RANK = 0
"""First part of the rank of whatever is hardly missed."""


class Queue(Protocol):
    """Free items with a known content, in order of eviction."""

    def push(self, item: int, tier: Tier, born: int, worth: float) -> None:
        """Add an item that is not in the queue. worth: work saved per byte, for policies that ask for it."""
        ...

    def push_many(self, items: Sequence[int], tier: Tier, born: bytearray, worth: float) -> None:
        """Add several, in this order. born: of every item there is."""
        ...

    def discard(self, item: int) -> None:
        """Take an item out: it is in use again, or forgotten."""
        ...

    def first(self) -> tuple[Rank, int] | None:
        """The next to be evicted."""
        ...

    def evicted(self, item: int) -> None:
        """`first` has been evicted: take it out, and learn from it."""
        ...

    def tiers(self) -> Iterable[tuple[Tier, Iterable[int]]]:
        """All items, by how early they go."""
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

    @property
    def asks_worth(self) -> bool: ...

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
    asks_worth = False

    def __init__(self, proven_share: float = 0.25):
        _check_share("proven_share", proven_share)
        self._proven_share = proven_share
        self._clock = _Clock()

    def queue(self, capacity: int) -> Queue:
        return TieredLru(self._clock, max(1, int(capacity * self._proven_share)), capacity)


class LruPolicy:
    """Least recently released first, whatever it is."""

    name = "lru"
    asks_worth = False

    def __init__(self) -> None:
        self._clock = _Clock()

    def queue(self, capacity: int) -> Queue:
        return PlainLru(self._clock)


class GreedyDualPolicy:
    """Saved prefill work per byte, with ageing."""

    name = "score"
    asks_worth = True

    def __init__(self) -> None:
        self._clock = _Clock()
        self._age = _Age()

    def queue(self, capacity: int) -> Queue:
        return GreedyDual(self._clock, self._age)


POLICIES = {"lru-tiers": TieredLruPolicy, "lru": LruPolicy, "score": GreedyDualPolicy}


def policy_named(name: str) -> Policy:
    """Raises `InvalidSetting` for an unknown name."""
    if name not in POLICIES:
        raise InvalidSetting(f"policy must be one of {', '.join(POLICIES)}; got {name!r}", field="policy")
    return POLICIES[name]()


class PlainLru:
    def __init__(self, clock: _Clock):
        self._clock = clock
        self._items: OrderedDict[int, int] = OrderedDict()

    def push(self, item: int, tier: Tier, born: int, worth: float) -> None:
        self._items[item] = self._clock.tick()

    def push_many(self, items: Sequence[int], tier: Tier, born: bytearray, worth: float) -> None:
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


class TieredLru:
    """One LRU list per tier. Invariant: at most `max_proven` items are proven, each in one list only."""

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

    def push(self, item: int, tier: Tier, born: int, worth: float) -> None:
        if born == FOUND or tier is Tier.PROVEN:
            self._proven[item] = self._clock.tick(), self._evictions
            if len(self._proven) > self._max_proven:
                self._demote()
        elif tier is Tier.LOW:
            self._low[item] = self._clock.tick()
        elif born == Born.AGAIN and len(self._proven) < self._max_proven:
            self._proven[item] = self._clock.tick(), self._evictions
        else:
            self._usual[item] = self._clock.tick()

    def push_many(self, items: Sequence[int], tier: Tier, born: bytearray, worth: float) -> None:
        if tier != Tier.PROVEN and not any(map(born.__getitem__, items)):
            target = self._low if tier == Tier.LOW else self._usual
            target.update(zip(items, self._clock.ticks(len(items)), strict=True))
        else:
            for item in items:
                self.push(item, tier, born[item], worth)

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
        self._usual[item] = self._clock.tick()


@dataclass(slots=True)
class _Age:
    """Rank of the last evicted item: what enters now is worth that much more."""

    value: float = 0.0


class GreedyDual:
    """A heap with lazy deletion."""

    def __init__(self, clock: _Clock, age: _Age):
        self._clock = clock
        self._age = age
        self._heap: list[tuple[float, int, int]] = []  # (score, stamp, item)
        self._stamps: dict[int, int] = {}  # of the entry that counts

    def push(self, item: int, tier: Tier, born: int, worth: float) -> None:
        stamp = self._clock.tick()
        is_low = tier == Tier.LOW and born != Born.FOUND
        score = LOW_RANK if is_low else self._age.value + max(worth, 1e-9)
        self._stamps[item] = stamp
        heapq.heappush(self._heap, (score, stamp, item))

    def push_many(self, items: Sequence[int], tier: Tier, born: bytearray, worth: float) -> None:
        for item in items:
            self.push(item, tier, born[item], worth)

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
        del self._stamps[item]

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


def _check_share(field: str, share: float) -> None:
    if not 0 <= share <= 1:
        raise InvalidSetting(f"{field} must be between 0 and 1, got {share}", field=field)


@dataclass(frozen=True, slots=True)
class Retain:
    """What a request asks to become of its blocks when it ends.

    priority  above 0: proven at once; below 0: first to go
    ttl_s     seconds after which the blocks are first to go; None: no limit
    pin       keep them until `ttl_s` or a reset, as far as the declared share of the memory allows
    """

    priority: int = 0
    ttl_s: float | None = None
    pin: bool = False

    def __post_init__(self):
        if self.ttl_s is not None and not self.ttl_s > 0:
            raise InvalidSetting(f"ttl must be a positive number of seconds, got {self.ttl_s}", field="ttl")

    @property
    def tier(self) -> Tier:
        return Tier.PROVEN if self.priority > 0 else Tier.LOW if self.priority < 0 else Tier.USUAL


USUAL_RETENTION = Retain()
