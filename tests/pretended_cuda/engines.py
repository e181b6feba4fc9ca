"""An engine over pretended devices, in this process, and what its steps cost."""

import asyncio
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from intarsia.controller.engine import Engine
from intarsia.controller.scheduling.step_times import StepTimes
from intarsia.kvcache.plan import MemoryPlan
from intarsia.proto.step import Step, StepResult
from intarsia.proto.worker import ModelFacts, ModelSettings, RunnerLimits
from intarsia.tests.local import Completion, LocalWorkers, complete, make_engine
from intarsia.workers.worker import OngoingStep, Worker

from .device import current_device
from .ledger import RECORDED, UPLOADS, Costs, Kind
from .runtime import pretend_in_this_thread
from .scenes import Scene

REPLAYED, UNRECORDED, MIXED = "replayed", "unrecorded", "mixed"
HOST = "127.0.0.1"
SMALL = {"max_prefill_chunk_tokens": 20, "max_num_batched_tokens": 32}
"""So that what is recorded before requests come is soon done."""
LOOKS, LOOK_EVERY_S = 10, 0.001
"""Whether the next step has been launched."""


@dataclass(slots=True)
class StepCosts:
    """The most that a step of one kind cost, over those that ran."""

    steps: int = 0
    replays: int = 0  # steps that were replayed
    most: Counter[Kind] = field(default_factory=Counter)
    most_syncs_of_launch: int = 0  # of these, before the next step could be launched
    places: dict[str, dict[str, int]] = field(default_factory=dict)  # what the latest of them did where

    def told(self) -> dict[str, Any]:
        most = {kind.value: n for kind, n in self.most.items()}
        launch = {"syncs of launch": self.most_syncs_of_launch}
        return {"steps": self.steps, "replays": self.replays, "most": most | launch, "places": self.places}


class Rank:
    """A worker in a thread of its own, which has a device of its own."""

    def __init__(self, rank: int, size: int):
        self._thread = ThreadPoolExecutor(1, f"rank-{rank}", pretend_in_this_thread)
        self.device = self._thread.submit(current_device).result()
        self.worker: Worker = self._thread.submit(Worker, rank, size).result()

    async def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.wrap_future(self._thread.submit(function, *arguments))


class PretendedWorkers(LocalWorkers):
    """All ranks, in this process. Counts what each step costs the first of them."""

    def __init__(self, size: int = 1) -> None:
        self._ranks = [Rank(rank, size) for rank in range(size)]
        self.worker = self._ranks[0].worker
        self.costs = {kind: StepCosts() for kind in (REPLAYED, UNRECORDED, MIXED)}
        self.quiet_bytes: dict[int, set[int]] = {}  # requests of a quiet step -> bytes that such steps uploaded
        self.failure: str | None = None
        self.failed = asyncio.Event()
        self._numbers, self._latest = count(), 0  # steps, and the latest that is launched

    async def load(self, settings: ModelSettings) -> ModelFacts:
        if len(self._ranks) > 1:
            await self.meet()
        # One after another, because transformers changes torch for the process while it makes a module.
        facts = [await rank.call(rank.worker.load, settings) for rank in self._ranks]
        return facts[0]

    async def meet(self) -> None:
        """Again, too: that is what happens when a controller is replaced, and workers keep what they have."""
        points = [rank.worker.meeting_point(HOST) for rank in self._ranks]
        await self._together(lambda worker: worker.join(points))

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        await self._together(lambda worker: worker.allocate(plan, limits))

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        return min(await self._together(lambda worker: worker.spare_memory(trial, limits, share)))

    async def start_step(self, step: Step) -> StepResult:
        """A step is waited for when the next one has been launched, if one comes: so it is where a GPU computes."""
        payload, number = step.pack(), next(self._numbers)
        launches = [rank.call(_launched, rank, payload) for rank in self._ranks]
        begun = await asyncio.gather(*launches)
        self._latest = number
        for _ in range(LOOKS):
            if self._latest > number:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        ended = await asyncio.gather(
            *(rank.call(_ended, rank, ongoing) for rank, (ongoing, _) in zip(self._ranks, begun, strict=True))
        )
        results = [result for result, _ in ended]
        failures = (result.error for result in results if result.error is not None)
        self.failure = self.failure or next(failures, None)  # what comes after the first one follows from it
        if self.failure is not None:
            self.failed.set()
            raise AssertionError(self.failure)
        self._note(step, begun[0][1], ended[0][1])
        return StepResult.unpack(results[0].pack())

    def _note(self, step: Step, of_launch: Costs, of_end: Costs) -> None:
        whole = of_launch + of_end
        costs = self.costs[_kind_of(step, whole.totals())]
        costs.steps += 1
        costs.replays += Kind.REPLAY in whole.totals()
        costs.most |= Counter(whole.totals())
        costs.most_syncs_of_launch = max(costs.most_syncs_of_launch, of_launch.totals().get(Kind.SYNC, 0))
        if step.decode and not (step.admit or step.advance):
            self.quiet_bytes.setdefault(len(step.decode), set()).add(whole.totals()[Kind.UPLOADED_BYTES])
        asked = {"sync": (Kind.SYNC,), "upload": UPLOADS, "kernel": (*RECORDED.keys(), *RECORDED.values())}
        costs.places = {name: whole.places(*kinds) for name, kinds in asked.items()}

    async def _together(self, work: Callable[[Worker], Any]) -> list[Any]:
        return await asyncio.gather(*(rank.call(work, rank.worker) for rank in self._ranks))

    @property
    def layers(self) -> int:
        model: Any = self.worker._model
        return model.module.config.get_text_config().num_hidden_layers


