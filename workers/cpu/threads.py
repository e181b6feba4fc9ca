"""How many threads compute a step, on a CPU.

A step of a small model is hundreds of operators, each over in 10 to 50 us, and all threads meet after each. When the
controller or the front end takes the core of one of them meanwhile, the others wait. Long steps are worth that; short
ones leave a core to the neighbours.
"""

import math
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor

from ...environment import threads_per_worker

SHORT_STEP_S = 0.02
"""With few threads. On two cores, with the controller, a front end and clients, 16 streams of the demo model have a
step in 3.9 ms with one thread and in 7.5 with two, 120 streams in 17 and 34 (`bench/threads.py`). On an idle machine
one thread computes what takes 20 ms as fast as two do, and what takes 35 in 1.4 times their time."""

TIMED_ROWS = (16, 256)
"""What a step takes anyway, and what each row adds to it, can be told apart by these."""

TIMED_STEPS = 2
"""The quicker one counts."""


class Threads:
    """Of one worker: `few` for steps of no more than `short_rows` rows, `most` for all others.

    Another rank's numbers of threads may differ, on a machine of more cores.
    """

    def __init__(self, most: int, few: int | None = None):
        """few: None: no rank has a choice, as where a GPU computes or the user chose"""
        self.most = most
        self.few = most if few is None else few
        self.short_rows = 0.0
        self._is_free = few is not None
        torch.set_num_threads(most)

    @classmethod
    def of_worker(cls, local_workers: int, device: torch.device, asked: int | None = None) -> "Threads":
        """local_workers: on its machine. asked: for every step, by the user"""
        if asked is not None:
            return cls(asked)
        most = threads_per_worker(local_workers)
        return cls(most, threads_per_worker(local_workers, spared_cores=1) if device.type == "cpu" else None)

    def learn(
        self, run_rows: Callable[[int], object], most_rows: int, share: Callable[[Tensor], object] = lambda _: None
    ) -> None:
        """Find out which steps are short: the same ones for all ranks, which run them together.

        run_rows: a step of so many rows, at most `most_rows`. share: makes a tensor the first rank's
        """
        if not self._is_free:
            return
        self.short_rows = math.inf  # what is timed is run as short steps will be
        few, many = (min(rows, most_rows) for rows in TIMED_ROWS)
        few_s = _shared_s(run_rows, few, share)
        if few_s >= SHORT_STEP_S:
            self.short_rows = 0.0
            return
        row_s = (_shared_s(run_rows, many, share) - few_s) / max(1, many - few)
        if row_s > 0:
            self.short_rows = few + (SHORT_STEP_S - few_s) / row_s


def _shared_s(run_rows: Callable[[int], object], rows: int, share: Callable[[Tensor], object]) -> float:
    """What a step of so many rows takes the first rank."""
    run_rows(rows)  # its operators are compiled
    times_s = [time.perf_counter()]
    for _ in range(TIMED_STEPS):
        run_rows(rows)
        times_s.append(time.perf_counter())
    took_s = torch.tensor([min(after - before for before, after in pairwise(times_s))])
    share(took_s)
    return took_s.item()
