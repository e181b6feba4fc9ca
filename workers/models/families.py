"""What transformers does not say about a family of models, in one place."""

from collections.abc import Mapping


def _cut(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """`styles` of what lies below a path of the model's layers."""
    return {f"model.layers.*.{path}.{name}": style for name, style in styles.items()}


def _of_h(path: str, styles: Mapping[str, str]) -> dict[str, str]:
    """The same in models that call their layers as GPT-2 does."""
    return {f"transformer.h.*.{path}.{name}": style for name, style in styles.items()}


ATTENTION = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
GATED_MLP = {"gate_proj": "colwise", "up_proj": "colwise", "down_proj": "rowwise"}

EXPERTS = {
    "experts": "moe_tp_experts", "experts.gate_up_proj": "packed_colwise", "experts.up_proj": "colwise",
    "experts.down_proj": "rowwise",
}  # fmt: skip
"""Experts are cut along their inner dimension, like any MLP: every rank holds a slice of every expert, so no rank waits
for the one with the popular experts."""

TENSOR_PARALLEL_PLANS: dict[str, dict[str, str]] = {
    "bamba": _cut("self_attn", ATTENTION) | _cut("feed_forward", GATED_MLP),
    # The latent is whole on every rank; heads come out of `q_b_proj` and `kv_b_proj`. transformers cuts experts alone.
    "deepseek_v3": _cut(
        "self_attn", {"q_proj": "colwise", "q_b_proj": "colwise", "kv_b_proj": "colwise", "o_proj": "rowwise"}
    )
    | _cut("mlp", GATED_MLP | EXPERTS)
    | _cut("mlp.shared_experts", GATED_MLP),
    # Lengths over all heads, or all columns of an MLP, the ranks add up.
    "dory": _cut("self_attn", {**ATTENTION, "gate_proj": "colwise", "attn_sub_norm": "lengths_over_ranks"})
    | _cut("mlp", {**GATED_MLP, "ffn_sub_norm": "lengths_over_ranks"})
    | dict.fromkeys(("model.layers.*.self_attn", "model.layers.*.mlp"), "channel_scales"),
    # Heads come in groups out of `q_b_proj`, and go through the output's two products. The vector that they all attend
    # to is whole on every rank, with its compressors and its indexer. transformers cuts experts alone.
    "deepseek_v4": _cut("self_attn", {"q_b_proj": "colwise", "o_a_proj": "colwise", "o_b_proj": "rowwise"})
    | {"model.layers.*.self_attn": "sinks"}
    | _cut("mlp", EXPERTS)
    | _cut("mlp.shared_experts", GATED_MLP),
    # transformers cuts experts alone.
    "inkling2_text": _cut(
        "self_attn",
        {f"{name}.linear": "colwise" for name in ("q_proj", "k_proj", "v_proj", "relative_position_bias")}
        | {"q_proj.norm": "head_scales", "relative_position_bias.norm": "head_scales", "sink_proj": "colwise"}
        | {"o_proj.gate_proj": "colwise", "o_proj.linear": "rowwise"},
    )
    | _cut("mlp", EXPERTS),
    "falcon_h1": _cut("self_attn", ATTENTION) | _cut("feed_forward", GATED_MLP),
    # What its first MLPs need of all columns the ranks add up: see `patch_sparsity`.
    "gemma3n_text": _cut("self_attn", ATTENTION) | _cut("mlp", GATED_MLP),
    # Gate and up of an expert take turns along one dimension, so any even cut leaves whole pairs.
    "gpt_oss": _cut("self_attn", ATTENTION)
    | {"model.layers.*.self_attn": "sinks", "model.layers.*.mlp.experts": "expert_columns"},
    "granitemoehybrid": _cut("self_attn", ATTENTION)
    | _cut("block_sparse_moe", EXPERTS)
    | _cut("shared_mlp", {"input_linear": "packed", "output_linear": "rowwise"}),
    # transformers' plan is for the experts alone.
    "jamba": _cut("self_attn", ATTENTION) | _cut("feed_forward", GATED_MLP | EXPERTS),
    "lfm2": _cut("self_attn", {**ATTENTION, "out_proj": "rowwise"})
    | _cut("feed_forward", {"w1": "colwise", "w3": "colwise", "w2": "rowwise"}),
    # transformers' plan is for the multimodal model's paths.
    "llama4_text": _cut("self_attn", ATTENTION)
    | _cut("feed_forward", GATED_MLP)
    | _cut("feed_forward.shared_expert", GATED_MLP)
    | _cut("feed_forward", {**EXPERTS, "experts.gate_up_proj": "packed_rowwise", "experts.down_proj": "colwise"}),
    # transformers' plan is for the experts alone. The mixer of a layer is any of these.
    "nemotron_h": _cut("mixer", ATTENTION | GATED_MLP | EXPERTS) | _cut("mixer.shared_experts", GATED_MLP),
    # transformers' plan computes all heads on every rank, because the norms of queries and keys go over all heads. Ours
    # cuts the heads, and the ranks add up what the norm needs: one number per token.
    "olmo3": _cut("self_attn", {**ATTENTION, "q_norm": "norm_over_ranks", "k_norm": "norm_over_ranks"})
    | _cut("mlp", GATED_MLP),
    # transformers' plan leaves attention whole. The embedding of n-grams is most of the model.
    "qwen4_exp_text": _cut("self_attn", ATTENTION)
    | _cut("mlp", EXPERTS)
    | _cut("mlp.shared_expert", GATED_MLP)
    | _cut("ple.ple_embedding", {"ngram_embedding": "vocab"}),
    # Each rank computes all heads of queries and keys, and takes its own: see `ConvolvedHeads`.
    "zaya": _cut("self_attn", {"o_proj": "rowwise", "qk_norm": "key_scales"}) | _cut("mlp", EXPERTS),
    "recurrent_gemma": _cut("temporal_block", ATTENTION) | _cut("mlp_block", GATED_MLP),
    "zamba2": _cut("shared_transformer.self_attn", ATTENTION)
    | _cut("shared_transformer.self_attn", {f"linear_{x}_adapter_list.*.1": "colwise" for x in "qkv"})
    | _cut("shared_transformer.feed_forward", {"gate_up_proj": "packed", "down_proj": "rowwise"})
    | _cut("shared_transformer.feed_forward", {"gate_up_proj_adapter_list.*.1": "packed"}),
}
"""model_type -> module path -> style, where transformers states no plan, or one that is not ours. Styles are explained
in `tensor_parallel.py`; state mixers say themselves how they are cut (`layers/states.py`)."""

TENSOR_PARALLEL_PLANS["inkling2_loop_text"] = TENSOR_PARALLEL_PLANS["inkling2_text"]
TENSOR_PARALLEL_PLANS["lfm2_moe"] = TENSOR_PARALLEL_PLANS["lfm2"] | _cut("feed_forward", EXPERTS)

TENSOR_PARALLEL_PLANS["kimi_linear"] = TENSOR_PARALLEL_PLANS["deepseek_v3"]
TENSOR_PARALLEL_PLANS["bailing_hybrid"] = TENSOR_PARALLEL_PLANS["deepseek_v3"] | _cut(
    "self_attn", {"g_proj": "colwise"}
)

TENSOR_PARALLEL_PLANS |= dict.fromkeys(("deepseek_v32", "glm_moe_dsa"), TENSOR_PARALLEL_PLANS["deepseek_v3"])
"""Indexers are whole on every rank: each has to choose the same tokens."""

TENSOR_PARALLEL_PLANS |= {
    "ctrl": _of_h("multi_head_attention", {"Wq": "colwise", "Wk": "colwise", "Wv": "colwise", "dense": "rowwise"})
    | _of_h("ffn", {"0": "colwise", "2": "rowwise"}),
    "gpt2": _of_h("attn", {"c_attn": "conv_thirds", "c_proj": "conv_rowwise"})
    | _of_h("mlp", {"c_fc": "conv_colwise", "c_proj": "conv_rowwise"}),
    # Queries, keys and values come out of one linear: see `cut_fused`.
    "gpt_bigcode": _of_h("attn", {"c_proj": "rowwise"}) | _of_h("mlp", {"c_fc": "colwise", "c_proj": "rowwise"}),
    "modernbert-decoder": _cut("attn", {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "Wo": "rowwise"})
    | _cut("mlp", {"Wi": "packed", "Wo": "rowwise"}),
    "moshi": _cut("self_attn", {f"{name}.linear": style for name, style in ATTENTION.items()})
    | _cut("mlp", {"fc1": "packed", "fc2": "rowwise"}),
}

VOCABULARIES = {"embed_tokens_per_layer"}
"""Embeddings beside the input's own with a row for each token, each rank holding some."""

TENSOR_PARALLEL_PLANS["mllama_text_model"] = {
    path.replace("model.layers", "model.language_model.layers"): style
    for path, style in (_cut("self_attn", ATTENTION) | _cut("cross_attn", ATTENTION) | _cut("mlp", GATED_MLP)).items()
}

EXPERTS_ONE_BY_ONE = {"gemma4_text": False, "llama4_text": True}
"""Families that hold all experts in one tensor and are quantised one by one, in ways that transformers does not put
together. Are an expert's inputs held before its outputs?"""

WITH_ENCODER = {"mllama"}
"""Models that are loaded with their vision tower. Of other multimodal models the text part is."""
