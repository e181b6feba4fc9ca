"""What configs say of quantised weights: whatever it is, it is read or refused by a typed error, soon."""

import json
import os
import random
import time
from pathlib import Path
from typing import Any

import pytest

from intarsia.errors import CorruptCheckpoint, IntarsiaError, UnsupportedModel
from intarsia.tests.packing import FORMATS
from intarsia.workers.checkpoint.json_file import quote
from intarsia.workers.checkpoint.packed.description import (
    BITS,
    CONFIG_FILES,
    Description,
    Integers,
    read_description,
)
from intarsia.workers.checkpoint.packed.patterns import Budget, Patterns

MODULE = "model.layers.10.self_attn.q_proj"
EVIL = "(?:a|aa)+b"
"""Compares for ages with a name of many a's."""


def said(quantization_config: Any, path: Path = Path("model")) -> Description:
    description = read_description(path, {"quantization_config": quantization_config})
    assert description is not None
    return description


def patterns(*some: str) -> Patterns:
    return Patterns("a test", some, Budget())


# -- where it is -------------------------------------------------------------------------------------------------------


def test_the_first_place_that_says_something_is_read(tmp_path: Path):
    fp8, awq = {"quant_method": "fp8"}, {"quant_method": "awq", "bits": 4, "group_size": 32}
    assert read_description(tmp_path, {}) is None
    assert read_description(tmp_path, {"quantization_config": {}, "text_config": None}) is None
    both = read_description(tmp_path, {"text_config": {"quantization_config": awq}, "compression_config": fp8})
    assert both is not None and both.method == "awq" and "text_config.quantization_config" in both.place
    first = read_description(tmp_path, {"text_config": {"quantization_config": awq}, "quantization_config": fp8})
    assert first is not None and first.method == "fp8"


@pytest.mark.parametrize(
    ("file", "content", "method"),
    [
        ("hf_quant_config.json", {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}, "modelopt"),
        ("quantize_config.json", {"bits": 4, "group_size": 128, "sym": True}, "gptq"),
        ("quant_config.json", {"w_bit": 4, "q_group_size": 128, "zero_point": True, "version": "GEMM"}, "awq"),
    ],
)
def test_a_file_beside_the_config_is_read_as_of_the_tool_that_writes_it(
    file: str, content: dict[str, Any], method: str, tmp_path: Path
):
    (tmp_path / file).write_text(json.dumps(content))
    description = read_description(tmp_path, {})
    assert description is not None and description.method == method and description.place == str(tmp_path / file)
    if method != "modelopt":
        assert description.integers.group == 128


@pytest.mark.parametrize(
    ("config", "method"),
    [
        ({"quant_algo": "NVFP4", "kv_cache_scheme": "FP8"}, "modelopt"),
        ({"quant_method": "modelopt_fp4", "quant_algo": "NVFP4"}, "modelopt"),
        ({"activation_scheme": "static", "kv_cache_scheme": "FP8"}, "fp8"),
        ({"config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 8}}}}, "compressed-tensors"),
    ],
)
def test_a_config_without_a_method_is_known_by_its_fields(config: dict[str, Any], method: str):
    assert said(config).method == method


@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"},
        {"quant_method": "compressed-tensors", "config_groups": {}, "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"targets": ["Linear"], "weights": None}}},
    ],
)
def test_a_config_that_is_of_caches_alone_says_nothing_of_weights(config: dict[str, Any], tmp_path: Path):
    assert read_description(tmp_path, {"quantization_config": config}) is None


# -- what it says ------------------------------------------------------------------------------------------------------


def test_groups_of_modules_have_their_own_integers():
    four = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    config = {
        "quant_method": "compressed-tensors",
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": four},
            "group_1": {"targets": ["re:.*down_proj$"], "weights": {**four, "num_bits": 8, "symmetric": False}},
            "group_2": {"targets": ["model.layers.1"], "weights": {**four, "group_size": 64}},
            "group_3": {"targets": ["re:.*o_proj"], "weights": {"num_bits": 8, "type": "float"}},
        },
    }
    description = said(config)
    assert description.integers_of("model.layers.0.mlp.up_proj") == Integers(4, 32)
    assert description.integers_of("model.layers.0.mlp.down_proj") == Integers(8, 32, is_symmetric=False)
    assert description.integers_of("model.layers.1.mlp.up_proj") == Integers(4, 64)
    assert description.integers_of("model.layers.11.mlp.up_proj") == Integers(4, 32)


@pytest.mark.parametrize(
    ("inputs", "rounds"),
    [
        ({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}, True),
        ({"num_bits": 8, "type": "float"}, False),
        ({"num_bits": 4, "type": "int"}, False),
        (None, False),
    ],
)
def test_inputs_of_whole_numbers_of_eight_bits_are_told(inputs: dict[str, Any] | None, rounds: bool):
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    description = said({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})
    assert description.integers_of("model.layers.0.mlp.up_proj").rounds_inputs == rounds


