"""The tensor-parallel workers as one: placed by Ray, stepped over streams.

Ray owns their life cycle (placement group, actors); a step is one MessagePack frame broadcast to all ranks and one
frame back from each. Which transport carries the frames is known here and in `proto/channel.py` only.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Collection
from itertools import count
from typing import Any

import ray
from ray.exceptions import RayError

from ..errors import EngineUnavailable, IntarsiaError, OutOfMemory
from ..kvcache.plan import MemoryPlan
from ..proto.channel import ChannelClosed, CorruptFrame, Stream, reading
from ..proto.step import Fault, Step, StepResult
from ..proto.worker import ModelFacts, ModelSettings, Process, RunnerLimits, WorkerStatus
from .losses import NoRoom
from .placement import Placement, end_process, place_workers, release_workers
from .ray_calls import LOOPBACK, answer

logger = logging.getLogger(__name__)

REBUILD_TIMEOUT_S = 120.0
"""For the actors; a lost node may have to be replaced. Loading the model again takes what it takes."""

SETTLE_TIMEOUT_S = 5.0
"""For a worker to end a step whose result is not wanted any more. One that takes longer is replaced."""

LOOK_AGAIN_S = 0.05

HUNG_AFTER_S = 5.0
"""Without an answer to a step workers are asked whether they are alive at all: who computes says so, however long."""

ALIVE_WITHIN_S = 5.0
"""In which it has to say so. Together, the longest that a stopped process is waited for."""

GONE_AFTER_S = 3.0
"""Without a word from its machine, a worker is gone with it."""


class WorkerGroup:
    """All ranks of one model. Ranks are in order: rank 0 samples and meets the others."""

    def __init__(self, placement: Placement):
        self._placement = placement
        self._streams: list[Stream] = []  # for steps
        self._beside: list[Beside] = []  # for what goes on beside them
        self._processes: list[Process | None] = [None] * len(placement.actors)  # None: not known
        self._serving: list[Any] = []  # calls of `serve` that have not returned
        self._answering = asyncio.Lock()  # one reader at a time, first come first served
        self._unanswered = 0  # steps
        self._quiet_since_s = 0.0  # when the latest answer came, or the first step that has none was sent
        self._has_dropped = False
        self._gone: set[int] = set()  # ranks whose streams ended before we gave them up
        self._hung: set[int] = set()  # ranks that neither compute nor say that they are alive
        self._failed: set[int] = set()  # ranks that could not run a step: their state is not known
        self._may_keep = False  # what workers have of the model from before they came together
        self._loaded: ModelSettings | None = None
        self._allocated: tuple[MemoryPlan, RunnerLimits] | None = None

    @classmethod
    async def create(cls, size: int) -> "WorkerGroup":
        """Workers of its own. Raises `InvalidSetting` or `EngineUnavailable` when the cluster has no room for them."""
        group = cls(await place_workers(size))
        try:
            await group.assemble()
        except BaseException:
            await group.close()
            raise
        return group

    async def assemble(self) -> None:
        """Let workers that begin meet each other and us."""
        await self._meet(lost=self._all_ranks)

    async def take_over(self) -> None:
        """The same with workers that had another controller. What they have of a model is kept where it is wanted."""
        async with self._in_time():
            await self._meet(lost=set())

    async def rebuild(self) -> None:
        """Have a new worker in place of each that is lost, where it was, or elsewhere when its node is lost; with the
        same model, and empty pages. The others keep their weights.

        Raises `NoRoom` when the cluster has none in time, `EngineUnavailable` when workers are lost meanwhile: then it
        can be tried again.
        """
        self._drop_streams()
        lost = self._failed | self._hung | self._gone
        if lost and self._placement.has_gpus:
            lost = self._all_ranks  # NCCL does not let go of a lost peer
        try:
            await self.leave(lost)
            async with self._in_time():
                await self._meet(lost)
            if self._loaded is not None:
                await self.load(self._loaded)
            if self._allocated is not None:
                await self.allocate(*self._allocated)
        except (ChannelClosed, OSError, RayError) as error:  # a worker's own error, too: its peer may have gone
            raise EngineUnavailable(f"workers could not be built again: {error}") from error

    @contextlib.asynccontextmanager
    async def _in_time(self) -> AsyncIterator[None]:
        try:
            async with asyncio.timeout(REBUILD_TIMEOUT_S):
                yield
        except TimeoutError:
            free = ray.available_resources()
            raise NoRoom(
                f"{len(self._placement.actors)} workers of {self._placement.bundle} could not be had again within "
                f"{REBUILD_TIMEOUT_S:g} s; free are {free.get('CPU', 0):g} CPUs and {free.get('GPU', 0):g} GPUs. "
                "Bring the lost node back, or add another, and start the engine again."
            ) from None

    async def _meet(self, lost: set[int]) -> None:
        """Connect all with all, and with us. lost: ranks where a new process is to come."""
        self._processes = list(await asyncio.gather(*(self._present(n, n in lost) for n in sorted(self._all_ranks))))
        hosts = [process.host for process in self._processes if process is not None]
        if set(hosts) == {ray.util.get_node_ip_address()}:
            hosts = [LOOPBACK] * len(hosts)  # no other machine connects
        if len(hosts) > 1:
            await self._all("join", await self._each("meeting_point", hosts))
        for steps, beside in await self._each("listen", hosts):
            self._streams.append(await Stream.connect(steps, taken_within_s=None))  # it is read between steps
            self._beside.append(Beside(await Stream.connect(beside, taken_within_s=GONE_AFTER_S)))
        self._may_keep = True

    async def _present(self, rank: int, is_lost: bool) -> Process:
        """Who is there: the process that was, as soon as it is done with what it does; or the one that Ray starts in
        place of one that is lost, or not done in time."""
        known, actor = self._processes[rank], self._placement.actors[rank]
        if not is_lost:
            try:
                return Process(*await asyncio.wait_for(answer(actor.process.remote(), "worker"), SETTLE_TIMEOUT_S))
            except TimeoutError:
                await self._end(rank)
            except EngineUnavailable:
                pass  # it died meanwhile
        patient_until_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            with contextlib.suppress(EngineUnavailable):  # Ray may learn of a death later than we
                process = Process(*await answer(actor.process.remote(), "worker"))
                if process != known:
                    return process
                if time.monotonic() > patient_until_s:
                    await self._end(rank)  # its stream ended, and it did not
            await asyncio.sleep(LOOK_AGAIN_S)

    async def _end(self, rank: int) -> None:
        """Have another process in place of this one."""
        known = self._processes[rank]
        if known is not None:
            await end_process(known)  # Ray asks a process to end, and one that is stopped hears nothing
        else:
            ray.kill(self._placement.actors[rank], no_restart=False)

    async def leave(self, lost: Collection[int] = ()) -> None:
        """Give up what is under way; end those who are lost and may not know it."""
        self._drop_streams()
        ends = set(lost) - self._gone
        self._streams, self._beside, self._serving = [], [], []
        self._unanswered, self._gone, self._hung, self._failed = 0, set(), set(), set()
        self._has_dropped = False
        await asyncio.gather(*map(self._end, ends))

    def _drop_streams(self) -> None:
        """No step is waited for any more, and no rank waits for another."""
        if self._has_dropped:
            return  # and all look as if they had gone
        self._has_dropped = True
        self._gone = {rank for rank, stream in self._all_streams if stream.is_gone}
        for _, stream in self._all_streams:
            stream.drop()

    @property
    def _all_streams(self) -> list[tuple[int, Stream]]:
        """With their ranks."""
        return [*enumerate(self._streams), *((rank, beside.stream) for rank, beside in enumerate(self._beside))]

    @property
    def _all_ranks(self) -> set[int]:
        return set(range(len(self._placement.actors)))

    async def load(self, settings: ModelSettings) -> ModelFacts:
        await self._stop_serving()
        facts = (await self._all("load", settings, self._may_keep))[0]
        self._loaded = settings
        return facts

    async def loaded(self) -> tuple[int, int]:
        """Parameters that all ranks have read, and will have; (0, 0) before they begin."""
        each = await asyncio.gather(*(beside.ask("loaded") for beside in self._beside))
        return sum(done for done, _ in each), sum(total for _, total in each)

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        """Afterwards the workers take steps, and nothing else until they are to load or allocate again."""
        await self._stop_serving()
        if self._may_keep and all(await self._all("keeps", plan, limits)):
            await self._all("clear")
        else:
            await self._all("allocate", plan, limits)
        self._allocated, self._may_keep = (plan, limits), False
        self._serving = [actor.call.remote("serve") for actor in self._placement.actors]

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
        results = await self._results(step)
        self._unanswered -= 1
        self._quiet_since_s = time.monotonic()
        faults = {rank: result.fault for rank, result in results.items() if result.fault is not None}
        # A GPU's process whose peers wait for it ends itself: nothing else makes them stop.
        ends = {Fault.OTHER, Fault.MEMORY} if self._waits_for_ever else {Fault.OTHER}
        self._failed = {rank for rank, fault in faults.items() if fault in ends}
        if faults:
            rank = max(faults, key=faults.__getitem__)  # a peer's is but its echo
            kind = OutOfMemory if faults[rank] is Fault.MEMORY else EngineUnavailable
            raise kind(f"worker {rank} could not run step {step.number}: {results[rank].error}")
        return results[0]

    @property
    def _waits_for_ever(self) -> bool:
        """Does a rank wait for one that failed? NCCL lets go of none."""
        return self._placement.has_gpus and len(self._streams) > 1

    async def _results(self, step: Step) -> dict[int, StepResult]:
        """The answers of all ranks; or of some, if one that others wait for has a fault of its own."""
        if not self._waits_for_ever:
            return {rank: await self._result(rank, stream, step) for rank, stream in enumerate(self._streams)}
        results: dict[int, StepResult] = {}
        calls = (self._result(rank, stream, step) for rank, stream in enumerate(self._streams))
        waits = {asyncio.ensure_future(call): rank for rank, call in enumerate(calls)}
        try:
            while waits and not any(result.fault in (Fault.OTHER, Fault.MEMORY) for result in results.values()):
                done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                results |= {waits.pop(each): each.result() for each in done}
            return results
        finally:
            for each in waits:
                each.cancel()

    async def lost(self) -> EngineUnavailable:
        """Wait until a worker is gone, be a step under way or not, or hangs in one; which one. A step under way fails
        then, whichever rank it waits for."""
        watches = [asyncio.ensure_future(stream.wait_gone()) for _, stream in self._all_streams]
        hanging = asyncio.ensure_future(self._hanging())
        try:
            await asyncio.wait((*watches, hanging), return_when=asyncio.FIRST_COMPLETED)
            self._hung = hanging.result() if hanging.done() else set()
            self._drop_streams()
            return EngineUnavailable(self._what_became_of(min(self._hung or self._gone)))
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
        return [process.pid for process in self._processes if process is not None]

    async def close(self) -> None:
        """End all workers and give their resources back."""
        await self.leave()
        release_workers(self._placement)

    async def _result(self, rank: int, stream: Stream, step: Step) -> StepResult:
        """A rank's answer to `step`. Answers to steps that were given up are dropped."""
        try:
            while True:
                payload = await stream.receive()
                with reading("a worker's answer"):
                    result = StepResult.unpack(payload)
                if (result.epoch, result.number) == (step.epoch, step.number):
                    return result
        except CorruptFrame as error:
            raise EngineUnavailable(f"worker {rank} of {len(self._streams)}: {error}") from error
        except ChannelClosed as error:
            lost = min(self._hung or self._gone, default=rank)  # the others were dropped for its sake
            raise EngineUnavailable(f"{self._what_became_of(lost)} in step {step.number}") from error

    async def _each(self, verb: str, arguments: list[Any]) -> list[Any]:
        """Call a method of every rank at once, each with its own argument."""
        calls = [actor.call.remote(verb, arg) for actor, arg in zip(self._placement.actors, arguments, strict=True)]
        return await asyncio.gather(*(answer(call, "worker") for call in calls))

    async def _all(self, verb: str, *arguments: Any) -> list[Any]:
        """Call a method of every rank at once; the first error counts."""
        calls = [actor.call.remote(verb, *arguments) for actor in self._placement.actors]
        return await asyncio.gather(*(answer(call, "worker") for call in calls))


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
                    message = await self.stream.receive_message()
                    with reading("a worker's answer"):
                        answered, result, error = message
                    if answered == number:  # else: it answers a question that was given up
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
