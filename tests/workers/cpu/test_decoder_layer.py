"""Layers of few rows, written down as calls, compute what layers of many do, bit by bit."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intarsia.kernels.tokenwise import cpu as native
from intarsia.proto.request import SamplingParams
from intarsia.tests.local import LocalWorkers, complete, make_engine
from intarsia.tests.models import make_checkpoint, prompts_of
from intarsia.tests.workers.cpu.test_fused import FUSED
from intarsia.workers.cpu.decoder_layer import MOST_FEW_ROWS, LayerOfCalls
from intarsia.workers.cpu.stack import Stack

pytestmark = pytest.mark.skipif(not native.is_available(), reason="there is no C++ compiler")

WITH_LAYERS = [family for family, counts in FUSED.items() if counts[3]]


def layers(workers: LocalWorkers) -> list[LayerOfCalls]:
    assert workers.worker._model is not None
    return [module for module in workers.worker._model.module.modules() if isinstance(module, LayerOfCalls)]


def set_most_rows(some: list[LayerOfCalls], most: int) -> None:
    """Of steps that go by lists of calls."""
    for layer in some:
        assert isinstance(layer.stack, Stack)
        layer.stack.most = most


def answers(path: Path, change: Callable[[list[LayerOfCalls]], None] | None = None, **settings: Any) -> list[Any]:
    """Of prompts that are computed together. change: is given the layers before anything is asked"""
    prompts, images = prompts_of(path.name)
    params = SamplingParams(temperature=0, max_tokens=8, logprobs=2, ignore_eos=True)

    async def ask() -> list[Any]:
        workers = LocalWorkers()
        engine = await make_engine(path, workers, **settings)
        if change is not None:
            change(layers(workers))
        return await complete(engine, prompts, params, images)

    return [(answer.token_ids, answer.logprobs) for answer in asyncio.run(ask())]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", WITH_LAYERS)
def test_a_layer_has_the_same_bits_by_its_calls_and_by_its_modules(family: str, dtype: str, tmp_path: Path):
    path = make_checkpoint(family, tmp_path / family)
    settings = {"dtype": dtype, "max_num_batched_tokens": 48}  # so that most steps are of few rows
    by_modules = answers(path, lambda some: set_most_rows(some, 0), **settings)
    assert answers(path, lambda some: set_most_rows(some, MOST_FEW_ROWS), **settings) == by_modules
