"""Configs of real models, read by transformers, keep what is known of these models."""

from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from intarsia.deploy.checkpoints.known_models import known_model
from intarsia.errors import InvalidSetting, UnsupportedModel
from intarsia.kvcache.reach import Full, Sliding
from intarsia.kvcache.spec import LayerSpec
from intarsia.workers.checkpoint.layer_specs import ENTRIES, GIVERS, complete_layer_types, read_layers, told_prefix

S, F, L = "sliding_attention", "full_attention", "linear_attention"

REAL: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma-3-27b": ("gemma3_text", {"num_hidden_layers": 62, "num_attention_heads": 32, "num_key_value_heads": 16,
                                    "head_dim": 128, "sliding_window": 1024}),
    "gemma-3n-e4b": ("gemma3n_text", {}),
    "gpt-oss-20b": ("gpt_oss", {"num_hidden_layers": 24}),
    "ministral-8b": ("ministral", {"num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8,
                                   "head_dim": 128, "sliding_window": 32768, "layer_types": [F, S, S, S] * 9}),
    "llama-4-scout": ("llama4_text", {}),
    "bamba-9b": ("bamba", {"num_hidden_layers": 32, "attn_layer_indices": [9, 18, 27], "num_attention_heads": 32,
                           "num_key_value_heads": 8, "mamba_d_state": 128}),
    "granite-4.0-h-tiny": ("granitemoehybrid", {
        "num_hidden_layers": 40, "hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 4,
        "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "layer_types": [F if n in (5, 15, 25, 35) else L for n in range(40)]}),
    "falcon-h1-7b": ("falcon_h1", {"num_hidden_layers": 44, "num_attention_heads": 12, "num_key_value_heads": 2,
                                   "head_dim": 128, "mamba_n_heads": 24, "mamba_d_head": 128, "mamba_d_ssm": 3072,
                                   "mamba_d_state": 256}),
    "jamba-1.5-mini": ("jamba", {}),
    "zamba2-2.7b": ("zamba2", {}),
    "qwen3-next": ("qwen3_next", {}),
    "lfm2-1.2b": ("lfm2", {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32,
                           "num_key_value_heads": 8, "layer_types": [
                               F if n in (2, 5, 8, 10, 12, 14) else "conv" for n in range(16)]}),
    "llama-3.2-11b-vision": ("mllama_text_model", {}),
    "deepseek-v3": ("deepseek_v3", {}),
    "kimi-linear": ("kimi_linear", {"layer_types": [*[L, L, L, F] * 6, L, L, F]}),
    "ling-3.0-flash": ("bailing_hybrid", {}),
    "recurrentgemma-2b": ("recurrent_gemma", {"num_key_value_heads": 1}),
    "mamba-2.8b": ("mamba", {"hidden_size": 2560, "num_hidden_layers": 64}),
    "zaya1-8b": ("zaya", {}),
    "deepseek-v3.2": ("deepseek_v32", {}),
    "deepseek-v4-flash": ("deepseek_v4", {"num_hidden_layers": 43, "compress_ratios": [0, 0, 4, *[128, 4] * 20]}),
    "glm-5.3-flash": ("glm5_next", {}),
    "mistral-large-4": ("mistral_large4", {}),
}  # fmt: skip
"""Known model -> model_type and what its config.json says otherwise than the class."""


def config(model_type: str, **fields: Any) -> Any:
    return CONFIG_MAPPING[model_type](**fields).get_text_config()


def account(layers: tuple[LayerSpec, ...]) -> dict[Any, int]:
    """What is kept, without regard to the order of layers."""
    count: dict[Any, int] = {}
    for layer in layers:
        key = layer.reach, layer.token_bytes, tuple(sorted(t.bytes for t in layer.state)), layer.shares is None
        count[key] = count.get(key, 0) + 1
    return count


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("name", REAL)
def test_config_of_a_real_model_keeps_what_is_known_of_it(name: str, ranks: int):
    model_type, fields = REAL[name]
    assert account(read_layers(config(model_type, **fields), ranks, 2)) == account(known_model(name).layers(ranks))


def test_head_sizes_may_differ_between_layers():
    layers = read_layers(config("gemma4_text"), 1, 2)
    assert {layer.key_dim for layer in layers if layer.reach.kind == "full"} == {512}
    assert {layer.key_dim for layer in layers if layer.reach.kind == "sliding"} == {256}


def test_layers_that_choose_keep_an_index_key_beside_the_latent_and_those_that_go_by_another_choice_do_not():
    kinds = ["full", "full", "shared"] * 26
    layers = read_layers(config("glm_moe_dsa", indexer_types=kinds), 2, 2)
    assert [layer.extra_token_bytes for layer in layers] == [256, 256, 0] * 26
    assert {layer.token_bytes - layer.extra_token_bytes for layer in layers} == {2 * (512 + 64)}
    assert {layer.reach.kind for layer in layers} == {"full"}


def test_entries_of_several_tokens_are_kept_as_layers_of_their_own_and_so_is_what_tokens_give_to_them():
    sizes = {"head_dim": 32, "index_head_dim": 8, "sliding_window": 12}
    kinds = ["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention"]
    rates = {kinds[1]: 4, kinds[2]: 12}
    layers = read_layers(
        config("deepseek_v4", num_hidden_layers=3, layer_types=kinds, compress_rates=rates, **sizes), 1, 2
    )
    window, entries, givers = 32 * 2, (32 + 8) * 2, 4 * (32 + 8) * 2
    assert [(layer.reach, layer.entry_bytes, layer.entry_tokens) for layer in layers] == [
        (Sliding(12), window, 1),
        (Sliding(12), window, 1), (Full(), entries, 4), (Sliding(8), givers, 1),
        (Sliding(12), window, 1), (Full(), window, 12), (Sliding(12), 2 * window, 1),
    ]  # fmt: skip


def test_entries_of_one_token_are_refused():
    rates = {"compressed_sparse_attention": 1, "heavily_compressed_attention": 128}
    with pytest.raises(UnsupportedModel, match="an entry for each 1 tokens"):
        read_layers(config("deepseek_v4", compress_rates=rates), 1, 2)


def test_a_layer_that_shares_latents_and_has_an_index_keeps_its_keys_apart():
    shared = config("mistral_large4", text_config={"num_hidden_layers": 2, "kv_source_layers": [0, 0]})
    owner, sharer, keys = read_layers(shared, 1, 2)
    assert (owner.shares, sharer.shares, sharer.extra_token_bytes) == (None, 0, 0)
    assert (keys.index, keys.shares, keys.token_bytes) == (ENTRIES + 1, None, owner.extra_token_bytes)


def test_layers_without_positions_keep_no_rotary_numbers():
    layers = read_layers(config("mistral_large4", text_config={"num_hidden_layers": 4}), 1, 2)
    assert [layer.key_dim for layer in layers] == [576, 576, 576, 512]


@pytest.mark.parametrize(
    ("family", "fields", "kept"),
    [
        ("gpt_neo", {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "window_size": 8},
         [Full(), Sliding(8)]),
        ("dory", {"num_hidden_layers": 4, "n_input_layers": 1, "n_output_layers": 1, "layer_types": [S, S, F, S],
                  "sliding_window": 8}, [Sliding(8), Sliding(8), Full(), Sliding(8), Sliding(8), Full()]),
        ("hrm_text", {"num_hidden_layers": 1, "H_cycles": 1, "L_cycles": 2}, [Full()] * 3),
    ],
)  # fmt: skip
def test_layers_are_as_many_as_are_gone_through(family: str, fields: dict, kept: list):
    layers = read_layers(config(family, **fields), 1, 2)
    assert [layer.reach for layer in layers] == kept
    assert [layer.index for layer in layers] == list(range(len(kept)))


@pytest.mark.parametrize(
    ("fields", "heads"),
    [
        ({"multi_query": True}, 1),
        ({"multi_query": False}, 71),
        ({"new_decoder_architecture": True, "num_kv_heads": 8, "num_attention_heads": 128, "hidden_size": 8192}, 8),
    ],
)
def test_falcon_has_one_key_for_all_or_a_few_or_one_for_each(fields: dict, heads: int):
    assert {layer.kv_heads for layer in read_layers(config("falcon", **fields), 1, 2)} == {heads}


def test_layers_that_choose_blocks_keep_an_index_key_beside_keys_and_values():
    kinds = [F, "minimax_m3_sparse"] * 30
    layers = read_layers(config("minimax_m3_vl_text", layer_types=kinds), 2, 2)
    assert [(layer.kv_heads, layer.extra_token_bytes) for layer in layers] == [(2, 0), (2, 256)] * 30


QWEN4_EXP = {
    "eos_token_id": 1, "ple_layer_ids": [2], "indexer_n_heads": 8, "indexer_kv_heads": 1, "indexer_head_dim": 128,
    "indexer_budget": 2048, "indexer_compress_ratio": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000_000, "partial_rotary_factor": 0.25},
}  # fmt: skip


