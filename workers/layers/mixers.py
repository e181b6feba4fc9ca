"""State mixers: one class per kind, running packed tokens over the weights of a transformers module.

Each class is the forward pass of its module, from hidden states [1,T,D] to [1,T,D], in the order of the paper: project,
convolve, recur, gate, project. What is remembered between steps lies in pages (`states.py`). Each also says how its
weights are cut among ranks: heads and channels go to their rank, and what all heads share stays whole.

Suffixes: T packed tokens    C channels    H heads of this rank    G groups of heads that share B and C    K, V, S sizes
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.activations import ACT2FN

from ...kernels.state import CONVOLUTION, GATED_DELTA, LINEAR_ATTENTION, SELECTIVE_SCAN
from ..tensor_parallel import STYLES, Cut, Section, Style, TensorParallel
from .states import PagedStates

CONV, RECURRENT = 0, 1
"""Places of the tensors of a state; a mixer with one tensor has it at 0."""


class _Mixer:
    """What all kinds share: the module, and the way to its pages."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        self._module = module
        self._states = states
        self._parallel = parallel
        self._layer: int = module.layer_idx
        self._activate = ACT2FN[getattr(module, "activation", "silu")]

    def _convolve(self, x_TC: Tensor) -> Tensor:
        conv = getattr(self._module, "conv1d", None) or self._module.conv
        weight = conv.weight.squeeze(1)
        bias = conv.bias if conv.bias is not None else weight.new_zeros(len(weight))
        return self._states.scan(self._layer, CONV, CONVOLUTION, (weight, bias), (x_TC,))


class ShortConv(_Mixer):
    """LFM2: two gates around a short convolution."""

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels = Section(module.in_proj.weight.shape[0] // 3)
        return {"in_proj": (channels,) * 3, "conv": (channels,)}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        before, after, x = self._module.in_proj(hidden_states[0]).chunk(3, dim=-1)
        return self._module.out_proj(after * self._convolve(before * x)).unsqueeze(0)


class Mamba2(_Mixer):
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


class Mamba1(_Mixer):
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


class Lightning(_Mixer):
    """MiniMax: linear attention whose heads forget at fixed rates. arXiv 2401.04658."""

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
        qkv = module.act_fn(module.qkv_proj(hidden)).float().unflatten(-1, (len(self._decay_H), -1))
        q_THK, k_THK, v_THV = qkv.split(module.head_dim, dim=-1)
        decay_TH = self._decay_H.expand(len(hidden), -1)
        out = self._states.scan(self._layer, 0, LINEAR_ATTENTION, (), (q_THK, k_THK, v_THV, decay_TH))
        out = module.norm(out.flatten(1).to(hidden.dtype))
        return module.out_proj(torch.sigmoid(module.output_gate(hidden)) * out).unsqueeze(0), None


class GatedDeltaNet(_Mixer):
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


MIXERS: dict[str, Any] = {
    "BambaMixer": Mamba2,
    "FalconH1Mixer": Mamba2,
    "GraniteMoeHybridMambaLayer": Mamba2,
    "JambaMambaMixer": Mamba1,
    "Lfm2MoeShortConv": ShortConv,
    "Lfm2ShortConv": ShortConv,
    "MiniMaxLightningAttention": Lightning,
    "NemotronHMamba2Mixer": Mamba2,
    "Qwen3NextGatedDeltaNet": PackedGatedDeltaNet,
    "Qwen3_5GatedDeltaNet": GatedDeltaNet,
    "Qwen3_5MoeGatedDeltaNet": GatedDeltaNet,
    "Zamba2MambaMixer": Mamba2,
}
"""Class of a transformers module -> its forward pass here."""


def cut_mixers(model: Any, ranks: int) -> dict[str, Style]:
    """Module path -> style, of all state mixers of a model and what they consist of."""
    styles: dict[str, Style] = {}
    for path, module in model.named_modules():
        mixer = MIXERS.get(type(module).__name__)
        if mixer is None:
            continue
        own: dict[str, Cut] = {}
        for name, sections in mixer.sections(module, ranks).items():
            cut = Cut(0, tuple(sections))
            if isinstance(getattr(module, name), torch.nn.Parameter):
                own[name] = cut
            else:
                styles[f"{path}.{name}"] = Style({"weight": cut, "bias": cut})
        styles[path] = Style(own)
        for name in ("out_proj", "x_proj"):
            if hasattr(module, name):
                styles[f"{path}.{name}"] = STYLES["rowwise"]
        if isinstance(mixer, type) and issubclass(mixer, Lightning):
            styles[f"{path}.norm"] = STYLES["norm_over_ranks"]
    return styles
