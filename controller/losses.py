"""Losses in a row: of workers, or of a controller, that come back and go again before they have done anything.

They are bounded by time, not by number: six kills within two seconds may be all of them. A rebuild that
takes minutes is no reason to give up after the second loss, so a few tries are always made.
"""

import asyncio
import time

from ..errors import EngineUnavailable, IntarsiaError

GIVE_UP_AFTER_S = 120.0

LEAST_TRIES = 5
"""Before anything is given up, however long they took."""

PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Before each further try, so that what can not be had is not asked for without a rest. The last one stays."""


class Losses:
    """Those since the last progress."""

    def __init__(self, give_up_after_s: float):
        self._give_up_after_s = give_up_after_s
        self._tries = 0
        self._first_s = 0.0
        self._back_s: float | None = None  # when it was back after the last one

    async def bear(self, error: IntarsiaError) -> None:
        """One more; wait before the next try. Raises `EngineUnavailable` when it is one too many."""
        self.count(error)
        await asyncio.sleep(PAUSES_S[min(self._tries, len(PAUSES_S)) - 1])

    def count(self, error: IntarsiaError) -> None:
        """One more. Raises `EngineUnavailable` when it is one too many."""
        now_s = time.monotonic()
        if self._back_s is not None and now_s - self._back_s > self._give_up_after_s:
            self._tries = 0  # no request came, and it lived
        if not self._tries:
            self._first_s = now_s
        self._tries, self._back_s = self._tries + 1, None
        took_s = now_s - self._first_s
        if self._tries > LEAST_TRIES and took_s > self._give_up_after_s:
            raise EngineUnavailable(
                f"{error}; lost {self._tries} times in {took_s:.0f} s without a step in between, and given up "
                f"(give_up_after_s is {self._give_up_after_s:g})"
            ) from error

    def back(self) -> None:
        """What was lost is there again."""
        self._back_s = time.monotonic()

    def progress(self) -> None:
        """It has done something: what comes next is another matter."""
        self._tries = 0


class NoRoom(EngineUnavailable):
    """What was lost can not be had again: the cluster has no room for it, and had none for as long as we wait."""
