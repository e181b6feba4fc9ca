"""What to keep: which point of all is given up when memory is needed.

The least worth (`point_worth.py`) of some points drawn at random is given up. Its blocks are not evicted by that: they
are cached still, but evicted before all others (`Tier.LOW`). Where all groups keep whole sequences, an end is cut
shorter instead.

Requests tell when they come and when they leave, the pool tells when it needs memory. That is all.
"""

import random
from collections.abc import Callable, Iterable, Iterator, Sequence

from .group_table import Row
from .hints import Retain
from .ids import RequestId
from .lookup import Hit
from .plan import MemoryPlan
from .point_blocks import PointBlocks, PointSizes
from .point_worth import PointWorth
from .points import Point, PointTree
from .pool import BlockPool
from .prefix import Encoder
from .sorts import Kind, Sort, gap_bucket, uses_bucket
from .tables import Tables
from .visits import Arrival, Visit

DRAWN, SHORTLIST = 64, 16
"""Candidates drawn for a choice, and of those the least worth that are candidates again at the next one."""

CHOSEN_AT_ONCE = 4
"""Of those drawn, so many may be given up one after another while no request comes: what they are worth is the same."""

CUT_TOKENS = 512
"""By which an end is cut shorter at a time."""

LEARN_EVERY, LEARN_FROM = 200, 1000
"""Requests between two times of learning, at most; and points that wait then and are counted, at most."""

AWAITED_REQUESTS = 32
"""So many requests may come in until a prefix for which one waited is like any other."""

REMEMBERED_PER_KEPT, LEAST_REMEMBERED = 8, 512
"""Points remembered after their eviction, for each that is kept; and so many at least."""

POINT_BYTES, NAME_BYTES = 900, 75
"""Memory that a point takes, and each name of its blocks, about: measured with tracemalloc."""

MOST_REMEMBERED_BYTES, REMEMBERED_SHARE, LEAST_REMEMBERED_BYTES = 64 << 20, 0.02, 1 << 20
"""That they may take, and as a share of the pool's memory: the smaller one. So many bytes at least, since a pool that
remembers nothing can not learn from uses that came too late."""

PRIORITY_FACTOR, MOST_PRIORITY = 8.0, 16
"""What one step of priority multiplies the worth by, and the steps that count."""


