"""The small copy of a model: a checkpoint with random weights, and transformers' own model of it."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModel
from ...workers.checkpoint.files import Checkpoint
from ...workers.checkpoint.json_file import clipped
from ...workers.layers.patches import patch_rotary_dim
from ...workers.models.families import WITH_ENCODER
from ...workers.models.text_part import around, has_own_class, name_of_text, text_part_class, with_initial_weights
from .oracle import Oracle
from .scaled import DROPPED, scaled

SPREAD_OF_VECTORS = 0.1
"""What is added to norms, biases and the like: at 0 or 1, where models begin, mistakes would not be seen."""

SPREAD_OF_GATES = 0.5
GATES = "sinks", "gate"
DRAWN_BUFFERS = re.compile("bias|scalar")
"""Names of buffers that come out of a checkpoint: others are computed of the config."""

EXPERTS_OF_TOKENS = "tid2eid"
"""The buffer of a router that says for each token of the vocabulary which experts it goes to."""


def make_copy(whole: Any, folder: Path, seed: int, ranks: int = 1) -> dict[str, tuple[Any, Any]]:
    """Write the checkpoint to `folder`. Returns what was scaled: (from, to) by name.

    whole: the model's config
    ranks: on which the copy is to run, as the model does

    Raises `UnsupportedModel` where no small copy can be made."""
    config = whole.get_text_config(decoder=True)
    made = scaled(config, ranks)
    torch.manual_seed(seed)
    try:
        model = _built(whole, type(config).from_dict(dict(made.fields)))
        with torch.no_grad():
            _draw(model)
        model.save_pretrained(folder)
    except Exception as error:  # transformers raises errors of any kind
        raise UnsupportedModel(
            f"no small copy of a {config.model_type} can be made: {type(error).__name__}: {clipped(str(error))}",
            field="model",
        ) from error
    return made.changed


def _built(whole: Any, small: Any) -> Any:
    """The copy's model, in float32. small: the copy's config, of the text part"""
    from transformers import AutoModelForCausalLM

    if whole.model_type in WITH_ENCODER:
        raise ValueError("it is run with its encoder, which a proof leaves out")
    if has_own_class(small):
        return AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
    # Around the text part the whole stays as large as it is.
    name = name_of_text(whole)
    wrapped = around(small) if name is None else type(whole).from_dict(_with_text(whole, name, small))
    return with_initial_weights(small if wrapped is None else wrapped)


GIVEN_OUT = "out_hidden_size", "text_hidden_size"
"""Names that towers have for the width of what they give out."""


def _with_text(whole: Any, name: str, small: Any) -> dict[str, Any]:
    """The fields of a whole's config around the small text part, of whose width some towers say what they give out."""
    fields = {**_fields(whole), name: small.to_dict()}
    width = whole.get_text_config(decoder=True).hidden_size
    for tower in "vision_config", "audio_config":
        own = fields.get(tower)
        if isinstance(own, dict):
            fields[tower] = own | {size: small.hidden_size for size in GIVEN_OUT if own.get(size) == width}
    return fields


def _fields(whole: Any) -> dict[str, Any]:
    return {name: value for name, value in whole.to_dict().items() if name not in DROPPED}


def _draw(model: Any) -> None:
    """Weights such that every one of them matters to what comes out."""
    embeddings = {id(model.get_input_embeddings().weight)}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * _spread(name) * _size(parameter))
            else:
                is_embedding = isinstance(module, nn.Embedding) or id(parameter) in embeddings
                parameter.normal_(0, _inputs_of(module, parameter, is_embedding) ** -0.5)
        for name, buffer in module.named_buffers(recurse=False):
            if DRAWN_BUFFERS.search(name) and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * SPREAD_OF_VECTORS)
            if name == EXPERTS_OF_TOKENS:
                router: Any = module
                buffer.copy_(torch.rand(len(buffer), router.num_experts).topk(buffer.shape[1]).indices)


def _spread(name: str) -> float:
    return SPREAD_OF_GATES if name.endswith(GATES) else SPREAD_OF_VECTORS


def _size(parameter: Tensor) -> float:
    """Of its numbers, 1 at most: small ones are multiplied by much. Those that begin at 0 say nothing of it."""
    return min(float(parameter.abs().mean()), 1.0) or 1.0


def _inputs_of(module: nn.Module, weight: Tensor, is_embedding: bool) -> int:
    if is_embedding:
        return weight.shape[-1]
    is_stacked = weight.dim() == 3 and not isinstance(module, nn.Conv1d)
    return min(weight.shape[1:]) if is_stacked else int(weight[0].numel())


def _fill_missing(model: Any, folder: Path, missing: Iterable[str]) -> None:
    """What transformers wrote and does not find again, because it takes its name for another's of long ago."""
    stored = Checkpoint(folder)
    there = [name for name in missing if name in stored.names()]
    model.load_state_dict({name: stored.read(name) for name in there}, strict=False)


def load_oracle(folder: Path, dtype: torch.dtype = torch.float32) -> Oracle:
    """transformers' own model, eager. Of parameters that it keeps in float32 always, it keeps them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    part = None if has_own_class(config.get_text_config(decoder=True)) else text_part_class(config)
    kind: Any = AutoModelForCausalLM if part is None else part
    how = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    model, found = kind.from_pretrained(folder, **how, local_files_only=True, output_loading_info=True)
    _fill_missing(model, folder, found["missing_keys"])
    patch_rotary_dim(model, model.config)  # which transformers does not read
    return Oracle(model.eval())
