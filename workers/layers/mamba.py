"""Mamba 1 and 2, and Zamba's.

Suffixes: T packed tokens    C channels    H heads of this rank    G groups of heads that share B and C    K, V, S sizes
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...kernels.mixers import Function, GatedNorm, Mamba2Sizes, Order
from ...kernels.state import LINEAR_ATTENTION, SELECTIVE_SCAN
from ..tensor_parallel import Section, TensorParallel
from .states import RECURRENT, Mixer, PagedStates


class Mamba2(Mixer):
    """Bamba, Granite 4, Nemotron-H, Falcon-H1, Zamba2, Mamba-2 itself: arXiv 2405.21060.

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
        groups = torch.arange(self._groups, device=module.A_log.device)
        self._is_of_group_GH = (self._group_of_head == groups.unsqueeze(1)).float()
        self._groups_span_ranks = parallel.size > 1 and not groups_are_cut
        self._A = -module.A_log.float().exp()
        self._bias = module.dt_bias.float()
        self._D = module.D.float().repeat_interleave(module.head_dim)
        limits = _checked_limits(module.time_step_limit)
        self._sizes = Mamba2Sizes(self._heads, module.head_dim, self._groups, module.ssm_state_size, limits)
        self._group_width = module.head_dim * heads_per_group
        self._norm = self._norm_of(module)
        self._in_scale: float = getattr(module, "ssm_in_multiplier", 1.0)
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
        hidden_TD = hidden_states[0]
        if self._in_scale != 1.0:
            hidden_TD = hidden_TD * self._in_scale
        projected = module.in_proj(hidden_TD)
        if self._scales is not None:
            projected = projected * self._scales.flatten()
        gate_TC, xBC_TC, dt_TH = projected.split([self._inner, self._inner + 2 * self._shared, self._heads], dim=-1)
        xBC_TC = self._convolve(xBC_TC)
        q_TGK, k_TGK, x_THV, decay_TH = self._around.mamba2_inputs(xBC_TC, dt_TH, self._A, self._bias, self._sizes)
        if self._groups_span_ranks:
            q_TGK, k_TGK = q_TGK[:, self._group_of_head], k_TGK[:, self._group_of_head]
        inputs = q_TGK, k_TGK, x_THV, decay_TH
        out_TC = self._states.scan(self._layer, RECURRENT, LINEAR_ATTENTION, (), inputs).flatten(1)
        skip = self._D, xBC_TC[:, : self._inner]
        if self._groups_span_ranks and self._norm.order is not Order.NO_NORM:
            out_TC = self._gated_over_ranks(out_TC, gate_TC.float(), skip)
        else:
            out_TC = self._around.gated_norm(out_TC, gate_TC, self._norm, skip)
        return module.out_proj(out_TC.to(hidden_states.dtype)).unsqueeze(0)

    def _norm_of(self, module: Any) -> GatedNorm:
        norm = module.norm
        if not hasattr(norm, "weight"):
            return GatedNorm(Order.NO_NORM, None, 0.0, self._inner)
        order = Order.NORM_FIRST if getattr(norm, "norm_before_gate", False) else Order.GATE_FIRST
        return GatedNorm(order, norm.weight.float(), norm.variance_epsilon, self._group_width)

    def _gated_over_ranks(self, y_TC: Tensor, gate_TC: Tensor, skip: tuple[Tensor, Tensor]) -> Tensor:
        assert self._norm.weight is not None, "there is a norm"
        D_C, x_TC = skip
        y_TC, gate_TC = y_TC + D_C * x_TC.float(), F.silu(gate_TC)
        heads = self._heads, -1
        if self._norm.order is Order.NORM_FIRST:
            return self._normalized(y_TC.unflatten(1, heads)) * self._norm.weight * gate_TC
        return self._normalized((y_TC * gate_TC).unflatten(1, heads)) * self._norm.weight

    def _normalized(self, x_THV: Tensor) -> Tensor:
        """By the mean square of each group, which has heads on several ranks."""
        # Not by `index_add_`: on a GPU that adds in another order each time.
        squares_TH = x_THV.pow(2).sum(-1)
        squares_TG = (squares_TH.unsqueeze(1) * self._is_of_group_GH).sum(-1)
        self._parallel.collectives.all_reduce(squares_TG)
        scale_TG = torch.rsqrt(squares_TG / self._group_width + self._module.norm.variance_epsilon)
        return (x_THV * scale_TG[:, self._group_of_head].unsqueeze(-1)).flatten(1)


