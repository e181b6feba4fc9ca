"""Small copies keep what is peculiar to a model."""

from typing import Any

import pytest
from transformers import CONFIG_MAPPING

from intarsia.deploy.proof.scaled import (
    FEWEST_POSITIONS,
    HEAD_SIZE,
    POSITIONS,
    TRAINED_POSITIONS,
    VOCABULARY,
    WINDOW,
    scaled,
)
from intarsia.deploy.proof.sweep import LACKING
from intarsia.errors import UnsupportedModel


def config_of(family: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[family](**fields).get_text_config(decoder=True)


def copy_of(family: str, **fields: Any) -> Any:
    config = config_of(family, **fields)
    return type(config).from_dict(scaled(config).fields)


def test_each_kind_of_layer_is_there_and_the_last_is_of_the_last_kind():
    copy = copy_of("gemma3_text", num_hidden_layers=26)
    assert copy.layer_types[:7] == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert copy_of("gemma4_text").layer_types[-1] == "full_attention"
    jamba = config_of("jamba")
    assert set(copy_of("jamba").layer_types) == set(jamba.layer_types)


def test_layers_that_attend_twice_become_few_too():
    copy = copy_of("longcat_flash")
    assert (copy.num_layers, copy.num_hidden_layers) == (2, 4)


def test_ratios_of_heads_stay_and_each_head_shrinks():
    copy = copy_of("llama", num_attention_heads=32, num_key_value_heads=8, hidden_size=4096)
    assert (copy.num_attention_heads, copy.num_key_value_heads) == (8, 2)
    assert copy.head_dim == HEAD_SIZE and copy.hidden_size == 8 * HEAD_SIZE
    alone = copy_of("llama", num_attention_heads=32, num_key_value_heads=32)
    assert alone.num_attention_heads == alone.num_key_value_heads == 4
    single = copy_of("gemma", num_attention_heads=8, num_key_value_heads=1)
    assert (single.num_attention_heads, single.num_key_value_heads) == (4, 1)


def test_unequal_sizes_stay_unequal():
    copy = copy_of("deepseek_v3")
    assert (copy.qk_nope_head_dim, copy.qk_rope_head_dim, copy.v_head_dim) == (32, 16, 32)
    assert copy.q_lora_rank != copy.kv_lora_rank
    mimo = copy_of("mimo_v2_flash")
    assert 2 * mimo.head_dim == 3 * mimo.v_head_dim


@pytest.mark.parametrize(("window", "becomes"), [(4096, WINDOW), (129, WINDOW + 1)])
def test_windows_are_shorter_than_prompts_and_odd_ones_stay_odd(window: int, becomes: int):
    assert copy_of("mistral", sliding_window=window).sliding_window == becomes


def test_positions_are_stretched_within_the_copy():
    ropes = {
        "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32_768,
    }  # fmt: skip
    copy = copy_of("qwen3", rope_parameters=ropes, max_position_embeddings=131_072)
    assert copy.rope_parameters["original_max_position_embeddings"] == TRAINED_POSITIONS < copy.max_position_embeddings
    assert copy.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize(("longest", "trained"), [(131_072, FEWEST_POSITIONS), (4096, POSITIONS)])
def test_of_two_sets_of_frequencies_the_one_counts_that_an_engine_takes(longest: int, trained: int):
    ropes = {
        "rope_type": "longrope", "rope_theta": 10_000.0, "short_factor": [1.0] * 48, "long_factor": [2.0] * 48,
    }  # fmt: skip
    copy = copy_of("phi3", rope_parameters=ropes, max_position_embeddings=longest)
    assert copy.rope_parameters["original_max_position_embeddings"] == trained


def test_kinds_of_layers_that_come_late_are_there():
    fields = {"num_hidden_layers": 32, "use_sliding_window": True, "max_window_layers": 28, "sliding_window": 4096}
    copy = copy_of("qwen2", **fields)
    assert copy.layer_types == ["full_attention"] * 2 + ["sliding_attention"] * 3
    assert copy.sliding_window == WINDOW


def test_what_ranks_leave_of_a_vocabulary_stays():
    assert copy_of("llama", vocab_size=151_937).vocab_size == VOCABULARY + 1
    assert copy_of("llama", vocab_size=128_256).vocab_size == VOCABULARY


def test_epsilons_are_large_enough_to_be_seen():
    assert copy_of("llama", rms_norm_eps=1e-6).rms_norm_eps == pytest.approx(1e-3)


def test_what_was_changed_is_told():
    made = scaled(config_of("llama"))
    assert made.changed["hidden_size"][1] == made.fields["hidden_size"]
    assert "attention_bias" not in made.changed


def test_a_config_whose_sizes_have_other_names_is_refused():
    with pytest.raises(UnsupportedModel, match="no number of layers"):
        scaled(config_of("blt"))


@pytest.mark.parametrize(("queries", "keys"), [(24, 8), (32, 32), (64, 8), (8, 1), (40, 8), (14, 2)])
@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
def test_heads_divide_among_the_ranks_where_those_of_the_model_do(queries: int, keys: int, ranks: int):
    config = config_of("qwen2", hidden_size=queries * 16, num_attention_heads=queries, num_key_value_heads=keys)
    fields = scaled(config, ranks).fields
    copied, their_keys = fields["num_attention_heads"], fields["num_key_value_heads"]
    assert copied <= queries and copied % their_keys == 0
    assert queries % ranks or (copied % ranks == 0 and (their_keys % ranks == 0 or ranks % their_keys == 0))


def test_layers_that_run_several_times_are_some_of_a_copys():
    made = scaled(CONFIG_MAPPING["dory"]()).fields
    parts = [made[f"n_{part}_layers"] for part in ("input", "recurrent", "output")]
    assert sum(parts) == made["num_hidden_layers"] == len(made["layer_types"]) and min(parts) > 0
    assert set(made["layer_types"]) == {"sliding_attention", "full_attention", "mlp"}


def test_a_copy_has_a_layer_for_each_pass():
    made = scaled(CONFIG_MAPPING["hrm_text"]()).fields
    assert made["num_hidden_layers"] == made["num_layers_per_stack"] * made["H_cycles"] * (made["L_cycles"] + 1)


def test_layers_that_are_counted_from_one_stay_those_that_they_are():
    made = scaled(CONFIG_MAPPING["qwen4_exp_text"](**LACKING["qwen4_exp_text"])).fields
    assert made["ple_layer_ids"] == [2] and made["layer_types"][1] == "linear_attention"
    assert made["indexer_budget"] % made["indexer_compress_ratio"] == 0
    assert made["indexer_budget"] + made["indexer_compress_ratio"] < 24  # all prompts but the first are longer


def test_sections_of_rotated_numbers_stay_in_their_ratios():
    ropes = {"rope_type": "default", "rope_theta": 500_000.0, "mrope_section": [22, 22, 20]}
    kind: Any = CONFIG_MAPPING["ernie4_5_vl_moe"]
    config = kind(text_config={"head_dim": 128, "rope_parameters": ropes})
    assert scaled(config.get_text_config()).fields["rope_parameters"]["mrope_section"] == [3, 3, 2]
