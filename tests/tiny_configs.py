"""Configs of tiny checkpoints of real families: few narrow layers that have all that is peculiar to the family."""

from collections.abc import Callable
from typing import Any

from transformers import (
    BailingHybridConfig,
    BambaConfig,
    Cohere2Config,
    DeepseekV3Config,
    DeepseekV32Config,
    Exaone4Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3nTextConfig,
    Gemma3TextConfig,
    Gemma4TextConfig,
    GlmMoeDsaConfig,
    GptOssConfig,
    GraniteMoeHybridConfig,
    JambaConfig,
    KimiLinearConfig,
    Lfm2Config,
    Lfm2MoeConfig,
    Llama4TextConfig,
    LlamaConfig,
    MambaConfig,
    MiniMaxConfig,
    Ministral3Config,
    MinistralConfig,
    MistralConfig,
    MllamaConfig,
    NemotronHConfig,
    Olmo3Config,
    PretrainedConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
    SmolLM3Config,
    Zamba2Config,
    ZayaConfig,
)
from transformers.models.mllama.configuration_mllama import MllamaTextConfig, MllamaVisionConfig

VOCAB = 128
IMAGE = VOCAB
"""Token that stands for an image, in the one family that has images: it can be read and never said."""

WINDOW = 12
"""Visible tokens; divided by 1 and by no usual block size, so block borders and window edges do not coincide."""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "initializer_range": 0.25,  # large, so that the output depends on the context
}


def without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


HEADS_BY_WIDTH = without(COMMON, "head_dim")
"""For families whose heads share the model's width."""

S, F, C = "sliding_attention", "full_attention", "chunked_attention"


def gemma3() -> PretrainedConfig:
    """5 sliding : 1 full, two ropes."""
    return Gemma3TextConfig(
        **COMMON,
        num_hidden_layers=6,
        layer_types=[S, S, S, S, S, F],
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        rope_parameters={
            S: {"rope_type": "default", "rope_theta": 10_000.0},
            F: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
    )


def gemma2() -> PretrainedConfig:
    """Sliding and full in turn, softcaps on scores and logits."""
    return Gemma2Config(
        **COMMON,
        num_hidden_layers=4,
        layer_types=[S, F, S, F],
        sliding_window=WINDOW,
        query_pre_attn_scalar=16,
        attn_logit_softcapping=5.0,
        final_logit_softcapping=30.0,
    )


def ministral() -> PretrainedConfig:
    """1 full : 3 sliding."""
    return MinistralConfig(**COMMON, num_hidden_layers=4, layer_types=[F, S, S, S], sliding_window=WINDOW)


def gpt_oss() -> PretrainedConfig:
    """Sinks, experts, biases, a window of 128 scaled down."""
    return GptOssConfig(
        **COMMON,
        num_hidden_layers=4,
        layer_types=[S, F, S, F],
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 4.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 128,
        },
    )


def llama() -> PretrainedConfig:
    """Uniform full attention: the control."""
    return LlamaConfig(**COMMON, num_hidden_layers=3)


def qwen3() -> PretrainedConfig:
    """Uniform, norms on the heads of queries and keys."""
    return Qwen3Config(**COMMON, num_hidden_layers=3)


def smollm3() -> PretrainedConfig:
    """Uniform, without positions on every fourth layer."""
    return SmolLM3Config(**COMMON, num_hidden_layers=4, no_rope_layers=[1, 1, 1, 0])


def cohere2() -> PretrainedConfig:
    """3 sliding : 1 full, attention and feed-forward side by side, positions on sliding layers only, scaled logits."""
    return Cohere2Config(
        **COMMON, num_hidden_layers=4, layer_types=[S, S, S, F], sliding_window=WINDOW, logit_scale=0.5
    )


def olmo3() -> PretrainedConfig:
    """3 sliding : 1 full, norms after each part and over the whole projection of queries and keys."""
    return Olmo3Config(**HEADS_BY_WIDTH, num_hidden_layers=4, layer_types=[S, S, S, F], sliding_window=WINDOW)


