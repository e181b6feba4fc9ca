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
from .streams import Clock
from .tensors import CUDA

PROPERTIES = SimpleNamespace(
    name="a pretended device", major=9, minor=0, multi_processor_count=PROCESSORS, total_memory=MEMORY_BYTES
)


class Stream:
    """By its number. Made without one, it is a new one."""

    def __init__(self, *_: Any, number: int | None = None, **__: Any):
        self.device = CUDA
        self.number = current_device().streams.add() if number is None else number

    def synchronize(self) -> None:
        device = current_device()
        device.wait(place(), clock=device.streams.clock(self.number))

    def wait_stream(self, other: "Stream") -> None:
        streams = current_device().streams
        streams.wait(self.number, streams.clock(other.number))

    def wait_event(self, event: "Event") -> None:
        event.wait(self)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event


MOST_LOOKS = 3
"""After so many the device has come to an event, whether the host waits for it or not."""


class Event:
    """A place in a stream."""

    def __init__(self, *_: Any, **__: Any):
        self._mark = 0
        self._clock: Clock = {}
        self._looks = 0

    def record(self, stream: Stream | None = None) -> None:
        device = current_device()
        self._mark = device.transfers.mark
        self._clock = device.streams.clock(stream.number if stream is not None else device.streams.current)

    def synchronize(self) -> None:
        current_device().wait(place(), self._mark, self._clock)

    def query(self) -> bool:
        device = current_device()
        self._looks += 1
        if self._looks > MOST_LOOKS:
            device.comes_to(self._mark, self._clock, place())
        return device.transfers.has_arrived(self._mark)

    def wait(self, stream: Stream | None = None) -> None:
        streams = current_device().streams
        streams.wait(stream.number if stream is not None else streams.current, self._clock)


@contextlib.contextmanager
def _stream(stream: Stream) -> Iterator[None]:
    streams = current_device().streams
    before, streams.current = streams.current, stream.number
    try:
        yield
    finally:
        streams.current = before


def _synchronize(device: object = None) -> None:
    streams = current_device().streams
    current_device().wait(place(), clock=streams.all_done())


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
    "current_stream": lambda device=None: Stream(number=current_device().streams.current),
    "default_stream": lambda device=None: Stream(number=0),
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
