"""How long requests wait of late: the middle and the slow end of three times, for people who watch.

Prometheus has the same since the start, as counts between bounds (`metrics.py`). This is of the last minute, and exact.
"""

from typing import NamedTuple


class Spread(NamedTuple):
    """Of times in seconds. None: there are none of late."""

    p50_s: float | None = None
    p95_s: float | None = None


class Latencies(NamedTuple):
    """Of the requests of the last minute."""

    first_token: Spread = Spread()  # from arrival to first token
    next_token: Spread = Spread()  # from a token of an answer to its next
    queue: Spread = Spread()  # from arrival to the first admission
