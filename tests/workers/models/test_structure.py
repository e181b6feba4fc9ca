"""How models are cut among ranks by what they consist of: heads always, MLPs and experts by their inner dimension."""

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.muse_spark import modeling_muse_spark

from intarsia.deploy.proof.scaled import scaled
from intarsia.workers.models.structure import _experts, cut_fused, plan_by_structure
from intarsia.workers.tensor_parallel import TensorParallel


def plan_of(family: str) -> dict[str, str]:
    config = CONFIG_MAPPING[family]()
    small: Any = type(config).from_dict(scaled(config).fields)
    with torch.device("meta"):
        return plan_by_structure(AutoModelForCausalLM.from_config(small))


def test_attention_is_cut_where_transformers_cuts_experts_alone():
    plan = plan_of("granitemoe")
    assert plan["model.layers.1.self_attn.k_proj"] == "colwise" and plan["model.layers.1.self_attn.o_proj"] == "rowwise"
    assert plan["model.layers.0.block_sparse_moe.experts"] == "moe_tp_experts"
    assert plan["model.layers.0.block_sparse_moe.experts.gate_up_proj"] == "packed_colwise"


def test_outputs_of_experts_are_summed_up_before_a_norm_of_each():
    config: Any = CONFIG_MAPPING["muse_spark_text"]()
    with torch.device("meta"):
        experts: Any = modeling_muse_spark.MuseSparkExperts(config)
    plan = _experts("experts", experts)
    assert plan.pop("experts") == "expert_parts" and plan.pop("experts.post_expert_norm") == "summed_inputs"
    assert plan == {"experts.gate_up_proj": "packed_colwise", "experts.down_proj": "rowwise"}


def test_norms_over_all_heads_are_cut_and_those_of_each_head_are_not():
    assert plan_of("olmo2")["model.layers.0.self_attn.q_norm"] == "norm_over_ranks"
    assert "model.layers.0.self_attn.q_norm" not in plan_of("qwen3")


def test_a_norm_of_each_head_is_not_cut_where_there_is_one_head():
    """As in Gemma 3 270M and 1B, whose ranks all have the one head of keys."""
    kind: Any = CONFIG_MAPPING["gemma3_text"]
    config = kind(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1)
    with torch.device("meta"):
        plan = plan_by_structure(AutoModelForCausalLM.from_config(config))
    assert not [path for path in plan if path.endswith("norm")]


def test_sinks_are_of_their_heads():
    assert plan_of("granite_swa")["model.layers.0.self_attn"] == "sinks"


def test_mlps_without_a_gate_are_cut_too():
    plan = plan_of("phi")
    assert (plan["model.layers.0.mlp.fc1"], plan["model.layers.0.mlp.fc2"]) == ("colwise", "rowwise")


def test_a_model_whose_attention_is_of_another_form_has_no_such_plan():
    assert plan_of("gpt2") == {}


def test_a_linear_with_a_query_a_key_and_a_value_of_each_head_in_turn_is_cut_by_its_heads():
    plan = plan_of("persimmon")
    layer = "model.layers.0"
    assert plan[f"{layer}.self_attn.query_key_value"] == plan[f"{layer}.mlp.dense_h_to_4h"] == "colwise"
    assert plan[f"{layer}.self_attn.dense"] == plan[f"{layer}.mlp.dense_4h_to_h"] == "rowwise"


def test_norms_of_what_heads_and_mlps_give_out_are_cut_with_it():
    plan = plan_of("bitnet")
    layer = "model.layers.1"
    assert plan[f"{layer}.self_attn.attn_sub_norm"] == "norm_over_ranks" == plan[f"{layer}.mlp.ffn_sub_norm"]


def test_norms_with_numbers_for_each_head_are_cut_with_the_heads():
    kind: Any = CONFIG_MAPPING["cohere"]
    config = kind(use_qk_norm=True, num_key_value_heads=8)
    small: Any = type(config).from_dict(scaled(config).fields)
    with torch.device("meta"):
        plan = plan_by_structure(AutoModelForCausalLM.from_config(small))
    assert plan["model.layers.0.self_attn.q_norm"] == "colwise" == plan["model.layers.0.self_attn.k_norm"]


def test_queries_keys_and_values_of_one_linear_are_cut_each_by_itself():
    kind: Any = CONFIG_MAPPING["phi3"]
    config = kind(hidden_size=64, num_attention_heads=8, num_key_value_heads=2)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    plan, style = plan_by_structure(model), cut_fused(model)["model.layers.0.self_attn.qkv_proj"]
    assert plan["model.layers.0.self_attn.o_proj"] == "rowwise" and plan["model.layers.0.mlp.gate_up_proj"] == "packed"
    # Of 8 query heads each of 4 ranks has two, and of 2 key-value heads two ranks have the same one.
    parts = [TensorParallel(rank, 4).slice_of("qkv_proj", "weight", (96, 64), style, config) for rank in range(4)]
    assert [part.ranges for part in parts if part is not None] == [
        ((0, 16), (64, 72), (80, 88)),
        ((16, 32), (64, 72), (80, 88)),
        ((32, 48), (72, 80), (88, 96)),
        ((48, 64), (72, 80), (88, 96)),
    ]


def test_the_one_key_and_value_of_all_heads_is_whole_on_every_rank():
    config: Any = CONFIG_MAPPING["gpt_bigcode"]()
    small: Any = type(config).from_dict(scaled(config).fields)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(small)
    queries, both = cut_fused(model)["transformer.h.0.attn.c_attn"].cuts["weight"].sections
    assert (queries.size, queries.is_cut) == (small.hidden_size, True)
    assert (both.size, both.is_cut) == (2 * small.hidden_size // small.num_attention_heads, False)
