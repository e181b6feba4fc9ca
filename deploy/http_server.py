"""Any ASGI application on an address, in this process's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import uvicorn

from ..errors import InvalidSetting
from ..workers.environment import give_back_large_blocks
from .access import Access
from .connections import Connections, Held
from .http_protocol import DoorProtocol
from .limits import Limits
from .unread import Unreading

BACKLOG = 2048
SHUTDOWN_GRACE_S = 5


class _Uvicorn(uvicorn.Server):
    """Signals are the business of whoever runs the process, and a TLS handshake has a time."""

    def __init__(self, config: uvicorn.Config, handshake_timeout_s: float):
        super().__init__(config)
        self._handshake_timeout_s = handshake_timeout_s

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """uvicorn's own, which leaves a handshake the minute that asyncio gives it."""
        config, loop = self.config, asyncio.get_running_loop()
        protocol = partial(config.http_protocol_class, config=config, server_state=self.server_state, app_state={})
        timeout_s = self._handshake_timeout_s if config.ssl else None
        self.servers = [
            await loop.create_server(
                protocol, sock=sock, ssl=config.ssl, backlog=config.backlog, ssl_handshake_timeout=timeout_s
            )
            for sock in sockets or ()
        ]
        self.started = True


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
        self._server = _Uvicorn(config, self._limits.head_timeout_s)
        self._serving: asyncio.Task[None] | None = None
        self._unread = Unreading(lambda: self._server.server_state.connections, self._limits)
        self._watching: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> str:
        """Listen; port 0 takes a free one. Returns the URL. Raises `InvalidSetting` if that can not be."""
        self._access.check_host(host)
        give_back_large_blocks()
        listening = _listen(host, port)
        self._serving = asyncio.ensure_future(self._server.serve(sockets=[listening]))
        self._watching = asyncio.ensure_future(self._unread.watch())
        while not self._server.started and not self._serving.done():
            await asyncio.sleep(0.001)
        if self._serving.done():
            await self._serving
        name = f"[{host}]" if ":" in host else host
        return f"{'https' if self._access.has_tls else 'http'}://{name}:{listening.getsockname()[1]}"

    async def stop(self) -> None:
        """Take nothing new, and give running answers a few seconds to end."""
        self._server.should_exit = True
        if self._serving is not None:
            await self._serving
        if self._watching is not None:
            self._watching.cancel()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listening.bind((host, port))
    except OSError as error:
        listening.close()
        raise InvalidSetting(
            f"can not listen on {host}:{port}: {error.strerror}. Choose another port, or 0 for a free one.",
            field="port",
            asked=port,
        ) from error
    listening.listen(BACKLOG)
    return listening
