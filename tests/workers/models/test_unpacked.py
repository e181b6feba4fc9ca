"""Packed weights: their numbers, any slice of them, and engines that answer as the plain twin does."""

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from intarsia.kernels.products import CodesLinear, IntegerCodesLinear, NativeCodesLinear
from intarsia.kernels.products.codes import CodeKind, in_fewer_bits
from intarsia.proto.request import SamplingParams
from intarsia.proto.worker import ModelSettings
from intarsia.tests import models
from intarsia.tests.local import complete, make_engine
from intarsia.tests.packing import FORMATS, RARE_FORMATS, Format, make_twins
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.checkpoint.packed.formats import Packed
from intarsia.workers.models.load import load_model
from intarsia.workers.models.unpacked import Unpacked, in_words, pairs_in_words
from intarsia.workers.tensor_parallel import TensorParallel

EVERY_FORMAT = {**FORMATS, **RARE_FORMATS}
FAMILIES = "gemma3", "gpt_oss", "qwen3_5_moe", "nemotron_h", "granite4", "jamba", "deepseek_v3", "llama4"


def weight_of(
    format: Format, folder: Path, rows: int = 72, columns: int = 96, seed: int = 1
) -> tuple[Unpacked, torch.Tensor]:
    """A weight in a checkpoint of nothing else, and its numbers."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.1
    tensors, plain = format.pack(weight)
    save_file(
        {f"proj.{suffix}": tensor.contiguous() for suffix, tensor in tensors.items()}, folder / "model.safetensors"
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": format.config}))
    checkpoint = Checkpoint(folder)
    packed = checkpoint.packed.weights["proj.weight"]
    assert isinstance(packed, Packed)
    return Unpacked(checkpoint, packed, torch.float32), plain


@pytest.mark.parametrize("order", [(), (0, 4, 1, 5, 2, 6, 3, 7), (7, 1, 0, 6, 2, 4, 3, 5)])
@pytest.mark.parametrize("is_cut", [False, True])
@pytest.mark.parametrize("words, columns", [(1, 2), (3, 10), (5, 64)])
def test_pairs_of_integers_in_words_are_those_that_are_opened_one_by_one(
    words: int, columns: int, is_cut: bool, order: tuple[int, ...]
):
    stored = torch.randint(-(2**31), 2**31, (columns, 9), generator=torch.Generator().manual_seed(2)).int()
    some = stored[:, 4 : 4 + words] if is_cut else stored[:, :words].contiguous()
    opened, _ = in_fewer_bits(CodeKind.INT4, in_words(some.T, 0, 4, order))
    assert torch.equal(pairs_in_words(some.T, order), opened)


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_every_format_gives_the_numbers_of_its_formula(name: str, tmp_path: Path):
    source, plain = weight_of(EVERY_FORMAT[name], tmp_path)
    assert source.shape == plain.shape
    torch.testing.assert_close(source.read(), plain, rtol=0, atol=0)


@pytest.mark.parametrize("name", EVERY_FORMAT)
def test_a_slice_that_begins_and_ends_within_groups_is_that_of_the_whole(name: str, tmp_path: Path):
    source, plain = weight_of(EVERY_FORMAT[name], tmp_path)
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
@pytest.mark.parametrize("name", RARE_FORMATS)
def test_an_engine_of_a_rare_format_answers_as_transformers_with_the_plain_twin(
    name: str, products: str, tiny: Callable, tmp_path: Path
):
    source = tiny("qwen3")
    folder = make_twins(source.path, tmp_path, RARE_FORMATS[name])
    expected = [models.greedy(models.load_oracle(folder / "plain", ()), prompt, 12) for prompt in source.prompts]
    assert asyncio.run(answers(folder / "packed", source.prompts, packed_products=products)) == expected


@pytest.mark.parametrize("name", RARE_FORMATS)
def test_slices_of_a_rare_format_are_kept_in_its_bits(name: str, tmp_path: Path):
    source, plain = weight_of(RARE_FORMATS[name], tmp_path)
    if "inputs" in source.packed.parts:
        assert source.codes() is None
        return
    for dim, start, stop in ((0, 0, 36), (0, 17, 43), (1, 0, 48), (1, 16, 64)):
        codes = source.codes(dim, start, stop)
        assert codes is not None
        torch.testing.assert_close(codes.numbers(torch.float32), plain.narrow(dim, start, stop - start), rtol=0, atol=0)


@pytest.mark.parametrize("products", ["cpu", "reference"])
@pytest.mark.parametrize("name", ["fp8-blocks", "w4a16-zero-points", "nvfp4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_with_packed_weights_answer_as_transformers_with_the_plain_twin(
    family: str, name: str, products: str, tiny: Callable, tmp_path: Path
):
    source = tiny(family)
    folder = make_twins(source.path, tmp_path, FORMATS[name])
    expected = [models.greedy(models.load_oracle(folder / "plain", ()), prompt, 8) for prompt in source.prompts]
    assert asyncio.run(answers(folder / "packed", source.prompts, 8, packed_products=products)) == expected


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (1, 2)])
@pytest.mark.parametrize("family", ["qwen3_5_moe", "llama4"])
def test_experts_stay_packed(family: str, rank: int, size: int, tiny: Callable, tmp_path: Path):
    folder = make_twins(tiny(family).path, tmp_path, FORMATS["w4a16"])
    experts = sum(
        each.nbytes for name, each in load_file(folder / "plain/model.safetensors").items() if "experts." in name
    )
    kept, expanded = (
        load_model(
            ModelSettings(str(folder / "packed"), dtype="float32", packed_products=products),
            TensorParallel(rank, size),
            torch.device("cpu"),
        ).facts.weight_bytes
        for products in ("reference", "expanded")
    )
    assert kept < expanded - 0.8 * experts / size


async def answers(path: Path, prompts: list[list[int]], tokens: int = 12, **settings: Any) -> list[list[int]]:
    engine = await make_engine(path, dtype="float32", **settings)
    asked = SamplingParams(temperature=0, max_tokens=tokens)
    return [completion.token_ids for completion in await complete(engine, prompts, asked)]


# -- inputs in eight bits ----------------------------------------------------------------------------------------------

MOST_CHANGE = 0.1
"""Of log-probabilities, relative to how far they lie apart."""


@pytest.mark.parametrize(
    ("family", "name"),
    [
        ("qwen3", "int8"),
        ("qwen3", "w4a16-zero-points"),
        ("qwen3", "gptq-v2-by-activation"),
        ("qwen3", "nvfp4"),
        ("gpt_oss", "mxfp4"),
    ],
)
def test_rounded_inputs_change_log_probabilities_a_little(family: str, name: str, tiny: Callable, tmp_path: Path):
    source = tiny(family)
    folder = make_twins(source.path, tmp_path, FORMATS[name]) / "packed"
    _take_all_experts(folder)
    plain, rounded = (
        asyncio.run(log_probabilities(folder, source.prompts, packed_products=products))
        for products in ("cpu", "cpu-int8")
    )
    assert not torch.equal(plain, rounded)
    assert (rounded - plain).square().mean().sqrt() < MOST_CHANGE * plain.std()


def _take_all_experts(folder: Path) -> None:
    """Else a small change sends a token to other experts, whose weights are random."""
    config = json.loads((folder / "config.json").read_text())
    for part in (config, config.get("text_config", {})):
        if "num_experts_per_tok" in part:
            part["num_experts_per_tok"] = part["num_local_experts"]
    (folder / "config.json").write_text(json.dumps(config))


async def log_probabilities(path: Path, prompts: list[list[int]], **settings: Any) -> torch.Tensor:
    """Of all tokens, after each prompt. [prompts, vocabulary], by token"""
    engine = await make_engine(path, dtype="float32", **settings)
    completions = await complete(engine, prompts, SamplingParams(temperature=0, max_tokens=1, logprobs=-1))
    rows = [dict(completion.logprobs[0].top) for completion in completions]
    return torch.tensor([[row[token] for token in sorted(row)] for row in rows])


def test_inputs_are_rounded_unasked_where_the_description_says_so(tiny: Callable, tmp_path: Path):
    folder = make_twins(tiny("qwen3").path, tmp_path, FORMATS["int8"]) / "packed"
    config = json.loads((folder / "config.json").read_text())
    kinds = [_kinds_of_linears(folder)]
    for group in config["quantization_config"]["config_groups"].values():
        group["input_activations"] = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    (folder / "config.json").write_text(json.dumps(config))
    kinds.append(_kinds_of_linears(folder))
    assert kinds == [{NativeCodesLinear}, {IntegerCodesLinear}]


def _kinds_of_linears(folder: Path) -> set[type]:
    """Of packed weights."""
    loaded = load_model(ModelSettings(str(folder)), TensorParallel(0, 1), torch.device("cpu"))
    return {type(child) for child in loaded.module.modules() if isinstance(child, CodesLinear)}
