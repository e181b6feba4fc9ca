"""Any ASGI application on an address, in this process's event loop."""

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from ..errors import InvalidSetting
from .access import Access
from .limits import Limits
from .unread import Connections

BACKLOG = 2048
SHUTDOWN_GRACE_S = 5

IDLE_S = 75
"""Before a connection is closed that nobody uses. Longer than clients and load balancers keep one (httpx, and OpenAI's
client with it, 5 s; AWS's balancer and nginx 60 s): whoever closes first knows that it is closed, and the other one may
be sending a request just then, which is lost."""


class _Uvicorn(uvicorn.Server):
    """Signals are the business of whoever runs the process."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """An application that listens between `start` and `stop`."""

    def __init__(self, app: Any, access: Access | None = None, limits: Limits | None = None):
        self._access = access or Access()
        self._limits = limits or Limits()
        options: Any = self._access.ssl_options()
        config = uvicorn.Config(
            app,
            log_level="warning",
            access_log=False,
            lifespan="off",
            server_header=False,
            timeout_keep_alive=IDLE_S,
            timeout_graceful_shutdown=SHUTDOWN_GRACE_S,
            **options,
        )
        self._server = _Uvicorn(config)
        self._serving: asyncio.Task[None] | None = None
        self._unread = Connections(lambda: self._server.server_state.connections, self._limits)
        self._watching: asyncio.Task[None] | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 8000) -> str:
        """Listen; port 0 takes a free one. Returns the URL. Raises `InvalidSetting` if that can not be."""
        self._access.check_host(host)
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
