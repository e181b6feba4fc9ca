"""Configs of released models, as a config.json has them. Weights are random: see `weights.py`.

Sizes are those of the released models; what stands for texts (tokens of the end, say) is left out.
"""

from typing import Any

SLIDING, FULL = "sliding_attention", "full_attention"


def _gemma3(**sizes: Any) -> dict[str, Any]:
    """Five layers with a window of 1,024, then one that sees all."""
    layers = sizes["num_hidden_layers"]
    return {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "vocab_size": 262_208,
        "max_position_embeddings": 131_072,
        "sliding_window": 1024,
        "layer_types": [FULL if n % 6 == 5 else SLIDING for n in range(layers)],
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
        },
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        **sizes,
    }


def _gpt_oss(**sizes: Any) -> dict[str, Any]:
    """Every second layer has a window of 128; 4 of 32 experts; sinks. In 16 bits, as our engine computes it."""
    return {
        "model_type": "gpt_oss",
        "architectures": ["GptOssForCausalLM"],
        "max_position_embeddings": 131_072,
        "sliding_window": 128,
        "layer_types": [FULL if n % 2 else SLIDING for n in range(sizes["num_hidden_layers"])],
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        "tie_word_embeddings": False,
        **sizes,
    }


MODELS: dict[str, dict[str, Any]] = {
    "gemma-3-4b": _gemma3(
        hidden_size=2560, intermediate_size=10_240, num_hidden_layers=34, num_attention_heads=8,
        num_key_value_heads=4, head_dim=256, query_pre_attn_scalar=256,
    ),
    "gemma-3-27b": _gemma3(
        hidden_size=5376, intermediate_size=21_504, num_hidden_layers=62, num_attention_heads=32,
        num_key_value_heads=16, head_dim=128, query_pre_attn_scalar=168,
    ),
    "llama-3.1-8b": {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
    },
    "gpt-oss-20b": _gpt_oss(
        vocab_size=201_088, hidden_size=2880, intermediate_size=2880, num_hidden_layers=24, num_attention_heads=64,
        num_key_value_heads=8, head_dim=64, num_local_experts=32, num_experts_per_tok=4,
    ),
    "bamba-9b": {
        "model_type": "bamba",
        "architectures": ["BambaForCausalLM"],
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attn_layer_indices": [9, 18, 27],
        "mamba_n_heads": 128,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_chunk_size": 256,
        "max_position_embeddings": 262_144,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
}  # fmt: skip

COMMON = {"dtype": "bfloat16", "bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

TINY: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_key_value_heads": 1,
    "head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 12, "num_hidden_layers": 2,
    "max_position_embeddings": 512, "num_local_experts": 4, "num_experts_per_tok": 2, "attn_layer_indices": [1],
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16, "dtype": "float32",
}  # fmt: skip


def cut(config: dict[str, Any]) -> dict[str, Any]:
    """With the fewest layers that are of every kind."""
    layers = config.get("layer_types", [])
    count = layers.index(FULL) + 1 if layers else 2
    fewer = {"num_hidden_layers": count, "layer_types": layers[:count], "attn_layer_indices": [1]}
    return config | {name: value for name, value in fewer.items() if name in config}


def config_of(model: str, is_rehearsed: bool) -> dict[str, Any]:
    """What its config.json says."""
    config = {**MODELS[model], **COMMON}
    if is_rehearsed:
        config |= {name: value for name, value in TINY.items() if name in config}
        if "layer_types" in config:
            config["layer_types"] = [SLIDING, FULL]
    return config
