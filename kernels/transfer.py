"""Copies between host and GPU: values for tensors that stay where they are, in one copy; and tensors that are read
later, while the GPU goes on."""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

ALIGNMENT_BYTES = 16
"""Where each tensor's values begin in the buffer that is sent: any kind of number may be read there."""

NUMPY = {torch.int32: np.int32, torch.int64: np.int64, torch.bool: np.bool_, torch.float32: np.float32}


class Transfer:
    """Collects what is to be written with `put` and `put_at`; `run` writes all of it. It is used once."""

    def __init__(self, device: torch.device):
        self._device = device
        self._values: list[np.ndarray] = []
        self._targets: list[tuple[Tensor, int]] = []  # each with the number of its values
        self._scattered: list[tuple[Tensor, int, int]] = []  # likewise of places and of values
        self._afterwards: list[Callable[[], None]] = []

    def put(self, target: Tensor, values: np.ndarray) -> None:
        """Have `target` filled with as many values. They are kept by reference until `run`."""
        assert target.numel() == values.size, f"{values.size} values do not fill {target.numel()} places"
        self._targets.append((target, self._number(values, target.dtype)))

    def put_at(self, target: Tensor, places: np.ndarray, values: np.ndarray) -> None:
        """Have values written at some places of `target`, which has one axis. A place may be named twice, with one
        value."""
        assert places.shape == values.shape, f"{values.size} values are not for {places.size} places"
        numbers = self._number(places, torch.int64), self._number(values, target.dtype)
        self._scattered.append((target, *numbers))

    def _number(self, values: np.ndarray, dtype: torch.dtype) -> int:
        self._values.append(np.ascontiguousarray(values, dtype=NUMPY[dtype]))
        return len(self._values) - 1

    def then(self, work: Callable[[], None]) -> None:
        """Have something done after that which reads what was written."""
        self._afterwards.append(work)

    def run(self) -> None:
        sources = [torch.from_numpy(values) for values in self._values]
        if self._device.type != "cpu":
            sources = self._sent(sources)
        # Tensors of one dtype are written by one kernel, if their numbers lie side by side.
        batches: dict[torch.dtype, list[tuple[Tensor, Tensor]]] = {}
        for target, number in self._targets:
            source = sources[number].view(target.shape)
            if target.is_contiguous():
                batches.setdefault(target.dtype, []).append((target, source))
            else:
                target.copy_(source)
        for batch in batches.values():
            targets, values = map(list, zip(*batch, strict=True))
            torch._foreach_copy_(targets, values)
        for target, places, values in self._scattered:
            target.index_copy_(0, sources[places], sources[values])
        for work in self._afterwards:
            work()

    def _sent(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """All values on the device, as parts of one buffer."""
        ends = np.cumsum([-(-source.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for source in sources])
        packed = torch.empty(int(ends[-1]) if len(ends) else 0, dtype=torch.uint8, pin_memory=True)
        starts = [0, *ends[:-1].tolist()]
        for start, values in zip(starts, self._values, strict=True):
            packed[start : start + values.nbytes].numpy()[:] = values.reshape(-1).view(np.uint8)
        sent = packed.to(self._device, non_blocking=True)
        return [
            sent[start : start + source.nbytes].view(source.dtype)
            for start, source in zip(starts, sources, strict=True)
        ]


class Arrival:
    """A tensor on its way to the host. What is asked of the device later does not wait for that."""

    def __init__(self, source: Tensor, beside: torch.cuda.Stream | None = None):
        """beside: the stream that copies; None: that in which the device computes"""
        self._event: torch.cuda.Event | None = None
        if source.device.type == "cpu":
            self._target = source
            return
        self._target = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        self._event = torch.cuda.Event()
        current = torch.cuda.current_stream()
        if beside is not None:
            beside.wait_stream(current)
            source.record_stream(beside)
        with torch.cuda.stream(beside or current):
            self._target.copy_(source, non_blocking=True)
            self._event.record()

    def is_there(self) -> bool:
        return self._event is None or self._event.query()

    def read(self) -> Tensor:
        """Waits for it."""
        if self._event is not None and not self._event.query():
            self._event.synchronize()
        self._event = None
        return self._target
