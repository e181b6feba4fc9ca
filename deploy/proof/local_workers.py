"""Tensor-parallel workers in this process, a thread for each rank: the very classes that run in the cluster.

There is no Ray. Ranks meet over sockets of this machine, and steps travel as packed bytes.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from torch import nn

from ...controller.losses import NoRoom
from ...errors import IntarsiaError
from ...kvcache.plan import MemoryPlan
from ...proto.step import Step, StepResult
from ...proto.worker import ModelFacts, ModelSettings, RunnerLimits, WorkerStatus
from ...workers.worker import Worker

LOOPBACK = "127.0.0.1"

T = TypeVar("T")


class LocalWorkers:
    """What an engine needs of its workers. Close it when it is not needed any more."""

    def __init__(self, size: int = 1):
        self.ranks = [Worker(rank, size) for rank in range(size)]
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(size)]

    async def meet(self) -> None:
        """Before anything else, if there is more than one."""
        if len(self.ranks) > 1:
            places = [worker.meeting_point(LOOPBACK) for worker in self.ranks]
            await self._all(lambda worker: worker.join(places))

    @property
    def module(self) -> nn.Module:
        """Of rank 0, once it is loaded."""
        model = self.ranks[0].model
        assert model is not None, "load a model first"
        return model.module

    async def load(self, settings: ModelSettings) -> ModelFacts:
        return (await self._all(lambda worker: worker.load(settings, may_keep=True)))[0]

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        await self._all(lambda worker: worker.allocate(plan, limits))

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        spare = await self._all(lambda worker: worker.spare_memory(trial, limits, share))
        return min((each for each in spare if each is not None), default=None)

    async def prepare_form(self, kind: str, text: str) -> None:
        await self._all(lambda worker: worker.prepare_form(kind, text))

    async def status(self) -> list[WorkerStatus]:
        return [worker.status() for worker in self.ranks]

    async def rebuild(self) -> None:
        raise NoRoom("there are no others")

    async def lost(self) -> IntarsiaError:
        await asyncio.Event().wait()
        raise AssertionError

    def start_step(self, step: Step) -> Awaitable[StepResult]:
        """At once: threads take their steps in order."""
        frame = step.pack()
        results = self._all(lambda worker: worker.run(Step.unpack(frame)))

        async def first() -> StepResult:
            return StepResult.unpack((await results)[0].pack())

        return first()

    def close(self) -> None:
        for threads in self._threads:
            threads.shutdown(wait=False, cancel_futures=True)

    def _all(self, call: Callable[[Worker], T]) -> Awaitable[Sequence[T]]:
        loop = asyncio.get_running_loop()
        ranks = zip(self._threads, self.ranks, strict=True)
        return asyncio.gather(*(loop.run_in_executor(threads, call, worker) for threads, worker in ranks))
