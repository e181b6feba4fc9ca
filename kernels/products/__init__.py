"""Products of tokens with constant weights: `nn.Linear` modules whose weight is packed once.

    kind = linear_kind(dtype, device)      # None: modules stay as they are
    kind.take_over(linear)

`protocol.py` says what a kind must do, `reference.py` shows the arithmetic. On a CPU it runs in C++ (`cpu.py`), or by
oneDNN where nothing can be compiled (`onednn.py`). On a GPU torch's products are taken, or Triton's for the same bits
and for experts (`triton.py`). Weights in fewer bits stay so on both (`codes.py`, `unpacking.py`); on a CPU inputs may
be rounded, too (`integers.py`).
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from . import cpu, reference, triton
from .codes import Codes, side_by_side, stacked
from .cpu import NativeCodesLinear, NativeLinear, PackedCodes, PackedEmbedding, PackedWeights
from .integers import IntegerCodes, IntegerCodesLinear
from .onednn import OneDnnLinear, compile_products
from .protocol import CodesLinear, PackedLinear, SortedRows
from .reference import ExpandedCodes, ReferenceCodesLinear
from .triton import TritonLinear, TritonWeights
from .unpacking import OrderedTritonCodes, OrderedTritonCodesLinear, TritonCodes, TritonCodesLinear

__all__ = [
    "CODES_KINDS",
    "LINEAR_KINDS",
    "Codes",
    "CodesLinear",
    "ExpandedCodes",
    "GroupedProducts",
    "IntegerCodes",
    "IntegerCodesLinear",
    "NativeCodesLinear",
    "NativeLinear",
    "OneDnnLinear",
    "OrderedTritonCodes",
    "OrderedTritonCodesLinear",
    "PackedCodes",
    "PackedEmbedding",
    "PackedLinear",
    "PackedWeights",
    "ReferenceCodesLinear",
    "SortedRows",
    "TritonCodes",
    "TritonCodesLinear",
    "TritonLinear",
    "TritonWeights",
    "compile_products",
    "grouped_products",
    "linear_kind",
    "side_by_side",
    "stacked",
]

LINEAR_KINDS: tuple[type[PackedLinear], ...] = (NativeLinear, OneDnnLinear)
"""On a CPU, fastest first."""


def linear_kind(dtype: torch.dtype, device: torch.device, same_bits: bool = False) -> type[PackedLinear] | None:
    """The fastest way for weights of this dtype. None: torch's own product is, or no other takes it.

    same_bits: on a GPU: a row's result is to depend on that row alone
    """
    kinds = LINEAR_KINDS if device.type == "cpu" else (TritonLinear,) if same_bits else ()
    return next((kind for kind in kinds if dtype in kind.dtypes and kind.lacks() is None), None)


CODES_KINDS: dict[str, type[CodesLinear]] = {
    "cpu": NativeCodesLinear,
    "cpu-int8": IntegerCodesLinear,
    "triton": TritonCodesLinear,
    "reference": ReferenceCodesLinear,
}


class GroupedProducts(NamedTuple):
    """What experts are computed with."""

    linear: type[PackedLinear]  # of one weight
    weights: type[PackedWeights] | type[TritonWeights]
    sort_rows: Callable[[Tensor, int], SortedRows]
    combine: Callable[[Tensor, Tensor, Tensor], Tensor]


_GROUPED = {
    "cpu": GroupedProducts(NativeLinear, PackedWeights, reference.sort_rows, cpu.combine),
    "cuda": GroupedProducts(TritonLinear, TritonWeights, triton.sort_rows, triton.combine),
}


def grouped_products(device: torch.device) -> GroupedProducts | None:
    """None: nothing here computes them on such a device."""
    found = _GROUPED.get(device.type)
    return found if found is not None and found.linear.lacks() is None else None