def _launched(rank: Rank, payload: bytes) -> tuple[OngoingStep, Costs]:
    """In the rank's thread."""
    rank.device.ledger.take()
    return rank.worker.launch(Step.unpack(payload)), rank.device.ledger.take()


def _ended(rank: Rank, ongoing: OngoingStep) -> tuple[StepResult, Costs]:
    rank.device.ledger.take()
    return ongoing.result(), rank.device.ledger.take()


def _kind_of(step: Step, totals: dict[Kind, int]) -> str:
    if step.admit or any(advance.tokens > 1 for advance in step.advance):
        return MIXED
    return REPLAYED if Kind.REPLAY in totals else UNRECORDED


class StepFailed(Exception):
    """With the words of the worker."""


async def answers(engine: Engine, workers: PretendedWorkers, scene: Scene) -> list[Completion]:
    """Raises `StepFailed`, where an engine would wait for other workers."""
    asked = asyncio.ensure_future(complete(engine, scene.prompts, scene.sampling, scene.images))
    failed = asyncio.ensure_future(workers.failed.wait())
    await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
    failed.cancel()
    if workers.failed.is_set():
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        raise StepFailed(workers.failure)
    return await asked


def swapping(memory: str) -> dict[str, Any]:
    """Settings of an engine whose requests wait in host memory, when they have to give way. For the whole process: that
    is taken to be cheaper than to compute them anew."""
    StepTimes.prefill_us = lambda self, tokens: 1e9  # type: ignore[method-assign]
    usual = {"block_size": 5, "max_prefill_chunk_tokens": 7, "enable_prefix_caching": False}
    return {"kv_cache_memory": memory, "swap_space": "64MiB", **usual}


async def run_scene(scene: Scene, **settings: Any) -> dict[str, Any]:
    """All prompts at once, then again out of the prefix cache."""
    workers = PretendedWorkers(scene.ranks)
    engine = await make_engine(scene.path, workers, **(SMALL | settings))
    first = await answers(engine, workers, scene)
    if scene.meets_anew:
        await workers.meet()
    again = await answers(engine, workers, scene) if scene.is_asked_again else []
    return {
        "tokens": [each.token_ids for each in first],
        "again": [each.token_ids for each in again],
        "cached": [each.num_cached_tokens for each in again],
        "preemptions": engine.stats.preemptions,
        "swaps": engine.stats.swaps,
        "is_all_free": engine.recount().all_free,
        "refusal": workers.refusal,
        "layers": workers.layers,
        "costs": {kind: costs.told() for kind, costs in workers.costs.items()},
        "quiet bytes": {rows: sorted(found) for rows, found in workers.quiet_bytes.items()},
    }