def llama4() -> PretrainedConfig:
    """3 chunked : 1 full, no positions and scaled queries on full layers, experts on every other layer."""
    return Llama4TextConfig(
        **{**COMMON, "intermediate_size": 32},
        num_hidden_layers=4,
        layer_types=[C, C, C, F],
        attention_chunk_size=WINDOW,
        intermediate_size_mlp=96,
        num_local_experts=4,
        num_experts_per_tok=1,
        interleave_moe_layer_step=2,
        no_rope_layers=[1, 1, 1, 0],
        attn_temperature_tuning=True,
        floor_scale=16,
        use_qk_norm=True,
    )


def exaone4() -> PretrainedConfig:
    """3 sliding : 1 full, norms after each part and on heads, positions on sliding layers only."""
    return Exaone4Config(**COMMON, num_hidden_layers=4, layer_types=[S, S, S, F], sliding_window=WINDOW)


MAMBA2: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_n_groups": 2,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}


def bamba() -> PretrainedConfig:
    """Mamba-2 and attention in turn, rope on half of each head."""
    return BambaConfig(**COMMON, **MAMBA2, num_hidden_layers=4, attn_layer_indices=[1, 3])


def granite4() -> PretrainedConfig:
    """Mamba-2 and attention without positions, multipliers everywhere, experts beside a shared one."""
    return GraniteMoeHybridConfig(
        **{**COMMON, "intermediate_size": 32},
        **MAMBA2,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "mamba"],
        shared_intermediate_size=64,
        num_local_experts=4,
        num_experts_per_tok=2,
        embedding_multiplier=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.2,
        logits_scaling=2.0,
    )


def nemotron_h() -> PretrainedConfig:
    """One mixer per block: Mamba-2, attention, MLP, experts."""
    return NemotronHConfig(
        **COMMON,
        layers_block_type=["mamba", "mlp", "attention", "mamba", "moe"],
        mamba_num_heads=8,
        mamba_head_dim=16,
        n_groups=2,
        ssm_state_size=8,
        conv_kernel=4,
        chunk_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=1,
        moe_intermediate_size=32,
        moe_shared_expert_intermediate_size=32,
        n_group=1,
        topk_group=1,
    )


def falcon_h1() -> PretrainedConfig:
    """Attention and Mamba-2 side by side in every layer, multipliers everywhere."""
    return FalconH1Config(
        **COMMON,
        **MAMBA2,
        num_hidden_layers=3,
        mamba_d_ssm=128,
        mamba_rms_norm=True,
        mamba_norm_before_gate=False,
        lm_head_multiplier=0.5,
        embedding_multiplier=2.0,
        mlp_multipliers=[0.7, 0.9],
        key_multiplier=0.8,
        attention_out_multiplier=0.9,
        attention_in_multiplier=1.1,
        ssm_multipliers=[0.9, 0.8, 1.1, 0.7, 1.2],
        ssm_in_multiplier=1.2,
        ssm_out_multiplier=0.8,
    )


def zamba2() -> PretrainedConfig:
    """Mamba-2, and two attention blocks shared by several layers, each with its own keys and values."""
    return Zamba2Config(
        **{**COMMON, "head_dim": 32, "num_key_value_heads": 4},  # heads of twice the width, one key head for each
        num_hidden_layers=6,
        layers_block_type=["mamba", "hybrid", "mamba", "hybrid", "mamba", "hybrid"],
        n_mamba_heads=8,
        mamba_ngroups=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        chunk_size=16,
        num_mem_blocks=2,
        use_shared_attention_adapter=True,
        adapter_rank=8,
        use_mem_rope=True,
    )


def jamba() -> PretrainedConfig:
    """Mamba-1, attention without positions on every fourth layer, experts on every other."""
    return JambaConfig(
        **COMMON,
        num_hidden_layers=4,
        attn_layer_period=4,
        attn_layer_offset=2,
        expert_layer_period=2,
        expert_layer_offset=1,
        num_experts=4,
        num_experts_per_tok=2,
        mamba_d_state=8,
        mamba_d_conv=4,
        mamba_expand=2,
        mamba_dt_rank=8,
    )


