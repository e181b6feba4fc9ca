"""Mamba 1 and 2.

Suffixes: T packed tokens    C channels    H heads of this rank    G groups of heads that share B and C    K, V, S sizes
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.state import LINEAR_ATTENTION, SELECTIVE_SCAN
from ..tensor_parallel import Section, TensorParallel
from .states import RECURRENT, Mixer, PagedStates


class Mamba2(Mixer):
    """Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba2: arXiv 2405.21060.

    Nemotron-H and Zamba2 keep dt above a minimum. transformers forgets that in decode; here it always holds.
    Falcon-H1 scales what goes in, and gates without a norm unless told otherwise.
    """

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._heads = len(module.A_log)
        self._inner = self._heads * module.head_dim
        self._shared = (module.conv1d.weight.shape[0] - self._inner) // 2
        self._groups = self._shared // module.ssm_state_size
        groups_are_cut = parallel.size > 1 and self._groups < module.n_groups
        heads_per_group = module.num_heads // module.n_groups
        first_head = 0 if groups_are_cut else parallel.rank * self._heads
        self._group_of_head = (torch.arange(self._heads, device=module.A_log.device) + first_head) // heads_per_group
        self._groups_span_ranks = parallel.size > 1 and not groups_are_cut
        self._A = -module.A_log.float().exp()
        self._group_width = module.head_dim * heads_per_group
        self._scales = getattr(module, "mup_vector", None)
        if self._scales is not None and parallel.size > 1:
            sections = self.sections(module, parallel.size)["in_proj"]
            self._scales = torch.cat(parallel.own_parts(self._scales, sections), dim=-1)

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        inner = Section(module.intermediate_size)
        shared = Section(module.n_groups * module.ssm_state_size, module.n_groups % ranks == 0)
        heads = Section(module.num_heads)
        return {
            "in_proj": (inner, inner, shared, shared, heads), "conv1d": (inner, shared, shared),
            "A_log": (heads,), "D": (heads,), "dt_bias": (heads,), "norm": (inner,),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        module = self._module
        projected = module.in_proj(hidden_states[0] * getattr(module, "ssm_in_multiplier", 1.0))
        if self._scales is not None:
            projected = projected * self._scales.flatten()
        gate, conv_in, dt_TH = projected.split([self._inner, self._inner + 2 * self._shared, self._heads], dim=-1)
        convolved = self._activate(self._convolve(conv_in)).float()
        x, B, C = convolved.split([self._inner, self._shared, self._shared], dim=-1)
        x_THV = x.unflatten(-1, (self._heads, -1))
        k_THK, q_THK = (shared.unflatten(-1, (self._groups, -1))[:, self._group_of_head] for shared in (B, C))
        dt_TH = F.softplus(dt_TH.float() + module.dt_bias.float()).clamp(*module.time_step_limit)
        out_THV = self._states.scan(
            self._layer, RECURRENT, LINEAR_ATTENTION, (), (q_THK, k_THK, x_THV * dt_TH.unsqueeze(-1), dt_TH * self._A)
        )
        out_THV = out_THV + module.D.float().unsqueeze(-1) * x_THV
        return module.out_proj(self._gated(out_THV, gate.float()).to(hidden_states.dtype)).unsqueeze(0)

    def _gated(self, x_THV: Tensor, gate_TC: Tensor) -> Tensor:
        norm = self._module.norm
        gate_TC = F.silu(gate_TC)
        if not hasattr(norm, "weight"):
            return x_THV.flatten(1) * gate_TC
        if getattr(norm, "norm_before_gate", False):
            return self._normalized(x_THV) * norm.weight * gate_TC
        gated = x_THV.flatten(1) * gate_TC
        return self._normalized(gated.view_as(x_THV)) * norm.weight

    def _normalized(self, x_THV: Tensor) -> Tensor:
        """By the mean square of each group, which may have heads on several ranks."""
        groups = x_THV.new_zeros((len(x_THV), self._groups))
        squares_TG = groups.index_add_(1, self._group_of_head, x_THV.pow(2).sum(-1))
        if self._groups_span_ranks:
            self._parallel.collectives.all_reduce(squares_TG)
        scale_TG = torch.rsqrt(squares_TG / self._group_width + self._module.norm.variance_epsilon)
        return (x_THV * scale_TG[:, self._group_of_head].unsqueeze(-1)).flatten(1)


class Mamba1(Mixer):
    """Jamba: arXiv 2312.00752, with a norm on each of dt, B and C."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._A = -module.A_log.float().exp()

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels = Section(module.intermediate_size)
        return {
            "in_proj": (channels, channels), "conv1d": (channels,), "dt_proj": (channels,), "A_log": (channels,),
            "D": (channels,),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        module = self._module
        x_TC, gate_TC = module.in_proj(hidden_states[0]).chunk(2, dim=-1)
        x_TC = self._activate(self._convolve(x_TC))
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, B_TS, C_TS = module.x_proj(x_TC).split(sizes, dim=-1)
        dt_TC = F.softplus(module.dt_proj(module.dt_layernorm(time_step)).float())
        B_TS, C_TS = module.b_layernorm(B_TS).float(), module.c_layernorm(C_TS).float()
        x_TC = x_TC.float()
        out = self._states.scan(self._layer, RECURRENT, SELECTIVE_SCAN, (self._A,), (x_TC, dt_TC, B_TS, C_TS))
        out = (out + module.D.float() * x_TC) * F.silu(gate_TC.float())
        return module.out_proj(out.to(hidden_states.dtype)).unsqueeze(0)
