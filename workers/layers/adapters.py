"""Which modules of transformers have a forward pass of ours: the one place that puts it there.

Attention that calls a function by name needs no adapter: transformers finds ours through `PagedAttention.bind`. Layers
of cross-attention are bound by `CrossAttention`, which also runs the encoder.
"""

from torch import nn

from ..tensor_parallel import TensorParallel
from .attention import PagedAttention
from .latent import LATENT_ATTENTION, LatentAttention
from .mixers import MIXERS
from .states import PagedStates


def bind(model: nn.Module, attention: PagedAttention, states: PagedStates, parallel: TensorParallel) -> None:
    """Let the layers of `model` read and write our pages."""
    attention.bind(model)
    for module in model.modules():
        kind = type(module).__name__
        if kind in LATENT_ATTENTION:
            module.forward = LatentAttention(module, attention)
        elif kind in MIXERS:
            module.forward = MIXERS[kind](module, states, parallel)
