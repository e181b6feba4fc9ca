"""How a process of the command line ends when somebody asks it to: at once while it starts, in time while it serves.

Python hears a signal when its first thread is between two of its own instructions. While that thread is in Ray, or in
an import, it is not. So a thread of our own waits for the byte that Python's handler writes anyhow (`set_wakeup_fd`).
Imports nothing heavy: it is there before all the rest.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from typing import NoReturn

from ..controller.processes import descendants, end_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end this process and all that it started, whatever it does, until somebody else hears them."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    before = [signal.signal(number, _ignore) for number in SIGNALS]  # what counts is the byte
    wakeup_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    threading.Thread(target=_wait, args=(reader,), name="signals", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        os.close(writer)


def _ignore(number: int, frame: object) -> None:
    pass


def _wait(reader: int) -> None:
    while heard := os.read(reader, 1):
        if heard[0] in SIGNALS:
            say("stopping ...")
            leave(128 + heard[0])


def say(what: str) -> None:
    """To whoever sits there, if anybody does."""
    with contextlib.suppress(OSError, ValueError):
        print(what, flush=True)


def leave(status: int) -> NoReturn:
    """End this process now, and all that it started. Nobody's answers are lost but those that were given up."""
    end_processes(descendants(), descendants)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(status)


def leave_at_the_latest(within_s: float, status: int) -> None:
    """However long an orderly end takes: a Ray whose GCS is dead would be waited for a minute."""

    def wait() -> None:
        time.sleep(within_s)
        leave(status)

    threading.Thread(target=wait, name="ending", daemon=True).start()
