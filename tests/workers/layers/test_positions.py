"""Models with two sets of frequencies: one of them is taken, whatever is computed beside."""

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from intarsia.proto.request import SamplingParams
from intarsia.tests.local import complete, make_engine
from intarsia.tests.models import greedy, load_oracle, prompts
from intarsia.tests.tiny_configs import COMMON

TRAINED_TOKENS, TOKENS, NEW = 64, 256, 8
LENGTHS = 20, 120
SHORT = [1.0, 1.0, 1.1, 1.1, 1.2, 1.3, 1.4, 1.5]
LONG = [1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0]


def ropes(short: list[float], long: list[float]) -> dict[str, Any]:
    return {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": short, "long_factor": long, "factor": 4.0,
        "original_max_position_embeddings": TRAINED_TOKENS,
    }  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("longrope")
    torch.manual_seed(0)
    common: dict[str, Any] = COMMON | {"max_position_embeddings": TOKENS}
    config = LlamaConfig(**common, num_hidden_layers=3, rope_parameters=ropes(SHORT, LONG))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(path)
    return path


async def answers(path: Path, asked: list[list[int]], **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, **settings)
    sampling = SamplingParams(temperature=0, max_tokens=NEW, ignore_eos=True)
    return [answer.token_ids for answer in await complete(engine, asked, sampling)]


def test_long_texts_and_short_ones_have_the_frequencies_of_long_ones(model: Path):
    asked = prompts(1, LENGTHS)
    oracle = load_oracle(model, rope_parameters=ropes(LONG, LONG))
    expected = [greedy(oracle, prompt, NEW) for prompt in asked]
    assert asyncio.run(answers(model, asked)) == expected
    assert asyncio.run(answers(model, asked[:1])) == expected[:1]
    assert greedy(load_oracle(model), asked[0], NEW) != expected[0], "both sets say the same of a short prompt"


def test_with_short_texts_only_they_have_those_of_short_ones(model: Path):
    asked = prompts(1, LENGTHS)[:1]
    expected = greedy(load_oracle(model), asked[0], NEW)
    assert asyncio.run(answers(model, asked, max_model_len=TRAINED_TOKENS)) == [expected]
