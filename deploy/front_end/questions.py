"""What a front end asks an engine beside requests: how busy it is, what is in its cache, what was measured."""

import asyncio
from collections.abc import Sequence
from typing import Any, TypeVar

from ...controller.metrics import Metrics
from ...controller.snapshot import EngineSnapshot
from ...errors import IntarsiaError
from ...proto.codec import read
from ...proto.leases import Lease
from ...proto.messages import (
    AskCacheState,
    AskLeases,
    AskLoad,
    AskMetrics,
    AskProbe,
    AskSnapshot,
    Prepare,
    ReleaseLease,
)
from ...proto.status import CacheState, EngineLoad, PreparedPrompt, Probe, SnapshotQuery
from .connection import Connection

Known = TypeVar("Known")


class Questions:
    """Questions that wait for their answers. Each raises `EngineUnavailable` when the engine is lost meanwhile.

    A viewer is a salt: the answer is about its requests. None: about all.
    """

    def __init__(self, connection: Connection):
        self._connection = connection
        self._waiting: dict[int, asyncio.Future[Any]] = {}  # by handle

    async def load(self, viewer: str | None = None) -> EngineLoad:
        """How busy the engine is."""
        return await self._ask(AskLoad, viewer, kind=EngineLoad)

    async def cache_state(self, viewer: str | None = None) -> CacheState:
        """Where the pool's blocks are."""
        return await self._ask(AskCacheState, viewer, kind=CacheState)

    async def probe(self, tokens: Sequence[int], salt: str = "", viewer: str | None = None) -> Probe:
        """What a request with this prompt and salt would meet. viewer: whose requests the load counts."""
        return await self._ask(AskProbe, list(tokens), salt, viewer, kind=Probe)

    async def prepare(
        self,
        tokens: Sequence[int],
        tenant: str = "",
        salt: str = "",
        kept: int = 0,
        passed: Sequence[int] = (),
        lease: str = "",
    ) -> PreparedPrompt:
        """Have a prompt computed up to its last token when there is room. Returns when it is, or will not be.

        kept, passed: an earlier sequence has so many tokens in common with it, and goes on so; none will ask for that.
        lease: of the conversation, which is to hold this, too
        """
        about = tenant, salt, kept, list(passed), lease
        return await self._ask(Prepare, list(tokens), *about, kind=PreparedPrompt)

    async def metrics(self) -> Metrics:
        """What was measured since the start."""
        return await self._ask(AskMetrics, kind=Metrics)

    async def snapshot(self, query: SnapshotQuery) -> EngineSnapshot:
        """All there is to see at one moment."""
        return await self._ask(AskSnapshot, query, kind=EngineSnapshot)

    async def leases(self, viewer: str | None = None) -> tuple[Lease, ...]:
        """Conversations whose cache is held."""
        return await self._ask(AskLeases, viewer, kind=tuple[Lease, ...])

    async def release_lease(self, lease: str, viewer: str | None = None) -> bool:
        """End one. False if there is none of that id."""
        return await self._ask(ReleaseLease, lease, viewer, kind=bool)

    async def _ask(self, question: type, *about: Any, kind: type[Known]) -> Known:
        handle = self._connection.ask(question, *about)
        self._waiting[handle] = asyncio.get_running_loop().create_future()
        try:
            return read(await self._waiting[handle], kind)
        finally:
            self._waiting.pop(handle, None)

    def answer(self, handle: int, value: Any) -> None:
        """The engine has answered. An asker may have left before."""
        waiting = self._waiting.get(handle)
        if waiting is not None and not waiting.done():
            waiting.set_result(value)

    def end(self, error: IntarsiaError) -> None:
        """The engine is lost: no answer comes any more."""
        asked, self._waiting = self._waiting, {}
        for waiting in asked.values():
            if not waiting.done():
                waiting.set_exception(error)
