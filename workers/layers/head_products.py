"""Products of each head's numbers with a weight of its own.

Suffixes: T tokens    H heads of this rank    I, O inputs and outputs of a head
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ...kernels.products import NativeLinear, PackedWeights

HeadProduct = Callable[[Tensor], Tensor]
"""[T,H,I] -> [T,H,O]"""


def head_product(weight_HOI: Tensor, beside: nn.Module) -> HeadProduct:
    """beside: a linear layer of the same model; where its products are packed ones, these are"""
    return _packed(weight_HOI) if isinstance(beside, NativeLinear) else _plain(weight_HOI)


def _packed(weight_HOI: Tensor) -> HeadProduct:
    return PackedWeights(weight_HOI).product_of_each


def _plain(weight_HOI: Tensor) -> HeadProduct:
    return lambda x_THI: torch.einsum("thi,hoi->tho", x_THI, weight_HOI)
