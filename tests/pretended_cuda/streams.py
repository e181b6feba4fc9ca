"""Several streams of one device: what one of them uses may be used by another when it has waited, and not before.

Work runs at once and in the order in which it is asked for, whatever its stream. What is looked at is whether a GPU
would have to keep that order: each stream counts what it is asked to do, and knows how far of each other stream it has
waited. That memory is given to another tensor while a stream still reads it (`record_stream`) is not looked at.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from .faults import Race

Clock = dict[int, int]
"""Of each stream, how much of its work."""


@dataclass(slots=True)
class _Uses:
    """Of one piece of memory: its latest uses."""

    memory: StorageWeakRef
    written: tuple[int, int, str] | None = None  # stream, place in its order, place in the source
    read: dict[int, tuple[int, str]] = field(default_factory=dict)  # by stream


class Streams:
    """Of one device. Stream 0 is the one in which work is done unless told otherwise."""

    def __init__(self) -> None:
        self.current = 0
        self._numbers = count(1)
        self._done: Clock = {0: 0}
        self._waited: dict[int, Clock] = {0: {}}
        self._host: Clock = {}  # how far the host has waited: all that it asks for later comes after
        self._uses: dict[int, _Uses] = {}

    def add(self) -> int:
        number = next(self._numbers)
        self._done[number], self._waited[number] = 0, {}
        return number

    def clock(self, stream: int) -> Clock:
        """What has happened when all that it was asked to do is done."""
        return {**self._waited[stream], stream: self._done[stream]}

    def all_done(self) -> Clock:
        return dict(self._done)

    def wait(self, stream: int, clock: Clock) -> None:
        """A stream goes on when that has happened."""
        _advance(self._waited[stream], clock)

    def host_waits(self, clock: Clock) -> None:
        _advance(self._host, clock)

    def use(self, read: Sequence[Tensor], written: Sequence[Tensor], at: str) -> None:
        """Work of the current stream. Raises `Race` if other streams may not be done with what it uses."""
        own = self.current
        self._done[own] += 1
        for tensor in read:
            uses = self._uses_of(tensor)
            if uses.written is not None:
                self._check(*uses.written, at, "wrote")
            uses.read[own] = self._done[own], at
        for tensor in written:
            uses = self._uses_of(tensor)
            if uses.written is not None:
                self._check(*uses.written, at, "wrote")
            for stream, (number, place) in uses.read.items():
                self._check(stream, number, place, at, "reads")
            uses.written = own, self._done[own], at
            uses.read.clear()

    def _check(self, stream: int, number: int, place: str, at: str, did: str) -> None:
        own = self.current
        known = max(self._waited[own].get(stream, 0), self._host.get(stream, 0))
        if stream != own and known < number:
            raise Race(f"{at} uses in one stream what {place} {did} in another, without having waited for that")

    def _uses_of(self, tensor: Tensor) -> _Uses:
        storage = tensor.untyped_storage()
        found = self._uses.get(storage._cdata)
        if found is None or found.memory.expired():
            found = self._uses[storage._cdata] = _Uses(StorageWeakRef(storage))
        return found


def _advance(clock: Clock, other: Clock) -> None:
    for stream, done in other.items():
        clock[stream] = max(clock.get(stream, 0), done)
