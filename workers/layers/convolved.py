"""Queries, keys and values that tokens mix before they attend: Zaya.

Suffixes: T packed tokens    C channels    G heads of queries, then of keys    I, O inputs and outputs of a head
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.state import CONVOLUTION
from ..tensor_parallel import Section, TensorParallel
from .head_products import HeadProduct, head_product
from .states import CONV, Mixer, PagedStates

DELAYED = 1
"""The tensor of a state that keeps what the token before had, less what there is before a text's first token."""


class ConvolvedHeads(Mixer):
    """Compressed convolutional attention: arXiv 2510.04476. Takes the place of the projections alone.

    Queries and keys go through two short convolutions, of each channel and then within each head; half of the value
    heads are of the token before. The halves lie in other heads, so each rank computes all heads and takes its own.
    """

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        heads, kv_heads = module.num_attention_heads, module.num_key_value_heads
        self._counts = heads, kv_heads
        self._own_heads = _share(heads, parallel)
        self._own_kv_heads = _share(kv_heads, parallel)
        self._first_C = torch.cat([module.conv_qk_depthwise.bias, _bias_of(module.v_proj_delayed)]).float()
        self._one_before = self._first_C.new_tensor([[1.0, 0.0]]).expand(len(self._first_C), -1).contiguous()
        self._nothing = torch.zeros_like(self._first_C)
        self._within: HeadProduct | None = None

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        return {}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, Tensor]:
        """Returns queries, keys and values of this rank's heads, [1,T,heads,size] each."""
        module, hidden_TD, (heads, kv_heads) = self._module, hidden_states[0], self._counts
        q_TC, k_TC = module.q_proj(hidden_TD), module.k_proj(hidden_TD)
        conv = module.conv_qk_depthwise
        now_TC = self._scan(CONV, conv.weight.squeeze(1), conv.bias, torch.cat([q_TC, k_TC], dim=-1))
        before_TC, value_before_TC = self._before(now_TC, module.v_proj_delayed(hidden_TD))
        both_TGI = torch.cat([x.unflatten(-1, (heads + kv_heads, -1)) for x in (before_TC, now_TC)], dim=-1)
        mixed_TGO = self._product()(both_TGI) + module.conv_qk_grouped.bias.view(heads + kv_heads, -1)
        # Beside what was mixed, queries and keys go on as they are, each as a mean of both.
        q_TGO, k_TGO = q_TC.unflatten(-1, (kv_heads, heads // kv_heads, -1)), k_TC.unflatten(-1, (kv_heads, 1, -1))
        mean_TGO = (q_TGO + k_TGO) * 0.5
        query = mixed_TGO[:, :heads] + mean_TGO.flatten(1, 2)
        key = mixed_TGO[:, heads:] + mean_TGO.mean(dim=2)
        value = torch.cat([module.v_proj_current(hidden_TD), value_before_TC], dim=-1).unflatten(-1, (kv_heads, -1))
        return (
            query[:, self._own_heads].unsqueeze(0),
            key[:, self._own_kv_heads].unsqueeze(0),
            value[:, self._own_kv_heads].unsqueeze(0),
        )

    def _before(self, *of_each_TC: Tensor) -> list[Tensor]:
        """What the token before had of each."""
        x_TC = torch.cat(of_each_TC, dim=-1)
        before = self._scan(DELAYED, self._one_before, self._nothing, x_TC.float() - self._first_C) + self._first_C
        return list(before.to(x_TC.dtype).split([x.shape[-1] for x in of_each_TC], dim=-1))

    def _scan(self, which: int, weight: Tensor, bias: Tensor, x_TC: Tensor) -> Tensor:
        return self._states.scan(self._layer, which, CONVOLUTION, (weight, bias), (x_TC,))

    def _product(self) -> HeadProduct:
        """Of a head's numbers of the token before and of this one; made of the weights once."""
        if self._within is None:
            weight_COI2 = self._module.conv_qk_grouped.weight.detach().unflatten(0, (sum(self._counts), -1))
            self._within = head_product(weight_COI2.mT.flatten(2), self._module.q_proj)
        return self._within


def _share(heads: int, parallel: TensorParallel) -> slice:
    """This rank's of some heads; with more ranks than heads, one lives on several ranks."""
    parts = min(heads, parallel.size)
    first = parallel.rank * parts // parallel.size * (heads // parts)
    return slice(first, first + heads // parts)


def _bias_of(linear: Any) -> Tensor:
    return linear.weight.new_zeros(linear.out_features) if linear.bias is None else linear.bias
