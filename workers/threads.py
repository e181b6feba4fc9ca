"""How many threads compute a step, on a CPU.

A step of a small model is hundreds of operators, each over in 10 to 50 us, and all threads meet after each. When the
controller or the front end takes the core of one of them meanwhile, the others wait. Long steps are worth that; short
ones leave a core to the neighbours.
"""

import math
import time
from collections.abc import Callable

import torch

from .environment import threads_per_worker
from .linear import padded_rows

SHORT_STEP_S = 0.02
"""With few threads. On two cores, with the controller, a front end and clients, 16 streams of the demo model have a
step in 3.7 ms with one thread and in 9.5 with two, 48 streams in 8.3 and 18 (`bench/threads.py`)."""

TIMED_ROWS = 16
"""Few enough to be a short step of a small model, enough to tell what a row takes."""

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
        torch.set_num_threads(most)

    @classmethod
    def of_worker(cls, local_workers: int, device: torch.device, asked: int | None = None) -> "Threads":
        """local_workers: on its machine. asked: for every step, by the user"""
        if asked is not None:
            return cls(asked, asked)
        most = threads_per_worker(local_workers)
        return cls(most, most if device.type != "cpu" else threads_per_worker(local_workers, spared_cores=1))

    def learn(self, run_rows: Callable[[int], object], most_rows: int) -> None:
        """Find out which steps are short. run_rows: a step of so many rows, at most `most_rows`"""
        if self._few == self._most:
            return
        self._short_rows = math.inf
        rows = min(TIMED_ROWS, most_rows)
        run_rows(rows)  # its operators are compiled
        took_s = min(_seconds(lambda: run_rows(rows)) for _ in range(TIMED_STEPS))
        # A careful guess: part of it a step takes anyway, however many rows it has.
        self._short_rows = rows * SHORT_STEP_S / took_s if took_s < SHORT_STEP_S else 0.0

    def use_for(self, rows: int) -> None:
        """Before a step. One shape of a product has one number of threads always, so it is compiled once."""
        torch.set_num_threads(self._few if padded_rows(rows) <= self._short_rows else self._most)


def _seconds(run: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    run()
    return time.perf_counter() - started_s
