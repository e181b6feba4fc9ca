"""Start an engine from an ordinary process: start or join Ray, hire workers, create the controller, connect to it.

The process that starts an engine owns all its actors. When the controller dies, it makes another one for the workers
that are there; its requests go on by themselves (`client.py`).
"""

import asyncio
import contextlib
import logging
import os
import time
import uuid
from collections.abc import Callable, Collection, Coroutine
from dataclasses import replace
from functools import partial
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from ..errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ..kvcache.check import Recount
from ..proto.channel import Address
from ..workers.checkpoint import Checkpoint
from ..workers.facts import Process
from .actor import NAMESPACE, ControllerActor
from .client import EngineClient
from .crew import Crew, dismiss, end_process, hire
from .remote import answer
from .startup import EngineSettings

logger = logging.getLogger(__name__)

INSECURE = "INTARSIA_INSECURE_RAY"
"""Environment variable; 1: a cluster of several machines need not ask for a token."""

SHUTDOWN_TIMEOUT_S = 10.0
NAME_TIMEOUT_S = 10.0
MOST_TRIES = 5
"""Times in a row that a controller is lost while it takes over."""

WATCH_EVERY_S = 0.2
ASK_TIMEOUT_S = 1.0
QUIET_LOOKS = 3
LOOK_EVERY_S = 0.1


class RunningEngine:
    """A started engine and our connection to it."""

    def __init__(self, actors: "_Actors", client: EngineClient, *, owns_ray: bool):
        self.client = client
        self._actors = actors
        self._owns_ray = owns_ray

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
        """Wait until nobody is answered any more, having told other front ends to ask elsewhere."""
        await answer(self._controller.leave.remote(), "controller")
        deadline = time.monotonic() + within_s
        quiet = 0
        while quiet < QUIET_LOOKS and time.monotonic() < deadline:  # whoever asked before we left may just be coming
            load = await self.client.load()
            quiet = quiet + 1 if load.running + load.waiting == 0 else 0
            await asyncio.sleep(LOOK_EVERY_S)

    async def shutdown(self) -> None:
        """End the engine; and Ray, if starting the engine started it."""
        await self.client.close()
        await self._actors.end()
        if self._owns_ray:
            ray.shutdown()


Watch = Callable[[int, int], None]
"""Told how many of how many parameters are loaded."""


async def start_engine(settings: EngineSettings, watch: Watch | None = None) -> RunningEngine:
    """Start an engine in the Ray cluster at hand, or in a local one of its own. `watch` sees it load.

    Raises `ModelError`, `InvalidSetting` or `EngineUnavailable`; nothing is left running then.
    """
    Checkpoint(settings.model.model_dir)  # a wrong path or a broken file is told at once, not after Ray has started
    owns_ray = ensure_ray(settings.model.tensor_parallel_size)
    try:
        check_cluster({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]}, _wants_token())
        actors = await _Actors.create(settings)
        try:
            client = await EngineClient.connect(await actors.start(watch), actors.start_again)
        except BaseException:
            await actors.end()
            raise
    except BaseException:
        if owns_ray:
            ray.shutdown()
        raise
    return RunningEngine(actors, client, owns_ray=owns_ray)


