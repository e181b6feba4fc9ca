"""HTTP/1.1 as uvicorn and httptools read it, with bounds on what comes before a request is known: neither has any."""

import asyncio
from collections.abc import Callable
from typing import Any

from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from ...errors import Overloaded
from ..settings.limits import Limits
from .connections import Connections, Held

PIECE_BYTES = 8 * 1024
"""Read at once, so that a limit is passed by no more than that."""

LINGER_BYTES = 256 * 1024
LINGER_S = 1.0
"""How much of a body is read on, and for how long, when its request was answered already. A client that is cut off
while it sends does not read the answer; one that sends on for ever is cut off all the same."""

MOST_PIPELINED = 64
"""Requests of one connection that wait for the answers before theirs."""

PHRASES = {
    400: "Bad Request",
    408: "Request Timeout",
    431: "Request Header Fields Too Large",
    503: "Service Unavailable",
}

CONNECTION = "intarsia.connection"
"""Where an application finds the connection of a request in its scope."""

NO_KEY = b""
"""Stands for the key of a request whose head has not been read."""


class _TooLong(Exception):
    """Raised while a head is parsed, to end that."""


class _Flow(FlowControl):
    """uvicorn's, which does not read on while requests wait unparsed, however many of those before ask for more."""

    def __init__(self, transport: Any, has_unparsed: Callable[[], bool]):
        super().__init__(transport)
        self._has_unparsed = has_unparsed

    def resume_reading(self) -> None:
        if not self._has_unparsed():
            super().resume_reading()


class DoorProtocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, limits: Limits, connections: Connections, held: Held, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._limits = limits
        self._open = connections
        self.held = held
        self._unparsed = b""
        self._parsed_bytes = 0  # of these
        self._is_in_head = True  # or before one
        self._head_size = 0  # bytes of its URL and headers so far
        self._raw_bytes = 0  # read since the head began or since the last byte of a body: of nothing that is known yet
        self._head_timer: asyncio.TimerHandle | None = None
        self._is_refused = False
        self._linger_timer: asyncio.TimerHandle | None = None
        self._lingered_bytes = 0

    # -- what `Connections` asks ---------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def end(self) -> None:
        self.transport.abort()

    def name(self, key: bytes) -> None:
        """The client has shown this key. Raises `Overloaded` if it has too many connections."""
        self._open.name(self, key)

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.flow = _Flow(transport, lambda: self._has_unparsed)
        if not self._open.add(self):
            self._refuse(503, "too many connections are open; try again later")
            return
        idle_s = self._limits.idle_timeout_s
        self.timeout_keep_alive_task = self.loop.call_later(idle_s, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        self._open.remove(self)
        self._end_head()
        self._unset_keepalive_if_required()
        self._end_linger()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        self._unparsed = self._unparsed[self._parsed_bytes :] + data if self._has_unparsed else data
        self._parsed_bytes = 0
        self._parse()

    @property
    def _has_unparsed(self) -> bool:
        return self._parsed_bytes < len(self._unparsed)

    def _parse(self) -> None:
        """Parse as long as not too many requests run at once; the rest waits, and reading pauses."""
        while self._has_unparsed and len(self.pipeline) < MOST_PIPELINED:
            if self.transport.is_closing() or self.parser is None:
                return
            piece = self._unparsed[self._parsed_bytes : self._parsed_bytes + PIECE_BYTES]
            self._parsed_bytes += len(piece)
            self._receive(piece)
        if self._has_unparsed:
            self.flow.pause_reading()
        else:
            self._unparsed, self._parsed_bytes = b"", 0

    def _receive(self, piece: bytes) -> None:
        if self._is_refused or (not self._is_in_head and self.is_idle):  # nothing of it is wanted any more
            self._lingered_bytes += len(piece)
            if self._lingered_bytes > LINGER_BYTES:
                self.end()
                return
        if self._is_refused:
            return
        if self._is_in_head and self._head_timer is None:
            self._head_timer = self.loop.call_later(self._limits.head_timeout_s, self._head_is_late)
        if self._take(len(piece)):
            super().data_received(piece)

    def _take(self, count: int) -> bool:
        """Whether bytes that may be of a head may be read."""
        while True:
            try:
                self.held.take(NO_KEY, count)
                break
            except Overloaded as error:
                if not self._open.make_room():
                    self._refuse(503, error.message)
                    return False
                if self.transport.is_closing():  # it was this one
                    return False
        self._raw_bytes += count
        if self._raw_bytes > self._limits.max_head_bytes + PIECE_BYTES:
            self._refuse_head()
            return False
        return True

    # -- what the parser calls -----------------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._head_size = 0
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._add_to_head(len(url))

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._add_to_head(len(name) + len(value) + len(b": \r\n"))

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._end_head()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._forget_raw()
        super().on_body(body)

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_head = True
        self._end_head()
        self._end_linger()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._has_unparsed:
            self._parse()
            self.flow.resume_reading()
        if not self._is_in_head and not self.transport.is_closing():
            self._linger()

    # -- heads ---------------------------------------------------------------------------------------------------------

    def _add_to_head(self, count: int) -> None:
        """Also of trailers, which are headers after a body. Ends the parsing where there are too many."""
        self._head_size += count
        if self._head_size > self._limits.max_head_bytes or len(self.headers) > self._limits.max_headers:
            self._refuse_head()
            raise _TooLong

    def _end_head(self) -> None:
        self._forget_raw()
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _forget_raw(self) -> None:
        self.held.give_back(NO_KEY, self._raw_bytes)
        self._raw_bytes = 0

    def _head_is_late(self) -> None:
        self._refuse(408, f"a request's head must be whole within {self._limits.head_timeout_s:g} s")

    def _refuse_head(self) -> None:
        limits = self._limits
        self._refuse(
            431, f"a request's head may have {limits.max_head_bytes} bytes and {limits.max_headers} headers at most"
        )

    # -- refusals ------------------------------------------------------------------------------------------------------

    def _refuse(self, status: int, message: str) -> None:
        """Say why, and close. Where an answer is on its way already nothing can be said any more."""
        if self.transport.is_closing() or self._is_refused:
            return
        if not self.is_idle:
            self.end()
            return
        self._is_refused = True
        self._end_head()
        self._unset_keepalive_if_required()
        body = b'{"error":{"message":"%s","type":"invalid_request_error","param":null,"code":null}}' % message.encode()
        self.transport.write(
            b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s"
            % (status, PHRASES[status].encode(), len(body), body)
        )
        if self.transport.can_write_eof():  # over TLS it cannot be said before the end
            self.transport.write_eof()
        self._linger()

    def _linger(self) -> None:
        """Read on for a little while without looking at what comes."""
        self._lingered_bytes = 0
        if self._linger_timer is None:
            self._linger_timer = self.loop.call_later(LINGER_S, self.end)

    def _end_linger(self) -> None:
        if self._linger_timer is not None and not self._is_refused:
            self._linger_timer.cancel()
            self._linger_timer = None

    def send_400_response(self, msg: str) -> None:
        """uvicorn's way to refuse what it cannot parse. It may have been refused while it was parsed."""
        self._refuse(400, "this is not HTTP/1.1: the request line or a header cannot be read")
