"""Preempted requests whose blocks wait in host memory: they go on as if nothing had happened."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from intarsia.controller.engine import Engine
from intarsia.controller.scheduling.step_times import StepTimes
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import Loop, TinyModel
from intarsia.tests.least_memory import least_memory
from intarsia.tests.local import complete, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=24)


def short_pool(model: TinyModel, ranks: int = 1) -> dict[str, Any]:
    """Settings of an engine in which the longest request fits alone, but not all of them together."""
    longest = max(map(len, model.prompts)) + GREEDY.max_tokens
    return {
        "kv_cache_memory": least_memory(model, 5, longest, ranks),
        "block_size": 5,
        "max_prefill_chunk_tokens": 7,
        "swap_space": "64MiB",
        "enable_prefix_caching": False,
    }


@pytest.mark.parametrize("family", ["gemma3", "llama4", "deepseek_v3", "bamba", "qwen3_next", "lfm2"])
def test_tokens_are_the_oracles_and_nothing_is_computed_twice(
    tiny: Callable, family: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StepTimes, "prefill_us", lambda self, tokens: 1e9)  # computing anew is always dearer
    model: TinyModel = tiny(family)

    async def run() -> tuple[Engine, list[list[int]]]:
        engine = await make_engine(model.path, **short_pool(model))
        completions = await complete(engine, model.prompts, GREEDY)
        return engine, [completion.token_ids for completion in completions]

    engine, tokens = asyncio.run(run())
    assert engine.stats.swaps == engine.stats.preemptions > 0
    assert tokens == model.expected
    assert engine.stats.computed_tokens == sum(len(prompt) + 23 for prompt in model.prompts)
    assert engine.recount().all_free


def test_tokens_are_the_oracles_on_two_workers(
    tiny: Callable, two_workers: Any, loop: Loop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(StepTimes, "prefill_us", lambda self, tokens: 1e9)
    model: TinyModel = tiny("gemma3")

    async def run() -> tuple[int, list[list[int]]]:
        engine = await make_engine(model.path, two_workers, **short_pool(model, ranks=2))
        completions = await complete(engine, model.prompts, GREEDY)
        return engine.stats.swaps, [completion.token_ids for completion in completions]

    swaps, tokens = loop.run(run())
    assert swaps > 0
    assert tokens == model.expected


def test_what_is_cheaper_to_compute_than_to_copy_is_computed(tiny: Callable, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(StepTimes, "prefill_us", lambda self, tokens: 0.0)
    model: TinyModel = tiny("gemma3")

    async def run() -> Engine:
        engine = await make_engine(model.path, **short_pool(model))
        await complete(engine, model.prompts, GREEDY)
        return engine

    stats = asyncio.run(run()).stats
    assert stats.preemptions > 0
    assert stats.swaps == 0
