"""The tensor-parallel workers as one: placed by Ray, stepped over streams.

Ray owns their life cycle (placement group, actors); a step is one MessagePack frame broadcast to all ranks and one
frame back from each. Which transport carries the frames is known here and in `proto/channel.py` only.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable
from itertools import count
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from ..errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ..kvcache.plan import MemoryPlan
from ..proto.channel import ChannelClosed, Stream
from ..proto.step import Step, StepResult
from ..workers.actor import WorkerActor
from ..workers.facts import ModelFacts, ModelSettings, RunnerLimits, WorkerStatus
from .remote import answer

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0

REBUILD_TIMEOUT_S = 120.0
"""For the actors; a lost node may have to be replaced. Loading the model again takes what it takes."""

TRY_AGAIN_AFTER_S = 0.5


class WorkerGroup:
    """All ranks of one model. Ranks are in order: rank 0 samples and meets the others."""

    def __init__(self, placement: PlacementGroup, size: int):
        self._placement = placement
        self._size = size
        self._actors: list[Any] = []
        self._streams: list[Stream] = []  # for steps
        self._beside: list[Beside] = []  # for what goes on beside them
        self._process_ids: list[int] = []
        self._serving: list[Any] = []  # calls of `serve` that have not returned
        self._answering = asyncio.Lock()  # one reader at a time, first come first served
        self._loaded: ModelSettings | None = None
        self._allocated: tuple[MemoryPlan, RunnerLimits] | None = None

    @classmethod
    async def create(cls, size: int) -> "WorkerGroup":
        """Place `size` workers, one GPU each where the cluster has them, else one CPU each; let them meet."""
        group = cls(await _place(size), size)
        try:
            await group._start()
        except BaseException:
            await group.close()
            raise
        return group

    async def _start(self) -> None:
        """Make the actors, and connect all with all."""
        strategy = PlacementGroupSchedulingStrategy(self._placement)
        num_gpus = self._placement.bundle_specs[0].get("GPU", 0)
        options = {"num_cpus": 1, "num_gpus": num_gpus, "scheduling_strategy": strategy}
        local_workers = _workers_per_node(self._placement, self._size)
        make: Any = WorkerActor
        self._actors = [make.options(**options).remote(rank, self._size, local_workers) for rank in range(self._size)]
        nodes = await self._all("node")
        hosts = [host for host, _ in nodes]
        self._process_ids = [pid for _, pid in nodes]
        if self._size > 1:
            await self._all("join", await self._each("meeting_point", hosts))
        for steps, beside in await self._each("listen", hosts):
            self._streams.append(await Stream.connect(steps))
            self._beside.append(Beside(await Stream.connect(beside)))

    async def rebuild(self) -> None:
        """New workers in place of those that are left, on the same places, or on others where a node is gone; with the
        same model, and empty pages. Raises `EngineUnavailable` when the cluster has no room for them in time."""
        await self._end()
        try:
            async with asyncio.timeout(REBUILD_TIMEOUT_S):
                await self._start_again()
        except TimeoutError:
            free = ray.available_resources()
            raise EngineUnavailable(
                f"{self._size} workers of {self._placement.bundle_specs[0]} could not be built again within "
                f"{REBUILD_TIMEOUT_S:g} s; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs. "
                "Bring the lost node back, or add another, and start the engine again."
            ) from None
        if self._loaded is not None:
            await self.load(self._loaded)
        if self._allocated is not None:
            await self.allocate(*self._allocated)

    async def _start_again(self) -> None:
        """Ray may learn of a node's death later than we: what fails meanwhile is tried again."""
        while True:
            try:
                return await self._start()
            except (EngineUnavailable, ChannelClosed, OSError) as error:
                logger.info("workers could not be started: %s", error)
                await self._end()
                await asyncio.sleep(TRY_AGAIN_AFTER_S)

    async def load(self, settings: ModelSettings) -> ModelFacts:
        await self._stop_serving()
        facts = (await self._all("load", settings))[0]
        self._loaded = settings
        return facts

    async def loaded(self) -> tuple[int, int]:
        """Parameters that all ranks have read, and will have; (0, 0) before they begin."""
        each = await asyncio.gather(*(beside.ask("loaded") for beside in self._beside))
        return sum(done for done, _ in each), sum(total for _, total in each)

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        """Afterwards the workers take steps, and nothing else until they are to load or allocate again."""
        await self._stop_serving()
        await self._all("allocate", plan, limits)
        self._allocated = plan, limits
        self._serving = [actor.serve.remote() for actor in self._actors]

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        """Bytes for pages on the rank that has least; None where devices have no memory of their own."""
        await self._stop_serving()
        spare = await self._all("spare_memory", trial, limits, share)
        return None if None in spare else min(spare)

    async def prepare_form(self, kind: str, text: str) -> None:
        """Compile the form of an answer where tokens are drawn. Raises `InvalidRequest`, naming the field."""
        if not self._beside:
            raise EngineUnavailable("the workers are being built again")
        await self._beside[0].ask("form", kind, text)

    async def _stop_serving(self) -> None:
        if self._serving:
            for stream in self._streams:
                stream.send(b"")
            await asyncio.gather(*(answer(call, "worker") for call in self._serving))
            self._serving = []

    def start_step(self, step: Step) -> Awaitable[StepResult]:
        """Broadcast a step at once; the answer waits for every rank. Raises `EngineUnavailable` when one is lost or
        fails. Workers run steps in order, and answers are to be awaited in order."""
        payload = step.pack()
        for stream in self._streams:
            stream.send(payload)
        return self._answer(step)

    async def _answer(self, step: Step) -> StepResult:
        async with self._answering:
            return await self._collect(step)

    async def _collect(self, step: Step) -> StepResult:
        results = [await self._result(rank, stream, step) for rank, stream in enumerate(self._streams)]
        for rank, result in enumerate(results):
            if result.error is not None:
                raise EngineUnavailable(f"worker {rank} could not run step {step.number}: {result.error}")
        return results[0]

    async def lost(self) -> EngineUnavailable:
        """Wait until a worker is gone, be a step under way or not; which one."""
        size = len(self._streams)
        watches = [asyncio.ensure_future(stream.wait_gone()) for stream in self._streams]
        try:
            await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            rank = next(rank for rank, watch in enumerate(watches) if watch.done())
            return EngineUnavailable(f"worker {rank} of {size} is gone")
        finally:
            for watch in watches:
                watch.cancel()

    async def status(self) -> list[WorkerStatus]:
        """How each rank is. Raises `EngineUnavailable` when one is gone."""
        return [WorkerStatus(*each) for each in await asyncio.gather(*(b.ask("status") for b in self._beside))]

    async def process_ids(self) -> list[int]:
        """Of the workers, in rank order."""
        return self._process_ids

    async def close(self) -> None:
        """End all workers and give their resources back."""
        await self._end()
        remove_placement_group(self._placement)

    async def _end(self) -> None:
        """End the workers that are left; their places are kept."""
        streams = [*self._streams, *(beside.stream for beside in self._beside)]
        self._streams, self._beside, self._serving = [], [], []
        for stream in streams:
            await stream.close()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []

    async def _result(self, rank: int, stream: Stream, step: Step) -> StepResult:
        """A rank's answer to `step`. Answers to steps that were given up are dropped."""
        try:
            while True:
                result = StepResult.unpack(await stream.receive())
                if (result.epoch, result.number) == (step.epoch, step.number):
                    return result
        except ChannelClosed as error:
            raise EngineUnavailable(f"worker {rank} of {len(self._streams)} is gone in step {step.number}") from error

    async def _each(self, method: str, arguments: list[Any]) -> list[Any]:
        """Call a method of every rank at once, each with its own argument."""
        calls = (getattr(actor, method).remote(arg) for actor, arg in zip(self._actors, arguments, strict=True))
        return await asyncio.gather(*(answer(call, "worker") for call in calls))

    async def _all(self, method: str, *args: Any) -> list[Any]:
        """Call a method of every rank at once; the first error counts."""
        return await asyncio.gather(*(answer(getattr(actor, method).remote(*args), "worker") for actor in self._actors))


