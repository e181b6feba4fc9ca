"""A connection until it speaks TLS: counted like any other from its first moment, and given no longer than a head."""

import asyncio
import ssl
from collections.abc import Callable
from typing import Any

from .connections import Connections


class Handshake(asyncio.Protocol):
    """Agrees on TLS with one client, and then puts the protocol of the application in its own place."""

    def __init__(self, context: ssl.SSLContext, within_s: float, connections: Connections, then: Callable[[], Any]):
        """then: makes that protocol"""
        self._context = context
        self._within_s = within_s
        self._connections = connections
        self._then = then
        self._early: list[bytes] = []  # the client may speak before the task below goes on
        self._shaking: asyncio.Task[None] | None = None

    # -- what `Connections` asks ---------------------------------------------------------------------------------------

    @property
    def is_idle(self) -> bool:
        return True

    def end(self) -> None:
        self._transport.abort()

    # -- what asyncio calls --------------------------------------------------------------------------------------------

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        transport.pause_reading()  # what comes is for `start_tls`
        if self._connections.add(self):
            self._shaking = asyncio.ensure_future(self._shake())
        else:
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.remove(self)
        if self._shaking is not None:
            self._shaking.cancel()

    def data_received(self, data: bytes) -> None:
        self._early.append(data)

    async def _shake(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            secured = await loop.start_tls(
                self._transport, self, self._context, server_side=True, ssl_handshake_timeout=self._within_s
            )
        except OSError:  # what TLS does not like, and what takes too long, are some of them
            secured = None
        self._connections.remove(self)
        if secured is None:
            self._transport.abort()
            return
        protocol = self._then()
        secured.set_protocol(protocol)
        protocol.connection_made(secured)
        for data in self._early:
            protocol.data_received(data)
