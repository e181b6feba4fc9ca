"""What transformers does not say about a family of models, in one place."""

from collections.abc import Mapping


def _cut(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """`styles` of what lies below a path of the model's layers."""
    return {f"model.layers.*.{path}.{name}": style for name, style in styles.items()}


def _of_h(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """The same in models that call their layers as GPT-2 does."""
    return {f"transformer.h.*.{path}.{name}": style for name, style in styles.items()}


ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}

CUT_OTHERWISE: dict[str, dict[str, str]] = {
    "codegen": _of_h("attn", {"qkv_proj": "colwise", "out_proj": "rowwise"})
    | _of_h("mlp", {"fc_in": "colwise", "fc_out": "rowwise"}),
    "ctrl": _of_h("multi_head_attention", {"Wq": "colwise", "Wk": "colwise", "Wv": "colwise", "dense": "rowwise"})
    | _of_h("ffn", {"0": "colwise", "2": "rowwise"}),
    # Heads come in groups out of `q_b_proj`, and go through the output's two products. The vector that they all attend
    # to is whole on every rank, with its compressors and its indexer.
    "deepseek_v4": _cut("self_attn", {"q_b_proj": "colwise", "o_a_proj": "colwise", "o_b_proj": "rowwise"})
    | {"model.layers.*.self_attn": "sinks"},
    # Lengths over all heads, or all columns of an MLP, the ranks add up.
    "dory": _cut("self_attn", {"attn_sub_norm": "lengths_over_ranks"})
    | _cut("mlp", {"ffn_sub_norm": "lengths_over_ranks"})
    | dict.fromkeys(("model.layers.*.self_attn", "model.layers.*.mlp"), "channel_scales"),
    "gpt2": _of_h("attn", {"c_attn": "conv_thirds", "c_proj": "conv_rowwise"})
    | _of_h("mlp", {"c_fc": "conv_colwise", "c_proj": "conv_rowwise"}),
    # Queries, keys and values come out of one linear: see `cut_fused`.
    "gpt_bigcode": _of_h("attn", {"c_proj": "rowwise"}) | _of_h("mlp", {"c_fc": "colwise", "c_proj": "rowwise"}),
    # Gate and up of an expert take turns along one dimension, so any even cut leaves whole pairs.
    "gpt_oss": _cut("mlp", {"experts": "expert_columns"}),
    "granitemoehybrid": _cut("shared_mlp", {"input_linear": "packed", "output_linear": "rowwise"}),
    "inkling2_text": _cut(
        "self_attn",
        {f"{name}.linear": "colwise" for name in ("q_proj", "k_proj", "v_proj", "relative_position_bias")}
        | {"q_proj.norm": "head_scales", "relative_position_bias.norm": "head_scales", "sink_proj": "colwise"}
        | {"o_proj.gate_proj": "colwise", "o_proj.linear": "rowwise"},
    ),
    # An expert's inputs are held before its outputs.
    "llama4_text": _cut("feed_forward.experts", {"gate_up_proj": "packed_rowwise", "down_proj": "colwise"}),
    "modernbert-decoder": _cut("attn", {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "Wo": "rowwise"})
    | _cut("mlp", {"Wi": "packed", "Wo": "rowwise"}),
    "moshi": _cut("self_attn", {f"{name}.linear": style for name, style in ATTENTION.items()})
    | _cut("mlp", {"fc1": "packed", "fc2": "rowwise"}),
    # The embedding of n-grams is most of the model.
    "qwen4_exp_text": _cut("ple.ple_embedding", {"ngram_embedding": "vocab"}),
    # Each rank computes all heads of queries and keys, and takes its own: see `ConvolvedHeads`.
    "zaya": _cut("self_attn", {"o_proj": "rowwise", "qk_norm": "key_scales"}),
    "zamba2": _cut("shared_transformer.self_attn", {f"linear_{x}_adapter_list.*.1": "colwise" for x in "qkv"})
    | _cut("shared_transformer.feed_forward", {"gate_up_proj_adapter_list.*.1": "packed"}),
}
"""model_type -> module path -> style, where `structure.py` does not see how modules are cut by what they consist of.
Styles are explained in `tensor_parallel.py`; state mixers say themselves how they are cut (`layers/states.py`)."""

CUT_OTHERWISE["inkling2_loop_text"] = CUT_OTHERWISE["inkling2_text"]

VOCABULARIES = {"embed_tokens_per_layer"}
"""Embeddings beside the input's own with a row for each token, each rank holding some."""

EXPERTS_ONE_BY_ONE = {"gemma4_text": False, "llama4_text": True}
"""Families that hold all experts in one tensor and are quantised one by one, in ways that transformers does not put
together. Are an expert's inputs held before its outputs?"""

WITH_ENCODER = {"mllama"}
"""Models that are loaded with their vision tower. Of other multimodal models the text part is."""
