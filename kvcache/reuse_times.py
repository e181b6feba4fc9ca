"""How soon points are used again, learnt from what happens: the chance of it, by age, for each sort of point.

For each kind and gap of a sort (`sorts.py`) there is a table of rates by age (uses per request that comes in). Times
and new tokens multiply it. What is rare leans on what is like it: a table begins with a few points that were used as
those of gaps near its own, and a factor begins as 1. Ages are counted in requests, so a quiet night makes nothing old.

A point's `chance` is the best that waiting for it could bring: over all times that one could go on keeping it, the
largest ratio of the probability of a use to the time that memory is held for it (an index as Gittins defines it). It
falls with age where uses come early, as in conversations, which is then what an LRU list does. It rises with age where
they come late, as in a cycle of sessions, and then the newest is evicted, which is right there.

A point that waits still, or was forgotten before it was used again, has told how long it was not used; so what is
cached, and names of what was evicted, are counted with it.
"""

import math
from collections.abc import Iterable

import numpy as np

from .sorts import GAPS, NEWS, TIMES, Kind, Sort

BUCKETS = 30
"""Of age, two for each doubling: up to 32,768 requests."""

EDGES = np.array([2 ** (b / 2) - 1 for b in range(BUCKETS + 1)])
WIDTHS = np.diff(EDGES)

PRIOR_POINTS = 10.0
"""Of the gaps near one, which its table begins with."""

LIKENESS_OF_NEXT_GAP, LIKENESS_OF_ANY_GAP = 0.4, 0.02
"""What events of the next gap count among those near one, the one after that by as much less again; and of any gap. A
point that was used once only is like no other."""

PRIOR_OF_FACTORS = 100.0
"""Uses that a factor must have seen to count as much as 1."""

FEW_USES = 0.02
"""In each bucket of age, so that no rate is 0 or unknown."""

NEIGHBOURS = 0.25
"""Weight of the ages next to one, when rates are counted."""

ROUNDS = 3
"""In which factors and rates are fitted to each other, each time."""

FORGET_AFTER_EVENTS, KEEP = 6000, 0.7
"""After so many events all counts shrink to this share: loads change."""

FIRST_RATE = 1 / (np.cumsum(WIDTHS) + 50)
"""Before anything is known: the older, the less likely."""


