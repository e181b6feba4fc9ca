"""The tensor-parallel workers as one: placed by Ray, stepped over streams.

Ray owns their life cycle (placement group, actors); a step is one MessagePack frame broadcast to all ranks and one
frame back from each. Which transport carries the frames is known here and in `proto/channel.py` only.
"""

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections import Counter
from collections.abc import Awaitable
from itertools import count
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from ..errors import EngineUnavailable, IntarsiaError, InvalidSetting
from ..kvcache.plan import MemoryPlan
from ..proto.channel import ChannelClosed, Stream
from ..proto.step import Step, StepResult
from ..workers.actor import WorkerActor
from ..workers.environment import start_of_process
from ..workers.facts import ModelFacts, ModelSettings, RunnerLimits, WorkerStatus
from .remote import answer

logger = logging.getLogger(__name__)

PLACEMENT_TIMEOUT_S = 60.0

REBUILD_TIMEOUT_S = 120.0
"""For the actors; a lost node may have to be replaced. Loading the model again takes what it takes."""

TRY_AGAIN_AFTER_S = 0.5

HUNG_AFTER_S = 5.0
"""Without an answer to a step workers are asked whether they are alive at all: who computes says so, however long."""

ALIVE_WITHIN_S = 5.0
"""In which it has to say so. Together, the longest that a stopped process is waited for."""

KILL_WITHIN_S = 10.0


class WorkerGroup:
    """All ranks of one model. Ranks are in order: rank 0 samples and meets the others."""

    def __init__(self, placement: PlacementGroup, size: int):
        self._placement = placement
        self._size = size
        self._actors: list[Any] = []
        self._streams: list[Stream] = []  # for steps
        self._beside: list[Beside] = []  # for what goes on beside them
        self._processes: list[Process] = []
        self._serving: list[Any] = []  # calls of `serve` that have not returned
        self._answering = asyncio.Lock()  # one reader at a time, first come first served
        self._unanswered = 0  # steps
        self._quiet_since_s = 0.0  # when the latest answer came, or the first step that has none was sent
        self._hung: set[int] = set()  # ranks that neither compute nor say that they are alive
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
        self._processes = [Process(*process) for process in await self._all("process")]
        hosts = [process.host for process in self._processes]
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
        if not self._unanswered:
            self._quiet_since_s = time.monotonic()
        self._unanswered += 1
        return self._answer(step)

    async def _answer(self, step: Step) -> StepResult:
        async with self._answering:
            return await self._collect(step)

    async def _collect(self, step: Step) -> StepResult:
        results = [await self._result(rank, stream, step) for rank, stream in enumerate(self._streams)]
        self._unanswered -= 1
        self._quiet_since_s = time.monotonic()
        for rank, result in enumerate(results):
            if result.error is not None:
                raise EngineUnavailable(f"worker {rank} could not run step {step.number}: {result.error}")
        return results[0]

    async def lost(self) -> EngineUnavailable:
        """Wait until a worker is gone, be a step under way or not, or hangs in one; which one.

        A step that waits for a worker that hangs fails then.
        """
        watches = [asyncio.ensure_future(stream.wait_gone()) for stream in self._streams]
        hanging = asyncio.ensure_future(self._hanging())
        try:
            await asyncio.wait((*watches, hanging), return_when=asyncio.FIRST_COMPLETED)
            if hanging.done():
                self._hung = hanging.result()
                rank = min(self._hung)
                for stream in self._streams:
                    stream.drop()
            else:
                rank = next(rank for rank, watch in enumerate(watches) if watch.done())
            return EngineUnavailable(self._what_became_of(rank))
        finally:
            for watch in (*watches, hanging):
                watch.cancel()

    async def _hanging(self) -> set[int]:
        """Wait until workers neither answer a step nor say that they are alive; which ones."""
        while True:
            await asyncio.sleep(HUNG_AFTER_S / 4)
            since_s = self._quiet_since_s
            if not self._unanswered or time.monotonic() - since_s < HUNG_AFTER_S:
                continue
            alive = await asyncio.gather(*(beside.is_alive(ALIVE_WITHIN_S) for beside in self._beside))
            silent = {rank for rank, lives in enumerate(alive) if not lives}
            if silent and self._quiet_since_s == since_s:
                return silent

    def _what_became_of(self, rank: int) -> str:
        who = f"worker {rank} of {len(self._streams)}"
        if rank not in self._hung:
            return f"{who} is gone"
        return f"{who} hangs: no answer to a step, nor any sign of life, for {HUNG_AFTER_S + ALIVE_WITHIN_S:g} s"

    async def status(self) -> list[WorkerStatus]:
        """How each rank is. Raises `EngineUnavailable` when one is gone."""
        return [WorkerStatus(*each) for each in await asyncio.gather(*(b.ask("status") for b in self._beside))]

    async def process_ids(self) -> list[int]:
        """Of the workers, in rank order."""
        return [process.pid for process in self._processes]

    async def close(self) -> None:
        """End all workers and give their resources back."""
        await self._end()
        remove_placement_group(self._placement)

    async def _end(self) -> None:
        """End the workers that are left; their places are kept."""
        streams = [*self._streams, *(beside.stream for beside in self._beside)]
        hung = [self._processes[rank] for rank in self._hung]
        self._streams, self._beside, self._serving = [], [], []
        self._unanswered, self._hung = 0, set()
        for stream in streams:
            stream.drop()
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        await asyncio.gather(*map(end_process, hung))  # Ray asks a process to end, and these hear nothing

    async def _result(self, rank: int, stream: Stream, step: Step) -> StepResult:
        """A rank's answer to `step`. Answers to steps that were given up are dropped."""
        try:
            while True:
                result = StepResult.unpack(await stream.receive())
                if (result.epoch, result.number) == (step.epoch, step.number):
                    return result
        except ChannelClosed as error:
            lost = min(self._hung, default=rank)  # the others were dropped for its sake
            raise EngineUnavailable(f"{self._what_became_of(lost)} in step {step.number}") from error

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

    async def is_alive(self, within_s: float) -> bool:
        """Whether it answers at all. One that is gone counts as alive: its stream says so better."""
        try:
            await asyncio.wait_for(self.ask("status"), within_s)
        except TimeoutError:
            return False
        except IntarsiaError:
            return True
        return True


class Process(NamedTuple):
    """Where a worker runs. `started` tells it from a later one of the same number."""

    node_id: str
    host: str
    pid: int
    started: int


async def end_process(process: Process) -> None:
    """Kill it, wherever in the cluster it is, be it stopped or not. A node that is gone took it along."""
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
