"""Products of tokens with constant weights: `nn.Linear` modules whose weight is packed once.

    kind = linear_kind(dtype, device)      # None: modules stay as they are
    kind.take_over(linear)

`protocol.py` says what a kind must do, `reference.py` shows the arithmetic. On a CPU it runs in C++ (`cpu.py`), or by
oneDNN where nothing can be compiled (`onednn.py`).
"""

import torch

from .cpu import NativeLinear, PackedEmbedding, PackedWeights, combine
from .onednn import OneDnnLinear, compile_products
from .protocol import PackedLinear

__all__ = [
    "LINEAR_KINDS",
    "NativeLinear",
    "OneDnnLinear",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeights",
    "combine",
    "compile_products",
    "linear_kind",
]

LINEAR_KINDS: tuple[type[PackedLinear], ...] = (NativeLinear, OneDnnLinear)
"""Fastest first."""


def linear_kind(dtype: torch.dtype, device: torch.device) -> type[PackedLinear] | None:
    """The fastest way for weights of this dtype. None: torch's own product is, or no other takes it."""
    if device.type != "cpu":
        return None
    return next((kind for kind in LINEAR_KINDS if dtype in kind.dtypes and kind.lacks() is None), None)
