"""Processes of the Ray that this one started. Imports nothing heavy: it is asked at any moment, start-up included."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

END_WITHIN_S = 1.0
LOOK_EVERY_S = 0.01

_RAY = (b"/ray/core/", b"/ray/_private/", b"/ray/autoscaler/", b"/ray/dashboard/")


def processes_of_ray() -> list[int]:
    """Children of this process that are part of Ray, and all that they started in turn."""
    return descendants(_is_ray)


def descendants(is_meant: Callable[[int], bool] = lambda pid: True, *, of: int | None = None) -> list[int]:
    """Children of this process, or of another, that are meant, and all that they started in turn."""
    children: dict[int, list[int]] = {}
    for pid, parent in _parents():
        children.setdefault(parent, []).append(pid)
    found = [pid for pid in children.get(of or os.getpid(), []) if is_meant(pid)]
    for pid in found:
        found += children.get(pid, [])
    return found


def end_processes(pids: list[int], again: Callable[[], list[int]] = processes_of_ray) -> None:
    """Kill them, and those that they still started meanwhile; wait until they are gone, within reason."""
    deadline = time.monotonic() + END_WITHIN_S
    while pids and time.monotonic() < deadline:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        while any(map(_is_there, pids)) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY_S)
        pids = [pid for pid in again() if _is_there(pid)]


def _parents() -> list[tuple[int, int]]:
    """All processes with their parents."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                found.append((int(entry.name), int(_stat(int(entry.name))[1])))
    return found


def _is_ray(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return any(part in Path(f"/proc/{pid}/cmdline").read_bytes() for part in _RAY)
    return False


def _is_there(pid: int) -> bool:
    """Does the process run? A zombie does not."""
    with contextlib.suppress(OSError):
        return _stat(pid)[0] not in "ZX"
    return False


def _stat(pid: int) -> list[str]:
    """The fields of a process in /proc/PID/stat, from its state on."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
