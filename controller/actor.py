"""The Ray actor around `Engine`: the central controller of one model. The one place that wraps it."""

import asyncio
from dataclasses import asdict
from typing import Any

import ray

from ..environment import freeze_startup_objects, log_as_asked, prepare_process
from ..kvcache.check import Recount
from ..proto.channel import Address
from ..proto.worker import Process
from ..workers.process.actor import own_process
from .engine import Engine
from .kv_publisher import KvEvents, kv_events
from .placement import Placement
from .server import EngineServer
from .startup import EngineSettings, build_engine
from .worker_group import WorkerGroup


@ray.remote(num_cpus=0)
class ControllerActor:
    """Drives the workers, runs the engine's loop, tells front ends where to connect."""

    def __init__(self):
        prepare_process()
        log_as_asked()
        self._workers: WorkerGroup | None = None
        self._engine: Engine | None = None
        self._kv_events: KvEvents | None = None
        self._loop_task: asyncio.Task | None = None
        self._address: Address | None = None

    async def process(self) -> Process:
        """Where we run."""
        return own_process()

    async def start(
        self, settings: EngineSettings, placement: Placement, *, is_new: bool, host: str | None = None
    ) -> Address:
        """Load and allocate everything; or, with workers that had another controller, as much as they have not. Returns
        where front ends connect: at `host`, or None, where other machines can."""
        self._workers = WorkerGroup(placement)
        await (self._workers.assemble() if is_new else self._workers.take_over())
        self._engine = engine = await build_engine(settings, self._workers)
        self._kv_events = kv_events(settings.kv_events, engine.info, engine.cache_watchers)
        if self._kv_events is not None:
            engine.info = engine.info._replace(notes=(*engine.info.notes, self._kv_events.note))
        door = EngineServer(self._engine)
        self._address = await door.start(host or ray.util.get_node_ip_address())
        freeze_startup_objects()
        self._loop_task = asyncio.create_task(self._serve(self._engine, door))
        return self._address

    async def address(self) -> Address | None:
        """Where front ends connect; None while it starts."""
        return self._address

    async def leave(self) -> None:
        """Tell routers to choose another engine."""
        assert self._engine is not None
        self._engine.status.is_leaving = True

    async def loaded(self) -> tuple[int, int]:
        """How far `start` has come: parameters that are there, and all of them."""
        return await self._workers.loaded() if self._workers is not None else (0, 0)

    async def _serve(self, engine: Engine, door: EngineServer) -> None:
        """Run the engine until it fails or is stopped; closed connections tell every front end."""
        try:
            await engine.run()
        finally:
            if self._kv_events is not None:
                await asyncio.to_thread(self._kv_events.close)
            await door.close(engine.failure)

    async def stats(self) -> dict[str, Any]:
        assert self._engine is not None
        return asdict(self._engine.stats)

    async def recount(self) -> Recount:
        """Count every block from the tables. Raises `AssertionError` on any contradiction."""
        assert self._engine is not None
        return self._engine.recount()

    async def reset_prefix_cache(self) -> None:
        assert self._engine is not None
        self._engine.reset_prefix_cache()

    async def worker_process_ids(self) -> list[int]:
        assert self._workers is not None
        return await self._workers.process_ids()

    async def shutdown(self) -> None:
        """Stop serving, and leave the workers. The process that started the engine ends them and the actor."""
        if self._loop_task:
            self._loop_task.cancel()
            await asyncio.gather(self._loop_task, return_exceptions=True)
        if self._engine and (tracer := self._engine.telemetry.tracer):
            await asyncio.to_thread(tracer.close)
        if self._workers:
            await self._workers.leave()
