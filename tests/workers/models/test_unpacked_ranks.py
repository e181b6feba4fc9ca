"""Engines of several ranks that hold packed weights answer as transformers does with the plain twin, and again out of
the prefix cache."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from intarsia.controller.worker_group import WorkerGroup
from intarsia.proto.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.conftest import Loop
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import FORMATS, make_twins

FAMILIES = (
    "llama", "gemma3", "gpt_oss", "qwen3_5", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3",
    "llama4",
)  # fmt: skip
WITH_TWO_STATE_HEADS = "qwen3_5", "qwen3_5_moe"
"""Tiny models whose states four ranks cannot part."""

PRODUCTS = "cpu", "reference"
TOKENS = 8

USUAL = (
    ("llama", "awq"), ("gpt_oss", "mxfp4"), ("phi3", "fp8-rows"), ("qwen3_5_moe", "fp8-blocks"),
    ("nemotron_h", "nvfp4"), ("llama4", "w4a16"),
)  # fmt: skip
"""Family and format of tests that are not slow, on two ranks."""


@pytest.fixture(scope="module")
def four_workers(ray_cluster: None, loop: Loop) -> Iterator[Any]:
    group = loop.run(WorkerGroup.create(4))
    yield group
    loop.run(group.close())


@pytest.fixture(scope="module")
def twins(tiny: Callable, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, list]]:
    """Makes the twins of a family in a format, and the tokens that transformers gives for the plain one. Only those of
    the latest family and format are remembered, as tests take them one after the other."""
    latest: dict[tuple[str, str], tuple[Path, list[list[int]]]] = {}

    def make(family: str, name: str) -> tuple[Path, list[list[int]]]:
        if (family, name) not in latest:
            source = tiny(family)
            folder = make_twins(source.path, tmp_path_factory.mktemp("twins"), FORMATS[name])
            oracle = models.load_oracle(folder / "plain", ())
            latest.clear()
            latest[family, name] = folder, [models.greedy(oracle, prompt, TOKENS) for prompt in source.prompts]
        return latest[family, name]

    return make


async def check(path: Path, prompts: list[list[int]], expected: list[list[int]], workers: Any, products: str) -> None:
    engine = await make_engine(path, workers, dtype="float32", packed_products=products, max_prefill_chunk_tokens=16)
    asked = SamplingParams(temperature=0, max_tokens=TOKENS)
    assert [answer.token_ids for answer in await complete(engine, prompts, asked)] == expected
    again = await complete(engine, prompts, asked)
    assert [answer.token_ids for answer in again] == expected
    assert all(answer.num_cached_tokens > 0 for answer in again[1:]), "repeated prompts of 33 tokens and more must hit"
    assert engine.recount().all_free


@pytest.mark.parametrize(("family", "name"), USUAL)
def test_two_ranks_of_packed_weights_answer_as_transformers_with_the_plain_twin(
    family: str, name: str, tiny: Callable, twins: Callable, two_workers: Any, loop: Loop
):
    folder, expected = twins(family, name)
    loop.run(check(folder / "packed", tiny(family).prompts, expected, two_workers, "cpu"))


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("family", FAMILIES)
def test_any_number_of_ranks_with_any_products_answers_as_transformers_with_the_plain_twin(
    family: str, name: str, tiny: Callable, twins: Callable, two_workers: Any, four_workers: Any, loop: Loop
):
    folder, expected = twins(family, name)
    for workers in (None, two_workers) if family in WITH_TWO_STATE_HEADS else (None, two_workers, four_workers):
        for products in PRODUCTS:
            loop.run(check(folder / "packed", tiny(family).prompts, expected, workers, products))
