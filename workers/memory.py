"""How much of a device's memory is left for pages, found out by running a step.

    the device   |  others, the runtime  |  weights  |  a step's own memory  |  pages  |  left alone  |
                 |<-------------------  gpu_memory_utilization of it  ----------------->|

A step's own memory cannot be told from a config: it depends on the module, the backend and the allocator. So the
largest steps are run once, over the null block, before there are pages.
"""

import os
import time
from collections.abc import Callable
from typing import Protocol

import torch

from ..errors import InvalidSetting

FREE_ENOUGH, STEADY_S, FREED_WITHIN_S, LOOK_EVERY_S = 0.05, 2.0, 30.0, 0.1
"""Share of a device's memory below which none is waited for; how long it has to stay the same; how long at most."""


class DeviceMemory(Protocol):
    """The memory of one device, in bytes."""

    def total(self) -> int: ...

    def in_use(self) -> int:
        """By all processes, when what is not needed has been given back."""
        ...

    def held(self) -> int:
        """By all processes, without disturbing those that compute."""
        ...

    def peak_of(self, work: Callable[[], object]) -> int:
        """The most that tensors took while `work` ran, beyond those that were there before."""
        ...


class CudaMemory:
    def __init__(self, device: torch.device):
        self._device = device

    def total(self) -> int:
        return torch.cuda.mem_get_info(self._device)[1]

    def in_use(self) -> int:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def held(self) -> int:
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def peak_of(self, work: Callable[[], object]) -> int:
        torch.cuda.reset_peak_memory_stats(self._device)
        before = torch.cuda.memory_allocated(self._device)
        work()
        torch.cuda.synchronize(self._device)
        return torch.cuda.max_memory_allocated(self._device) - before


def device_memory(device: torch.device) -> DeviceMemory | None:
    """None where memory is not a device's own: a CPU shares it with the whole machine."""
    return CudaMemory(device) if device.type == "cuda" else None


def check_device(device: torch.device) -> None:
    """Raises `InvalidSetting` if this process was given a GPU and computes without."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if device.type == "cuda" or given in ("", "-1", "NoDevFiles"):
        return
    build = f"is built for CUDA {torch.version.cuda}" if torch.version.cuda else "is a build without CUDA"
    raise InvalidSetting(
        f"CUDA_VISIBLE_DEVICES gives this worker GPU {given}, and torch sees none: torch {torch.__version__} {build}. "
        "Install a build of torch that fits the driver (nvidia-smi says which CUDA it takes). To compute on the CPU "
        "instead, start Ray with --num-gpus 0, or set CUDA_VISIBLE_DEVICES to nothing.",
        field="CUDA_VISIBLE_DEVICES",
    )


def await_freed_memory(
    device: torch.device,
    memory: DeviceMemory | None = None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until a device's memory gets no freer. The memory of a process that was killed is given back when the
    driver has noticed, and a worker in its place needs it. memory: None: the device's own"""
    memory = memory or device_memory(device)
    if memory is None:
        return
    began_s = steady_s = clock()
    least = memory.held()
    # Where hardly anything is held, there is nothing to wait for.
    while least > memory.total() * FREE_ENOUGH and clock() - began_s < FREED_WITHIN_S:
        sleep(LOOK_EVERY_S)
        held = memory.held()
        if held < least:
            least, steady_s = held, clock()
        elif clock() - steady_s >= STEADY_S:
            return


def is_lack_of_memory(error: Exception) -> bool:
    """Whether something was to be allocated and could not be."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's way to say so on a CPU


def is_of_the_device(error: Exception) -> bool:
    """Whether a GPU raised it, or what drives one: it says nothing about what it was asked to compute."""
    return isinstance(error, torch.AcceleratorError) or (
        isinstance(error, RuntimeError) and any(word in str(error) for word in ("CUDA", "captur", "mempool"))
    )


def spare_bytes(
    memory: DeviceMemory, share: float, work: Callable[[], object], trial_bytes: int, unseen_bytes: int = 0
) -> int:
    """What is left for pages of `share` of the memory. trial_bytes: of pages that are there now and will go.
    unseen_bytes: what steps take beyond that of `work`.

    Raises `InvalidSetting` when nothing is.
    """
    peak = memory.peak_of(work) + unseen_bytes
    used = memory.in_use() - trial_bytes
    allowed = int(memory.total() * share)
    if allowed <= used + peak:
        raise InvalidSetting(
            f"gpu_memory_utilization of {share:g} allows {_gib(allowed)} of the device's {_gib(memory.total())}; "
            f"weights and what else is there take {_gib(used)}, a step takes {_gib(peak)}, so nothing is left for keys "
            "and values. Raise it, lower max_num_batched_tokens, or spread the model over more devices "
            "(tensor_parallel_size).",
            field="gpu_memory_utilization",
            asked=share,
            needed=used + peak,
        )
    return allowed - used - peak


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
