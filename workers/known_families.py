"""Which families of models are known to run, for code that must not import torch."""

from collections.abc import Iterable

KNOWN_FAMILIES: dict[str, str] = {
    "llama": "Llama",
    "qwen3": "Qwen3",
    "smollm3": "SmolLM3",
    "mistral": "Mistral",
    "ministral": "Ministral 8B",
    "ministral3": "Ministral 3",
    "gemma2": "Gemma 2",
    "gemma3_text": "Gemma 3",
    "gemma3n_text": "Gemma 3n",
    "gemma4_text": "Gemma 4",
    "gpt_oss": "gpt-oss",
    "cohere2": "Cohere2",
    "olmo3": "Olmo 3",
    "exaone4": "Exaone 4",
    "llama4_text": "Llama 4",
    "deepseek_v3": "DeepSeek-V3",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm_moe_dsa": "GLM-5",
    "bamba": "Bamba",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H",
    "falcon_h1": "Falcon-H1",
    "zamba2": "Zamba2",
    "jamba": "Jamba",
    "minimax": "MiniMax",
    "lfm2": "LFM2",
    "lfm2_moe": "LFM2 (experts)",
    "qwen3_next": "Qwen3-Next",
    "qwen3_5_text": "Qwen3.5",
    "qwen3_5_moe_text": "Qwen3.5 (experts)",
    "mllama": "Llama 3.2 Vision",
    "kimi_linear": "Kimi-Linear",
    "bailing_hybrid": "Ling 3",
    "recurrent_gemma": "RecurrentGemma",
    "mamba": "Mamba",
    "zaya": "Zaya",
}
"""model_type -> name, of the families that the tests put through the whole gate. Of multimodal models the text part,
except where the name says vision."""


def is_known(model_types: Iterable[str | None]) -> bool:
    """model_types: of the whole model and of its text part"""
    return bool(KNOWN_FAMILIES.keys() & set(model_types))
