"""One pretended device: what it is asked to do, what is under way, and whether a graph is being recorded.

Each thread has one of its own, as each rank has a process and a GPU of its own.
"""

import threading
from collections.abc import Callable, Sequence

from torch import Tensor

from .faults import ForbiddenWhileRecording
from .ledger import Kind, Ledger
from .streams import Clock, Streams
from .tape import Tape
from .transfers import PinnedMemory, Transfers

PROCESSORS = 132  # of an H100
MEMORY_BYTES = 1 << 30


class Device:
    """Life: asked for work by one thread; `wait` is where host and device meet."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.transfers = Transfers()
        self.streams = Streams()
        self.tape: Tape | None = None  # where a graph is being recorded

    def use(self, read: Sequence[Tensor], written: Sequence[Tensor], at: str) -> None:
        """Memory is used by the current stream; where a graph is recorded, with each replay of it."""
        if self.tape is not None:
            self.tape.uses.append((read, written, at))
        else:
            self.streams.use(read, written, at)

    def wait(self, at: str, mark: int | None = None, clock: Clock | None = None) -> None:
        """The host waits for all that the current stream was asked for; or for copies before `mark` and for `clock`."""
        self.refuse_while_recording("the host waits for the device", at)
        self.ledger.add(Kind.SYNC, at)
        whole = self.transfers.mark if mark is None else mark
        self.comes_to(whole, self.streams.clock(self.streams.current) if clock is None else clock, at)

    def comes_to(self, mark: int, clock: Clock, at: str) -> None:
        """Copies before `mark` have been done, and the host knows that `clock` has happened."""
        self.streams.host_waits(clock)
        self.transfers.wait(mark, at)

    def upload(self, target: Tensor, source: Tensor, is_pinned: bool, is_blocking: bool, at: str) -> None:
        """source, target: in host memory and on the device; both are given as tensors in host memory"""
        self.refuse_while_recording("the host's memory is copied to the device", at)
        self.use((), (target,), at)
        target.copy_(source)
        self.ledger.add(Kind.UPLOAD_PINNED if is_pinned else Kind.UPLOAD_PAGEABLE, at)
        self.ledger.add(Kind.UPLOADED_BYTES, at, source.nbytes)
        if is_pinned:
            self.transfers.upload(source, at)
        if is_blocking:
            self.wait(at)

    def download(self, target: Tensor, source: Tensor, is_blocking: bool, at: str) -> None:
        self.refuse_while_recording("the device's memory is copied to the host", at)
        self.ledger.add(Kind.DOWNLOAD, at)
        self.use((source,), (), at)
        if is_blocking:
            self.wait(at)
            target.copy_(source)
        else:
            self.transfers.download(target, source.clone(), at)

    def compute(self, kind: Kind, run: Callable[[], object], tensors: Sequence[Tensor], at: str) -> None:
        """A launch or a collective, which may write the tensors; where a graph is recorded, it becomes part of it."""
        self.use((), tensors, at)
        if self.tape is not None:
            self.tape.other(kind, run, at)
            return
        self.ledger.add(kind, at)
        run()

    def refuse_while_recording(self, what: str, at: str) -> None:
        if self.tape is not None:
            raise ForbiddenWhileRecording(f"operation not permitted when stream is capturing: {what} at {at}")


pinned = PinnedMemory()
"""Of the whole process: any device can read it."""

_own = threading.local()


def current_device() -> Device:
    """Of this thread."""
    device = getattr(_own, "device", None)
    if device is None:
        device = _own.device = Device()
    return device
