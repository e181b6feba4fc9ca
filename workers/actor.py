"""The Ray actor around `Worker`. The one place in this folder that knows Ray."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

import ray

from ..kvcache.plan import MemoryPlan
from ..proto.channel import Address
from .environment import prepare_process, start_of_process
from .facts import ModelFacts, ModelSettings, RunnerLimits

if TYPE_CHECKING:
    from .worker import Worker


@ray.remote
class WorkerActor:
    """One rank in a process of its own. Life cycle by actor calls, one at a time and in the process's first thread.
    Steps come over a stream of their own while `serve` runs, and what goes on beside them over another."""

    def __init__(self, rank: int, size: int, local_workers: int):
        prepare_process(local_workers)
        self._rank, self._size, self._local_workers = rank, size, local_workers
        self._worker: Worker | None = None

    def process(self) -> tuple[str, str, int, int]:
        """This node's id, its address within the cluster, our process id, and when we began."""
        node_id = ray.get_runtime_context().get_node_id()
        return node_id, ray.util.get_node_ip_address(), os.getpid(), start_of_process(os.getpid())

    def meeting_point(self, host: str) -> Address:
        return self._real().meeting_point(host)

    def join(self, addresses: Sequence[Address]) -> None:
        self._real().join(addresses)

    def load(self, settings: ModelSettings) -> ModelFacts:
        return self._real().load(settings)

    def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        self._real().allocate(plan, limits)

    def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        return self._real().spare_memory(trial, limits, share)

    def listen(self, host: str) -> tuple[Address, Address]:
        return self._real().listen(host)

    def serve(self) -> None:
        """Take steps until the controller leaves or has something else for us."""
        self._real().serve()

    def _real(self) -> "Worker":
        """Made at its first use: importing torch takes seconds, and all ranks do it at the same time."""
        if self._worker is None:
            from .worker import Worker

            self._worker = Worker(self._rank, self._size, self._local_workers)
        return self._worker
