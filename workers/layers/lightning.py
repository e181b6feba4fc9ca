"""Lightning attention: MiniMax."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.mixers import Function
from ...kernels.state import LINEAR_ATTENTION
from ..tensor_parallel import Section, TensorParallel
from .states import Mixer, PagedStates, is_silu


class Lightning(Mixer):
    """MiniMax: linear attention whose heads forget at fixed rates. arXiv 2401.04658."""

    norms_over_ranks = ("norm",)

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        heads = Section(module.num_attention_heads)
        rates = parallel.own_parts(module.slope_rate.flatten(), (heads,))[0]
        self._decay_H = -rates.float()

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        heads = module.num_attention_heads * module.head_dim
        return {"qkv_proj": (Section(3 * heads),), "output_gate": (Section(heads),)}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module = self._module
        hidden = hidden_states[0]
        qkv = self._activated(module.qkv_proj(hidden)).unflatten(-1, (len(self._decay_H), -1))
        q_THK, k_THK, v_THV = qkv.split(module.head_dim, dim=-1)
        if hidden.dtype is torch.bfloat16 and hidden.is_cuda:
            # As transformers has them: kernels of a GPU multiply them as they are.
            q_THK, k_THK = q_THK.to(hidden.dtype), k_THK.to(hidden.dtype)
        decay_TH = self._decay_H.expand(len(hidden), -1)
        out = self._states.scan(self._layer, 0, LINEAR_ATTENTION, (), (q_THK, k_THK, v_THV, decay_TH))
        out = module.norm(out.flatten(1).to(hidden.dtype))
        out = self._around.times_mapped(module.output_gate(hidden), Function.SIGMOID, out)
        return module.out_proj(out).unsqueeze(0), None

    def _activated(self, x_TC: Tensor) -> Tensor:
        activate = self._module.act_fn
        return self._around.mapped(x_TC, Function.SILU) if is_silu(activate) else activate(x_TC).float()
