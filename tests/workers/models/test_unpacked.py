"""Packed weights: their numbers, any slice of them, and engines that answer as the plain twin does."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from intarsia.proto.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import FORMATS, Format, make_twins
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.checkpoint.packed.formats import Packed
from intarsia.workers.models.unpacked import Unpacked

FAMILIES = "gemma3", "gpt_oss", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3"


def weight_of(
    format: Format, folder: Path, rows: int = 72, columns: int = 96, seed: int = 1
) -> tuple[Unpacked, torch.Tensor]:
    """A weight in a checkpoint of nothing else, and its numbers."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    tensors, plain = format.pack(weight)
    save_file(
        {f"proj.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}, folder / "model.safetensors"
    )
    import json

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": format.config}))
    checkpoint = Checkpoint(folder)
    packed = checkpoint.packed.weights["proj.weight"]
    assert isinstance(packed, Packed)
    return Unpacked(checkpoint, packed, torch.float32), plain


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_numbers_of_its_formula(name: str, tmp_path: Path):
    source, plain = weight_of(FORMATS[name], tmp_path)
    assert source.shape == plain.shape
    torch.testing.assert_close(source.read(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", FORMATS)
def test_a_slice_that_begins_and_ends_within_groups_is_that_of_the_whole(name: str, tmp_path: Path):
    source, plain = weight_of(FORMATS[name], tmp_path)
    for dim, start, stop in ((0, 0, 36), (0, 17, 43), (0, 71, 72), (0, 9, 9), (1, 0, 48), (1, 13, 67), (1, 95, 96)):
        part = source.read(dim, start, stop)
        torch.testing.assert_close(part, plain.narrow(dim, start, stop - start), rtol=0, atol=0)


@pytest.mark.parametrize("products", ["cpu", "reference", "expanded"])
@pytest.mark.parametrize("name", FORMATS)
def test_an_engine_of_packed_weights_answers_as_transformers_with_the_plain_twin(
    name: str, products: str, tiny: Callable, tmp_path: Path
):
    source = tiny("qwen3")
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    expected = [models.greedy(models.load_oracle(folder / "plain", ()), prompt, 12) for prompt in source.prompts]
    assert asyncio.run(answers(folder / "packed", source.prompts, packed_products=products)) == expected


@pytest.mark.parametrize("products", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["fp8-blocks", "w4a16-zero-points", "nvfp4"])
@pytest.mark.parametrize(
    "family", ["gemma3", "gpt_oss", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3"]
)
def test_families_with_packed_weights_answer_as_transformers_with_the_plain_twin(
    family: str, name: str, products: str, tiny: Callable, tmp_path: Path
):
    source = tiny(family)
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    expected = [models.greedy(models.load_oracle(folder / "plain", ()), prompt, 8) for prompt in source.prompts]
    assert asyncio.run(answers(folder / "packed", source.prompts, 8, packed_products=products)) == expected


async def answers(path: Path, prompts: list[list[int]], tokens: int = 12, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, dtype="float32", **settings)
    asked = SamplingParams(temperature=0, max_tokens=tokens)
    return [completion.token_ids for completion in await complete(engine, prompts, asked)]
