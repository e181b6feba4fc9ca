"""The functions of `torch.cuda`, as far as an engine calls them; and `install`, which changes torch for good."""

import contextlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from . import launches, nccl
from .device import MEMORY_BYTES, PROCESSORS, current_device
from .graphs import Graph, Pool, Recording
from .guard import load_guard
from .operators import OnPretendedDevice
from .places import place
from .tensors import CUDA

PROPERTIES = SimpleNamespace(
    name="a pretended device", major=9, minor=0, multi_processor_count=PROCESSORS, total_memory=MEMORY_BYTES
)


class Stream:
    """There is one stream, so they need not wait for each other."""

    def __init__(self, *_: Any, **__: Any):
        self.device = CUDA

    def synchronize(self) -> None:
        current_device().wait(place())

    def wait_stream(self, other: object) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record()
        return event


class Event:
    """A place in the stream."""

    def __init__(self, *_: Any, **__: Any):
        self._mark = 0

    def record(self, stream: object = None) -> None:
        self._mark = current_device().transfers.mark

    def synchronize(self) -> None:
        current_device().wait(place(), self._mark)

    def query(self) -> bool:
        return current_device().transfers.has_arrived(self._mark)

    def wait(self, stream: object = None) -> None: ...


@contextlib.contextmanager
def _stream(stream: object) -> Iterator[None]:
    yield


def _synchronize(device: object = None) -> None:
    current_device().wait(place())


FUNCTIONS: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_lazy_init": lambda: None,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "get_device_name": lambda device=None: PROPERTIES.name,
    "get_device_capability": lambda device=None: (PROPERTIES.major, PROPERTIES.minor),
    "get_device_properties": lambda device=None: PROPERTIES,
    "mem_get_info": lambda device=None: (MEMORY_BYTES, MEMORY_BYTES),
    "memory_allocated": lambda device=None: 0,
    "max_memory_allocated": lambda device=None: 0,
    "reset_peak_memory_stats": lambda device=None: None,
    "empty_cache": lambda: None,
    "is_current_stream_capturing": lambda: current_device().tape is not None,
    "synchronize": _synchronize,
    "current_stream": lambda device=None: Stream(),
    "default_stream": lambda device=None: Stream(),
    "stream": _stream,
    "Stream": Stream,
    "Event": Event,
    "graph_pool_handle": Pool,
    "CUDAGraph": Graph,
    "graph": Recording,
}


def install() -> None:
    """Before any module of ours that needs torch is imported: `inference_mode` is a decorator there."""
    assert "pytest" not in sys.modules, "torch is changed for good: pretend in a process of its own"
    load_guard()
    _replace(torch.cuda, **FUNCTIONS)
    # In inference mode torch shows composite operators, not those that they are made of.
    _replace(torch, inference_mode=lambda mode=True: torch.no_grad())
    _watch_reads()
    launches.install()
    nccl.install()
    pretend_in_this_thread()


def pretend_in_this_thread() -> None:
    torch._C._set_only_lift_cpu_tensors(True)  # else `torch.tensor(.., device="cuda")` copies unseen
    OnPretendedDevice().__enter__()


def _watch_reads() -> None:
    """Ways out of torch that are no operators."""
    for name in ("numpy", "tolist", "__array__"):
        original = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, _original: Any = original, **kwargs: Any) -> Any:
            transfers = current_device().transfers
            if not transfers.is_idle:
                transfers.check_read(tensor, place())
            return _original(tensor, *args, **kwargs)

        _replace(Tensor, **{name: read})


def _replace(owner: Any, **functions: Any) -> None:
    for name, function in functions.items():
        setattr(owner, name, function)
