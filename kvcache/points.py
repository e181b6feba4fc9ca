"""The points at which requests could go on, as a tree: prompts that begin alike share a path.

    "You are ..."  ──►  parting  ──►  turn 1  ──►  turn 2       an end: no prompt has gone beyond it
                           └──────►  another conversation

A point stands for the blocks between its parent and itself, and for what else it takes to go on there: the blocks of
windows before it, the states just there. It is `kept`, in part or in whole, or it is *remembered*: its blocks were
evicted, and only their names are there, to recognise it by when it comes back. Names name all that comes before, so the
last one tells whether a prompt passes the whole of it.
"""

from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

from .prefix import shared_blocks
from .sorts import Sort


class Point:
    """Lengths of its path count blocks, but `lengths`, which count tokens."""

    __slots__ = (
        "awaited", "children", "draft_names", "encoder", "end", "gap", "is_ready", "kept", "kept_children", "last",
        "lengths", "names", "parent", "place", "sort", "start", "stop_sort", "stopped", "turns", "users", "uses",
        "weight",
    )  # fmt: skip

    def __init__(self, parent: "Point | None", start: int, end: int, names: Sequence[bytes], now: int):
        self.parent = parent
        self.children: set[Point] = set()
        self.start, self.end = start, end
        self.names = names  # of the blocks between
        self.draft_names: Sequence[bytes] = ()
        # What is there.
        self.kept = start  # up to which block
        self.kept_children = 0
        self.is_ready = False  # could a request go on here now?
        self.lengths: dict[int, bytes | None] = {}  # at which one can go on -> the name, where it ends inside a block
        self.encoder: tuple[int, int] | None = None  # group and tokens, of an encoder's output
        self.place = -1  # among the candidates
        # Who uses it, when, how often.
        self.users = 0  # running requests that went on here
        self.awaited = -1  # when a waiting request was last seen that will
        self.last = self.stopped = now  # when a request was here; when one went on just here
        self.gap = 0  # requests between the last two uses
        self.uses, self.turns = 1, 0
        self.weight = 1.0
        self.sort: Sort | None = None
        self.stop_sort: Sort | None = None

    @property
    def is_kept(self) -> bool:
        return self.kept > self.start

    @property
    def is_end(self) -> bool:
        """Does no kept path lead on?"""
        return not self.kept_children


class Walk(NamedTuple):
    """How far a sequence is known."""

    path: list[Point]  # points that it passes
    within: Point | None  # the one in which it parts
    blocks: int


class PointTree:
    """Invariant: a kept point's parent is kept whole; a name is the first one of at most one point."""

    def __init__(self) -> None:
        self.root = Point(None, 0, 0, (), 0)
        self.remembered: OrderedDict[Point, None] = OrderedDict()  # evicted the longest ago first
        self.remembered_names = 0
        self._first: dict[bytes, Point] = {}  # first name -> point

    def __len__(self) -> int:
        return len(self._first)

    # -- asking ------------------------------------------------------------------------------------------------------

    def walk(self, names: Sequence[bytes]) -> Walk:
        path: list[Point] = []
        at, count = 0, len(names)
        while at < count:
            point = self._first.get(names[at])
            if point is None:
                return Walk(path, None, at)
            if point.end <= count and names[point.end - 1] == point.names[-1]:
                path.append(point)
                at = point.end
                continue
            return Walk(path, point, shared_blocks(names, point.names, at))
        return Walk(path, None, at)

    # -- acting ------------------------------------------------------------------------------------------------------

    def enter(self, names: Sequence[bytes], now: int) -> list[Point]:
        """The points of a path, the last one at its end. It is made if there is none."""
        path, within, blocks = self.walk(names)
        if within is not None:
            path.append(self._split(within, blocks))
        if blocks < len(names):
            parent = path[-1] if path else self.root
            point = Point(parent, blocks, len(names), names[blocks:], now)
            parent.children.add(point)
            assert names[blocks] not in self._first, "two points begin with the same block"
            self._first[names[blocks]] = point
            path.append(point)
        return path

    def keep(self, point: Point) -> None:
        """All its blocks are there."""
        if not point.is_kept:
            self._remember_no_more(point)
            assert point.parent is not None, "the root is no point"
            point.parent.kept_children += 1
        point.kept = point.end

    def let_go(self, point: Point) -> None:
        """None of its blocks is there, from now on it is remembered."""
        assert point.is_kept and point.is_end and point.parent is not None, "a path is let go from its end"
        point.kept, point.is_ready = point.start, False
        point.lengths, point.draft_names = {}, ()
        point.parent.kept_children -= 1
        assert point.parent.kept_children >= 0, "a point has less than no kept children"
        self._remember(point)

    def forget_oldest(self) -> Point:
        """Of the remembered ones, with all that follow it."""
        point = next(iter(self.remembered))
        self._remove(point)
        return point

    def _remove(self, point: Point) -> None:
        for child in list(point.children):
            self._remove(child)
        assert not point.is_kept and point.parent is not None, "a kept point is removed"
        self._remember_no_more(point)
        del self._first[point.names[0]]
        point.parent.children.discard(point)

    def _remember(self, point: Point) -> None:
        self.remembered[point] = None
        self.remembered_names += len(point.names)

    def _remember_no_more(self, point: Point) -> None:
        if point in self.remembered:
            del self.remembered[point]
            self.remembered_names -= len(point.names)

    def _split(self, point: Point, at: int) -> Point:
        """A point within another one, before it."""
        parent, names, was_kept = point.parent, point.names, point.is_kept
        assert parent is not None and point.start < at < point.end, "there is no place to part"
        self._remember_no_more(point)
        before = Point(parent, point.start, at, names[: at - point.start], point.last)
        before.gap, before.uses, before.turns, before.sort = point.gap, point.uses, point.turns, point.sort
        before.stop_sort, before.weight = point.stop_sort, point.weight
        before.draft_names = point.draft_names[: at - point.start]
        before.kept, before.children = min(at, point.kept), {point}
        parent.children.discard(point)
        parent.children.add(before)
        self._first[names[0]], self._first[names[at - point.start]] = before, point
        point.parent, point.start, point.names = before, at, names[at - point.start :]
        point.draft_names = point.draft_names[at - before.start :]
        if point.kept > at:
            before.kept_children = 1
            return before
        # What was cut off its end reaches to here.
        point.kept, point.is_ready, point.lengths = at, False, {}
        self._remember(point)
        if not was_kept:
            self._remember(before)
        return before


def names_between(point: Point, first: int, stop: int) -> list[bytes]:
    """Of the path to a kept point, the names of blocks first .. stop - 1."""
    parts: list[Sequence[bytes]] = []
    at: Point | None = point
    while at is not None and first < stop:
        if at.start < stop:
            low = max(first, at.start)
            parts.append(at.names[low - at.start : stop - at.start])
            stop = low
        at = at.parent
    return [name for part in reversed(parts) for name in part]