def test_dynamic_of_gptq_excludes_modules_and_changes_others():
    config = {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "checkpoint_format": "gptq",
        "dynamic": {"-:.*attn.*": {}, "-:.*visual.*": {}, r"+:.*\.18\..*down.*": {"bits": 8, "group_size": 64}},
    }
    description = said(config)
    assert not description.calls_quantised(MODULE)
    assert description.calls_quantised("model.layers.18.mlp.down_proj")
    assert description.integers_of("model.layers.18.mlp.down_proj") == Integers(8, 64, zero_is_less_one=True)
    assert description.integers_of("model.layers.17.mlp.down_proj") == Integers(4, 128, zero_is_less_one=True)


def test_gptq_says_how_zero_points_and_columns_are_stored():
    common = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert said(common).integers == Integers(4, 128, zero_is_less_one=True)
    assert said({**common, "checkpoint_format": "gptq_v2", "sym": False}).integers == Integers(4, 128, False)
    assert said({**common, "desc_act": True, "group_size": -1}).integers == Integers(
        4, None, zero_is_less_one=True, is_shuffled=True
    )


def test_auto_round_writes_the_formats_of_others_and_says_whose():
    common = {"quant_method": "auto-round", "bits": 4, "group_size": 128}
    assert said({**common, "packing_format": "auto_round:auto_gptq"}).method == "gptq"
    assert said({**common, "packing_format": "auto_round:auto_awq"}).method == "awq"
    with pytest.raises(UnsupportedModel, match="packing_format is llm_compressor"):
        said({**common, "packing_format": "auto_round:llm_compressor"})
    floats = said({**common, "packing_format": "auto_round:llm_compressor", "data_type": "mx_fp"})
    assert floats.method == "auto-round"


@pytest.mark.parametrize(
    ("packing", "is_less_one"),
    [("auto_round:auto_gptq", True), ("auto_round:gptqmodel", False), ("auto_round", False)],
)
def test_auto_round_says_by_its_packing_how_zero_points_are_stored(packing: str, is_less_one: bool):
    description = said({"quant_method": "auto-round", "bits": 4, "group_size": 128, "packing_format": packing})
    assert description.integers_of(MODULE).zero_is_less_one is is_less_one


def test_auto_round_names_modules_with_a_width_of_their_own_and_whole_names_count_first():
    extra = {
        ".*self_attn.*": {"bits": 8},
        "model.layers.10.self_attn.v_proj": {"bits": 3, "group_size": 64},
        "lm_head": {"bits": 16, "data_type": "fp"},
    }
    description = said({"quant_method": "auto-round", "bits": 4, "group_size": 128, "extra_config": extra})
    assert description.integers_of("model.layers.10.self_attn.k_proj")[:2] == (8, 128)
    assert description.integers_of("model.layers.10.self_attn.v_proj")[:2] == (3, 64)
    assert description.integers_of("model.layers.10.mlp.up_proj")[:2] == (4, 128)
    assert not description.calls_quantised("lm_head")


def test_modelopt_writes_its_algorithms_in_any_case_and_int8_is_among_them():
    assert not said({"quant_method": "modelopt", "quant_algo": "fp8_pb_wo"}).has_integers
    smooth = said({"quant_method": "modelopt", "quant_algo": "W8A8_SQ_PER_CHANNEL"})
    assert smooth.has_integers and smooth.integers_of(MODULE).rounds_inputs
    assert not said({"quant_method": "modelopt", "quant_algo": "W8A16"}).integers_of(MODULE).rounds_inputs


def test_floats_of_eight_bits_in_groups_are_blocks_of_one_row():
    weights = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}
    group = {"targets": ["Linear"], "weights": weights}
    assert said({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}).block == (1, 64)
    group["weights"] = weights | {"scale_dtype": "torch.uint8", "group_size": 32}
    assert said({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}).block == (128, 128)
    group["weights"] = {"num_bits": 6, "type": "float", "strategy": "group", "group_size": 32}
    with pytest.raises(UnsupportedModel, match="its weights are floats of 6 bits"):
        said({"quant_method": "compressed-tensors", "config_groups": {"group_0": group}})


def test_only_named_modules_are_called_quantised_where_a_config_names_them():
    layers = {"model.language_model.layers.3.mlp.experts": {"quant_algo": "W4A16_NVFP4"}}
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "ignore": ["mtp*"]}
    description = said({**mixed, "quantized_layers": layers})
    assert description.calls_quantised("model.language_model.layers.3.mlp.experts.7.up_proj")
    assert not description.calls_quantised("model.language_model.layers.3.self_attn.q_proj")
    assert not said({"quant_method": "fp8"}).calls_quantised(MODULE), "without a list nothing is said of a module"
    assert said({"quant_method": "fp8", "ignored_layers": ["lm_head"]}).calls_quantised(MODULE)


def test_patterns_are_names_parts_between_dots_stars_and_expressions():
    assert patterns(MODULE).match(MODULE)
    assert patterns("self_attn").match(MODULE) and patterns("model.layers.10").match(MODULE)
    assert not patterns("model.layers.1").match(MODULE)
    assert not patterns("gate").match("model.layers.1.mlp.gate_proj")
    assert patterns("model.layers.*.self_attn").match(MODULE) and patterns("*self_attn*").match(MODULE)
    assert not patterns("layers.*.self_attn").match(MODULE)
    assert patterns("re:.*self_attn.(q|k)_proj$").match(MODULE) and patterns(r"re:model\.layers\.\d{1,2}").match(MODULE)
    assert not patterns("re:self_attn").match(MODULE)
    assert not patterns().match(MODULE)


