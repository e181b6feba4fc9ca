"""What a model would take in a format, counted by the shapes of its weights, is what it takes once it is written so."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from intarsia.deploy.checkpoints.weights import shapes_of, weigh
from intarsia.deploy.checkpoints.weights_as import RECIPES, STAYS, Mix, Recipe, gets_more, recipe_of, weights_as
from intarsia.errors import InvalidSetting
from intarsia.tests.gguf_twins import make_twin
from intarsia.tests.packing import BLOCK, FORMATS, GROUP, make_twins
from intarsia.workers.checkpoint.files import Checkpoint


def recipe(name: str, **changes: object) -> Recipe:
    found = RECIPES[name]
    assert isinstance(found, Recipe)
    return replace(found, **changes)  # type: ignore[arg-type]


SMALL = {"scale_columns": GROUP, "multiple": GROUP}
FLOAT32, BFLOAT16 = 4, 2

AS_WRITTEN = {
    "fp8-blocks": recipe("fp8-blocks", scale_bytes=BFLOAT16, scale_rows=BLOCK[0], scale_columns=BLOCK[1]),
    "fp8-rows": recipe("fp8", scale_bytes=FLOAT32),
    "fp8-modelopt": recipe("fp8", scale_bytes=FLOAT32, scale_rows=0),
    "mxfp8": recipe("mxfp8"),
    "int8": recipe("int8"),
    "w4a16": recipe("w4a16", scale_bytes=FLOAT32, **SMALL),
    "w4a16-zero-points": recipe("w4a16", scale_bytes=FLOAT32, has_zeros=True, **SMALL),
    "w8a16": recipe("w8a16", scale_bytes=FLOAT32, **SMALL),
    "w8a16-zero-points": recipe("w8a16", scale_bytes=FLOAT32, has_zeros=True, **SMALL),
    "awq": recipe("awq", **SMALL),
    "gptq": recipe("gptq", **SMALL),
    "gptq-8-bits": recipe("gptq", bits=8, **SMALL),
    "gptq-v2-by-activation": recipe("gptq", **SMALL),
    "nvfp4": recipe("nvfp4"),
    "nvfp4-modelopt": recipe("nvfp4"),
    "mxfp4": recipe("mxfp4"),
}
"""The tests' makers write smaller groups and blocks than published files have, and some scales in other numbers."""


@pytest.mark.parametrize("name", AS_WRITTEN)
@pytest.mark.parametrize("family", ["llama", "qwen3_5_moe"])
def test_counted_bytes_are_those_of_files_in_that_format(family: str, name: str, tiny: Callable, tmp_path: Path):
    source = Path(tiny(family).path)
    counted = weights_as(shapes_of(Checkpoint(source)), AS_WRITTEN[name], "float32")
    twins = make_twins(source, tmp_path, FORMATS[name], only=lambda name: not STAYS.fullmatch(name))
    written = Checkpoint(twins / "packed")
    assert counted == weigh(written, "float32")
    # The shapes of what is packed are those that it has once it is expanded.
    assert shapes_of(written) == shapes_of(Checkpoint(source))


@pytest.mark.parametrize("family", ["gemma3", "jamba", "deepseek_v3", "nemotron_h", "lfm2_moe", "qwen3_5"])
def test_counted_bytes_are_those_of_files_of_other_families(family: str, tiny: Callable, tmp_path: Path):
    source = Path(tiny(family).path)
    counted = weights_as(shapes_of(Checkpoint(source)), AS_WRITTEN["fp8-rows"], "float32")
    twins = make_twins(source, tmp_path, FORMATS["fp8-rows"], only=lambda name: not STAYS.fullmatch(name))
    assert counted == weigh(Checkpoint(twins / "packed"), "float32")


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_1", "Q5_0"])
def test_counted_bytes_of_gguf_files_are_those_of_a_file(format: str, tmp_path: Path):
    mix = RECIPES[format.lower()]
    assert isinstance(mix, Mix)
    twin = make_twin("llama", tmp_path, lambda name: mix.output.name if name == "output.weight" else format)
    counted = weights_as(shapes_of(Checkpoint(twin.plain)), mix, "float32")
    assert counted == weigh(Checkpoint(twin.folder()), "float32")


def test_of_layers_the_first_and_last_eighth_and_every_third_between_get_more_bits():
    assert [layer for layer in range(24) if gets_more(layer, 24)] == [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]


@pytest.mark.parametrize(
    ("name", "stays"),
    [
        ("model.layers.0.mlp.gate_proj.weight", False), ("model.layers.0.mlp.gate.weight", True),
        ("model.layers.0.mlp.shared_expert_gate.weight", True), ("model.layers.0.linear_attn.in_proj_a.weight", True),
        ("model.layers.0.linear_attn.in_proj_qkv.weight", False), ("model.layers.0.mamba.in_proj.weight", False),
        ("model.layers.0.block_sparse_moe.router.layer.weight", True), ("lm_head.weight", True),
        ("model.embed_tokens.weight", True), ("model.layers.0.mamba.conv1d.weight", True),
        ("model.layers.0.mlp.experts.3.down_proj.weight", False), ("model.layers.1.self_attn.q_norm.weight", True),
    ],
)  # fmt: skip
def test_what_stays_is_known_by_its_name(name: str, stays: bool):
    assert (STAYS.fullmatch(name) is not None) == stays


def test_a_format_that_is_not_known_is_refused_with_those_that_are():
    with pytest.raises(InvalidSetting, match=r"one of fp8, fp8-blocks, .*q4_0; got 'exl3'") as refused:
        recipe_of("exl3")
    assert refused.value.field == "weights_format"