def test_layers_that_choose_by_means_keep_an_entry_of_each_pool_and_what_its_tokens_give():
    layers = [layer for layer in read_layers(config("qwen4_exp_text", **QWEN4_EXP), 2, 2) if not layer.state]
    own = [layer for layer in layers if layer.index < ENTRIES]
    assert [layer.index for layer in own] == list(range(3, 40, 4))
    assert {layer.extra_token_bytes for layer in own} == {0}
    entries = [layer for layer in layers if ENTRIES <= layer.index < GIVERS]
    assert {(layer.entry_tokens, layer.entry_bytes, layer.reach.name) for layer in entries} == {(64, 2 * 128, "full")}
    givers = [layer for layer in layers if layer.index >= GIVERS]
    assert {(layer.token_bytes, layer.reach.name) for layer in givers} == {(2 * 128, "chunked-64")}
    assert len(own) == len(entries) == len(givers)


@pytest.mark.parametrize("ranks", [1, 2])
def test_layers_with_features_of_ngrams_keep_what_these_are_made_of_on_every_rank(ranks: int):
    layers = read_layers(config("qwen4_exp_text", **QWEN4_EXP), ranks, 2)
    first, second = layers[0].state, layers[1].state
    assert second[:2] == first
    assert [(tensor.shape, tensor.item_bytes) for tensor in second[2:]] == [((4 * 2048, 9), 2), ((2, 2), 4)]


