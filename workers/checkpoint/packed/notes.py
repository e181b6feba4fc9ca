"""Where a config and the tensors beside it disagree, and the tensors are believed: said once, for people."""

import re
from collections.abc import Iterator, Mapping

from ..safetensors_header import StoredTensor
from .description import Description
from .formats import FLOATS, PackedTensors

STAY_WHOLE = re.compile(
    r"(^|\.)(\w*embed\w*|wte|lm_head|output|\w*norm\w*|ln_\w+|\w*router\w*|gate|\w*_gate|conv\w*|mtp|visual|vision\w*"
    r"|audio\w*|multi_modal\w*|embedder)(\.|$)"
)
"""Modules that no tool quantises unless it is asked to, and parts of a model that are not loaded."""


def find_notes(
    tensors: Mapping[str, StoredTensor], description: Description | None, packed: PackedTensors
) -> Iterator[str]:
    if description is None:
        return
    if not packed.weights:
        yield f"{description.place} describes quantised weights, and the files hold none: they are read as they are."
        return
    whole = [name for name, tensor in tensors.items() if _is_called_quantised(name, tensor, description)]
    if len(whole) == 1:
        yield (f"1 weight that {description.place} calls quantised is stored in full, {whole[0]}; it is read as it is.")
    elif whole:
        yield (
            f"{len(whole)} weights that {description.place} calls quantised are stored in full, the first of them "
            f"{whole[0]}; they are read as they are."
        )


def _is_called_quantised(name: str, tensor: StoredTensor, description: Description) -> bool:
    module, _, last = name.rpartition(".")
    if last != "weight" or len(tensor.shape) != 2 or tensor.dtype not in FLOATS or STAY_WHOLE.search(module):
        return False
    return description.calls_quantised(module)
