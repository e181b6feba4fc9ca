"""An engine over a pretended device, in this process, and what its steps cost."""

import asyncio
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from intarsia.controller.engine import Engine
from intarsia.proto.request import SamplingParams
from intarsia.proto.step import Step, StepResult
from intarsia.tests.local import Completion, LocalWorkers, complete, make_engine

from .device import current_device
from .ledger import RECORDED, UPLOADS, Kind

REPLAYED, UNRECORDED, MIXED = "replayed", "unrecorded", "mixed"


@dataclass(slots=True)
class StepCosts:
    """The most that a step of one kind cost, over those that ran."""

    steps: int = 0
    most: Counter[Kind] = field(default_factory=Counter)
    places: dict[str, dict[str, int]] = field(default_factory=dict)  # of what the host does, in the latest of them


class PretendedWorkers(LocalWorkers):
    """One rank. Counts what each step costs."""

    def __init__(self) -> None:
        super().__init__()
        self.costs = {kind: StepCosts() for kind in (REPLAYED, UNRECORDED, MIXED)}
        self.failure: str | None = None
        self.failed = asyncio.Event()

    async def start_step(self, step: Step) -> StepResult:
        ledger = current_device().ledger
        ledger.start()
        try:
            result = await super().start_step(step)
        except AssertionError as failure:
            self.failure = str(failure)
            self.failed.set()
            raise
        totals = ledger.totals()
        costs = self.costs[_kind_of(step, totals)]
        costs.steps += 1
        costs.most |= Counter(totals)
        asked = {"sync": (Kind.SYNC,), "upload": UPLOADS, "kernel": (*RECORDED.keys(), *RECORDED.values())}
        costs.places = {name: ledger.places(*kinds) for name, kinds in asked.items()}
        return result

    @property
    def refusal(self) -> str | None:
        """Why decode steps are not recorded, if they are not."""
        runner = self.worker._runner
        assert runner is not None
        return runner.graphs.refusal if runner.graphs is not None else "no steps of this model are recorded"


def _kind_of(step: Step, totals: dict[Kind, int]) -> str:
    if Kind.REPLAY in totals:
        return REPLAYED
    computes_prompts = bool(step.admit) or any(advance.tokens > 1 for advance in step.advance)
    return MIXED if computes_prompts else UNRECORDED


class Failed(Exception):
    """A step did, with these words."""


async def answers(
    engine: Engine,
    workers: PretendedWorkers,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    images: Sequence[Sequence[bytes]],
) -> list[Completion]:
    """Raises `Failed`, where an engine of its own would wait for its workers to be replaced."""
    asked = asyncio.ensure_future(complete(engine, prompts, sampling, images))
    failed = asyncio.ensure_future(workers.failed.wait())
    await asyncio.wait({asked, failed}, return_when=asyncio.FIRST_COMPLETED)
    failed.cancel()
    if not asked.done():
        asked.cancel()
        await asyncio.gather(asked, return_exceptions=True)
        raise Failed(workers.failure)
    return await asked


async def pretended_engine(model: Path, workers: PretendedWorkers, **settings: Any) -> Engine:
    return await make_engine(model, workers, max_prefill_chunk_tokens=20, **settings)


async def run_family(
    model: Path, prompts: Sequence[Sequence[int]], images: Sequence[Sequence[bytes]], tokens: int, **settings: Any
) -> dict[str, Any]:
    """All prompts at once, then again out of the prefix cache."""
    workers = PretendedWorkers()
    engine = await pretended_engine(model, workers, **settings)
    greedy = SamplingParams(temperature=0, max_tokens=tokens)
    first = await answers(engine, workers, prompts, greedy, images)
    again = await answers(engine, workers, prompts, greedy, images)
    return {
        "tokens": [each.token_ids for each in first],
        "again": [each.token_ids for each in again],
        "cached": [each.num_cached_tokens for each in again],
        "all_free": engine.recount().all_free,
        "refusal": workers.refusal,
        "layers": len(engine.info.layers) if hasattr(engine.info, "layers") else None,
        "costs": {
            kind: {"steps": costs.steps, **dict(costs.most), "places": costs.places}
            for kind, costs in workers.costs.items()
        },
    }
