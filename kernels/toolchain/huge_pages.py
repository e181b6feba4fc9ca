"""Memory in large pages of the operating system, where it lends them to those that ask (Linux: "madvise").

A processor keeps the addresses of some thousand pages; that of another one is looked up in memory. A step reads all
weights, and attention reads a few kilobytes here and there in gigabytes: in pages of 4 KiB nearly each such read waits
for its address, in pages of 2 MiB hardly any. In turns, products of 1, 32 and 128 rows with weights of some megabytes
took 1.1 to 1.2, 1.2 to 1.3 and 1.2 to 1.3 times as long in small pages; attention of 32 requests of SmolLM2 took 15 ms
of a step in small ones and 12.7 in large ones.
"""

import ctypes
import math
import mmap
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor

HUGE_BYTES = 2 << 20
CHUNK_BYTES = 16 * HUGE_BYTES
LEAST_BYTES = 64 << 10
"""Of a tensor that takes part: smaller ones are few pages."""

LINE_BYTES = 64


def zeros(size_bytes: int, device: torch.device) -> Tensor:
    """[size_bytes] uint8"""
    if device.type != "cpu" or size_bytes < 2 * HUGE_BYTES:
        return torch.zeros(size_bytes, dtype=torch.uint8, device=device)
    return _large(size_bytes).zero_()


class SideBySide:
    """Memory for tensors that stay for as long as a process serves, on the CPU: small ones share huge pages.

    A chunk's memory is given back when the last tensor in it is.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._chunk, self._used_bytes = torch.empty(0, dtype=torch.uint8), 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        size_bytes = math.prod(shape) * dtype.itemsize
        if size_bytes < LEAST_BYTES:
            return torch.empty(shape, dtype=dtype)
        memory = _large(size_bytes) if size_bytes > CHUNK_BYTES // 2 else self._part(size_bytes)
        return memory.view(dtype).view(*shape)

    def moved(self, tensor: Tensor) -> Tensor:
        return self.empty(tensor.shape, tensor.dtype).copy_(tensor)

    def _part(self, size_bytes: int) -> Tensor:
        with self._lock:
            if self._used_bytes + size_bytes > len(self._chunk):
                memory = _large(CHUNK_BYTES + HUGE_BYTES)
                self._chunk, self._used_bytes = memory[-memory.data_ptr() % HUGE_BYTES :][:CHUNK_BYTES], 0
            part = self._chunk[self._used_bytes :][:size_bytes]
            self._used_bytes += -(-size_bytes // LINE_BYTES) * LINE_BYTES
        return part


LASTING = SideBySide()
"""Weights of this process, and what lies between its layers."""


def _large(size_bytes: int) -> Tensor:
    tensor = torch.empty(size_bytes, dtype=torch.uint8)
    _ask_for_huge_pages(tensor)  # before it is written, which is when it gets its memory
    return tensor


def _ask_for_huge_pages(tensor: Tensor) -> None:
    """If there are none, it stays as it is."""
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if advice is None or madvise is None:
        return
    first = -(-tensor.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    size_bytes = (tensor.data_ptr() + tensor.nbytes - first) // HUGE_BYTES * HUGE_BYTES
    madvise(ctypes.c_void_p(first), ctypes.c_size_t(size_bytes), ctypes.c_int(advice))