class ReuseTimes:
    """Suffixes: R sorts that were met    B buckets of age    K kinds    G gaps"""

    def __init__(self) -> None:
        self._row: dict[Sort, int] = {}
        self._sorts = np.zeros((0, 4), dtype=np.intp)
        self._uses_RB = np.zeros((0, BUCKETS))
        self._time_RB = np.zeros((0, BUCKETS))  # requests that points of the sort waited at that age
        self._events = 0
        self._rates_KGB = np.tile(FIRST_RATE, (len(Kind), GAPS, 1))
        self._of_times = np.ones((len(Kind), TIMES))
        self._of_new = np.ones((len(Kind), NEWS))
        self._chances: dict[Sort | None, list[float]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory that is used, about."""
        return self._uses_RB.nbytes + self._time_RB.nbytes + 400 * len(self._chances)

    # -- asking ------------------------------------------------------------------------------------------------------

    def chance(self, sort: Sort | None, age: int) -> float:
        """Uses per request of waiting, at best. Between the middles of two buckets it goes in a line."""
        chances = self._chances.get(sort)
        if chances is None:
            assert sort is not None, "a point of no sort is no candidate"
            chances = self._chances[sort] = self._indices(sort)
        at = 2 * math.log2(age + 1) - 0.5
        if at <= 0:
            return chances[0]
        bucket = int(at)
        if bucket >= BUCKETS - 1:
            return chances[-1]
        low = chances[bucket]
        return low + (chances[bucket + 1] - low) * (at - bucket)

    def _indices(self, sort: Sort) -> list[float]:
        rate_B = self._rates_KGB[sort.kind, sort.gap] * self._factor(sort)
        # Waiting from bucket to bucket: what is left, and the time that was spent.
        stays_B = np.exp(-rate_B * WIDTHS)
        left = np.r_[1.0, np.cumprod(stays_B)]
        spent = np.r_[0.0, np.cumsum(left[:-1] * (1 - stays_B) / rate_B)]
        won = left[:-1, None] - left[None, 1:]
        took = spent[None, 1:] - spent[:-1, None]
        ratio = np.where(took > 0, won / np.where(took > 0, took, 1.0), 0.0)
        return np.triu(ratio).max(axis=1).tolist()

    def _factor(self, sort: Sort) -> float:
        return float(self._of_times[sort.kind, sort.times] * self._of_new[sort.kind, sort.new])

    # -- learning ----------------------------------------------------------------------------------------------------

    def seen(self, sort: Sort, age: int, *, used: bool) -> None:
        """A point was used at that age; or it was forgotten then, and had not been."""
        row = self._row_of(sort)
        bucket = _bucket(age)
        waited_B = self._time_RB[row]
        waited_B[:bucket] += WIDTHS[:bucket]
        waited_B[bucket] += max(0.0, age - EDGES[bucket])
        if used:
            self._uses_RB[row, bucket] += 1
        self._events += 1
        if self._events % FORGET_AFTER_EVENTS == 0:
            self._uses_RB *= KEEP
            self._time_RB *= KEEP

    def learn(self, waiting: Iterable[tuple[Sort, int]], each_stands_for: float = 1.0) -> None:
        """Work out rates and factors anew. waiting: sort and age of points that were not used since, or a sample."""
        found = [(self._row_of(sort), age) for sort, age in waiting]
        time_RB = self._time_RB.copy()
        if found:
            time_RB += self._waited(found) * each_stands_for
        kind_R, gap_R, times_R, new_R = self._sorts.T
        place_R = kind_R * GAPS + gap_R
        uses_KGB = _summed(place_R, self._uses_RB)
        uses_R = self._uses_RB.sum(1)
        for _ in range(ROUNDS):
            factor_R = self._of_times[kind_R, times_R] * self._of_new[kind_R, new_R]
            self._rates_KGB = _rates(uses_KGB, _summed(place_R, time_RB * factor_R[:, None]))
            expected_R = (time_RB * self._rates_KGB[kind_R, gap_R]).sum(1) * factor_R
            # Both factors share what is left over, so each moves by its root.
            for factors, mark_R in ((self._of_times, times_R), (self._of_new, new_R)):
                seen, expected = np.zeros_like(factors), np.zeros_like(factors)
                np.add.at(seen, (kind_R, mark_R), uses_R)
                np.add.at(expected, (kind_R, mark_R), expected_R)
                factors *= np.sqrt((seen + PRIOR_OF_FACTORS) / (expected + PRIOR_OF_FACTORS))
        self._chances.clear()

    def _waited(self, found: list[tuple[int, int]]) -> np.ndarray:
        """The time that these (row, age) have waited so far, by age."""
        rows, ages = np.array(found, dtype=np.intp).T
        buckets = np.minimum(BUCKETS - 1, (2 * np.log2(ages + 1)).astype(np.intp))
        there_RB, part_RB = np.zeros_like(self._time_RB), np.zeros_like(self._time_RB)
        np.add.at(there_RB, (rows, buckets), 1.0)
        np.add.at(part_RB, (rows, buckets), np.maximum(0.0, ages - EDGES[buckets]))
        older_RB = there_RB[:, ::-1].cumsum(1)[:, ::-1] - there_RB
        return older_RB * WIDTHS + part_RB

    def _row_of(self, sort: Sort) -> int:
        row = self._row.get(sort)
        if row is None:
            row = self._row[sort] = len(self._row)
            self._sorts = np.vstack([self._sorts, np.array(sort, dtype=np.intp)])
            self._uses_RB = np.vstack([self._uses_RB, np.zeros(BUCKETS)])
            self._time_RB = np.vstack([self._time_RB, np.zeros(BUCKETS)])
        return row


def _bucket(age: int) -> int:
    return min(BUCKETS - 1, int(2 * math.log2(age + 1)))


def _summed(place_R: np.ndarray, values_RB: np.ndarray) -> np.ndarray:
    """By kind and gap."""
    total = np.zeros((len(Kind) * GAPS, BUCKETS))
    np.add.at(total, place_R, values_RB)
    return total.reshape(len(Kind), GAPS, BUCKETS)


def _rates(uses_KGB: np.ndarray, time_KGB: np.ndarray) -> np.ndarray:
    # What is known of gaps near each, and beyond that what is thought of any point.
    near_uses_KGB, near_time_KGB = (np.einsum("gh,khb->kgb", LIKENESS_GG, seen) for seen in (uses_KGB, time_KGB))
    near_KGB = (_smoothed(near_uses_KGB) + FEW_USES) / (_smoothed(near_time_KGB) + FEW_USES / FIRST_RATE)
    # A few points that were used like that, and all that were seen.
    point_uses_KGB, point_time_KGB = _of_one_point(near_KGB)
    return (_smoothed(uses_KGB) + PRIOR_POINTS * point_uses_KGB + FEW_USES) / (
        _smoothed(time_KGB) + PRIOR_POINTS * point_time_KGB + FEW_USES / near_KGB
    )


def _of_one_point(rate_B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Until its first use: the uses and the time waited that these rates let expect, by age."""
    left_B = np.exp(-np.cumsum(rate_B * WIDTHS, axis=-1))
    came_B = np.concatenate([np.ones_like(left_B[..., :1]), left_B[..., :-1]], axis=-1)
    return came_B - left_B, (came_B - left_B) / rate_B


def _likeness() -> np.ndarray:
    gaps_G = np.arange(GAPS)
    likeness_GG = LIKENESS_OF_NEXT_GAP ** np.abs(gaps_G[:, None] - gaps_G)
    likeness_GG[0, 1:] = likeness_GG[1:, 0] = 0.0
    return likeness_GG + LIKENESS_OF_ANY_GAP


LIKENESS_GG = _likeness()


def _smoothed(values: np.ndarray) -> np.ndarray:
    total = values.copy()
    total[..., 1:] += NEIGHBOURS * values[..., :-1]
    total[..., :-1] += NEIGHBOURS * values[..., 1:]
    return total / (1 + 2 * NEIGHBOURS)
