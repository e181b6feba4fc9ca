"""How many threads compute a step, on a CPU.

A step of a small model is hundreds of operators, each over in 10 to 50 us, and all threads meet after each. When the
controller or the front end takes the core of one of them meanwhile, the others wait. Long steps are worth that; short
ones leave a core to the neighbours. So do steps in which a token costs the worker little more than the neighbours, who
want a core all the time then.
"""

import math
import time
from collections.abc import Callable
from functools import partial

import torch

from .environment import threads_per_worker
from .linear import padded_rows

SHORT_STEP_S = 0.02
"""With few threads. On two cores, with the controller, a front end and clients, 16 streams of the demo model have a
step in 3.7 ms with one thread and in 9.5 with two, 48 streams in 8.3 and 18 (`bench/threads.py`)."""

CHEAP_TOKEN_S = 0.0002
"""The controller, the front end and a client have 50 to 100 us of work with one. The demo model has 100 to 130 where
many decode, and one thread is 1.25 to 1.4 times as fast as two with 120 to 500 streams (`bench/threads.py`)."""

TIMED_ROWS = 16
"""Few enough to be a short step of a small model, enough to tell what a row takes."""

MORE_ROWS = 2 * TIMED_ROWS
"""What these take more is what rows take: part of a step takes as long for one as for many."""

TIMED_STEPS = 2
"""The quicker one counts. As many on every rank, since ranks run steps together."""


class Threads:
    """Of one worker. Both numbers may be the same, as where a GPU computes or somebody chose: then nothing is left to
    choose."""

    def __init__(self, most: int, few: int):
        """few: for short steps"""
        self._most = most
        self._few = few
        self._short_rows = 0.0  # a step of no more is short
        self._cheap_rows = range(0)  # in a decoding step of so many a token is cheap
        torch.set_num_threads(most)

    @classmethod
    def of_worker(cls, local_workers: int, device: torch.device, asked: int | None = None) -> "Threads":
        """local_workers: on its machine. asked: for every step, by the user"""
        if asked is not None:
            return cls(asked, asked)
        most = threads_per_worker(local_workers)
        return cls(most, most if device.type != "cpu" else threads_per_worker(local_workers, spared_cores=1))

    def learn(self, run_rows: Callable[[int], object], most_rows: int) -> None:
        """Find out which steps few threads compute. run_rows: a decoding step of so many rows, at most `most_rows`"""
        if self._few == self._most:
            return
        self._short_rows = math.inf
        rows, more = min(TIMED_ROWS, most_rows), min(MORE_ROWS, most_rows)
        took_s, more_took_s = (_quickest_s(partial(run_rows, each)) for each in (rows, more))
        # A careful guess: part of it a step takes anyway, however many rows it has.
        self._short_rows = rows * SHORT_STEP_S / took_s if took_s < SHORT_STEP_S else 0.0
        if more > rows and (row_s := max(0.0, more_took_s - took_s) / (more - rows)) < CHEAP_TOKEN_S:
            from_rows = max(0.0, took_s - rows * row_s) / (CHEAP_TOKEN_S - row_s)
            self._cheap_rows = range(math.ceil(from_rows), padded_rows(most_rows) + 1)

    def use_for(self, rows: int) -> None:
        """Before a step. One shape of a product has one number of threads always, so it is compiled once."""
        rows = padded_rows(rows)
        torch.set_num_threads(self._few if rows <= self._short_rows or rows in self._cheap_rows else self._most)


def _quickest_s(run: Callable[[], object]) -> float:
    run()  # its operators are compiled
    took_s = []
    for _ in range(TIMED_STEPS):
        started_s = time.perf_counter()
        run()
        took_s.append(time.perf_counter() - started_s)
    return min(took_s)
