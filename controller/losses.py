"""Losses in a row: of workers, or of a controller, that come back and are lost again before they have done anything.

Two things are given up after too many: what is lost (`Losses`), and a request that may be the cause (`is_the_cause`).
Both are bounded by time as well as by number. Six kills within two seconds may be all that happens; and when a rebuild
takes minutes, the second loss is no reason to give up.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from ..errors import EngineUnavailable, IntarsiaError

logger = logging.getLogger(__name__)

GIVE_UP_AFTER_S = 120.0

LEAST_TRIES = 5
"""Before anything is given up, however long they took."""

PAUSES_S = (0.0, 0.05, 0.1, 0.2, 0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
"""Before each further try, so that what cannot be had is not asked for without a rest. The last one stays."""

SUSPICIOUS_LOSSES = 2
"""Losses of the workers in a row while a request ran, without a token of it: from then on it runs alone."""

MOST_LOSSES = SUSPICIOUS_LOSSES + 2
"""Losses in a row that a request may be there at. At the last three of them it runs alone: one of those may be chance,
when workers are killed as soon as they are back."""

SUSPECT_FOR_S = 5.0
"""The same in time, since the first of them: something that kills processes from outside may have stopped by then."""


def is_the_cause(losses: int, first_loss_s: float, most: int = MOST_LOSSES) -> bool:
    """Whether a request must be taken for the cause of losses, and given up.

    losses: in a row while it ran, without a token of it in between
    first_loss_s: when the first of them was, on the monotonic clock
    """
    return losses > most and time.monotonic() - first_loss_s >= SUSPECT_FOR_S


def given_up_with(losses: int, error: IntarsiaError) -> EngineUnavailable:
    """What the subscriber of such a request is sent. error: the last loss."""
    return EngineUnavailable(
        f"the workers were lost {losses} times while this request ran, in the end alone, and it got no "
        f"token in between: they seem to die of it; last: {error}"
    )


class Losses:
    """Losses of one thing, in a row: since it last made progress."""

    def __init__(self, give_up_after_s: float):
        self._give_up_after_s = give_up_after_s
        self.in_a_row = 0
        self._first_s = 0.0
        self._back_s: float | None = None  # when it was back after the last one

    async def rebuild(self, again: Callable[[], Awaitable[None]], error: IntarsiaError) -> None:
        """Call `again` until it succeeds, with pauses. error: why the thing is lost.

        Raises `EngineUnavailable` when there is no room for it, or when it was tried often enough.
        """
        await self.bear(error)
        while True:
            try:
                await again()
            except NoRoom as failure:
                raise EngineUnavailable(f"{error}, and {failure}") from failure
            except EngineUnavailable as failure:
                logger.warning("%s", failure)
                await self.bear(failure)
            else:
                return self.back()

    async def bear(self, error: IntarsiaError) -> None:
        """One more; wait before the next try. Raises `EngineUnavailable` when it is one too many."""
        self.count(error)
        await asyncio.sleep(PAUSES_S[min(self.in_a_row, len(PAUSES_S)) - 1])

    def count(self, error: IntarsiaError) -> None:
        """One more. Raises `EngineUnavailable` when it is one too many."""
        now_s = time.monotonic()
        if self._back_s is not None and now_s - self._back_s > self._give_up_after_s:
            self.in_a_row = 0  # no request came, and it lived
        if not self.in_a_row:
            self._first_s = now_s
        self.in_a_row, self._back_s = self.in_a_row + 1, None
        took_s = now_s - self._first_s
        if self.in_a_row > LEAST_TRIES and took_s > self._give_up_after_s:
            raise EngineUnavailable(
                f"{error}; lost {self.in_a_row} times in {took_s:.0f} s without a step in between, and given up "
                f"(give_up_after_s is {self._give_up_after_s:g})"
            ) from error

    def back(self) -> None:
        """What was lost is there again."""
        self._back_s = time.monotonic()

    def progress(self) -> None:
        """It has done something: what comes next is another matter."""
        self.in_a_row = 0


class NoRoom(EngineUnavailable):
    """What was lost cannot be had again: the cluster has no room for it, and had none for as long as we wait."""
