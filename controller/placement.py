"""The worker actors of one engine, and their places.

The process that starts the engine owns them, so that they outlive a controller that dies: the next one takes them over
with the weights they have. Ray puts a new process in the place of one that dies.
"""

import asyncio
import contextlib
import os
import signal
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..environment import start_of_process
from ..errors import EngineUnavailable, InvalidSetting
from ..proto.worker import Process, check_gpus
from ..workers.process.actor import WorkerActor, homes

PLACEMENT_TIMEOUT_S = 60.0

BESIDE_US_TIMEOUT_S = 2.0
"""For places on our own node: they are there at once, or others have them."""

KILL_WITHIN_S = 10.0


class Placement(NamedTuple):
    """All ranks in order, each an actor in a bundle of the placement group."""

    group: PlacementGroup
    actors: list[Any]

    @property
    def bundle(self) -> dict[str, float]:
        """What each of them has."""
        return self.group.bundle_specs[0]

    @property
    def has_gpus(self) -> bool:
        return bool(self.bundle.get("GPU"))


async def place_workers(size: int) -> Placement:
    """Place `size` workers, one GPU each where the cluster has them, else one CPU each. They begin to start.

    Raises `InvalidSetting` when the cluster is too small, `EngineUnavailable` when it has no room in time.
    """
    group = await _place(size)
    placement = Placement(group, [])
    options = {"num_cpus": 1, "num_gpus": placement.bundle.get("GPU", 0), "max_restarts": -1}
    make: Any = WorkerActor
    for rank in range(size):
        strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=rank)
        placement.actors.append(make.options(scheduling_strategy=strategy, **options).remote(rank, size))
    return placement


def release_workers(placement: Placement) -> None:
    """End all workers and give their resources back."""
    for actor in placement.actors:
        ray.kill(actor)
    remove_placement_group(placement.group)


async def end_process(process: Process) -> None:
    """Kill it, wherever in the cluster it is, even if it is stopped. If its node was lost, so was it."""
    here = NodeAffinitySchedulingStrategy(process.node_id, soft=False)
    kill: Any = _kill
    with contextlib.suppress(TimeoutError, RayError):
        await asyncio.wait_for(
            kill.options(scheduling_strategy=here).remote(process.pid, process.started), KILL_WITHIN_S
        )


@ray.remote(num_cpus=0)
def _kill(pid: int, started: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        if start_of_process(pid) == started:
            os.kill(pid, signal.SIGKILL)


async def _place(size: int) -> PlacementGroup:
    have = ray.cluster_resources()
    gpus = have.get("GPU", 0)
    check_gpus(size, gpus, "the Ray cluster")
    bundle = {"CPU": 1.0, "GPU": 1.0} if gpus else {"CPU": 1.0}
    if have.get("CPU", 0) < size:
        raise InvalidSetting(
            f"tensor_parallel_size {size} needs {size} CPUs; the Ray cluster has {have.get('CPU', 0):g}. "
            "Lower it, or add nodes.",
            field="tensor_parallel_size",
            asked=size,
            limit=have.get("CPU", 0),
        )
    placement = await _place_beside_us([bundle] * size)
    if placement is None:
        placement = placement_group([bundle] * size, strategy="PACK")
        if not await _is_ready(placement, PLACEMENT_TIMEOUT_S):
            remove_placement_group(placement)
            free = ray.available_resources()
            raise EngineUnavailable(
                f"Ray could not place {size} workers of {bundle} within {PLACEMENT_TIMEOUT_S:g} s; free are "
                f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs. Stop other jobs, or add nodes."
            )
    return placement


async def _place_beside_us(bundles: list[dict[str, float]]) -> PlacementGroup | None:
    """All on this node, if it has room: then the loss of another node is not ours. `PACK` would take any node."""
    own_id = ray.get_runtime_context().get_node_id()
    own = next(node["Resources"] for node in ray.nodes() if node["NodeID"] == own_id)
    if any(own.get(name, 0) < len(bundles) * count for name, count in bundles[0].items()):
        return None
    placement = placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=own_id)
    if await _is_ready(placement, BESIDE_US_TIMEOUT_S) and set(homes(placement)) == {own_id}:
        return placement
    remove_placement_group(placement)
    return None


async def _is_ready(placement: PlacementGroup, within_s: float) -> bool:
    ready: Any = placement.ready()
    try:
        await asyncio.wait_for(ready, within_s)
    except TimeoutError:
        return False
    return True