class _Actors:
    """The actors of an engine: workers, and a controller that can be replaced."""

    def __init__(self, settings: EngineSettings, controller: Any, process: Process, crew: Crew):
        self.controller = controller
        self.process = process
        self._settings = settings
        self._crew = crew

    @classmethod
    async def create(cls, settings: EngineSettings) -> "_Actors":
        settings = replace(settings, name=settings.name or f"engine-{uuid.uuid4().hex[:8]}")
        controller = _create(settings.name)
        try:
            crew = await hire(settings.model.tensor_parallel_size)
            try:
                return cls(settings, controller, await _process_of(controller), crew)
            except BaseException:
                dismiss(crew)
                raise
        except BaseException:
            ray.kill(controller)
            raise

    async def start(self, watch: Watch | None) -> Address:
        """Where front ends connect, when all is loaded."""
        starting = answer(self.controller.start.remote(self._settings, self._crew, is_new=True), "controller")
        return await _watched(self.controller, starting, watch)

    async def start_again(self) -> Address:
        """With another controller in place of the one that has gone, or does not answer. Raises `EngineUnavailable`."""
        started = time.monotonic()
        logger.warning("the controller is gone; another one takes over")
        for tried in range(1, MOST_TRIES + 1):
            await end_process(self.process)
            ray.kill(self.controller)
            self.controller = await _name_freed(partial(_create, self._settings.name))
            try:
                self.process = await _process_of(self.controller)
                start = self.controller.start.remote(self._settings, self._crew, is_new=False)
                address = await answer(start, "controller")
            except EngineUnavailable as error:
                logger.warning("a controller could not be started: %s", error)
                if tried == MOST_TRIES:
                    raise
            else:
                logger.warning("a controller is back after %.1f s", time.monotonic() - started)
                return address
        raise AssertionError

    async def end(self) -> None:
        with contextlib.suppress(IntarsiaError, TimeoutError):  # it is gone, or it hangs: killing is all that is left
            await asyncio.wait_for(answer(self.controller.shutdown.remote(), "controller"), SHUTDOWN_TIMEOUT_S)
        ray.kill(self.controller)
        dismiss(self._crew)


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


def ensure_ray(workers: int) -> bool:
    """Use the Ray this process is connected to, else the one RAY_ADDRESS names, else start one. True if started."""
    if ray.is_initialized():
        return False
    logging.getLogger("ray").setLevel(logging.ERROR)  # its start-up remarks are not for our users
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR, "configure_logging": False}
    if os.environ.get("RAY_ADDRESS"):
        ray.init(namespace=NAMESPACE, **quiet)
        return False
    os.environ.setdefault("RAY_worker_niceness", "0")  # Ray would let our workers yield to every other process
    # Nobody reads Ray's own metrics where it has no dashboard; to send them wakes all its processes again and again.
    os.environ.setdefault("RAY_enable_metrics_collection", "0")
    cores = len(os.sched_getaffinity(0))
    ray.init(
        address="local",
        namespace=NAMESPACE,
        num_cpus=max(cores, workers),  # workers share cores rather than wait for each other
        include_dashboard=False,
        _node_ip_address="127.0.0.1",
        **quiet,
    )
    return True


def check_cluster(addresses: Collection[str], wants_token: bool) -> None:
    """Whoever can connect to a Ray cluster runs code on all of it. Raises `InvalidSetting` where that is anybody on the
    network between its machines. addresses: of its nodes."""
    if wants_token or len(set(addresses)) <= 1 or os.environ.get(INSECURE) == "1":
        return
    raise InvalidSetting(
        f"the Ray cluster spans {len(set(addresses))} machines and asks for no token, so that whoever reaches its "
        "ports runs code on them. Start its nodes with RAY_AUTH_MODE=token and a token of your own (ray get-auth-token "
        f"--generate), or set {INSECURE}=1 if the network itself keeps strangers out.",
        field="RAY_AUTH_MODE",
    )


def _wants_token() -> bool:
    try:  # Ray has no public way to ask
        from ray._private.authentication.authentication_utils import is_token_auth_enabled
    except ImportError:
        return os.environ.get("RAY_AUTH_MODE") == "token"
    return is_token_auth_enabled()


def _create(name: str | None) -> Any:
    """On this node, because its front end is here, and goes with it. Ray does not keep to a mere preference (`soft`)
    when an actor asks for no CPUs."""
    make: Any = ControllerActor
    here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)
    try:
        return make.options(name=name, namespace=NAMESPACE, scheduling_strategy=here).remote()
    except ValueError as error:
        raise InvalidSetting(
            f"an engine named {name!r} runs in this Ray cluster already; choose another name or stop that one",
            field="name",
        ) from error
