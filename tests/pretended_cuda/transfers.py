"""Copies between host and device that go on beside the host, and host memory that must be left alone meanwhile."""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .faults import Race

GARBAGE = 0x7F
"""Bytes in the target of a download that has not arrived: no token, and a NaN in most kinds of numbers."""


class PinnedMemory:
    """Which host memory the device can read by itself."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}

    def add(self, tensor: Tensor) -> None:
        reference = StorageWeakRef(tensor.untyped_storage())
        self._storages[reference.cdata] = reference

    def has(self, tensor: Tensor) -> bool:
        found = self._storages.get(tensor.untyped_storage()._cdata)
        return found is not None and not found.expired()


@dataclass(frozen=True, slots=True)
class _Upload:
    source: Tensor
    before: Tensor  # its bytes when the copy was asked for
    place: str


@dataclass(frozen=True, slots=True)
class _Download:
    target: Tensor
    arriving: Tensor
    place: str


class Transfers:
    """What is under way, in the order of the stream. All of it has arrived when the host has waited."""

    def __init__(self) -> None:
        self._under_way: list[_Upload | _Download] = []
        self._arrived = 0

    def upload(self, source: Tensor, place: str) -> None:
        self._under_way.append(_Upload(source, _bytes(source).clone(), place))

    def download(self, target: Tensor, arriving: Tensor, place: str) -> None:
        if target.is_contiguous():
            _bytes(target).fill_(GARBAGE)
        self._under_way.append(_Download(target, arriving, place))

    @property
    def mark(self) -> int:
        """Of an event: how many copies were asked for before it."""
        return self._arrived + len(self._under_way)

    def has_arrived(self, mark: int) -> bool:
        return mark <= self._arrived

    def wait(self, mark: int, place: str) -> None:
        """Let those before `mark` arrive. Raises `Race` where a source is no longer what was to be copied."""
        count = max(0, mark - self._arrived)
        arrived, self._under_way = self._under_way[:count], self._under_way[count:]
        self._arrived += len(arrived)
        for copy in arrived:
            if isinstance(copy, _Download):
                copy.target.copy_(copy.arriving)
            elif not torch.equal(_bytes(copy.source), copy.before):
                raise Race(
                    f"the pinned buffer that {copy.place} copies to the device was changed before the host waited at "
                    f"{place}"
                )

    def check_read(self, tensor: Tensor, place: str) -> None:
        """Raises `Race` if `tensor` has not arrived."""
        for copy in self._under_way:
            if isinstance(copy, _Download) and _share(copy.target, tensor):
                raise Race(
                    f"{place} reads what {copy.place} copies from the device, without having waited for an event"
                )

    def check_write(self, tensor: Tensor, place: str) -> None:
        """Raises `Race` if `tensor` is still being copied."""
        for copy in self._under_way:
            kept = copy.source if isinstance(copy, _Upload) else copy.target
            if _share(kept, tensor):
                raise Race(f"{place} writes into the buffer that {copy.place} copies, without having waited")

    @property
    def is_idle(self) -> bool:
        return not self._under_way


def _share(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def _bytes(tensor: Tensor) -> Tensor:
    dense = tensor if tensor.is_contiguous() else tensor.contiguous()
    return dense.reshape(-1).view(torch.uint8)