class Retention:
    """Invariant: a point is a candidate if and only if giving it up would free something."""

    def __init__(self, plan: MemoryPlan, blocks: PointSizes, arrivals: list[Arrival], drawn: int = DRAWN):
        """arrivals: where the manager notes them; they are taken out here. drawn: candidates for each choice."""
        self._arrivals = arrivals
        self._size = plan.block_tokens
        self._blocks = blocks
        self._drawn = drawn
        share_bytes = int(plan.memory_bytes * REMEMBERED_SHARE)
        self._most_bytes = max(LEAST_REMEMBERED_BYTES, min(MOST_REMEMBERED_BYTES, share_bytes))
        self._rng = random.Random(0)
        self.after: Callable[[Arrival, Row], None] | None = None  # is told of each request that has left
        self.forget_all()

    def forget_all(self) -> None:
        self._arrivals.clear()
        from .reuse_times import ReuseTimes  # numpy takes a moment to load, and a refusal at the start need not wait

        self.tree = PointTree()
        self.reuse = ReuseTimes()
        self._worth = PointWorth(self.reuse, self._blocks, self._size)
        self._now = 0  # requests that came
        self._learnt_at = 0
        self._visits: dict[RequestId, Visit] = {}
        self._candidates: list[Point] = []
        self._shortlist: list[Point] = []
        self._cutting = self.tree.root, -1  # an end, and when it was chosen
        self._chosen: list[Point] = []  # what is given up next, worth more and more from the last on
        self._chosen_at = -1

    @property
    def num_bytes(self) -> int:
        """Memory that is used to remember, about."""
        tree = self.tree
        return len(tree.remembered) * POINT_BYTES + tree.remembered_names * NAME_BYTES

    # -- requests come and leave -------------------------------------------------------------------------------------

    def released(self, row: Row, retain: Retain) -> None:
        """A request has given all back: what it leaves are points."""
        self._catch_up()
        visit = self._visits.pop(row.request, None) or Visit(0, 0, 0, 0, row.extent, None, None)
        if visit.end is not None:
            visit.end.users -= 1
            self._consider(visit.end)
            self._give_up_if_useless(visit.end)
        if retain.priority < 0:
            return
        names = row.chain.names
        path: list[Point] = []
        # Where it ends, and where others may leave its path.
        for length in sorted({*(mark for mark in row.marks if mark <= row.extent), row.extent}):
            if 0 < length // self._size <= len(names):
                path = self.tree.enter(names[: length // self._size], self._now)
                for point in path:
                    first = max(point.start, point.kept)
                    self.tree.keep(point)
                    self._blocks.keep(point, first)
                self._blocks.end_at(path[-1], row.chain, length)
        if path:
            self._sort_anew(path, visit, retain)
            self._give_up_if_useless(path[-1])
        if row.encoder is not None:
            self._encoder_left(row.encoder)
        self._forget_beyond_most()
        if self.after is not None and visit.arrival is not None:
            self.after(visit.arrival, row)

    def await_hit(self, hit: Hit) -> None:
        """A request waits that will go on there."""
        path, within, _ = self.tree.walk(hit.chain.names[: -(-hit.tokens // self._size)])
        for point in (*path[-1:], *((within,) if within is not None else ())):
            point.awaited = self._now

    def hold(self, paths: Iterable[Sequence[bytes]]) -> Iterator[Point]:
        """The points at which these paths end: they are no candidates until they are let go.

        paths: the names of their blocks
        """
        self._catch_up()
        for names in paths:
            path, _, blocks = self.tree.walk(names)
            if path and path[-1].end == blocks == len(names):
                path[-1].users += 1
                self._consider(path[-1])
                yield path[-1]

    def let_go(self, points: Iterable[Point]) -> None:
        """They are candidates like any others."""
        for point in points:
            point.users -= 1
            self._consider(point)
            self._give_up_if_useless(point)

    # -- the pool needs memory ---------------------------------------------------------------------------------------

    def give_up(self) -> bool:
        """Have blocks of the point that is worth least evicted before all others. False if there is none."""
        self._catch_up()
        point = self._least()
        if point is not None:
            self._give_up(point)
        return point is not None

    def give_up_for(self, request: RequestId, length: int) -> bool:
        """`give_up`, if that is worth less than a place of this request at that length."""
        return self._give_up_if_less(request, length, self._worth.of_place)

    def give_up_for_end(self, request: RequestId, length: int) -> bool:
        """`give_up`, if that is worth less than an end of this request at that length, which it is on its way to."""
        return self._give_up_if_less(request, length, self._worth.of_end)

    def _give_up_if_less(self, request: RequestId, length: int, worth: Callable[[Visit, int], float]) -> bool:
        self._catch_up()
        point, visit = self._least(), self._visits.get(request)
        if point is None or visit is None or self._worth.of_point(point, self._now) >= worth(visit, length):
            return False
        self._give_up(point)
        return True

    def supersede(self, names: Sequence[bytes], first: int) -> None:
        """No request will go on at the end of this path: give up its last point if that lies behind block `first`, and
        no other path leads through it."""
        self._catch_up()
        path, within, _ = self.tree.walk(names)
        point = path[-1] if path and within is None else None
        if point is None or point.start < first or not point.is_kept or not point.is_end or point.users:
            return
        for length in list(point.lengths):
            self._blocks.drop_length(point, length, point.start)
        self._blocks.demote_path(point, point.start)
        self._let_go(point)
        if point.parent is not None:
            self._give_up_if_useless(point.parent)

    def _give_up(self, point: Point) -> None:
        if not point.is_end:
            self._give_up_place(point)
        elif self._blocks.has_places or point.encoder is not None:
            self._give_up_end(point)
        else:
            self._cutting = point, self._now
            self._cut(point)

    def _least(self) -> Point | None:
        # An end is cut shorter until it is no more, or until another request has come.
        cut, at = self._cutting
        if at == self._now and cut.place >= 0 and cut.is_end:
            return cut
        while self._chosen and self._chosen_at == self._now:
            if (point := self._chosen.pop()).place >= 0:
                return point
        candidates, count = self._candidates, len(self._candidates)
        if count <= self._drawn:
            drawn = candidates
        else:
            draw = self._rng.random
            drawn = [candidates[int(draw() * count)] for _ in range(self._drawn)]
            drawn += [point for point in self._shortlist if point.place >= 0]
        awaited = max(0, self._now - AWAITED_REQUESTS)
        rated = {
            point: (point.awaited >= awaited, self._worth.of_point(point, self._now), -point.end) for point in drawn
        }
        order = sorted(rated, key=rated.__getitem__)
        few = min(CHOSEN_AT_ONCE, 1 + len(order) // 16)
        self._chosen, self._chosen_at = order[1:few][::-1], self._now
        self._shortlist = order[few : few + SHORTLIST]
        return order[0] if order else None

    # -- giving up ---------------------------------------------------------------------------------------------------

    def _cut(self, point: Point) -> None:
        """The last blocks of an end."""
        cut = max(point.start, point.kept - max(1, CUT_TOKENS // self._size))
        self._blocks.demote_path(point, cut)
        for length in [length for length in point.lengths if length // self._size > cut]:
            self._blocks.drop_length(point, length)
        if cut > point.start:
            point.kept = cut
        else:
            self._let_go(point)

    def _give_up_if_useless(self, point: Point) -> None:
        """An end at which one cannot go on: no state is there, or a part of a window is not."""
        if self._blocks.has_places and point.is_kept and point.is_end and not point.is_ready:
            self._give_up_end(point)

    def _give_up_end(self, point: Point) -> None:
        """An end, and before it whatever only led to it."""
        at: Point | None = point
        while at is not None and at.parent is not None and at.is_kept and at.is_end and not at.users:
            parent = at.parent
            self._give_up_place(at)
            self._blocks.demote_path(at, at.start)
            self._let_go(at)
            if parent.is_ready:
                break
            at = parent
        if at is not None:
            self._consider(at)

    def _give_up_place(self, point: Point) -> None:
        """One cannot go on here any more. Blocks that serve points before or beyond it stay."""
        if point.encoder is not None:
            return
        for length in list(point.lengths):
            self._blocks.drop_length(point, length)
        point.is_ready = not self._blocks.has_places
        self._consider(point)

    def _let_go(self, point: Point) -> None:
        parent = point.parent
        self.tree.let_go(point)
        self._consider(point)
        assert parent is not None, "the root is let go"
        self._consider(parent)

    # -- what requests leave -----------------------------------------------------------------------------------------

    def _sort_anew(self, path: Sequence[Point], visit: Visit, retain: Retain) -> None:
        """What all points of a path have learnt from a request that leaves."""
        for point in path:
            point.last = self._now
            point.weight = PRIORITY_FACTOR ** min(retain.priority, MOST_PRIORITY)
            if len(point.children) > 1:
                own = gap_bucket(point.gap), uses_bucket(point.uses), 0
                point.sort, point.stop_sort = Sort(Kind.PARTING, *own), Sort(Kind.STOP_AT_PARTING, *own)
            else:
                point.sort, point.stop_sort = visit.sort(Kind.END), visit.sort(Kind.STOP)
            self._consider(point)
            for child in point.children:
                self._consider(child)  # it may have been cut in two
        if path[-1].uses == 1:
            path[-1].turns = visit.turns

    def _encoder_left(self, encoder: Encoder) -> None:
        """An encoder's output is a point of its own, since it serves whatever text is read beside it."""
        for g, names in self._blocks.encoder_names(encoder):
            for point in self.tree.enter(names, self._now):
                self.tree.keep(point)
                point.encoder, point.last, point.is_ready = (g, encoder.tokens), self._now, True
                point.sort = Sort(Kind.END, gap_bucket(point.gap), 0, 0)
                self._consider(point)

    def _consider(self, point: Point) -> None:
        """Is it a candidate?"""
        is_one = (
            point.parent is not None
            and point.is_kept
            and not point.users
            and point.sort is not None
            and (point.is_end if point.encoder is not None or not self._blocks.has_places else point.is_ready)
        )
        if is_one and point.place < 0:
            point.place = len(self._candidates)
            self._candidates.append(point)
        elif not is_one and point.place >= 0:
            last = self._candidates.pop()
            if last is not point:
                self._candidates[point.place] = last
                last.place = point.place
            point.place = -1

    # -- learning ----------------------------------------------------------------------------------------------------

    def _catch_up(self) -> None:
        """With the requests that have come."""
        for arrival in self._arrivals:
            self._arrived(arrival)
        self._arrivals.clear()

    def _arrived(self, arrival: Arrival) -> None:
        self._now += arrival.is_asked
        path, within, blocks = self.tree.walk(arrival.chain.names[: arrival.blocks])
        end = path[-1] if path else None
        visit = Visit(
            gap=self._now - end.last if end is not None else 0,
            turns=end.turns + 1 if end is not None else 0,
            known_tokens=blocks * self._size,
            ready_tokens=next((max(point.lengths) for point in reversed(path) if point.lengths), 0),
            new_tokens=arrival.tokens - blocks * self._size,
            end=within or end,
            arrival=arrival,
        )
        if not arrival.is_asked:  # it is of the turn that was asked last, and no use of what it passes
            if end is not None:
                visit = visit._replace(gap=end.gap, turns=end.turns)
            self._visits[arrival.request] = visit._replace(arrival=None)
            if visit.end is not None:
                visit.end.users += 1
                self._consider(visit.end)
            return
        self._visits[arrival.request] = visit
        self._learn_from(path)
        for point in path:
            point.gap, point.last, point.uses = self._now - point.last, self._now, point.uses + 1
        if end is not None:
            end.stopped, end.turns = self._now, visit.turns
        if visit.end is not None:
            visit.end.users += 1
            self._consider(visit.end)
        if self._now - self._learnt_at >= min(LEARN_EVERY, max(8, self._now // 8)):
            self._learn()

    def _learn_from(self, path: Sequence[Point]) -> None:
        """A prompt has come that passes these points."""
        for point in path:
            if point.sort is not None and point.sort.kind is Kind.PARTING:
                self.reuse.seen(point.sort, self._now - point.last, used=True)
        if not path or path[-1].sort is None:
            return
        end = path[-1]
        if not end.children:
            self.reuse.seen(end.sort, self._now - end.last, used=True)  # type: ignore[arg-type]
        elif end.stop_sort is not None:
            self.reuse.seen(end.stop_sort, self._now - end.stopped, used=True)

    def _forget_beyond_most(self) -> None:
        most, remembered = max(LEAST_REMEMBERED, REMEMBERED_PER_KEPT * len(self._candidates)), self.tree.remembered
        while remembered and (len(remembered) > most or self.num_bytes > self._most_bytes):
            point = self.tree.forget_oldest()
            if point.sort is not None and (not point.children or point.sort.kind is Kind.PARTING):
                self.reuse.seen(point.sort, self._now - point.last, used=False)

    def _learn(self) -> None:
        self._learnt_at = self._now
        waiting = [*self._candidates, *self.tree.remembered]
        each_stands_for = max(1.0, len(waiting) / LEARN_FROM)
        if each_stands_for > 1:
            waiting = self._rng.sample(waiting, LEARN_FROM)
        seen: list[tuple[Sort, int]] = []
        for point in waiting:
            if point.sort is not None and (not point.children or point.sort.kind is Kind.PARTING):
                seen.append((point.sort, self._now - point.last))
            if self._blocks.has_places and point.children and point.stop_sort is not None:
                seen.append((point.stop_sort, self._now - point.stopped))
        self.reuse.learn(seen, each_stands_for)


def retain_by_worth(plan: MemoryPlan, pool: BlockPool, tables: Tables, arrivals: list[Arrival]) -> Retention:
    """Have a pool evict what is worth least."""
    retention = Retention(plan, PointBlocks(plan, pool, tables), arrivals)
    pool.ask_before_evictions(retention.give_up, retention.give_up_for)
    return retention
