"""The Ray actor around a `Worker` and its process. The one place in this folder that knows Ray."""

import os
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup

from ...environment import prepare_process, start_of_process
from ...errors import EngineUnavailable
from ...proto.worker import Process
from .fork_server import ForkServer, WorkerProcess


@ray.remote
class WorkerActor:
    """One rank: its place in the cluster, and a process there that computes. Calls one at a time; steps come to the
    process over a stream of their own while `serve` runs, and control over another."""

    def __init__(self, rank: int, size: int):
        self._local_workers = _workers_here()
        prepare_process(self._local_workers)
        self._rank, self._size = rank, size
        self._server = ForkServer()
        self._worker: WorkerProcess | None = None

    def process(self) -> Process:
        """The process that computes: a new one if there is none. Answered when the process is idle."""
        if self._worker is None or not self._worker.is_alive:
            self._worker = self._server.fork(self._rank, self._size, self._local_workers)
        return own_process()._replace(pid=self._worker.pid, started=self._worker.started)

    def call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of `Worker`. Raises what it raises, or `EngineUnavailable` when its process is gone."""
        if self._worker is None:
            raise EngineUnavailable("there is no worker process yet")
        return self._worker.call(verb, *arguments)


def own_process() -> Process:
    """Of the actor that asks."""
    node_id = ray.get_runtime_context().get_node_id()
    return Process(node_id, ray.util.get_node_ip_address(), os.getpid(), start_of_process(os.getpid()))


def _workers_here() -> int:
    """Workers of our group that share this node, and so its cores."""
    placement = ray.util.get_current_placement_group()
    if placement is None:
        return 1
    return homes(placement).count(ray.get_runtime_context().get_node_id()) or 1


def homes(placement: PlacementGroup) -> list[str]:
    """The node of each bundle that has one."""
    return list(ray.util.placement_group_table(placement).get("bundles_to_node_id", {}).values())
