"""Gated delta nets: Qwen3-Next, Qwen3.5, Qwen4-Exp, Olmo Hybrid and Lara; Kimi delta attention: Kimi-Linear, Ling 3 and
GLM-5.3.

Suffixes: T packed tokens    D hidden size    C channels    H heads of this rank    K, V sizes of a key and a value
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.mixers import DeltaSizes, Function, GatedNorm, Order
from ...kernels.state import GATED_DELTA, KEYED_DELTA
from ..tensor_parallel import Section, TensorParallel
from .states import RECURRENT, Mixer, PagedStates


class GatedDeltaNet(Mixer):
    """Qwen3.5, Qwen4-Exp, and the base of the others: arXiv 2412.06464."""

    norm_name, output_name = "norm", "out_proj"
    norm_rounds = True

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._value_heads = len(module.A_log)
        self._values_per_key = module.num_v_heads // module.num_k_heads
        key_heads = self._value_heads // self._values_per_key
        self._sizes = DeltaSizes(key_heads, module.head_k_dim, self._value_heads, module.head_v_dim)
        self._A = -module.A_log.float().exp()
        self._bias = module.dt_bias.float()
        norm = getattr(module, self.norm_name)
        weight = norm.weight.float().repeat(self._value_heads)
        gate = Function.SIGMOID if getattr(norm, "activation", "silu") == "sigmoid" else Function.SILU
        eps, width = norm.variance_epsilon, module.head_v_dim
        self._norm = GatedNorm(Order.NORM_FIRST, weight, eps, width, self.norm_rounds, gate)

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        keys, values, heads = Section(module.key_dim), Section(module.value_dim), Section(module.num_v_heads)
        return {
            "in_proj_qkv": (keys, keys, values), "in_proj_z": (values,), "in_proj_b": (heads,), "in_proj_a": (heads,),
            "conv1d": (keys, keys, values), "A_log": (heads,), "dt_bias": (heads,),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        qkv_TC, z_TC, b_TH, a_TH = self._project(hidden_states[0])
        qkv_TC = self._convolve(qkv_TC)
        inputs = self._inputs(qkv_TC, a_TH, b_TH)
        out_THV = self._states.scan(self._layer, RECURRENT, GATED_DELTA, (), inputs)
        out_TC = self._around.gated_norm(out_THV.flatten(1), z_TC, self._norm)
        return getattr(self._module, self.output_name)(out_TC).unsqueeze(0)

    def _inputs(self, qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor) -> tuple[Tensor, ...]:
        return self._around.delta_inputs(qkv_TC, a_TH, b_TH, self._A, self._bias, self._sizes)

    def _project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k and v side by side, then z [T,C], b and a [T,H]."""
        projections = self._module.in_proj_qkv, self._module.in_proj_z, self._module.in_proj_b, self._module.in_proj_a
        qkv_TC, z_TC, b_TH, a_TH = (project(hidden_TD) for project in projections)
        return qkv_TC, z_TC, b_TH, a_TH


class SmoothGatedDeltaNet(GatedDeltaNet):
    """Lara: its norm rounds once, at its end."""

    norm_rounds = False


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
        return qkv, z.flatten(1), b.flatten(1), a.flatten(1)


class SeparateGatedDeltaNet(GatedDeltaNet):
    """Olmo Hybrid: a projection each for q, k, v, the gate, a and b; a state may be turned round (arXiv 2411.12537)."""

    norm_name, output_name = "o_norm", "o_proj"

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        keys, values, heads = Section(module.key_dim), Section(module.value_dim), Section(module.num_v_heads)
        return {
            "q_proj": (keys,), "k_proj": (keys,), "v_proj": (values,), "g_proj": (values,), "a_proj": (heads,),
            "b_proj": (heads,), "conv1d": (keys, keys, values), "A_log": (heads,), "dt_bias": (heads,),
        }  # fmt: skip

    def _project(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        module = self._module
        qkv_TC = torch.cat([project(hidden_TD) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        return qkv_TC, module.g_proj(hidden_TD), module.b_proj(hidden_TD), module.a_proj(hidden_TD)

    def _inputs(self, qkv_TC: Tensor, a_TH: Tensor, b_TH: Tensor) -> tuple[Tensor, ...]:
        *others, beta_TH = super()._inputs(qkv_TC, a_TH, b_TH)
        return *others, 2.0 * beta_TH if self._module.allow_neg_eigval else beta_TH


class KeyedDeltaNet(Mixer):
    """Kimi-Linear, Ling 3, GLM-5.3: each number of a key decays by itself. arXiv 2510.26692.

    Ling 3 bounds decays from below, and projects to them and to the output's gate at once; Kimi-Linear by way of a few
    numbers, which all ranks compute; GLM-5.3 does both.
    """

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        gate, keys = module.forget_gate, module.head_dim
        heads = gate.A_log.numel()
        self._sizes = DeltaSizes(heads, keys, heads, keys, self._lower_bound(gate))
        self._A = -gate.A_log.float().flatten().exp().repeat_interleave(keys)
        self._bias = gate.dt_bias.float()
        norm = module.o_norm
        weight = norm.weight.float().repeat(heads)
        self._norm = GatedNorm(Order.NORM_FIRST, weight, norm.variance_epsilon, keys, gate=Function.SIGMOID)

    @staticmethod
    def _lower_bound(gate: Any) -> float:
        """Of decays; 0: none."""
        if hasattr(gate, "safe_gate_lower_bound"):
            return gate.safe_gate_lower_bound or 0.0
        return gate.lower_bound if getattr(gate, "safe_gate", False) else 0.0

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels, heads = (Section(module.qkv_dim),), (Section(module.num_heads),)
        is_by_way = hasattr(module, "g_b_proj")
        gates = ("forget_gate.f_b_proj", "g_b_proj") if is_by_way else ("forget_gate.f_proj", "g_proj")
        return {
            "q_proj": channels, "k_proj": channels, "v_proj": channels, "b_proj": heads, "conv1d": channels * 3,
            "forget_gate.A_log": heads, "forget_gate.dt_bias": channels, **dict.fromkeys(gates, channels),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        module, hidden_TD = self._module, hidden_states[0]
        qkv_TC = torch.cat([project(hidden_TD) for project in (module.q_proj, module.k_proj, module.v_proj)], dim=-1)
        qkv_TC, decay_TC, gate_TC = self._convolve(qkv_TC), *self._gates(hidden_TD)
        q_THK, k_THK, v_THV, g_TC, beta_TH = self._around.delta_inputs(
            qkv_TC, decay_TC, module.b_proj(hidden_TD), self._A, self._bias, self._sizes
        )
        inputs = q_THK, k_THK, v_THV, g_TC.view(q_THK.shape), beta_TH
        out_THV = self._states.scan(self._layer, RECURRENT, KEYED_DELTA, (), inputs)
        return module.o_proj(self._around.gated_norm(out_THV.flatten(1), gate_TC, self._norm)).unsqueeze(0)

    def _gates(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor]:
        """Of the state's decays and of what comes out, [T,C] each."""
        module, forget = self._module, self._module.forget_gate
        if not hasattr(module, "g_b_proj"):
            return forget.f_proj(hidden_TD), module.g_proj(hidden_TD)
        return forget.f_b_proj(forget.f_a_proj(hidden_TD)), module.g_b_proj(module.g_a_proj(hidden_TD))
