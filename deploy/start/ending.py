"""How a process of the command line ends when a signal asks it to: at once while it starts, in time while it serves.

Python hears a signal when its first thread is between two of its own instructions. While that thread is in Ray, or in
an import, it is not. So a thread of our own waits for the byte that Python's handler writes anyhow (`set_wakeup_fd`).
That thread stands still with all others while one keeps the interpreter: Ray does, for as long as it waits for a part
of it that has died as it started. So a small process waits for the byte, too, and kills this one if it is still there
after a while.

    signal ─► byte in a socket ─► our thread: says "stopping", ends the processes that we started, and this one
                               └─► the guard, 1.5 s later: kills this one, with whom all of Ray's die; if our thread
                                   has begun, it gets 4 s more

Imports nothing heavy: it is there before all the rest.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from typing import NoReturn

from .processes import descendants, end_processes

SIGNALS = (signal.SIGINT, signal.SIGTERM)

GUARD_S = 1.5
"""An end in order takes less, as a rule."""

BEGUN_S = 4.0
"""One that has begun gets so much more, on a machine that is busy with other things."""

BEGUN = 0
"""The byte that our thread leaves in place of the signal's: no signal has this number."""

GUARD = """
import os, select, signal, socket, sys
own, guarded, begun, *numbers = map(int, sys.argv[3:])
after_s, more_s = map(float, sys.argv[1:3])
bytes_heard, end = socket.socket(fileno=own), select.poll()
end.register(own, select.POLLRDHUP)
while bytes_heard.recv(1, socket.MSG_PEEK) and not end.poll(1000 * after_s) and os.getppid() == guarded:
    try:
        left = bytes_heard.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
    except BlockingIOError:
        continue
    if left and left[0] == begun and end.poll(1000 * more_s):
        break
    if left and left[0] in (begun, *numbers) and os.getppid() == guarded:
        tidy = b"\\r\\33[K\\33[?25h" if os.isatty(2) else b""
        os.write(2, tidy)
        os.write(1, b"stopping ...\\n")
        os.kill(guarded, signal.SIGKILL)
        os.write(2, tidy)
        break
"""
"""Its program: `after_s`, `more_s`, then numbers."""

TIDY = b"\r\33[K\33[?25h"
"""Empties a terminal's line and shows the cursor. A bar that is not finished leaves neither."""

ERROR = 2
"""The file of standard error. `sys.stderr` may be a bar's."""


_spared: set[int] = set()
"""Guards: they end with this process, and are wanted until then."""


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Ctrl-C and SIGTERM end this process and all that it started, whatever it does, until other handlers take over."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    before = [signal.signal(number, _ignore) for number in SIGNALS]  # what counts is the byte
    wakeup_before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
    guard = _guard(reader)
    _spared.add(guard.pid)
    threading.Thread(target=_wait, args=(reader, writer), name="signals", daemon=True).start()
    try:
        yield
    finally:
        guard.kill()
        guard.wait()
        _spared.discard(guard.pid)
        signal.set_wakeup_fd(wakeup_before)
        for number, handler in zip(SIGNALS, before, strict=True):
            signal.signal(number, handler)
        writer.close()


def _ignore(number: int, frame: object) -> None:
    pass


def _guard(reader: socket.socket) -> "subprocess.Popen[bytes]":
    about = GUARD_S, BEGUN_S, reader.fileno(), os.getpid(), BEGUN, *map(int, SIGNALS)
    command = [sys.executable, "-I", "-S", "-c", GUARD, *map(str, about)]
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # it inherits that: Ctrl-C is sent to both
    try:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=(reader.fileno(),))
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _wait(reader: socket.socket, writer: socket.socket) -> None:
    while heard := reader.recv(1, socket.MSG_PEEK):
        # The guard may find a signal's byte or the other one, but never none: this thread may stand still at any time.
        if heard[0] in SIGNALS:
            with contextlib.suppress(OSError):
                writer.send(bytes([BEGUN]))
                reader.recv(1)
            say("stopping ...")
            leave(128 + heard[0])
        reader.recv(1)


def say(what: str) -> None:
    """Print to the terminal, if there is one."""
    with contextlib.suppress(OSError, ValueError):
        print(what, flush=True)


def leave(status: int) -> NoReturn:
    """End this process now, and all that it started. No answers are lost but those that were given up."""
    others = partial(descendants, lambda pid: pid not in _spared)
    end_processes(others(), others)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        if os.isatty(ERROR):
            os.write(ERROR, TIDY)
    os._exit(status)


def leave_at_the_latest(within_s: float, status: int) -> None:
    """However long an orderly end takes: a Ray whose GCS is dead would be waited for a minute."""

    def wait() -> None:
        time.sleep(within_s)
        leave(status)

    threading.Thread(target=wait, name="ending", daemon=True).start()
