"""After a worker's or a controller's death a stream goes on with the very bits that it would have had."""

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, NamedTuple

import pytest

from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.kernels.products import NativeLinear
from intarsia.proto.request import SamplingParams
from intarsia.tests.conftest import Loop

pytestmark = pytest.mark.skipif(NativeLinear.lacks() is not None, reason="there is no C++ compiler")

TOKENS = 150
STRUCK_AT = 20
"""Tokens of the first stream by then."""

Bits = list[tuple[int, Any]]


class Struck(NamedTuple):
    """An engine under six streams."""

    engine: RunningEngine
    undisturbed: list[Bits]


async def streams(engine: RunningEngine, then: Callable[[], Awaitable[None]] | None = None) -> list[Bits]:
    """Tokens and log-probabilities, which tell logits apart that differ in a bit. `then` happens on the way."""

    async def one(n: int) -> Bits:
        sampling = SamplingParams(max_tokens=TOKENS, temperature=float(n % 2), seed=n, logprobs=3, ignore_eos=True)
        said: Bits = []
        async for delta in engine.client.generate(list(range(2, 9 + 7 * n)), sampling):
            said += zip(delta.token_ids, delta.logprobs or (), strict=True)
            if n == 0 and then is not None and len(said) == STRUCK_AT:
                await then()
        assert len(said) == TOKENS
        return said

    return await asyncio.gather(*(one(n) for n in range(6)))


@pytest.fixture(scope="module", params=[pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module", params=["gemma3", "bamba"])
def struck(
    request: pytest.FixtureRequest, dtype: str, ray_cluster: None, loop: Loop, tiny: Callable
) -> Iterator[Struck]:
    settings = engine_settings(
        str(tiny(request.param).path), dtype=dtype, tensor_parallel_size=2, kv_cache_memory="4MiB", same_bits=True
    )
    engine = loop.run(start_engine(settings))
    yield Struck(engine, loop.run(streams(engine)))
    loop.run(engine.shutdown())


def test_bits_are_the_same_after_a_workers_death(struck: Struck, loop: Loop):
    async def kill() -> None:
        os.kill((await struck.engine.worker_process_ids())[-1], signal.SIGKILL)

    assert loop.run(streams(struck.engine, kill)) == struck.undisturbed
    assert loop.run(struck.engine.stats())["rebuilds"] == 1
    assert loop.run(struck.engine.recount()).all_free


def test_bits_are_the_same_after_a_controllers_death(struck: Struck, loop: Loop):
    before = struck.engine.controller_process_id

    async def kill() -> None:
        os.kill(before, signal.SIGKILL)

    assert loop.run(streams(struck.engine, kill)) == struck.undisturbed
    assert struck.engine.controller_process_id != before
    assert loop.run(struck.engine.recount()).all_free
