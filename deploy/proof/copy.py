"""The small copy of a model: a checkpoint with random weights, and transformers' own model of it."""

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ...errors import UnsupportedModel
from ...workers.checkpoint.json_file import clipped
from .oracle import Oracle
from .scaled import scaled

SPREAD_OF_VECTORS = 0.1
"""What is added to norms, biases and the like: at 0 or 1, where models begin, mistakes would not be seen."""

SPREAD_OF_GATES = 0.5
GATES = "sinks", "gate"
DRAWN_BUFFERS = re.compile("bias|scalar")
"""Names of buffers that come out of a checkpoint: others are computed of the config."""


def make_copy(config: Any, folder: Path, seed: int) -> dict[str, tuple[Any, Any]]:
    """Write the checkpoint to `folder`. config: of the model's text part. Returns what was scaled: (from, to) by name.

    Raises `UnsupportedModel` where no small copy can be made."""
    from transformers import AutoModelForCausalLM

    made = scaled(config)
    torch.manual_seed(seed)
    try:
        small = type(config).from_dict(dict(made.fields))
        model = AutoModelForCausalLM.from_config(small, dtype=torch.float32, attn_implementation="eager")
        with torch.no_grad():
            _draw(model)
        model.save_pretrained(folder)
    except Exception as error:  # transformers raises errors of any kind
        raise UnsupportedModel(
            f"no small copy of a {config.model_type} can be made: {type(error).__name__}: {clipped(str(error))}",
            field="model",
        ) from error
    return made.changed


def _draw(model: Any) -> None:
    """Weights such that every one of them matters to what comes out."""
    embeddings = {id(model.get_input_embeddings().weight)}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() <= 1:
                parameter.add_(torch.randn_like(parameter) * _spread(name))
            else:
                is_embedding = isinstance(module, nn.Embedding) or id(parameter) in embeddings
                parameter.normal_(0, _inputs_of(module, parameter, is_embedding) ** -0.5)
        for name, buffer in module.named_buffers(recurse=False):
            if DRAWN_BUFFERS.search(name) and buffer.is_floating_point():
                buffer.add_(torch.randn_like(buffer) * SPREAD_OF_VECTORS)


def _spread(name: str) -> float:
    return SPREAD_OF_GATES if name.endswith(GATES) else SPREAD_OF_VECTORS


def _inputs_of(module: nn.Module, weight: Tensor, is_embedding: bool) -> int:
    if is_embedding:
        return weight.shape[-1]
    is_stacked = weight.dim() == 3 and not isinstance(module, nn.Conv1d)
    return min(weight.shape[1:]) if is_stacked else int(weight[0].numel())


def load_oracle(folder: Path) -> Oracle:
    """transformers' own model, eager, in float32."""
    from transformers import AutoModelForCausalLM

    return Oracle(
        AutoModelForCausalLM.from_pretrained(
            folder,
            attn_implementation="eager",
            experts_implementation="eager",
            dtype=torch.float32,
            local_files_only=True,
        ).eval()
    )
