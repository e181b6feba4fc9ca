"""What a program leaves open is closed when it ends: at the end of the script, by an exception, by `sys.exit`.

Python's `atexit` is too late for that: no thread can be started there from Python 3.12 on, executors take no work, and
Ray's own hook may have come first. So a thread waits for the main one, then for all others that Python waits for, since
they may still be using what is open, and closes it while everything still works.
"""

import contextlib
import logging
import threading
from typing import Protocol

logger = logging.getLogger(__name__)


class Closable(Protocol):
    def shutdown(self) -> None: ...


_open: list[Closable] = []
_lock = threading.Lock()
_closer: threading.Thread | None = None


def closed_at_exit(what: Closable) -> None:
    """Shut it down when the program ends, the latest first, unless `is_closed` is told before."""
    global _closer
    with _lock:
        _open.append(what)
        if _closer is None or not _closer.is_alive():  # it is the first, or the process was forked
            _open[:] = [what]  # the rest is its parent's
            _closer = threading.Thread(target=_close_at_exit, name="intarsia at exit", daemon=False)
            _closer.start()


def is_closed(what: Closable) -> None:
    with _lock, contextlib.suppress(ValueError):
        _open.remove(what)


def _close_at_exit() -> None:
    threading.main_thread().join()
    while others := [thread for thread in threading.enumerate() if _is_waited_for(thread)]:
        others[0].join()
    while _open:
        last = _open[-1]
        is_closed(last)
        try:
            last.shutdown()
        except Exception as error:  # noqa: BLE001  the others are still to be closed
            logger.warning("%s could not be shut down at the end: %s", type(last).__name__, error)


def _is_waited_for(thread: threading.Thread) -> bool:
    """Does Python wait for the thread before it ends?"""
    return not thread.daemon and thread not in (threading.main_thread(), threading.current_thread())