class Mamba1(Mixer):
    """Mamba, Falcon-Mamba, Jamba: arXiv 2312.00752; the latter two have a norm on each of dt, B and C."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._has_norms = hasattr(module, "dt_layernorm")
        self._A = -module.A_log.float().exp()
        self._D = module.D.float()
        self._gate = GatedNorm(Order.NO_NORM, None, 0.0, len(self._A))

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
        x_TC = self._convolve(x_TC)
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, B_TS, C_TS = module.x_proj(x_TC).split(sizes, dim=-1)
        if self._has_norms:
            time_step, B_TS, C_TS = module.dt_layernorm(time_step), module.b_layernorm(B_TS), module.c_layernorm(C_TS)
        dt_TC = self._around.mapped(module.dt_proj(time_step), Function.SOFTPLUS)
        inputs = x_TC.float(), dt_TC, B_TS.float(), C_TS.float()
        out_TC = self._states.scan(self._layer, RECURRENT, SELECTIVE_SCAN, (self._A,), inputs)
        out_TC = self._around.gated_norm(out_TC, gate_TC, self._gate, (self._D, x_TC))
        return module.out_proj(out_TC).unsqueeze(0)


class HeadedMamba1(Mixer):
    """Zamba: channels in a few heads, each with projections and steps of time of its own. What goes in and its gate
    take turns. A state has a tensor for each head."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._A_HCS = -module.A_log.float().exp()
        self._gate = GatedNorm(Order.NO_NORM, None, 0.0, module.D.numel())

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels, heads = Section(module.intermediate_size), (Section(module.n_mamba_heads),)
        of_heads = ("x_proj_weight", "dt_proj_weight", "dt_proj_bias", "A_log", "D")
        return {"in_proj": (Section(2 * channels.size),), "conv1d": (channels,), **dict.fromkeys(of_heads, heads)}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        module = self._module
        x_TC, gate_TC = module.in_proj(hidden_states[0]).unflatten(-1, (-1, 2)).unbind(-1)
        x_TC = self._convolve(x_TC.contiguous())
        x_THC = x_TC.unflatten(-1, (len(self._A_HCS), -1))
        out_TC = torch.cat([self._of_head(head, x_THC[:, head]) for head in range(len(self._A_HCS))], dim=-1)
        skip = module.D.float().flatten(), x_TC
        out_TC = self._around.gated_norm(out_TC, gate_TC.contiguous(), self._gate, skip)
        return module.out_proj(out_TC.to(hidden_states.dtype)).unsqueeze(0)

    def _of_head(self, head: int, x_TC: Tensor) -> Tensor:
        module = self._module
        sizes = [module.time_step_rank, module.ssm_state_size, module.ssm_state_size]
        time_step, B_TS, C_TS = F.linear(x_TC, module.x_proj_weight[head]).split(sizes, dim=-1)
        dt_TC = F.softplus(F.linear(time_step, module.dt_proj_weight[head]).float() + module.dt_proj_bias[head].float())
        inputs = x_TC.float().contiguous(), dt_TC, B_TS.float().contiguous(), C_TS.float().contiguous()
        return self._states.scan(self._layer, RECURRENT + head, SELECTIVE_SCAN, (self._A_HCS[head],), inputs)


def _checked_limits(limits: Sequence[float]) -> tuple[float, float]:
    """Least and greatest dt; infinity is one. Raises OverflowError for a number that float32 does not have."""
    shortest, longest = limits
    for limit in limits:
        if math.isfinite(limit) and abs(limit) > torch.finfo(torch.float32).max:
            raise OverflowError(f"time_step_limit {list(limits)} is beyond float32")
    return shortest, longest
