"""More configs of tiny checkpoints: families that came later, or that have little of their own."""

from collections.abc import Callable

from transformers import (
    AfmoeConfig,
    DeepseekV4Config,
    Glm4MoeConfig,
    Glm5NextTextConfig,
    Lfm3Config,
    MiMoV2FlashConfig,
    MiniMaxM2Config,
    MiniMaxM3VLTextConfig,
    Mistral4Config,
    MistralLarge4TextConfig,
    MixtralConfig,
    MuseGlimmerTextConfig,
    Olmo2Config,
    OlmoHybridConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen3MoeConfig,
    Step3p7TextConfig,
)

from intarsia.tests.tiny_configs import COMMON, HEADS_BY_WIDTH, INDEX, LATENT, WINDOW, F, S, without

LINEAR = "linear_attention"


def qwen2() -> PretrainedConfig:
    """Biases of queries, keys and values; the last layers have windows, which only few checkpoints use."""
    return Qwen2Config(
        **HEADS_BY_WIDTH, num_hidden_layers=4, use_sliding_window=True, sliding_window=WINDOW, max_window_layers=2
    )


def qwen3_moe() -> PretrainedConfig:
    """Experts in all layers but one, norms of queries and keys."""
    return Qwen3MoeConfig(
        **COMMON, num_hidden_layers=3, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32,
        norm_topk_prob=True, mlp_only_layers=[0],
    )  # fmt: skip


def mixtral() -> PretrainedConfig:
    """Experts in all layers."""
    return MixtralConfig(**COMMON, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2)


def phi3() -> PretrainedConfig:
    """Queries, keys and values in one product, gate and up in another; rope on three quarters of each head."""
    return Phi3Config(
        **HEADS_BY_WIDTH,
        num_hidden_layers=3,
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.75},
    )


def olmo2() -> PretrainedConfig:
    """Norms after attention and MLP, and of all queries and keys at once."""
    return Olmo2Config(**HEADS_BY_WIDTH, num_hidden_layers=3)


def glm4_moe() -> PretrainedConfig:
    """Experts in groups beside a shared one, rope on half of each head, biases, norms of queries and keys."""
    return Glm4MoeConfig(
        **COMMON, num_hidden_layers=3, first_k_dense_replace=1, moe_intermediate_size=32, n_routed_experts=4,
        num_experts_per_tok=2, n_group=2, topk_group=1, use_qk_norm=True, attention_bias=True,
        routed_scaling_factor=2.5,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def minimax_m2() -> PretrainedConfig:
    """Experts, norms of all queries and keys at once, rope on half of each head."""
    return MiniMaxM2Config(
        **COMMON, num_hidden_layers=3, num_local_experts=4, num_experts_per_tok=2,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def minimax_m3() -> PretrainedConfig:
    """Two layers attend to the blocks of tokens that an indexer chooses; a shared expert, clamped gates."""
    return MiniMaxM3VLTextConfig(
        **COMMON, num_hidden_layers=4, layer_types=[F, "minimax_m3_sparse", F, "minimax_m3_sparse"],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], dense_intermediate_size=96,
        shared_intermediate_size=48, num_local_experts=4, num_experts_per_tok=2, rotary_dim=8, swiglu_limit=1.0,
        index_n_heads=2, index_head_dim=16, index_block_size=4, index_topk_blocks=3,
        rope_parameters={"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
    )  # fmt: skip


def mimo_v2_flash() -> PretrainedConfig:
    """Windows with sinks, values narrower than keys, more key-value heads in windows."""
    return MiMoV2FlashConfig(
        **{**COMMON, "head_dim": 24}, v_head_dim=16, num_hidden_layers=4, layer_types=[F, S, S, F],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"], sliding_window=WINDOW, n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32,
        rope_parameters={
            F: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.334},
            S: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.334},
        },
    )  # fmt: skip


def step3p7() -> PretrainedConfig:
    """More heads of queries in windows, a gate for each head, a shared expert, clamped gates in the last layer."""
    return Step3p7TextConfig(
        **{**COMMON, "pad_token_id": 1}, num_hidden_layers=4, layer_types=[F, S, S, F], sliding_window=WINDOW,
        num_sliding_attention_heads=8, mlp_layer_types=["dense", "sparse", "sparse", "sparse"], n_routed_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, share_expert_dim=32, moe_router_scaling_factor=3.0,
        swiglu_limits=[None, None, None, 1.0], swiglu_limits_shared=[None, None, None, 2.0],
        rope_parameters={
            F: {"rope_type": "default", "rope_theta": 5_000_000.0, "partial_rotary_factor": 0.5},
            S: {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 1.0},
        },
    )  # fmt: skip


