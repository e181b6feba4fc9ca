"""`grpc.health.v1.Health`: whether requests had better come here, for load balancers. They have no keys."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from ..front_end.counted import Counted
from ..front_end.front_end import FrontEnd

HEALTH = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthServicer(health_pb2_grpc.HealthServicer):
    """All services of a server are well, or none is. Before the server starts, none is."""

    def __init__(self, services: Sequence[str], max_watchers: int):
        """services: by name; empty for the server as a whole."""
        self._services = frozenset(services)
        self._watchers = Counted("health watches", max_watchers, max_watchers)
        self._is_serving = False
        self._has_left = False
        self._changed = asyncio.Event()  # replaced with each change
        self._following: asyncio.Task[None] | None = None

    def set(self, *, is_serving: bool) -> None:
        """Say so from now on, unless it was said that the server leaves."""
        if is_serving != self._is_serving and not self._has_left:
            self._is_serving = is_serving
            self._changed.set()
            self._changed = asyncio.Event()

    def leave(self) -> None:
        """Say for good that nothing is served."""
        self.set(is_serving=False)
        self._has_left = True
        if self._following is not None:
            self._following.cancel()

    def follow(self, front_ends: Sequence[FrontEnd]) -> None:
        """Say from now on that requests are served, and that none is while no engine is there."""
        self.set(is_serving=True)
        self._following = asyncio.ensure_future(self._follow(front_ends))

    async def _follow(self, front_ends: Sequence[FrontEnd]) -> None:
        """Ends when no engine can come back."""
        gone: set[int] = set()

        async def one(number: int, front_end: FrontEnd) -> None:
            while True:
                await front_end.engine_gone()
                gone.add(number)
                self.set(is_serving=len(gone) < len(front_ends))
                if not await front_end.engine_back():
                    return
                gone.discard(number)
                self.set(is_serving=True)

        await asyncio.gather(*(one(number, each) for number, each in enumerate(front_ends)))

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Any) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status == SERVICE_UNKNOWN:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=status)

    async def List(self, request: Any, context: Any) -> Any:
        messages: Any = health_pb2
        statuses = {name: health_pb2.HealthCheckResponse(status=self._status(name)) for name in self._services}
        return messages.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Any
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        """The status now, and each other one that comes; what passes while the watcher does not read is not told."""
        with self._watchers.one():
            last = None
            while True:
                changed, status = self._changed, self._status(request.service)
                if status != last:
                    last = status
                    yield health_pb2.HealthCheckResponse(status=status)
                    continue  # it may have changed meanwhile
                await changed.wait()

    def _status(self, service: str) -> Any:
        if service not in self._services:
            return SERVICE_UNKNOWN
        return SERVING if self._is_serving else NOT_SERVING