def minimax() -> PretrainedConfig:
    """Lightning attention, softmax attention on the last layer, norms before which the residual branches off."""
    return MiniMaxConfig(
        **COMMON,
        num_hidden_layers=4,
        layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        block_size=16,
        full_attn_alpha_factor=1.5,
        linear_attn_alpha_factor=1.5,
        mlp_alpha_factor=1.5,
    )


def lfm2() -> PretrainedConfig:
    """Short convolutions, and attention with norms on heads."""
    return Lfm2Config(
        **HEADS_BY_WIDTH,
        num_hidden_layers=4,
        layer_types=["conv", "conv", "full_attention", "conv"],
        conv_L_cache=3,
        block_auto_adjust_ff_dim=False,
    )


DELTA: dict[str, Any] = {
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}


def qwen3_next() -> PretrainedConfig:
    """Gated delta net and gated attention 3:1, experts beside a gated shared one."""
    return Qwen3NextConfig(
        **COMMON,
        **DELTA,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def qwen3_5() -> PretrainedConfig:
    """Gated delta net and gated attention 3:1."""
    return Qwen3_5TextConfig(**COMMON, **DELTA, num_hidden_layers=4)


def lfm2_moe() -> PretrainedConfig:
    """Short convolutions, and experts chosen with a bias."""
    return Lfm2MoeConfig(
        **HEADS_BY_WIDTH,
        num_hidden_layers=4,
        layer_types=["conv", "full_attention", "conv", "conv"],
        conv_L_cache=3,
        moe_intermediate_size=32,
        num_dense_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
    )


def qwen3_5_moe() -> PretrainedConfig:
    """Gated delta net and gated attention 3:1, experts beside a gated shared one."""
    return Qwen3_5MoeTextConfig(
        **without(COMMON, "intermediate_size"),
        **DELTA,
        num_hidden_layers=4,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    )


def gemma3n() -> PretrainedConfig:
    """Four streams, embeddings per layer; the last layers read the keys and values of the last of their kind before."""
    return Gemma3nTextConfig(
        **COMMON,
        num_hidden_layers=6,
        layer_types=[S, F, S, F, S, F],
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
        laurel_rank=8,
        activation_sparsity_pattern=[0.5, 0.5, 0.0, 0.0, 0.0, 0.0],
    )


GEMMA4: dict[str, Any] = {"global_head_dim": 32, "num_global_key_value_heads": 2}  # of its full layers


def gemma4_e() -> PretrainedConfig:
    """Embeddings per layer, shared keys and values, full layers with heads of twice the size."""
    return Gemma4TextConfig(
        **COMMON,
        **GEMMA4,
        num_hidden_layers=6,
        layer_types=[S, F, S, F, S, F],
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        use_double_wide_mlp=True,
        vocab_size_per_layer_input=VOCAB,
        hidden_size_per_layer_input=8,
    )


def gemma4() -> PretrainedConfig:
    """Full layers with fewer, larger heads whose values are their keys, experts beside an MLP."""
    return Gemma4TextConfig(
        **{**COMMON, "num_key_value_heads": 4},
        **GEMMA4,
        num_hidden_layers=4,
        layer_types=[S, S, S, F],
        sliding_window=WINDOW,
        attention_k_eq_v=True,
        hidden_size_per_layer_input=0,
        enable_moe_block=True,
        num_experts=4,
        top_k_experts=2,
        moe_intermediate_size=32,
    )


LATENT: dict[str, Any] = {
    **HEADS_BY_WIDTH,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
}


def deepseek_v3() -> PretrainedConfig:
    """A latent per token, experts in groups beside a shared one."""
    return DeepseekV3Config(**LATENT, num_hidden_layers=3, first_k_dense_replace=1)


INDEX: dict[str, Any] = {"index_topk": WINDOW, "index_n_heads": 16, "index_head_dim": 24}
"""With few index heads tokens often score alike: nothing, where all heads are below zero."""


def deepseek_v32() -> PretrainedConfig:
    """Each query attends to the tokens that an indexer chooses."""
    return DeepseekV32Config(**LATENT, **INDEX, num_hidden_layers=3, first_k_dense_replace=1)


def glm_moe_dsa() -> PretrainedConfig:
    """The same, and the third layer goes by the choice of the second."""
    kinds = ["full", "full", "shared", "full"]
    return GlmMoeDsaConfig(**LATENT, **INDEX, num_hidden_layers=4, first_k_dense_replace=1, indexer_types=kinds)


LATENT_BESIDE_STATES: dict[str, Any] = {
    **HEADS_BY_WIDTH,
    "num_key_value_heads": 4,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 12,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_token": 2,
    "num_shared_experts": 1,
}


def kimi_linear() -> PretrainedConfig:
    """Delta nets in which each number of a key decays by itself, a latent without positions, experts."""
    fields = without(LATENT_BESIDE_STATES, "max_position_embeddings")
    kind: Any = KimiLinearConfig
    return kind(**fields, model_max_length=512, linear_num_heads=4, linear_head_dim=8, linear_conv_kernel_dim=4)


def ling3() -> PretrainedConfig:
    """The same with a bound to decays, positions, and a gate for each head of what attention gives."""
    kind: Any = BailingHybridConfig
    return kind(**LATENT_BESIDE_STATES, head_dim=8, num_expert_group=2, topk_group=1)


def recurrent_gemma() -> PretrainedConfig:
    """Two sums that decay by gates, then a window; rope on half of each head, softcapped logits."""
    fields = without(HEADS_BY_WIDTH, "max_position_embeddings")
    return RecurrentGemmaConfig(
        **fields, num_hidden_layers=6, attention_window_size=WINDOW, lru_width=80, w_init_variance_scale=0.25
    )


def mamba() -> PretrainedConfig:
    """States alone."""
    return MambaConfig(
        vocab_size=VOCAB, hidden_size=64, state_size=8, num_hidden_layers=3, initializer_range=0.25,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip


def zaya() -> PretrainedConfig:
    """Queries and keys mixed by convolutions, values of the token before, one expert or none, scaled residuals."""
    return ZayaConfig(
        **without(COMMON, "intermediate_size"),
        num_hidden_layers=4,
        layer_types=["hybrid", "hybrid_sliding", "hybrid", "hybrid_sliding"],
        sliding_window=WINDOW,
        moe_intermediate_size=32,
        num_experts=4,
        router_hidden_size=16,
        tie_word_embeddings=False,
    )


def mistral() -> PretrainedConfig:
    """Every layer slides."""
    return MistralConfig(**COMMON, num_hidden_layers=3, sliding_window=WINDOW)


def ministral3() -> PretrainedConfig:
    """Uniform, queries scaled by their position."""
    return Ministral3Config(
        **COMMON,
        num_hidden_layers=3,
        sliding_window=None,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1_000_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 32,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
            "llama_4_scaling_beta": 0.1,
        },
    )


def mllama() -> PretrainedConfig:
    """Every other layer attends to an image, of up to 4 tiles of 5 tokens each; text alone passes those layers by."""
    return MllamaConfig(
        text_config=MllamaTextConfig(
            **{**HEADS_BY_WIDTH, "bos_token_id": 0},
            num_hidden_layers=4,
            cross_attention_layers=[1, 3],
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        vision_config=MllamaVisionConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_global_layers=1,
            attention_heads=2,
            intermediate_size=48,
            vision_output_dim=64,
            image_size=28,
            patch_size=14,
            max_num_tiles=4,
            intermediate_layers_indices=[0],
            supported_aspect_ratios=[[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            initializer_range=0.25,
        ),
        image_token_index=IMAGE,
    )


FAMILIES: tuple[Callable[[], PretrainedConfig], ...] = (
    gemma3, gemma2, ministral, gpt_oss, llama, qwen3, smollm3, cohere2, olmo3, exaone4, llama4, bamba, granite4,
    nemotron_h, falcon_h1, zamba2, jamba, minimax, lfm2, qwen3_next, qwen3_5, gemma3n, gemma4_e, gemma4,
    deepseek_v3, deepseek_v32, glm_moe_dsa, mistral, ministral3, mllama, lfm2_moe, qwen3_5_moe, kimi_linear, ling3,
    recurrent_gemma, mamba, zaya,
)  # fmt: skip