def lfm3() -> PretrainedConfig:
    """Short convolutions, windows, and full attention of which half of each head is rotated; gates, four norms."""
    return Lfm3Config(
        **{**COMMON, "pad_token_id": 0}, num_hidden_layers=6, layer_types=["conv", S, F, "conv", S, F],
        sliding_window=WINDOW,
    )  # fmt: skip


def olmo_hybrid() -> PretrainedConfig:
    """Gated delta nets whose states may change their sign, and full attention with norms after it."""
    return OlmoHybridConfig(
        **HEADS_BY_WIDTH, num_hidden_layers=4, layer_types=[LINEAR, LINEAR, F, LINEAR], linear_num_key_heads=4,
        linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=16,
    )  # fmt: skip


def afmoe() -> PretrainedConfig:
    """Windows with rope, full attention without; gated attention, four norms, a router with a bias."""
    return AfmoeConfig(
        **COMMON, num_hidden_layers=4, layer_types=[S, S, S, F], sliding_window=WINDOW, num_dense_layers=1,
        num_experts=4, num_experts_per_tok=2, num_shared_experts=1, moe_intermediate_size=32, route_scale=2.5,
        mup_enabled=True,
    )  # fmt: skip


def muse_glimmer() -> PretrainedConfig:
    """Windows with rope, full attention without; gates, norms without weights, softcapped logits."""
    return MuseGlimmerTextConfig(
        **COMMON, num_hidden_layers=4, layer_types=[S, S, S, F], sliding_window=WINDOW, output_multiplier=1.0,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )  # fmt: skip


def mistral4() -> PretrainedConfig:
    """A latent per token, queries scaled by their position, experts in all layers."""
    return Mistral4Config(
        **LATENT, num_hidden_layers=3,
        rope_parameters={
            "rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0, "original_max_position_embeddings": 32,
            "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1,
        },
    )  # fmt: skip


def mistral_large4() -> PretrainedConfig:
    """Latents chosen by an indexer, that some layers take from others; one layer without rope."""
    return MistralLarge4TextConfig(
        **without(LATENT, "q_lora_rank"), **INDEX, num_hidden_layers=4,
        first_k_dense_replace=1, indexer_types=["full", "full", "shared", "full"], kv_source_layers=[0, 1, 1, 3],
    )  # fmt: skip


def deepseek_v4() -> PretrainedConfig:
    """Windows of latents beside entries of four and of twelve tokens, several residual streams, experts by token."""
    return DeepseekV4Config(
        **without(COMMON, "intermediate_size", "num_key_value_heads"),
        num_hidden_layers=4, q_lora_rank=24, o_groups=2, o_lora_rank=16, partial_rotary_factor=0.5,
        layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                     "compressed_sparse_attention"],
        compress_rates={"compressed_sparse_attention": 4, "heavily_compressed_attention": 12},
        mlp_layer_types=["hash_moe", "moe", "moe", "moe"], sliding_window=WINDOW, moe_intermediate_size=32,
        n_routed_experts=4, num_experts_per_tok=2, index_n_heads=16, index_head_dim=24, index_topk=4, hc_mult=2,
        hc_sinkhorn_iters=4, swiglu_limit=0.5,
    )  # fmt: skip


def glm5_next() -> PretrainedConfig:
    """Delta nets of keys that decay by themselves, latents whose entries an indexer chooses, residual streams."""
    fields = {**LATENT, "qk_rope_head_dim": 0}
    return Glm5NextTextConfig(
        **fields, **{**INDEX, "index_topk": WINDOW}, num_hidden_layers=4,
        layer_types=[LINEAR, "indexed_attention", "indexed_attention", LINEAR],
        indexer_types=["full", "full", "shared", "full"], mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
        index_kpool=4, linear_head_dim=8, linear_num_heads=4, hc_mult=2, hc_sinkhorn_iters=4, swiglu_limit=0.5,
    )  # fmt: skip


FAMILIES: tuple[Callable[[], PretrainedConfig], ...] = (
    qwen2, qwen3_moe, mixtral, phi3, olmo2, glm4_moe, minimax_m2, minimax_m3, mimo_v2_flash, step3p7, lfm3, olmo_hybrid,
    afmoe, muse_glimmer, mistral4, mistral_large4, deepseek_v4, glm5_next,
)  # fmt: skip
