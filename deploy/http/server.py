"""Any ASGI application on an address, in this process's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from ...environment import give_back_large_blocks
from ..front_end.access import Access
from ..front_end.unread import Unreading
from ..settings.limits import Limits
from ..settings.ports import BACKLOG, listening
from .connections import Connections, Held
from .protocol import DoorProtocol
from .tls import Handshake

SHUTDOWN_GRACE_S = 5


class _Uvicorn(uvicorn.Server):
    """Signals are the business of the process that runs it, and connections are counted from their first moment."""

    def __init__(self, config: uvicorn.Config, limits: Limits, connections: Connections):
        super().__init__(config)
        self._limits = limits
        self._connections = connections

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own would have asyncio agree on TLS: uncounted, and for a minute."""
        loop = asyncio.get_running_loop()
        self.servers = [await loop.create_server(self._accepted, sock=each, backlog=BACKLOG) for each in sockets or ()]
        self.started = True

    def _accepted(self) -> asyncio.BaseProtocol:
        protocol: Any = self.config.http_protocol_class
        spoken = partial(protocol, config=self.config, server_state=self.server_state, app_state={})
        if self.config.ssl is None:
            return spoken()
        return Handshake(self.config.ssl, self._limits.head_timeout_s, self._connections, spoken)


class HttpServer:
    """An application that listens between `start` and `stop`."""

    def __init__(self, app: Any, access: Access | None = None, limits: Limits | None = None):
        self._access = access or Access()
        self._limits = limits or Limits()
        options: Any = self._access.ssl_options()
        connections = Connections(self._limits, wants_key=self._access.wants_key)
        protocol: Any = partial(DoorProtocol, limits=self._limits, connections=connections, held=Held(self._limits))
        config = uvicorn.Config(
            app,
            log_level="error",  # a line for each malformed request would be a stranger's to write
            access_log=False,
            lifespan="off",
            server_header=False,
            http=protocol,
            ws="none",
            backlog=BACKLOG,
            timeout_keep_alive=self._limits.idle_timeout_s,  # type: ignore[arg-type]  fractions are fine
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            **options,
        )
        self._server = _Uvicorn(config, self._limits, connections)
        self._serving: asyncio.Task[None] | None = None
        self._unread = Unreading(lambda: self._server.server_state.connections, self._limits)
        self._watching: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> str:
        """Listen; port 0 takes a free one. Returns the URL. Raises `InvalidSetting` if that cannot be."""
        self._access.check_host(host)
        give_back_large_blocks()
        opened = listening(host, port)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[opened]))
        self._watching = asyncio.ensure_future(self._unread.watch())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            await self._serving
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self._access.has_tls else 'http'}://{name}:{opened.getsockname()[1]}"

    async def stop(self) -> None:
        """Take nothing new, and give running answers a few seconds to end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        if self._watching is not None:
            self._watching.cancel()