def test_each_pass_through_a_layer_is_a_layer_behind_all_others():
    layers = read_layers(config("dory", n_recurrent_loops=3), 1, 2)
    assert [layer.index for layer in layers] == list(range(36 + 2 * 20))
    kinds = [layer.reach.name for layer in layers]
    assert kinds[36:] == 2 * kinds[8:28]


@pytest.mark.parametrize("ranks", [1, 2])
def test_passes_through_layers_that_have_states_are_layers_with_states_of_the_same_sizes(ranks: int):
    layers = read_layers(config("inkling2_loop_text"), ranks, 2)
    of_states = {layer.index: layer for layer in layers if layer.state}
    of_heads = {layer.index: layer for layer in layers if not layer.state}
    assert sorted(of_states) == sorted(of_heads) == list(range(24 + 2 * 12))
    for index in range(24, 48):
        own = 6 + (index - 24) % 12
        assert of_states[index].state == of_states[own].state
        assert replace(of_heads[index], index=own) == of_heads[own]


def test_passes_that_read_what_the_last_one_kept_are_refused_with_the_reason():
    with pytest.raises(UnsupportedModel, match="depends on how its prompt was cut"):
        read_layers(config("dory", recurrent_kv_cache_mode="last_loop"), 1, 2)


def test_passes_of_both_stacks_are_layers():
    assert len(read_layers(config("hrm_text"), 1, 2)) == 16 * 2 * (3 + 1)


def test_a_model_that_was_trained_on_prompts_seen_both_ways_says_so():
    told = told_prefix(config("hrm_text"))
    assert told is not None and "each token sees those before it" in told
    assert told_prefix(config("hrm_text", prefix_lm=False)) is None


def test_blocks_without_a_cache_keep_nothing():
    layers = read_layers(config("nemotron_h"), 1, 2)
    assert [(layer.index, layer.reach.kind) for layer in layers] == [(0, "state"), (2, "full")]


def test_ministral_8b_is_ragged_although_its_config_does_not_say_so():
    """As published: a window, and no list of layer types."""
    fields = {
        "model_type": "mistral", "num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 131072, "head_dim": 128,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 32768, "max_position_embeddings": 32768,
    }  # fmt: skip
    one = AutoConfig.for_model(**fields)
    done = complete_layer_types(one, fields)
    assert done is not None and "every fourth layer" in done and "32768 tokens" in done
    kinds = [layer.reach.name for layer in read_layers(one, 1, 2)]
    assert kinds == ["full", "sliding-32768", "sliding-32768", "sliding-32768"] * 9


@pytest.mark.parametrize("change", [{"layer_types": [S] * 36}, {"sliding_window": 4096}, {"num_hidden_layers": 32}])
def test_configs_that_say_what_they_are_or_are_of_other_models_are_left_alone(change: dict):
    fields = {"num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 131072, "sliding_window": 32768} | change
    one = config("mistral")
    before = one.to_dict()
    assert complete_layer_types(one, fields) is None
    assert one.to_dict() == before


def test_unknown_kinds_and_states_are_refused_with_what_is_known():
    strange = config("llama")
    strange.layer_types = ["telepathy"] * strange.num_hidden_layers
    with pytest.raises(UnsupportedModel, match="layers of kind 'telepathy'; known are full_attention"):
        read_layers(strange, 1, 2)
    strange.layer_types = [L] * strange.num_hidden_layers
    with pytest.raises(UnsupportedModel, match="the states of llama are not known; known are those of bailing_hybrid"):
        read_layers(strange, 1, 2)


def test_states_that_do_not_divide_are_refused_with_the_numbers():
    with pytest.raises(InvalidSetting, match="3 does not divide the 128 state heads of the model"):
        read_layers(config("bamba"), 3, 2)
