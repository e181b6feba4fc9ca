"""How code that torch has compiled calls our attention: by an operator, which is opaque to the compiler.

Pages change unseen by the compiler. That is right as long as only this operator touches them.
"""

import itertools
import weakref
from typing import Protocol

import torch
from torch import Tensor

from ...kernels.paged_attention import LayerParams


class Attends(Protocol):
    """`PagedAttention`, as far as the operator knows it."""

    params: dict[int, LayerParams]

    def attend_packed(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, params: LayerParams) -> Tensor: ...


_numbers = itertools.count()
_by_number: weakref.WeakValueDictionary[int, Attends] = weakref.WeakValueDictionary()


def register(attention: Attends) -> int:
    """A new number, by which the operator finds this object while it lives: operators take no objects of ours."""
    number = next(_numbers)
    _by_number[number] = attention
    return number


@torch.library.custom_op("intarsia::attend", mutates_args=())
def _attend(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, number: int) -> Tensor:
    paged = _by_number[number]
    return paged.attend_packed(q_THD, k_TKD, v_TKD, layer, paged.params[layer])


@_attend.register_fake
def _(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, number: int) -> Tensor:
    latent_values = _by_number[number].params[layer].latent_values
    return q_THD.new_empty((*q_THD.shape[:2], latent_values or v_TKD.shape[-1]))