class Beside:
    """What a worker is asked while it computes: one question at a time, over a stream of their own."""

    def __init__(self, stream: Stream):
        self.stream = stream
        self._numbers = count()
        self._lock = asyncio.Lock()

    async def ask(self, verb: str, *arguments: Any) -> Any:
        """Raises what the worker answers, or `EngineUnavailable` when it is gone."""
        async with self._lock:
            number = next(self._numbers)
            self.stream.send_message([number, verb, *arguments])
            try:
                while True:
                    answered, result, error = await self.stream.receive_message()
                    if answered == number:  # else: of a question that nobody waits for any more
                        break
            except ChannelClosed as closed:
                raise EngineUnavailable("a worker is gone") from closed
        if error is not None:
            raise IntarsiaError.from_wire(error)
        return result


async def _place(size: int) -> PlacementGroup:
    have = ray.cluster_resources()
    bundle = {"CPU": 1.0, "GPU": 1.0} if have.get("GPU", 0) >= size else {"CPU": 1.0}
    if have.get("CPU", 0) < size:
        raise InvalidSetting(
            f"tensor_parallel_size {size} needs {size} CPUs; the Ray cluster has {have.get('CPU', 0):g}. "
            "Lower it, or add nodes.",
            field="tensor_parallel_size",
            asked=size,
            limit=have.get("CPU", 0),
        )
    placement = placement_group([bundle] * size, strategy="PACK")
    ready: Any = placement.ready()
    try:
        await asyncio.wait_for(ready, PLACEMENT_TIMEOUT_S)
    except TimeoutError:
        remove_placement_group(placement)
        free = ray.available_resources()
        raise EngineUnavailable(
            f"Ray could not place {size} workers of {bundle} within {PLACEMENT_TIMEOUT_S:g} s; free are "
            f"{free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs. Stop other jobs, or add nodes."
        ) from None
    return placement


def _workers_per_node(placement: PlacementGroup, size: int) -> int:
    """Most workers that share a node, and so its cores."""
    table = ray.util.placement_group_table(placement)
    nodes = Counter(table.get("bundles_to_node_id", {}).values())
    return max(nodes.values(), default=size)
