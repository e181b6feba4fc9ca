"""Which families of models are known to run, for code that must not import torch."""

from collections.abc import Iterable

from ..errors import UnsupportedModel

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
    "qwen2": "Qwen2",
    "qwen3_moe": "Qwen3 (experts)",
    "mixtral": "Mixtral",
    "phi3": "Phi-4",
    "olmo2": "Olmo 2",
    "glm4_moe": "GLM-4.6",
    "minimax_m2": "MiniMax-M2",
    "minimax_m3_vl_text": "MiniMax-M3",
    "mimo_v2_flash": "MiMo-V2-Flash",
    "step3p5": "Step 3.7",
    "lfm3": "LFM3",
    "olmo_hybrid": "Olmo Hybrid",
    "afmoe": "Trinity",
    "muse_glimmer_text": "Muse Glimmer",
    "mistral4": "Mistral Small 4",
    "mistral_large4_text": "Mistral Large 4",
    "deepseek_v4": "DeepSeek-V4",
    "glm5_next_text": "GLM-5.3",
}
"""model_type -> name, of the families that the tests put through the whole gate. Of multimodal models the text part,
except where the name says vision."""

PICTURES = "it writes what its encoder has seen in a picture, and this encoder is not run here"
SOUNDS = "it writes what its encoder has heard, and this encoder is not run here"
DRAFTER = (
    "it guesses what another model will say, out of that model's hidden states, keys and values; by itself it says "
    "nothing. Serve the model that it was made for"
)
REFUSED: dict[str, str] = {
    **dict.fromkeys(
        ("blip", "blip_text_model", "git", "kosmos-2", "kosmos-2.5", "pix2struct", "pp_formulanet"), PICTURES
    ),
    **dict.fromkeys(("gemma4_assistant", "gemma4_unified_assistant"), DRAFTER),
    "blt": "it reads bytes in patches, whose lengths a second model chooses, and its layers take whole patches",
    "diffusion_gemma": "it makes many tokens at once out of noise, in several passes, and not one after the other",
    "reformer": "its tokens attend within buckets, and how these are cut depends on the whole text",
    "rwkv": "its layers sum up the past in a way of their own (WKV of RWKV-4), which is not computed here",
    "unlimited_ocr": (
        "its layers see a whole prompt and the last tokens of the answer, so what a token sees depends on where the "
        "prompt ended, and a conversation that goes on would be answered otherwise"
    ),
    "whisper": SOUNDS,
    "xlnet": "it says the tokens of a text in any order, by two streams of attention, and not one after the other",
    "xlstm": "its layers sum up the past in a way of their own (mLSTM cells), which is not computed here",
}
"""model_type -> why no model of it is served, of causal language models by transformers' list."""


def check_not_refused(model_types: Iterable[str | None]) -> None:
    """model_types: of the whole model and of its text part. Raises `UnsupportedModel` for one of which is known that it
    cannot be served."""
    name = next((name for name in model_types if name in REFUSED), None)
    if name is not None:
        raise UnsupportedModel(f"{name} is not served: {REFUSED[name]}.", field="model")


def is_known(model_types: Iterable[str | None]) -> bool:
    """model_types: of the whole model and of its text part"""
    return bool(KNOWN_FAMILIES.keys() & set(model_types))
