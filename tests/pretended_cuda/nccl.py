"""What several ranks do together, each in a thread of this process: the functions of `torch.distributed` over NCCL.

A collective is a kernel: it is recorded where a graph is, and runs with each replay. The ranks meet at a barrier, so a
collective that only some of them call ends in an error after a while, where NCCL would hang.
"""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from . import operators
from .device import current_device
from .faults import DeviceFault
from .ledger import Kind
from .places import place
from .tensors import DeviceTensor, on_host

LONGEST_WAIT_S = 60.0
GROUP = "ranks"


class Communicator:
    """Ranks that have met."""

    def __init__(self, size: int):
        self.size = size
        self._barrier = threading.Barrier(size)
        self._given: list[Tensor | None] = [None] * size
        self._is_closed = False

    def close(self) -> None:
        self._is_closed = True

    def exchange(self, rank: int, tensor: Tensor, at: str) -> list[Tensor]:
        """What each rank gave, in rank order."""
        if self._is_closed:
            raise DeviceFault(f"{at} uses a communicator that was destroyed")
        self._given[rank] = tensor.clone()
        try:
            self._barrier.wait(LONGEST_WAIT_S)
            given = [each for each in self._given if each is not None]
            self._barrier.wait(LONGEST_WAIT_S)  # before one of them gives the next
        except threading.BrokenBarrierError:
            raise DeviceFault(f"not all ranks came to the collective at {at}") from None
        return given


class _Own(threading.local):
    communicator: Communicator | None = None
    rank = 0


_own = _Own()
_meetings: dict[int, Communicator] = {}  # by the port of the store where ranks find each other
_meeting = threading.Lock()


def _init_process_group(backend: str, *, store: Any, rank: int, world_size: int) -> None:
    assert backend == "nccl", f"a pretended device has no {backend}"
    with _meeting:
        found = _meetings.setdefault(store.port, Communicator(world_size))
        if found._is_closed:  # they meet anew
            found = _meetings[store.port] = Communicator(world_size)
    _own.communicator, _own.rank = found, rank


def _destroy_process_group() -> None:
    assert _own.communicator is not None, "there is no process group"
    _own.communicator.close()
    _own.communicator = None


def _all_reduce(tensor: Tensor) -> None:
    def run(own: Tensor, parts: list[Tensor]) -> None:
        own.copy_(sum(parts[1:], start=parts[0]))

    _together(tensor, run)


def _broadcast(tensor: Tensor, src: int) -> None:
    _together(tensor, lambda own, parts: own.copy_(parts[src]))


def _gather(tensor: Tensor, gather_list: list[Tensor] | None = None) -> None:
    targets = [on_host(target) for target in gather_list or ()]

    def run(own: Tensor, parts: list[Tensor]) -> None:
        for target, part in zip(targets, parts):
            target.copy_(part)

    _together(tensor, run)


def _together(tensor: Tensor, run: Callable[[Tensor, list[Tensor]], object]) -> None:
    communicator, rank, at = _own.communicator, _own.rank, place()
    assert communicator is not None, "there is no process group"
    if not isinstance(tensor, DeviceTensor) or not tensor.is_contiguous():
        raise DeviceFault(f"NCCL takes dense tensors of the device, which the one at {at} is not")
    own = tensor.host
    current_device().compute(Kind.COLLECTIVE, lambda: run(own, communicator.exchange(rank, own, at)), (own,), at)


def _one_shot_all_reduce(buffer: Tensor, given: Tensor, operation: str, group: str, out: Tensor) -> Tensor:
    """Each rank puts what it has into its buffer, and reads those of all. They are added in rank order."""
    assert operation == "sum" and group == GROUP, "there is one group, and ranks add up"
    assert isinstance(buffer, DeviceTensor) and isinstance(out, DeviceTensor), "it is on the device"
    communicator, rank, at = _own.communicator, _own.rank, place()
    shared, own, target = buffer.host, on_host(given), out.host
    assert communicator is not None, "there is no process group"

    def run() -> None:
        parts = communicator.exchange(rank, shared.copy_(own), at)
        target.copy_(sum(parts[1:], start=parts[0]))

    current_device().compute(Kind.COLLECTIVE, run, (shared, own, target), at)
    return out


def _symmetric_memory(size: int, **settings: Any) -> Tensor:
    return torch.zeros(size, **settings)


def install() -> None:
    operators._SPECIAL[torch.ops.symm_mem.one_shot_all_reduce_copy_out.default] = _one_shot_all_reduce
    symmetric_memory.empty = _symmetric_memory
    symmetric_memory.rendezvous = lambda tensor, group: None
    for name, function in {
        "is_initialized": lambda: _own.communicator is not None,
        "init_process_group": _init_process_group,
        "destroy_process_group": _destroy_process_group,
        "all_reduce": _all_reduce,
        "broadcast": _broadcast,
        "gather": _gather,
        "group": SimpleNamespace(WORLD=SimpleNamespace(group_name=GROUP)),
    }.items():
        setattr(dist, name, function)
