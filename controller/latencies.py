"""How long requests wait of late: the middle and the slow end of three times, for people who watch.

Prometheus has the same since the start, as counts between bounds (`metrics.py`). This is of the last minute, and exact.
"""

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

KEPT_S = 60.0

KEPT_VALUES = 2048
"""At most, of each kind: they are sorted when somebody looks."""


class Spread(NamedTuple):
    """Of times in seconds. None: there are none of late."""

    p50_s: float | None = None
    p95_s: float | None = None


class Latencies(NamedTuple):
    """Of the requests of the last minute."""

    first_token: Spread = Spread()  # from arrival to first token
    next_token: Spread = Spread()  # from a token of an answer to its next
    queue: Spread = Spread()  # from arrival to the first admission


class Window:
    """Values of the last minute, at most so many. Each may count several times."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float, int]] = deque(maxlen=KEPT_VALUES)  # when, what, how many times

    def add(self, value_s: float, now_s: float, times: int = 1) -> None:
        self._values.append((now_s, value_s, times))

    def spread(self, now_s: float) -> Spread:
        while self._values and self._values[0][0] < now_s - KEPT_S:
            self._values.popleft()
        ordered = sorted((value_s, times) for _, value_s, times in self._values)
        return Spread(_below(ordered, 0.5), _below(ordered, 0.95))


def _below(ordered: Sequence[tuple[float, int]], share: float) -> float | None:
    """The smallest value that so much of them do not exceed."""
    left = share * sum(times for _, times in ordered)
    for value, times in ordered:
        left -= times
        if left <= 0:
            return value
    return None
