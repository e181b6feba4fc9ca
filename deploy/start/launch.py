"""Start an engine from an ordinary process: start or join Ray, place workers, create the controller, connect to it.

The process that starts an engine owns all its actors. When the controller dies, it makes another one for the workers
that are there; its requests go on by themselves (`front_end/engine_client.py`).
"""

import asyncio
import contextlib
import logging
import threading
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ...controller.actor import ControllerActor
from ...controller.losses import Losses
from ...controller.placement import Placement, end_process, place_workers, release_workers
from ...controller.ray_calls import LOOPBACK, answer
from ...controller.startup import EngineSettings
from ...errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ...kvcache.check import Recount
from ...proto.channel import Address
from ...proto.worker import Process
from ...workers.checkpoint.files import Checkpoint
from ..front_end.engine_client import EngineClient
from ..proof.gate import check_right
from .before_ray import check_cluster
from .own_ray import NAMESPACE, OwnRay, asks_for_token, ensure_ray
from .processes import end_processes, processes_of_ray

logger = logging.getLogger(__name__)

SHUTDOWN_TIMEOUT_S = 1.0
"""Time for a controller to tell waiting clients and its workers that it ends."""

GIVE_UP_START_S = 3.0
"""Time for a Ray that starts to notice that its processes are gone."""

RELEASE_TIMEOUT_S = 10.0
"""Time for Ray to end our actors in a cluster that lives on."""

NAME_TIMEOUT_S = 10.0

WATCH_EVERY_S = 0.2
ASK_TIMEOUT_S = 1.0
QUIET_LOOKS = 3
LOOK_EVERY_S = 0.1


class RunningEngine:
    """A started engine and our connection to it."""

    def __init__(self, actors: "_Actors", client: EngineClient, own_ray: OwnRay | None):
        self.client = client
        self._actors = actors
        self._own_ray = own_ray

    @property
    def _controller(self) -> Any:
        return self._actors.controller

    async def recount(self) -> Recount:
        return await answer(self._controller.recount.remote(), "controller")

    async def stats(self) -> dict[str, Any]:
        return await answer(self._controller.stats.remote(), "controller")

    async def reset_prefix_cache(self) -> None:
        await answer(self._controller.reset_prefix_cache.remote(), "controller")

    async def worker_process_ids(self) -> list[int]:
        return await answer(self._controller.worker_process_ids.remote(), "controller")

    @property
    def controller_process_id(self) -> int:
        return self._actors.process.pid

    async def leave(self, within_s: float) -> None:
        """Tell other front ends to ask elsewhere, then wait until no request is being answered."""
        await answer(self._controller.leave.remote(), "controller")
        deadline = time.monotonic() + within_s
        quiet = 0
        while quiet < QUIET_LOOKS and time.monotonic() < deadline:  # a request sent before we left may still arrive
            load = await self.client.questions.load()
            quiet = quiet + 1 if load.running + load.waiting == 0 else 0
            await asyncio.sleep(LOOK_EVERY_S)

    async def shutdown(self) -> None:
        """End the engine; and Ray, if starting the engine started it. Within seconds, whatever has gone before."""
        await self.client.close()
        await self._actors.take_leave()
        await _end(self._actors, self._own_ray)


Watch = Callable[[int, int], None]
"""Called with the number of parameters loaded and their total."""


async def start_engine(settings: EngineSettings, watch: Watch | None = None) -> RunningEngine:
    """Start an engine in the Ray cluster at hand, or in a local one of its own. `watch` sees it load.

    Raises `ModelError`, `InvalidSetting` or `EngineUnavailable`; nothing is left running then.
    """
    # A wrong path, a broken file or a family that would be answered wrong is told at once, not after Ray has started.
    model = settings.model
    config = Checkpoint(model.model_dir).config
    ranks, runs_own_code = model.tensor_parallel_size, model.trust_remote_code
    await _beside(partial(check_right, model.model_dir, config, ranks, runs_own_code=runs_own_code))
    own_ray = await ensured_ray(model.tensor_parallel_size, settings.insecure_ray)
    actors = None
    try:
        await _beside(_check_cluster, settings.insecure_ray)
        actors = await _Actors.create(settings)
        client = await EngineClient.connect(await actors.start(watch), actors.start_again, settings.give_up_after_s)
    except BaseException:
        await asyncio.shield(_end(actors, own_ray))
        raise
    return RunningEngine(actors, client, own_ray)


