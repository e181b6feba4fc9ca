"""Rotary positions of models whose frequencies depend on how long a text is.

Models with `longrope` (arXiv 2402.13753; Phi-3 and later, MiniCPM) know two sets of frequencies: for texts as long as
those they were trained with first, and for longer ones. transformers takes the set by the longest text of a batch, in
each forward pass. So a short answer would change with what is computed beside it, and keys of the two kinds would meet
in the cache. Here one set is taken for good, by the longest text that the engine serves.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

LONG = "longrope"
SETTLED = "settled"
"""The kind that such modules say they have afterwards: transformers leaves their frequencies alone."""


class _Kind(NamedTuple):
    """One kind of positions of a module: most have one, some have one for each kind of layer."""

    layer_type: str | None
    parameters: Any  # of the config

    def buffer(self, name: str) -> str:
        return name if self.layer_type is None else f"{self.layer_type}_{name}"


def settle_frequencies(model: nn.Module, max_model_len: int) -> None:
    """May be called again with another length. max_model_len: tokens of the longest text"""
    for module in model.modules():
        for kind in _long_kinds(module):
            _settle(module, kind, max_model_len)


def _long_kinds(module: Any) -> Iterator[_Kind]:
    types: Any = getattr(module, "rope_type", None)
    if isinstance(types, str) and types in (LONG, SETTLED):
        yield _Kind(None, module.config.rope_parameters)
    elif isinstance(types, dict):
        for layer_type, kind in types.items():
            if kind in (LONG, SETTLED):
                yield _Kind(layer_type, module.config.rope_parameters[layer_type])


def _settle(module: Any, kind: _Kind, max_model_len: int) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies: torch.Tensor = getattr(module, kind.buffer("inv_freq"))
    of_layer = {} if kind.layer_type is None else {"layer_type": kind.layer_type}
    chosen, _ = ROPE_INIT_FUNCTIONS[LONG](module.config, frequencies.device, seq_len=max_model_len, **of_layer)
    frequencies.copy_(chosen)
    if kind.layer_type is None:
        module.rope_type = SETTLED
    else:
        module.rope_type[kind.layer_type] = SETTLED
