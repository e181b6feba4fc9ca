"""Families that released configs call by another name than transformers does, and say in other words.

Such a model comes with code of its own, which is not run; transformers computes the same under its own name for it.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .json_file import read_object

Fields = Mapping[str, Any]


def _same(fields: Fields) -> dict[str, Any]:
    return dict(fields)


MINIMAX_WORDS = {
    "layernorm_full_attention_alpha": "full_attn_alpha_factor",
    "layernorm_full_attention_beta": "full_attn_beta_factor",
    "layernorm_linear_attention_alpha": "linear_attn_alpha_factor",
    "layernorm_linear_attention_beta": "linear_attn_beta_factor",
    "layernorm_mlp_alpha": "mlp_alpha_factor",
    "layernorm_mlp_beta": "mlp_beta_factor",
}


def _minimax(fields: Fields) -> dict[str, Any]:
    """Lightning layers are numbered 0, those of softmax 1; what residuals are multiplied by has other names."""
    said = {MINIMAX_WORDS.get(name, name): value for name, value in fields.items()}
    numbers = said.pop("attn_type_list", None)
    if isinstance(numbers, list):
        said.setdefault("layer_types", ["full_attention" if number else "linear_attention" for number in numbers])
    return said


SPELLINGS: dict[str, tuple[str, Callable[[Fields], dict[str, Any]]]] = {
    "Yi": ("llama", _same),
    "kimi_k2": ("deepseek_v3", _same),
    "mimo": ("qwen2", _same),  # and layers that guess further tokens, which are not used
    "minimax_m1": ("minimax", _minimax),
    "minimax_text_01": ("minimax", _minimax),
}
"""model_type of released configs -> that of transformers, and what turns one's fields into the other's."""


def in_usual_words(config: Fields) -> dict[str, Any]:
    """config: as config.json has it. The same, if that is how transformers says it."""
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in SPELLINGS:
        return dict(config)
    family, respell = SPELLINGS[kind]
    return {**respell(config), "model_type": family}


def config_of(folder: Path, *, trust_remote_code: bool = False) -> Any:
    """transformers' config of a checkpoint, with what it may need beside config.json. Raises what transformers does."""
    from transformers import AutoConfig

    fields = read_object(folder / "config.json")
    if trust_remote_code or fields.get("model_type") not in SPELLINGS:
        return AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code, local_files_only=True)
    return AutoConfig.for_model(**in_usual_words(fields))
