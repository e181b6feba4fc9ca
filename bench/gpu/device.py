"""The device under test: random numbers on it, how long work takes there, and which kernels it is made of."""

import gc
import hashlib
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .lines import FAILED, short, told
from .parts import Row

Call = Callable[[], Any]

CACHE_BYTES = 256 << 20
"""More than any cache holds: inputs of a case are made so often that they take as much."""
MOST_COPIES = 16
TURNS = 20
"""Recorded in one graph, so that launching it is no part of a turn."""
REPLAYS = 7
MOST_KERNELS = 8
"""Of a case, that are named."""
ENOUGH_US = 100_000.0
"""Slow work takes fewer turns, so that one replay takes about this much at most."""


class Timing(NamedTuple):
    """Of one turn."""

    us: float
    how: str  # "recorded", or "launched" by Python, which may be slower than the device

    def row(self) -> Row:
        return {"us": self.us, "timed": self.how}


class Kernel(NamedTuple):
    """As the profiler saw it, in microseconds."""

    name: str
    start: float
    end: float


class Bench:
    """What every case is given."""

    def __init__(self, is_rehearsed: bool, processes: int, parts: Sequence[str], ceilings: Mapping[str, Any]):
        """ceilings: what this very run has measured, empty until it has"""
        self.device = torch.device("cuda")
        self.is_rehearsed, self.processes, self.parts, self.ceilings = is_rehearsed, processes, parts, ceilings
        self.turns, self.replays = (1, 1) if is_rehearsed else (TURNS, REPLAYS)

    # -- tensors -----------------------------------------------------------------------------------------------------

    def dtype(self, wanted: torch.dtype) -> torch.dtype:
        """Triton's interpreter, in which a rehearsal runs, multiplies bfloat16 wrongly."""
        return torch.float32 if self.is_rehearsed and wanted is torch.bfloat16 else wanted

    def seed(self, name: str) -> None:
        """The numbers that follow depend on nothing but this name."""
        number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        if self.is_rehearsed:
            torch.default_generator.manual_seed(number)
        else:
            torch.manual_seed(number)

    def random(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Normal numbers, made in the dtype itself: a large tensor takes no second one."""
        return torch.empty(shape, dtype=dtype, device=self.device).normal_()

    def random_bytes(self, count: int) -> Tensor:
        """Zeros would be copied with less power, and so at another clock."""
        words = torch.empty(-(-count // 8), dtype=torch.int64, device=self.device)
        return words.random_(-(2**62), 2**62).view(torch.uint8)[:count]

    def copies_of(self, size_bytes: float) -> int:
        """How many sets of inputs take turns."""
        if self.is_rehearsed:
            return 1
        return max(1, min(MOST_COPIES, -(-CACHE_BYTES // max(1, int(size_bytes)))))

    # -- time --------------------------------------------------------------------------------------------------------

    def time(self, calls: Sequence[Call], *, may_record: bool = True) -> Timing:
        """Of one turn; calls, of other inputs each, take turns. They have to be such that they can be repeated."""
        for call in calls:
            call()  # compiles, finds memory, plans
        once_us = 0.0 if self.is_rehearsed else self._elapsed_us(calls[-1])
        turns = max(1, min(self.turns, int(ENOUGH_US / max(once_us, 1.0))))
        how, replay = "launched", self._launched(calls, turns)
        if may_record:
            try:
                replay, how = self._recorded(calls, turns), "recorded"
            except Exception as error:
                if not self.is_alive():
                    raise
                how = f"launched, for {type(error).__name__}"
        if not self.is_rehearsed:
            replay()
        replays = 1 if once_us > ENOUGH_US * 10 else self.replays
        return Timing(short(statistics.median(self._elapsed_us(replay) / turns for _ in range(replays))), how)

    def _launched(self, calls: Sequence[Call], turns: int) -> Call:
        def run() -> None:
            for turn in range(turns):
                calls[turn % len(calls)]()

        return run

    def _recorded(self, calls: Sequence[Call], turns: int) -> Call:
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launched(calls, turns)()
        return graph.replay

    def _elapsed_us(self, call: Call) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        start.record()
        call()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) * 1e3

    def host_us(self, call: Call, times: int = 10) -> float:
        """Until the host can go on; the device may still be at work."""
        torch.cuda.synchronize()
        took = []
        for _ in range(1 if self.is_rehearsed else times):
            started = time.perf_counter()
            call()
            took.append((time.perf_counter() - started) * 1e6)
            torch.cuda.synchronize()
        return short(statistics.median(took))

    def done_us(self, call: Call, times: int = 5) -> float:
        """Until the device has done it, as the host's clock has it."""

        def whole() -> None:
            call()
            torch.cuda.synchronize()

        whole()
        return self.host_us(whole, times)

    # -- kernels -----------------------------------------------------------------------------------------------------

    def kernels(self, work: Call) -> list[Kernel]:
        """What runs on the device during `work`, in order. Such times are longer than those without a profiler."""
        activity = torch.profiler.ProfilerActivity
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=[activity.CPU if self.is_rehearsed else activity.CUDA]) as profile:
            work()
            torch.cuda.synchronize()
        return kernels_of(profile, self.is_rehearsed)

    def kernel_row(self, work: Call) -> Row:
        """Time by kernel, so that merges and writes are seen beside the rest."""
        try:
            spent = by_name(self.kernels(work))
        except Exception as error:  # noqa: BLE001  a profiler that does not work loses no times
            return {"kernels": f"{type(error).__name__}: {error}"}
        return {"kernels": {name: short(us) for name, (_, us) in spent[:MOST_KERNELS]}}

    # -- floors ------------------------------------------------------------------------------------------------------

    @property
    def memory_gb_per_s(self) -> float | None:
        found = [self.ceilings.get(name) for name in ("copy_gb_per_s", "read_gb_per_s")]
        known = [value for value in found if value is not None]
        return max(known) if known else None

    def floor_us(self, size_bytes: float, flops: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> float | None:
        """What must be read and written at the best rate of this run, or what must be multiplied. None: not known."""
        rate = self.memory_gb_per_s
        products = self.ceilings.get(f"{str(dtype)[6:]}_tflop_per_s")
        if rate is None or (flops and products is None):
            return None
        return max(size_bytes / rate / 1e3, flops / products / 1e6 if flops and products else 0.0)

    def rates(self, us: float, size_bytes: float, flops: float = 0.0, dtype: torch.dtype = torch.bfloat16) -> Row:
        row: Row = {"gb_per_s": short(size_bytes / us / 1e3)}
        if flops:
            row["tflop_per_s"] = short(flops / us / 1e6)
        floor = self.floor_us(size_bytes, flops, dtype)
        if floor:
            row |= {"floor_us": short(floor), "times_floor": short(us / floor)}
        return row

    # -- the process -------------------------------------------------------------------------------------------------

    def attempt(self, about: Row, work: Callable[[], Row]) -> Row:
        """A row of a case that has several: one that fails loses no other, unless the device is lost with it."""
        try:
            return {**about, **work()}
        except Exception as error:
            if not self.is_alive():
                raise
            return {**about, FAILED: told(error)}

    def is_alive(self) -> bool:
        """After some errors a device does nothing more for a process."""
        try:
            torch.cuda.synchronize()
        except RuntimeError:
            return False
        return True

    def tidy(self) -> None:
        """Give memory back between cases."""
        gc.collect()
        torch.cuda.empty_cache()


def kernels_of(profile: Any, is_rehearsed: bool) -> list[Kernel]:
    """Of a profile that has ended. On a pretended device operators of the host stand for kernels."""
    wanted = torch.autograd.DeviceType.CPU if is_rehearsed else torch.autograd.DeviceType.CUDA
    found = [
        Kernel(event.name, float(event.time_range.start), float(event.time_range.end))
        for event in profile.events()
        if event.device_type == wanted
    ]
    return sorted(found, key=lambda kernel: kernel.start)


def by_name(kernels: Sequence[Kernel]) -> list[tuple[str, tuple[int, float]]]:
    """How often and how long together, in microseconds, the longest first."""
    spent: dict[str, tuple[int, float]] = defaultdict(lambda: (0, 0.0))
    for kernel in kernels:
        count, us = spent[kernel.name[:120]]
        spent[kernel.name[:120]] = count + 1, us + kernel.end - kernel.start
    return sorted(spent.items(), key=lambda entry: -entry[1][1])


def busy_share(kernels: Sequence[Kernel]) -> float:
    """Of the time from the first kernel's start to the last one's end."""
    busy, until = 0.0, float("-inf")
    for kernel in kernels:
        busy += max(0.0, kernel.end - max(kernel.start, until))
        until = max(until, kernel.end)
    return busy / max(until - kernels[0].start, 1e-9) if kernels else 0.0


def rotating(bench: Bench, size_bytes: float, make: Callable[[int], Any]) -> Iterator[Any]:
    """So many worlds of a case that a turn finds nothing of its own in a cache."""
    return (make(n) for n in range(bench.copies_of(size_bytes)))
