"""What the best of all policies could find in a trace: a bound that none passes, and a plan that shows what can be had.

Both know all requests beforehand, which come one after another. The world they judge by is that of a memory plan,
without the large pages:

    to go on at a length, a request needs in each group what its layers look back to: blocks, or the state just there
    a request leaves what it computed or found, as far as there is room: blocks, and states at the borders of blocks
    while it runs it holds what it needs to go on at its end, beside all that is kept for others

What request j finds was last there at a request i before it, and has been kept over all requests between them. So each
length that j could go on at costs *spans* of memory; the question is which of them to buy with what each moment has.

    bound   each moment's memory has a price per byte. Each request buys the length with the most tokens above its cost,
            and what the memory itself is worth is added: no policy finds more, whatever the prices are (they are the
            multipliers of Lagrange's dual). The prices that say the least are looked for.
    plan    lengths are bought one after another, most tokens for their cost first, where all their spans still fit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ...kvcache.plan import Group, MemoryPlan
from ...kvcache.reach import Keeps
from .names import block_names
from .traces import TraceRequest

PRICE_ROUNDS = 300
"""Of the search for prices."""

SCALAR_ROUNDS = 60
"""Of the search for one price at all moments, with which it begins."""

FIRST_STEP, SHORTER = 0.05, 0.97
"""Of the bound, that a first step would take off if all went well; and of a step, after one that lowered nothing."""

LEAST_PRICE = 1e-3
"""Of the average price at which all hits together would pay: what a plan counts where memory is free."""

ROUNDING = 1e-6
"""Tokens by which sums of floats may be off."""


class Span(NamedTuple):
    """Blocks of a group that are kept from the end of request `since` on."""

    since: int
    num_bytes: int
    beside_own: int  # of these bytes, those that request `since` does not hold at its end anyway
    group: int
    first: int  # of the blocks


class Way(NamedTuple):
    """A length at which a request could go on."""

    request: int
    blocks: int
    spans: tuple[Span, ...]


class Optimum(NamedTuple):
    """Of the requests that count."""

    bound_tokens: int
    planned_tokens: int
    planned_blocks: tuple[int, ...]  # found by each request
    tokens: int  # of their prompts

    @property
    def bound_rate(self) -> float:
        return round(self.bound_tokens / self.tokens, 4) if self.tokens else 0.0

    @property
    def planned_rate(self) -> float:
        return round(self.planned_tokens / self.tokens, 4) if self.tokens else 0.0


class World:
    """What lengths cost, under a memory plan. Lengths are in blocks."""

    def __init__(self, plan: MemoryPlan):
        self.block_tokens = plan.block_tokens
        self.memory_bytes = plan.memory_bytes
        self._groups = [group for group in plan.groups if group.reach.keeps is not Keeps.ENCODER]

    def own_bytes(self, tokens: int) -> int:
        """What a request holds at its end."""
        return sum(group.blocks_between(tokens) * group.content_bytes for group in self._groups)

    def needed(self, group: Group, blocks: int) -> range:
        """The blocks of a group that are needed to go on after `blocks`; of a state, the block that it follows."""
        if group.reach.keeps is Keeps.STATE:
            return range(blocks - 1, blocks)
        return range(group.reach.oldest_needed(blocks * self.block_tokens) // self.block_tokens, blocks)

    def first_held(self, group: Group, tokens: int) -> int:
        """From which block on a request of so many tokens holds all at its end."""
        if group.reach.keeps is Keeps.STATE:
            exact, tail = divmod(tokens, self.block_tokens)
            return exact if tail else exact - 1
        return group.reach.oldest_needed(tokens) // self.block_tokens

    def passed(self, group: int, blocks: int) -> int:
        """Blocks of a group that a request which went on after `blocks` has not seen: it can leave none of them."""
        return self.needed(self._groups[group], blocks).start if blocks else 0

    def spans(self, blocks: int, runs: Sequence[tuple[int, int]], tokens_of: Sequence[int]) -> Iterator[Span]:
        """What it costs to go on after `blocks`. runs: (end, since) of blocks that were last there together, in order.
        tokens_of: of each request."""
        for g, group in enumerate(self._groups):
            needed = self.needed(group, blocks)
            start = 0
            for end, since in runs:
                first, last = max(start, needed.start), min(end, needed.stop)
                if first < last:
                    beside = max(0, min(last, self.first_held(group, tokens_of[since])) - first)
                    size = group.content_bytes
                    yield Span(since, (last - first) * size, beside * size, g, first)
                start = end

    def turns(self, runs: Sequence[tuple[int, int]], most: int) -> list[int]:
        """Lengths between which the cost grows in a line: one of them is the best for any prices."""
        ends = [end for end, _ in runs]
        borders = [0, *ends]
        found = set(ends)
        for group in self._groups:
            window, chunk = group.reach.window_tokens, group.reach.chunk_tokens
            if group.reach.keeps is Keeps.STATE:
                found.update(border + 1 for border in borders)
            elif window is not None:
                # Where the back of the window, or its front, enters another run.
                behind = -(-(window - 1) // self.block_tokens)
                found.update(border + at + near for border in borders for at in (0, behind) for near in (-1, 0, 1))
            elif chunk is not None and chunk % self.block_tokens == 0:
                # The first and the last length in a run at which no chunk has begun.
                step = chunk // self.block_tokens
                found.update(border + 1 for border in borders)
                found.update(at for border in borders for at in (border // step * step, -(-border // step) * step))
            elif chunk is not None:
                return list(range(1, most + 1))
        return sorted(length for length in found if 0 < length <= most)


def optimum(requests: Sequence[TraceRequest], plan: MemoryPlan, first_counted: int = 0) -> Optimum:
    """first_counted: what requests before this one find is not counted, and costs nothing."""
    world = World(plan)
    ways = ways_of(requests, world, first_counted)
    tokens = sum(request.length for request in requests[first_counted:])
    if not ways:
        return Optimum(0, 0, (0,) * len(requests), tokens)
    market = Market(ways, requests, world)
    prices_T, bound = market.cheapest_prices()
    found = market.plan(prices_T)
    return Optimum(int(bound + ROUNDING), sum(found) * world.block_tokens, tuple(found), tokens)


def ways_of(requests: Sequence[TraceRequest], world: World, first_counted: int = 0) -> list[Way]:
    """All lengths worth going on at, request by request, from short to long."""
    size = world.block_tokens
    tokens_of = [request.length for request in requests]
    last: dict[bytes, int] = {}  # name of a block -> the latest request that had it
    ways: list[Way] = []
    for number, request in enumerate(requests):
        names = block_names(request, size)
        if number >= first_counted:
            runs = _runs(names[: (request.length - 1) // size], last)
            lengths = world.turns(runs, runs[-1][0]) if runs else ()
            ways += [Way(number, blocks, tuple(world.spans(blocks, runs, tokens_of))) for blocks in lengths]
        last.update(dict.fromkeys(names, number))
    return ways


def _runs(names: Sequence[bytes], last: Mapping[bytes, int]) -> list[tuple[int, int]]:
    """(end, since): blocks up to `end`, and from the end before it on, were last there at request `since`."""
    runs: list[tuple[int, int]] = []
    for n, name in enumerate(names):
        since = last.get(name)
        if since is None:
            break
        if runs and runs[-1][1] == since:
            runs.pop()
        runs.append((n + 1, since))
    return runs


class Market:
    """The ways to all hits as arrays, and what they cost at given prices.

    Suffixes: W ways    S spans of all ways    T moments, one for each request
    """

    def __init__(self, ways: Sequence[Way], requests: Sequence[TraceRequest], world: World):
        self._ways, self._requests, self._world = ways, requests, world
        size = world.block_tokens
        own_T = np.array([world.own_bytes(request.length) for request in requests], dtype=np.float64)
        self._room_T = np.maximum(0.0, world.memory_bytes - own_T)
        self._request_W = np.array([way.request for way in ways])
        self._value_W = np.array([way.blocks * size for way in ways], dtype=np.float64)
        spans = [(w, span) for w, way in enumerate(ways) for span in way.spans]
        self._way_S = np.array([w for w, _ in spans])
        self._since_S = np.array([span.since for _, span in spans])
        self._bytes_S = np.array([span.num_bytes for _, span in spans], dtype=np.float64)
        self._until_S = self._request_W[self._way_S]
        self._first_W = np.flatnonzero(np.r_[True, np.diff(self._request_W) != 0])  # of each request that has some

    # -- the bound ---------------------------------------------------------------------------------------------------

    def _cost_W(self, prices_T: np.ndarray) -> np.ndarray:
        """A span costs at each moment between its two requests."""
        before = np.r_[0.0, np.cumsum(prices_T)]
        cost_S = self._bytes_S * (before[self._until_S] - before[self._since_S + 1])
        return np.bincount(self._way_S, cost_S, len(self._ways))

    def _bound(self, prices_T: np.ndarray) -> tuple[float, np.ndarray]:
        """What no policy passes; and the bytes that are wanted at each moment by those who buy."""
        gain_W = self._value_W - self._cost_W(prices_T)
        best = np.maximum.reduceat(gain_W, self._first_W)
        bound = float(prices_T @ self._room_T + np.maximum(best, 0).sum())
        sizes = np.diff(np.r_[self._first_W, len(gain_W)])
        is_best = gain_W >= np.repeat(best, sizes)
        # Of equal ones the first; of those without a gain none.
        firsts = np.flatnonzero(is_best & (gain_W > 0))
        _, at = np.unique(self._request_W[firsts], return_index=True)
        bought_W = np.zeros(len(gain_W), dtype=bool)
        bought_W[firsts[at]] = True
        bought_S = bought_W[self._way_S]
        change = np.zeros(len(prices_T) + 1)
        np.add.at(change, self._since_S[bought_S] + 1, self._bytes_S[bought_S])
        np.subtract.at(change, self._until_S[bought_S], self._bytes_S[bought_S])
        return bound, np.cumsum(change)[:-1]

    def cheapest_prices(self) -> tuple[np.ndarray, float]:
        """The prices whose bound is the least that was found, and that bound."""
        count = len(self._requests)
        same = np.ones(count)
        # One price for all moments: the bound is convex in it.
        low, high = 0.0, float(self._value_W.max()) / max(1.0, float(self._bytes_S.min()))
        for _ in range(SCALAR_ROUNDS):
            third = (high - low) / 3
            if self._bound(same * (low + third))[0] <= self._bound(same * (high - third))[0]:
                high -= third
            else:
                low += third
        best_T = same * low
        best, wanted_T = self._bound(best_T)
        # Then each moment's own, by steps against what is left or lacks.
        prices_T, step = best_T, FIRST_STEP * best
        for _ in range(PRICE_ROUNDS):
            slope_T = self._room_T - wanted_T
            norm = float(slope_T @ slope_T)
            if norm == 0:
                break
            prices_T = np.maximum(0.0, prices_T - step / norm * slope_T)
            bound, wanted_T = self._bound(prices_T)
            if bound < best:
                best, best_T = bound, prices_T
            else:
                step *= SHORTER
        return best_T, best

    # -- the plan ----------------------------------------------------------------------------------------------------

    def plan(self, prices_T: np.ndarray) -> list[int]:
        """Blocks that each request finds."""
        cost_W = self._cost_W(prices_T)
        length_W = np.bincount(
            self._way_S, self._bytes_S * np.maximum(1, self._until_S - self._since_S - 1), len(self._ways)
        )
        scarcity = float(self._value_W.sum()) / max(1.0, float(length_W.sum())) * LEAST_PRICE
        order = np.argsort(-(self._value_W / (cost_W + scarcity * length_W + 1e-12)), kind="stable")
        used_T = np.zeros(len(self._requests))
        taken: dict[int, int] = {}  # request -> way
        for _ in range(2):  # longer hits may fit where shorter ones were taken first
            for w in order:
                way = self._ways[w]
                held = taken.get(way.request)
                if held is not None and self._ways[held].blocks >= way.blocks:
                    continue
                if held is not None:
                    self._use(used_T, self._ways[held], -1)
                if self._fits(used_T, way):
                    self._use(used_T, way, 1)
                    taken[way.request] = int(w)
                elif held is not None:
                    self._use(used_T, self._ways[held], 1)
        return self._carried_out(taken, used_T)

    def _carried_out(self, taken: dict[int, int], used_T: np.ndarray) -> list[int]:
        """What is found as requests come in order. One that went on late has not seen what lies before, and can leave
        none of it: then a hit that was bought is not had, and the longest one that can be had takes its place."""
        found = [0] * len(self._requests)
        starts = self._first_W.tolist()
        for start, stop in zip(starts, [*starts[1:], len(self._ways)], strict=True):
            number = self._ways[start].request
            bought = taken.get(number)
            if bought is not None and self._was_left(self._ways[bought], found):
                found[number] = self._ways[bought].blocks
                continue
            if bought is not None:
                self._use(used_T, self._ways[bought], -1)
            for way in reversed(self._ways[start:stop]):
                if self._was_left(way, found) and self._fits(used_T, way):
                    self._use(used_T, way, 1)
                    found[number] = way.blocks
                    break
        return found

    def _was_left(self, way: Way, found: Sequence[int]) -> bool:
        return all(span.first >= self._world.passed(span.group, found[span.since]) for span in way.spans)

    def _fits(self, used_T: np.ndarray, way: Way) -> bool:
        """Its spans may overlap, so they are added one by one, and taken away again."""
        fits, added = True, list[Span]()
        for span in way.spans:
            at, between = span.since, slice(span.since + 1, way.request)
            fits = (
                used_T[at] + span.beside_own <= self._room_T[at]
                and not (used_T[between] + span.num_bytes > self._room_T[between]).any()
            )
            if not fits:
                break
            self._add(used_T, span, way.request, 1)
            added.append(span)
        for span in added:
            self._add(used_T, span, way.request, -1)
        return fits

    def _use(self, used_T: np.ndarray, way: Way, sign: int) -> None:
        for span in way.spans:
            self._add(used_T, span, way.request, sign)

    def _add(self, used_T: np.ndarray, span: Span, until: int, sign: int) -> None:
        used_T[span.since] += sign * span.beside_own
        used_T[span.since + 1 : until] += sign * span.num_bytes