async def ensured_ray(workers: int, is_insecure_fine: bool) -> OwnRay | None:
    """A Ray to run in, with room for so many workers; returned if it is our own, and then the caller's to stop. Given
    up while it starts, none of it is left; and the process is not left before its threads have noticed, for they would
    stumble."""
    ensure = partial(ensure_ray, is_insecure_fine=is_insecure_fine)
    starting = asyncio.ensure_future(_beside(ensure, workers))
    try:
        return await asyncio.shield(starting)
    except asyncio.CancelledError:
        end_processes(processes_of_ray())
        await asyncio.wait({starting}, timeout=GIVE_UP_START_S)
        if starting.done() and starting.exception() is None and (own_ray := starting.result()):
            await _beside(own_ray.stop)
        raise


def _check_cluster(is_insecure_fine: bool) -> None:
    """Raises `InvalidSetting` for a cluster that anybody can run code on."""
    is_asked = asks_for_token(ray.get_runtime_context().gcs_address)
    check_cluster(len(_addresses()), asks_for_token=is_asked, is_insecure_fine=is_insecure_fine)


def _addresses() -> set[str]:
    """The addresses of the cluster's machines."""
    return {node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}


async def stop_ray(own_ray: OwnRay) -> None:
    """End it with all that runs there."""
    await _end(None, own_ray)


async def _end(actors: "_Actors | None", own_ray: OwnRay | None) -> None:
    if own_ray is not None:  # and with it all that runs there
        await _beside(own_ray.stop)
    elif actors is not None:
        with contextlib.suppress(TimeoutError):  # a cluster without its GCS gives no answer
            await asyncio.wait_for(_beside(actors.release), RELEASE_TIMEOUT_S)


async def _beside(work: Callable[..., Any], *arguments: Any) -> Any:
    """Do it in a thread that is waited for here only: Ray may not come back from a call."""
    loop = asyncio.get_running_loop()
    made: asyncio.Future[Any] = loop.create_future()

    def run() -> None:
        try:
            result, error = work(*arguments), None
        except BaseException as raised:  # noqa: BLE001  it is raised where this is awaited
            result, error = None, raised
        # Nothing hears the result if the loop has gone; a Ray that was started is stopped then.
        try:
            loop.call_soon_threadsafe(tell, result, error)
        except RuntimeError:  # the loop has gone
            if isinstance(result, OwnRay):
                result.stop()

    def tell(result: Any, error: BaseException | None) -> None:
        if made.done():
            return  # the caller waits no more
        if error is not None:
            made.set_exception(error)
        else:
            made.set_result(result)

    try:
        threading.Thread(target=run, name=getattr(work, "__name__", "beside"), daemon=True).start()
    except RuntimeError:  # Python 3.12.0 and 3.12.1 start none once the program has come to its end
        run()
    return await made


