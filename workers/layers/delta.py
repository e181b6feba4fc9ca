"""Gated delta nets: Qwen3-Next and Qwen3.5.

Suffixes: T packed tokens    C channels    H heads of this rank    K, V sizes of a key and a value
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.state import GATED_DELTA
from ..tensor_parallel import Section, TensorParallel
from .states import RECURRENT, Mixer, PagedStates


class GatedDeltaNet(Mixer):
    """Qwen3.5, and the base of Qwen3-Next: arXiv 2412.06464."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._value_heads = len(module.A_log)
        self._values_per_key = module.num_v_heads // module.num_k_heads
        self._key_width = self._value_heads // self._values_per_key * module.head_k_dim
        self._A = module.A_log.float().exp()

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        keys, values, heads = Section(module.key_dim), Section(module.value_dim), Section(module.num_v_heads)
        return {
            "in_proj_qkv": (keys, keys, values), "in_proj_z": (values,), "in_proj_b": (heads,), "in_proj_a": (heads,),
            "conv1d": (keys, keys, values), "A_log": (heads,), "dt_bias": (heads,),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        module = self._module
        qkv_TC, z_THV, b_TH, a_TH = self._project(hidden_states[0])
        qkv_TC = self._activate(self._convolve(qkv_TC)).float()
        widths = [self._key_width, self._key_width, self._value_heads * module.head_v_dim]
        q, k, v = qkv_TC.split(widths, dim=-1)
        q_THK, k_THK = (self._keys_of_heads(x) for x in (q, k))
        decay_TH = -self._A * F.softplus(a_TH.float() + module.dt_bias.float())
        inputs = (
            q_THK * module.head_k_dim**-0.5,
            k_THK,
            v.unflatten(-1, (self._value_heads, -1)),
            decay_TH,
            b_TH.float().sigmoid(),
        )
        out_THV = self._states.scan(self._layer, RECURRENT, GATED_DELTA, (), inputs)
        out_THV = module.norm(out_THV.to(hidden_states.dtype), z_THV)
        return module.out_proj(out_THV.flatten(1)).unsqueeze(0)

    def _project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, then z [T,H,V], b and a [T,H]."""
        module = self._module
        z_THV = module.in_proj_z(hidden_TD).unflatten(-1, (self._value_heads, -1))
        return module.in_proj_qkv(hidden_TD), z_THV, module.in_proj_b(hidden_TD), module.in_proj_a(hidden_TD)

    def _keys_of_heads(self, x_TC: Tensor) -> Tensor:
        x_THK = x_TC.unflatten(-1, (-1, self._module.head_k_dim))
        x_THK = x_THK * torch.rsqrt(x_THK.pow(2).sum(-1, keepdim=True) + 1e-6)
        return x_THK.repeat_interleave(self._values_per_key, dim=1)


class PackedGatedDeltaNet(GatedDeltaNet):
    """Qwen3-Next: q, k, v and z of one key head lie side by side, and so do b and a."""

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        keys, values, heads = Section(module.key_dim), Section(module.value_dim), Section(module.num_v_heads)
        return {
            "in_proj_qkvz": (Section(2 * module.key_dim + 2 * module.value_dim),),
            "in_proj_ba": (Section(2 * module.num_v_heads),),
            "conv1d": (keys, keys, values), "A_log": (heads,), "dt_bias": (heads,),
        }  # fmt: skip

    def _project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        module, ratio = self._module, self._values_per_key
        key_heads = self._value_heads // ratio
        qkvz = module.in_proj_qkvz(hidden_TD).unflatten(-1, (key_heads, -1))
        widths = [module.head_k_dim, module.head_k_dim, ratio * module.head_v_dim, ratio * module.head_v_dim]
        q, k, v, z = qkvz.split(widths, dim=-1)
        b, a = module.in_proj_ba(hidden_TD).unflatten(-1, (key_heads, -1)).split(ratio, dim=-1)
        qkv = torch.cat([x.flatten(1) for x in (q, k, v)], dim=-1)
        return qkv, z.reshape(len(z), self._value_heads, -1), b.flatten(1), a.flatten(1)
