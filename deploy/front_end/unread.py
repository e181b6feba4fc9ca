"""Clients that do not read what they asked for. They cost themselves: what waits for one takes little, and an answer of
which nothing is taken is ended.

Who reads slowly lives, as long as something is taken within each `unread_timeout_s`, and more than `max_unread_bytes`
wait for no longer than that.
"""

import asyncio
import contextlib
import fcntl
import logging
import socket
import struct
import termios
from collections.abc import Callable, Collection, Iterable
from typing import Any, Protocol

from ...errors import DeadlineExceeded
from ..settings.limits import Limits

logger = logging.getLogger(__name__)

LOOKS = 10
"""In the time that a client may take nothing. Time in which this process stands still is one of them at most."""


class Unread(Protocol):
    """An answer, as far as it waits for its client."""

    request_id: str

    @property
    def unread_bytes(self) -> int: ...

    def abort(self, error: DeadlineExceeded) -> None: ...


class Unreading:
    """Ends HTTP connections whose clients take nothing of what was written for them, be it a stream, an answer in one
    go, or the rest of one behind which the connection is already closed."""

    def __init__(self, connections: Callable[[], Iterable[Any]], limits: Limits):
        """connections: those of a server, each with its asyncio `transport`"""
        self._connections = connections
        self._timeout_s = limits.unread_timeout_s
        self._stuck: dict[Any, tuple[Any, int]] = {}  # by transport: how much waits, and how often that was seen

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(self._timeout_s / LOOKS)
            self.look()

    def look(self) -> None:
        stuck = {}
        for connection in list(self._connections()):
            transport = connection.transport
            if transport is None or not any(waiting := _unsent(transport)):
                continue
            before, seen = self._stuck.get(transport, (None, 0))
            stuck[transport] = (waiting, seen + 1 if waiting == before else 0)
        self._stuck = {transport: found for transport, found in stuck.items() if found[1] < LOOKS}
        for transport in stuck.keys() - self._stuck.keys():
            logger.warning("a client has not read for %g s; its connection is closed", self._timeout_s)
            _reset(transport)


def _reset(transport: Any) -> None:
    """Close it now, and what waits in the kernel with it."""
    with contextlib.suppress(OSError, AttributeError):
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    transport.abort()


def _unsent(transport: Any) -> tuple[int, int]:
    """Bytes that wait in this process, and in the kernel, until the client takes them. A client that takes something
    changes one of the two; the kernel tells no sooner that it takes more from us."""
    return transport.get_write_buffer_size(), _unacknowledged(transport.get_extra_info("socket"))


def _unacknowledged(connection: Any) -> int:
    with contextlib.suppress(OSError, ValueError, AttributeError):  # it is closed
        return struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4)))[0]
    return 0


class Overdue:
    """Ends answers of which too much waits for too long, though their clients read now and then."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._seen: dict[Unread, int] = {}  # how often more than allowed was seen to wait

    def look(self, running: Collection[Unread]) -> None:
        """Look for clients that do not read. Call it `LOOKS` times in `unread_timeout_s`."""
        most = self._limits.max_unread_bytes
        self._seen = {each: self._seen.get(each, -1) + 1 for each in running if each.unread_bytes > most}
        for each in [each for each, seen in self._seen.items() if seen >= LOOKS]:
            error = DeadlineExceeded(
                f"more than {most} bytes of the answer waited for the client for {self._limits.unread_timeout_s:g} s; "
                "read faster, or ask less",
                limit=most,
            )
            logger.warning("request %s: %s", each.request_id, error)
            each.abort(error)
