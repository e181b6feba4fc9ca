"""The gate of every family: engine tokens equal transformers' full-recompute greedy tokens, whatever happens."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intarsia.controller.engine import Engine
from intarsia.controller.request import SamplingParams
from intarsia.tests.conftest import Loop, TinyModel
from intarsia.tests.local import Completion, complete, make_engine
from intarsia.tests.models import FAMILIES, UNIFORM, WINDOW

GREEDY = SamplingParams(temperature=0, max_tokens=24)
HYBRID = [family for family in FAMILIES if family not in UNIFORM]
BLOCK_SIZES = [1, 16, 5]  # 16 exceeds the window of 12, 5 does not divide it


async def check_in_one_batch(model: TinyModel, workers: Any, **settings: Any) -> None:
    """All prompts at once; then again, out of the prefix cache."""
    engine = await make_engine(model.path, workers, **settings)
    first = await complete(engine, model.prompts, GREEDY)
    assert [c.token_ids for c in first] == model.expected
    again = await complete(engine, model.prompts, GREEDY)
    assert [c.token_ids for c in again] == model.expected
    if settings.get("enable_prefix_caching", True):
        assert all(c.num_cached_tokens > 0 for c in again[1:]), "repeated prompts of 33 tokens and more must hit"
    else:
        assert not any(c.num_cached_tokens for c in again)
    assert engine.recount().all_free


async def check_preempted(model: TinyModel, workers: Any, block_size: int) -> None:
    """A pool in which the longest request fits alone, but not all of them together."""
    roomy = await make_engine(model.path, workers, block_size=block_size)
    block_bytes = roomy.info.kv_cache_bytes // (roomy.info.num_blocks + 1)
    longest = max(len(prompt) for prompt in model.prompts) + GREEDY.max_tokens
    blocks = roomy._manager.plan.blocks_alone(longest) + 1
    engine = await make_engine(
        model.path,
        workers,
        block_size=block_size,
        kv_cache_memory=(blocks + 1) * block_bytes,
        max_prefill_chunk_tokens=7,
    )
    # The longest starts last, so that it meets a pool the others already use.
    completions = await complete(engine, model.prompts, GREEDY)
    assert engine.stats.preemptions > 0
    assert [c.token_ids for c in completions] == model.expected
    assert engine.recount().all_free


SCENARIOS: dict[str, dict[str, Any]] = {
    "whole prompts": {},
    "chunks of 7": {"max_prefill_chunk_tokens": 7},
    "no prefix cache": {"enable_prefix_caching": False},
}


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracle_on_one_worker(family: str, scenario: str, block_size: int, tiny: Callable):
    asyncio.run(check_in_one_batch(tiny(family), None, block_size=block_size, **SCENARIOS[scenario]))


@pytest.mark.parametrize("strategy", ["layered", "packed", "partitioned", "uniform"])
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracle_whatever_the_memory_plan(family: str, strategy: str, tiny: Callable):
    asyncio.run(check_in_one_batch(tiny(family), None, block_size=5, strategy=strategy, max_prefill_chunk_tokens=7))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracle_after_preemption(family: str, block_size: int, tiny: Callable):
    asyncio.run(check_preempted(tiny(family), None, block_size))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracle_on_two_workers(
    family: str, scenario: str, block_size: int, tiny: Callable, two_workers: Any, loop: Loop
):
    loop.run(check_in_one_batch(tiny(family), two_workers, block_size=block_size, **SCENARIOS[scenario]))


@pytest.mark.parametrize("block_size", BLOCK_SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_equal_the_oracle_on_two_workers_after_preemption(
    family: str, block_size: int, tiny: Callable, two_workers: Any, loop: Loop
):
    loop.run(check_preempted(tiny(family), two_workers, block_size))


@pytest.mark.slow
def test_tokens_equal_the_oracle_on_more_workers_than_kv_heads(ray_cluster: None, tiny: Callable, loop: Loop):
    """Four workers for two key-value heads: each head lives on two of them."""
    from intarsia.controller.worker_group import WorkerGroup

    four_workers: Any = loop.run(WorkerGroup.create(4))
    try:
        for family in FAMILIES:
            loop.run(check_in_one_batch(tiny(family), four_workers, block_size=5, max_prefill_chunk_tokens=7))
    finally:
        loop.run(four_workers.close())


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_attention_backend_gives_the_oracle_tokens(family: str, backend: str, tiny: Callable):
    asyncio.run(check_in_one_batch(tiny(family), None, attention_backend=backend))


@pytest.mark.parametrize("family", FAMILIES)
def test_late_arrivals_join_running_requests_without_changing_them(family: str, tiny: Callable):
    model: TinyModel = tiny(family)

    async def staggered() -> list[Completion]:
        engine = await make_engine(model.path, max_prefill_chunk_tokens=7)
        running = asyncio.create_task(engine.run())
        completions = [Completion() for _ in model.prompts]
        for n, (prompt, completion) in enumerate(zip(model.prompts, completions, strict=True)):
            engine.submit(prompt, GREEDY, str(n), completion.outlet)
            while len(completion.token_ids) < 3:
                await asyncio.sleep(0)
        await asyncio.gather(*(c.done.wait() for c in completions))
        running.cancel()
        return completions

    assert [c.token_ids for c in asyncio.run(staggered())] == model.expected


@pytest.mark.parametrize("family", HYBRID)
def test_ignoring_the_window_changes_the_oracle_tokens(family: str, tiny: Callable):
    model: TinyModel = tiny(family)
    for prompt, expected, blind in zip(model.prompts, model.expected, model.window_ignored, strict=True):
        assert blind != expected, f"a prompt of {len(prompt)} tokens does not tell whether the window is honoured"


@pytest.mark.parametrize("family", HYBRID)
def test_an_engine_that_ignores_the_window_fails_the_gate(
    family: str, tiny: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    """The gate discriminates: take the window from our own layer specs, and the tokens are the blind oracle's."""
    from intarsia.kvcache.reach import Full
    from intarsia.workers import layers

    for kind in ("sliding_attention", "chunked_attention"):
        monkeypatch.setitem(layers.REACH_OF, kind, lambda config: Full())
    model: TinyModel = tiny(family)

    async def run() -> tuple[Engine, list[Completion]]:
        engine = await make_engine(model.path)
        return engine, await complete(engine, model.prompts, GREEDY)

    _, completions = asyncio.run(run())
    assert [c.token_ids for c in completions] == model.window_ignored
    assert [c.token_ids for c in completions] != model.expected


def test_windows_are_counted_with_the_token_itself(tiny: Callable):
    from intarsia.workers.layers import read_layers

    layers = read_layers(FAMILIES["ministral"](), tensor_parallel_size=1, item_bytes=4)
    assert [layer.reach.name for layer in layers] == ["full"] + [f"sliding-{WINDOW}"] * 3
