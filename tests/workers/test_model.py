"""Checkpoints that differ from the tiny families in one respect."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from intarsia.controller.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.conftest import Loop
from intarsia.tests.local import complete, make_engine

GREEDY = SamplingParams(temperature=0, max_tokens=12)


async def tokens(path: Path, workers: Any = None, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, workers, **settings)
    return [completion.token_ids for completion in await complete(engine, models.PROMPTS, GREEDY)]


def test_text_model_inside_a_multimodal_checkpoint_is_found(tmp_path: Path):
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    vision = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = Gemma3Config(
        text_config=models.gemma3().to_dict(),
        vision_config=vision | {"image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        image_token_index=127,
    )
    torch.manual_seed(3)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    assert asyncio.run(tokens(tmp_path)) == [models.greedy(whole, prompt, 12) for prompt in models.PROMPTS]


def test_vocabulary_that_does_not_divide_among_the_workers_gives_the_same_tokens(
    tmp_path: Path, two_workers: Any, loop: Loop
):
    from transformers import LlamaForCausalLM

    config: Any = models.llama()
    config.vocab_size = 131
    torch.manual_seed(4)
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    expected = [models.greedy(model, prompt, 12) for prompt in models.PROMPTS]
    assert loop.run(tokens(tmp_path, two_workers)) == expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_the_oracle_for_the_first_tokens(dtype: str, tiny: Callable):
    model = tiny("ministral")
    for output, expected in zip(asyncio.run(tokens(model.path, dtype=dtype)), model.expected, strict=True):
        assert len(output) == 12
        assert output[0] == expected[0]


def test_page_memory_follows_the_dtype(tiny: Callable):
    async def blocks(dtype: str) -> int:
        return (await make_engine(tiny("llama").path, dtype=dtype)).info.num_blocks

    assert asyncio.run(blocks("bfloat16")) == 2 * asyncio.run(blocks("float32")) + 1