# -- what a stranger may say -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern",
    ["re:(", "re:" + "(?:" * 100 + "a" + "){1,9}" * 100, "re:a{1,100000}", "re:" + "(" * 900, "re:(?R)", "re:a{e<=3}",
     "a" * 5000, "re:(?:ab){30}{30}{30}"],
)  # fmt: skip
def test_a_pattern_that_is_none_or_costs_much_is_refused(pattern: str):
    with pytest.raises(CorruptCheckpoint, match="quantization_config"):
        said({"quant_method": "fp8", "modules_to_not_convert": [pattern]})


def test_many_patterns_that_cost_much_together_are_refused():
    many = [f"re:(?:{'(?:ab|c)+' * 100}){{900}}{n}" for n in range(50)]
    with pytest.raises(CorruptCheckpoint, match="too many regular expressions"):
        said({"quant_method": "fp8", "modules_to_not_convert": many})
    with pytest.raises(CorruptCheckpoint, match="more than 16384 patterns"):
        said({"quant_method": "fp8", "modules_to_not_convert": ["a"] * 20_000})


def test_a_pattern_that_takes_long_on_a_name_is_refused_by_its_place():
    description = said({"quant_method": "gptq", "dynamic": {f"+:{EVIL}": {"bits": 8}}})
    with pytest.raises(CorruptCheckpoint, match=r"quantization_config\), dynamic holds .* takes more than 0.1 s"):
        description.integers_of("a" * 40)


ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 4, 4.0, 8, 2**31, 2**63, 10**30, 0.5, 1e308, float("inf"), "", "4", "x" * 300, "gptq",
    "\ud800", "re:", "re:(", f"re:{EVIL}", "*" * 60, [], [1], ["a"], ["Linear"], [[]], [None], [128, 128], {}, {"a": 1},
    {"a": {}}, {"-:(": {}}, {"+:.*": {"bits": 3}}, {"quant_algo": "FP8"}, {"weights": []},
    {"weights": {"num_bits": []}},
)  # fmt: skip
NAMES = (
    "quant_method", "fmt", "weight_block_size", "modules_to_not_convert", "ignore", "exclude_modules", "config_groups",
    "format", "sparsity_config", "transform_config", "quantization", "quant_algo", "quantized_layers", "bits", "sym",
    "group_size", "checkpoint_format", "dynamic", "version", "packing_format", "w_bit", "targets", "weights", "type",
    "num_bits", "strategy", "block_structure", "symmetric", "kv_cache_scheme",
)  # fmt: skip
METHODS = "fp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "mxfp4", "MODELOPT_FP4", "none"


def any_value(draw: random.Random, depth: int = 3) -> Any:
    kind = draw.randrange(4 if depth else 1)
    if kind == 1:
        return [any_value(draw, depth - 1) for _ in range(draw.randrange(4))]
    if kind >= 2:
        return {draw.choice(NAMES): any_value(draw, depth - 1) for _ in range(draw.randrange(5))}
    return draw.choice(ODD)


def mutated(value: Any, draw: random.Random) -> Any:
    """The same with one thing changed, somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.8:
        name = draw.choice(sorted(value))
        return {**value, name: mutated(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.5:
        place = draw.randrange(len(value))
        return [*value[:place], mutated(value[place], draw), *value[place + 1 :]]
    return any_value(draw)


def test_any_description_is_read_or_a_typed_error(tmp_path: Path):
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    good = [json.loads(json.dumps(dict(format.config))) for format in FORMATS.values()]
    places = "quantization_config", "compression_config", "text_config", *CONFIG_FILES
    read = 0
    for _ in range(3000):
        found = mutated(draw.choice(good), draw) if draw.random() < 0.5 else any_value(draw)
        if isinstance(found, dict) and draw.random() < 0.5:
            found = {**found, "quant_method": draw.choice(METHODS)}
        place = draw.choice(places[:3])
        config = {place: found if place != "text_config" else draw.choice([found, {"quantization_config": found}])}
        began_s = time.process_time()
        try:
            description = read_description(tmp_path, config)
            if description is not None:
                for module in (MODULE, "", "a" * 40):
                    assert description.integers_of(module).bits in BITS
                    assert description.calls_quantised(module) in (True, False)
                read += 1
        except (CorruptCheckpoint, UnsupportedModel) as error:
            assert len(str(error)) < 700 and "\n" not in str(error), str(error)
        assert time.process_time() - began_s < 10, quote(found)
    assert read > 100


def test_any_file_beside_the_config_is_read_or_a_typed_error(tmp_path: Path):
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    for _ in range(200):
        file = tmp_path / draw.choice(CONFIG_FILES)
        file.write_text(json.dumps(any_value(draw)))
        try:
            read_description(tmp_path, {})
        except IntarsiaError as error:
            assert len(str(error)) < 700
        file.unlink()
