"""Which slice of which parameter a rank reads. That the slices add up is shown by the families on two workers."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from intarsia.errors import InvalidSetting
from intarsia.tests.models import FAMILIES, new_model
from intarsia.workers.checkpoint.layer_specs import read_layers
from intarsia.workers.models.families import WITH_ENCODER
from intarsia.workers.models.weights import styles_of
from intarsia.workers.tensor_parallel import Slice, TensorParallel


def slices(path: Any, rank: int, size: int, **config_changes: Any) -> dict[str, Slice | None]:
    """Every parameter that the plan touches, with this rank's slice."""
    whole = AutoConfig.from_pretrained(path, **config_changes)
    config = whole.get_text_config()
    if whole.model_type in WITH_ENCODER:
        with torch.device("meta"):
            model = AutoModelForImageTextToText.from_config(whole)
    else:
        model = new_model(config)
    parallel = TensorParallel(rank, size)
    styles = styles_of(model, config, parallel)
    return {
        f"{module}.{name}": parallel.slice_of(module, name, tuple(parameter.shape), style, config)
        for module, style in styles.items()
        for name, parameter in model.get_submodule(module).named_parameters(recurse=False)
    }


def test_one_rank_cuts_nothing(tiny: Callable):
    assert slices(tiny("llama").path, 0, 1) == {}


@pytest.mark.parametrize("family", FAMILIES)
def test_slices_of_all_ranks_cover_each_parameter_once_or_each_hold_it(family: str, tiny: Callable):
    """Where sections are cut, the ranks' ranges interleave: together they are everything, without overlap."""
    ranks = [slices(tiny(family).path, rank, 2) for rank in range(2)]
    assert ranks[0].keys() == ranks[1].keys() != set()
    for name, first in ranks[0].items():
        second = ranks[1][name]
        if first is None or second is None:
            assert first is second, name
        elif second.ranges == ((0, 0),):  # a bias that is summed up: rank 0 holds it
            assert first.ranges[0][0] == 0 and first.ranges[0][1] > 0
        else:
            ranges = sorted({*first.ranges, *second.ranges})
            assert ranges[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(ranges)), name


def test_gpt_oss_is_cut_although_transformers_has_no_plan(tiny: Callable):
    cut = slices(tiny("gpt_oss").path, 1, 2)
    assert cut["model.layers.0.self_attn.sinks"] == Slice(0, ((2, 4),))
    assert cut["model.layers.0.mlp.experts.gate_up_proj"] == Slice(2, ((96, 192),))
    assert cut["model.layers.0.mlp.experts.down_proj"] == Slice(1, ((48, 96),))
    assert cut["model.layers.0.mlp.experts.down_proj_bias"] == Slice(0, ((0, 0),))


def test_more_ranks_than_kv_heads_replicate_the_heads(tiny: Callable):
    keys = [slices(tiny("llama").path, rank, 4)["model.layers.0.self_attn.k_proj.weight"] for rank in range(4)]
    assert keys == [Slice(0, ((0, 16),)), Slice(0, ((0, 16),)), Slice(0, ((16, 32),)), Slice(0, ((16, 32),))]
    assert read_layers(AutoConfig.from_pretrained(tiny("llama").path), 4, 4)[0].kv_heads == 1


def test_vocabulary_that_does_not_divide_is_filled_up_on_the_last_rank(tiny: Callable):
    cut = [slices(tiny("llama").path, rank, 4, vocab_size=130)["lm_head.weight"] for rank in range(4)]
    assert cut == [Slice(0, ((0, 33),)), Slice(0, ((33, 66),)), Slice(0, ((66, 99),)), Slice(0, ((99, 132),))]


def test_heads_that_do_not_divide_are_refused_with_the_numbers(tiny: Callable):
    config = AutoConfig.from_pretrained(tiny("llama").path)
    with pytest.raises(InvalidSetting, match="size 3 does not divide the model's 4 query heads and 2 key-value heads"):
        read_layers(config, 3, 4)


def test_columns_that_do_not_divide_name_the_parameter(tiny: Callable):
    with pytest.raises(InvalidSetting, match=r"gate_proj\.weight, which has 97 rows"):
        slices(tiny("llama").path, 0, 2, intermediate_size=97)


def test_mamba_heads_are_cut_and_what_they_share_is_cut_by_its_groups(tiny: Callable):
    """Of 8 heads of 16, and 2 groups of 8 states: gate, x, B, C, dt."""
    cut = slices(tiny("bamba").path, 1, 2)["model.layers.0.mamba.in_proj.weight"]
    assert cut == Slice(0, ((64, 128), (192, 256), (264, 272), (280, 288), (292, 296)))
    whole = slices(tiny("bamba").path, 3, 4)["model.layers.0.mamba.in_proj.weight"]
    assert whole == Slice(0, ((96, 128), (224, 256), (256, 272), (272, 288), (294, 296)))


def test_queries_keys_and_values_in_one_weight_are_no_value_projection(tiny: Callable):
    """MiniMax has 2 key-value heads, and 4 heads of states in `qkv_proj`, of which each of 4 ranks has its own."""
    cut = [slices(tiny("minimax").path, rank, 4) for rank in range(4)]
    assert [c["model.layers.0.self_attn.qkv_proj.weight"] for c in cut] == [
        Slice(0, ((48 * rank, 48 * rank + 48),)) for rank in range(4)
    ]