class _Actors:
    """The actors of an engine: workers, and a controller that can be replaced."""

    def __init__(self, settings: EngineSettings, controller: Any, process: Process, placement: Placement):
        self.controller = controller
        self.process = process
        self._settings = settings
        self._placement = placement
        self._host: str | None = None  # where front ends come to; None: on the network, since other machines have some

    @classmethod
    async def create(cls, settings: EngineSettings) -> "_Actors":
        is_private = settings.name is None  # only this process looks for it
        settings = replace(settings, name=settings.name or f"engine-{uuid.uuid4().hex[:8]}")
        controller = _create(settings.name)
        try:
            placement = await place_workers(settings.model.tensor_parallel_size)
            try:
                actors = cls(settings, controller, await _process_of(controller), placement)
            except BaseException:
                release_workers(placement)
                raise
        except BaseException:
            ray.kill(controller)
            raise
        if is_private or len(_addresses()) == 1:
            actors._host = LOOPBACK
        return actors

    async def start(self, watch: Watch | None) -> Address:
        """Start the engine. Returns the address for front ends, when all is loaded."""
        return await _watched(self.controller, self._begin(is_new=True), watch)

    def _begin(self, *, is_new: bool) -> Coroutine[Any, Any, Address]:
        return answer(
            self.controller.start.remote(self._settings, self._placement, is_new=is_new, host=self._host), "controller"
        )

    async def start_again(self) -> Address:
        """Start another controller in place of the one that has gone, or does not answer. Raises `EngineUnavailable`
        when none could be had for `give_up_after_s`."""
        started = time.monotonic()
        if ray.is_initialized():
            logger.warning("the controller is gone; another one takes over")
        losses = Losses(self._settings.give_up_after_s)
        while True:
            if not ray.is_initialized():  # to use Ray now would join whatever cluster runs here
                raise EngineUnavailable("this process has left Ray, and with it the engine; start another engine")
            await end_process(self.process)
            ray.kill(self.controller)
            try:
                self.controller = await _name_freed(partial(_create, self._settings.name))
                self.process = await _process_of(self.controller)
                address = await self._begin(is_new=False)
            except (EngineUnavailable, InvalidSetting) as error:
                logger.warning("a controller could not be started: %s", error)
                await losses.bear(error)
            else:
                logger.warning("a controller is back after %.1f s", time.monotonic() - started)
                return address

    async def take_leave(self) -> None:
        """Let who waits for the engine, and its workers, know that it goes."""
        with contextlib.suppress(IntarsiaError, TimeoutError):  # it is gone, or it hangs: killing is all that is left
            await asyncio.wait_for(answer(self.controller.shutdown.remote(), "controller"), SHUTDOWN_TIMEOUT_S)

    def release(self) -> None:
        """End them all."""
        ray.kill(self.controller)
        release_workers(self._placement)


async def _process_of(controller: Any) -> Process:
    return Process(*await answer(controller.process.remote(), "controller"))


async def _name_freed(create: Callable[[], Any]) -> Any:
    """Ray may learn of the death of the one before later than we."""
    deadline = time.monotonic() + NAME_TIMEOUT_S
    while True:
        try:
            return create()
        except InvalidSetting:
            if time.monotonic() > deadline:
                raise
        await asyncio.sleep(LOOK_EVERY_S)


async def find_engines(prefix: str, known: Collection[str] = ()) -> dict[str, Address]:
    """Engines of the Ray cluster that are ready and whose names begin so, beside those that are known."""

    def list_names() -> list[str]:
        actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        return [a["name"] for a in actors if a["namespace"] == NAMESPACE and a["name"].startswith(prefix)]

    async def address_of(name: str) -> Address | None:
        try:
            controller: Any = await asyncio.to_thread(ray.get_actor, name, NAMESPACE)
            return await asyncio.wait_for(answer(controller.address.remote(), "controller"), ASK_TIMEOUT_S)
        except (ValueError, TimeoutError, IntarsiaError):  # it has gone meanwhile, or is busy starting
            return None

    names = [name for name in await asyncio.to_thread(list_names) if name not in known]
    addresses = await asyncio.gather(*map(address_of, names))
    return {name: address for name, address in zip(names, addresses, strict=True) if address is not None}


async def _watched(controller: Any, starting: Coroutine[Any, Any, Address], watch: Watch | None) -> Address:
    if watch is None:
        return await starting
    task = asyncio.ensure_future(starting)
    while not (await asyncio.wait({task}, timeout=WATCH_EVERY_S))[0]:
        with contextlib.suppress(IntarsiaError):  # whatever is wrong, `starting` says it better
            watch(*await answer(controller.loaded.remote(), "controller"))
    return task.result()


def _create(name: str | None) -> Any:
    """Create it on this node, because its front end is here, and goes with it. Ray does not keep to a mere preference
    (`soft`) when an actor asks for no CPUs."""
    make: Any = ControllerActor
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        return make.options(name=name, namespace=NAMESPACE, scheduling_strategy=here).remote()
    except ValueError as error:
        raise InvalidSetting(
            f"an engine named {name!r} runs in this Ray cluster already; choose another name or stop that one",
            field="name",
        ) from error
