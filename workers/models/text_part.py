"""The text part of a model whose family has no class for it alone.

Of most multimodal models transformers has the text part as a class of its own (Gemma 3, Llama 4). Of others
(Qwen2.5-VL, Step 3.7, Muse Glimmer) it has the whole alone. The whole is built then, and what makes no text of text is
left out: towers, projectors, talkers. What the whole does with the text part's output stays as it is.
"""

from functools import cache
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForMultimodalLM, PreTrainedModel

WHOLES: tuple[Any, ...] = AutoModelForImageTextToText, AutoModelForMultimodalLM


def has_own_class(text: Any) -> bool:
    """text: the config of a model's text part"""
    return type(text) in AutoModelForCausalLM._model_mapping


def text_part_class(whole: Any) -> type[PreTrainedModel] | None:
    """The whole's class, of which an instance has the text part alone. None: transformers has none with a text part.

    whole: the config of a model. A text part's own config does where its family has no class for anything else."""
    kinds = (kind._model_mapping.get(type(whole), None) for kind in WHOLES)
    return next((_without_others(kind) for kind in kinds if kind is not None), None)


def with_initial_weights(whole: Any) -> Any:
    """The whole's model with its text part alone, in float32, as transformers begins to train it. What is left out is
    given no memory.

    Raises `ValueError` where transformers has no class for it"""
    kind: Any = text_part_class(whole)
    if kind is None:
        raise ValueError("transformers has no class for it that makes text of text")
    with torch.device("meta"):
        model = kind._from_config(whole, dtype=torch.float32, attn_implementation="eager")
    model.to_empty(device="cpu")
    model.initialize_weights()
    model.tie_weights()
    return model


def around(text: Any) -> Any:
    """The config of a whole of which `text` is the text part's. The first that fits, or None.

    For a checkpoint that holds the text part alone, as config.json has it, where transformers only knows the whole."""
    for kind in (kind for mapping in WHOLES for kind in mapping._model_mapping):
        if kind.sub_configs.get("text_config") is type(text):
            return kind(text_config=text)
    return None


def name_of_text(whole: Any) -> str | None:
    """Of the field in which a whole's config has the text part's. None: it is one itself."""
    text = whole.get_text_config(decoder=True)
    return next((name for name in whole.sub_configs if getattr(whole, name, None) is text), None)


@cache
def _without_others(kind: type[PreTrainedModel]) -> type[PreTrainedModel]:
    """With the same name, by which classes of models are told apart."""

    def init(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        kind.__init__(self, config, *args, **kwargs)
        leave_out_others(self)

    return type(kind.__name__, (kind,), {"__init__": init, "__module__": kind.__module__})


def leave_out_others(model: Any) -> None:
    """Drop what has weights and is neither on the way to the module with the input's embeddings, nor the output."""
    embeddings, outputs = model.get_input_embeddings(), model.get_output_embeddings()
    path = next(path for path, module in model.named_modules() if module is embeddings)
    here: nn.Module = model
    for step in path.split(".")[:-1]:
        for name, child in list(here.named_children()):
            if name != step and child is not outputs and any(True for _ in child.parameters()):
                setattr(here, name, None)
        here = getattr(here, step)
