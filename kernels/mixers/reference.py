"""What a state mixer does around its recurrence in plain torch: what the fast ways must equal."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import DeltaSizes, Function, GatedNorm, Mamba2Sizes, Order


def delta_inputs(
    qkv_TC: Tensor, a_TD: Tensor, b_TH: Tensor, A_D: Tensor, bias_D: Tensor, sizes: DeltaSizes
) -> tuple[Tensor, ...]:
    """What goes into `GATED_DELTA`: q_TGK and k_TGK of length 1 (q scaled), v_THV, g_TD and beta_TH, float32.

    D: as many logarithms of decays as there are heads, or as many for each. A, bias: float32; A is negative
    """
    keys = sizes.key_heads * sizes.keys
    q, k, v = qkv_TC.float().tensor_split((keys, 2 * keys), dim=-1)
    q_TGK, k_TGK = (_of_length_1(x.unflatten(-1, (sizes.key_heads, -1))) for x in (q, k))
    shifted = a_TD.float() + bias_D
    g_TD = sizes.least * torch.sigmoid(-A_D * shifted) if sizes.least else A_D * F.softplus(shifted)
    v_THV = v.unflatten(-1, (sizes.heads, -1))
    return q_TGK * sizes.keys**-0.5, k_TGK, v_THV, g_TD, b_TH.float().sigmoid()


def _of_length_1(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def mamba2_inputs(xBC_TC: Tensor, dt_TH: Tensor, A_H: Tensor, bias_H: Tensor, sizes: Mamba2Sizes) -> tuple[Tensor, ...]:
    """What goes into `LINEAR_ATTENTION`: q_TGK, k_TGK, v_THV and g_TH, float32.

    A, bias: float32; A is negative
    """
    inner, shared = sizes.heads * sizes.values, sizes.groups * sizes.keys
    x, B, C = xBC_TC.float().tensor_split((inner, inner + shared), dim=-1)
    k_TGK, q_TGK = (values.unflatten(-1, (sizes.groups, -1)) for values in (B, C))
    dt_TH = F.softplus(dt_TH.float() + bias_H).clamp(*sizes.limits)
    return q_TGK, k_TGK, x.unflatten(-1, (sizes.heads, -1)) * dt_TH.unsqueeze(-1), dt_TH * A_H


def lru_inputs(
    x_TC: Tensor, input_TC: Tensor, forget_TC: Tensor, rate_C: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    """What goes into `DECAYING_SUM`: x_TC and g_TC, float32.

    input, forget: gates before their sigmoid, of x's dtype    rate: float32, negative
    The more a token lets the sum decay, the more it adds; the first token of a text has no sum, and adds all.
    """
    g_TC = rate_C * forget_TC.sigmoid().float()
    share_TC = (1.0 - (2.0 * g_TC).exp()).sqrt().masked_fill((positions_T == 0).unsqueeze(-1), 1.0)
    return (x_TC * input_TC.sigmoid()).float() * share_TC, g_TC


_FUNCTIONS = {Function.SOFTPLUS: F.softplus, Function.SILU: F.silu, Function.SIGMOID: torch.sigmoid}


def mapped(x_TC: Tensor, function: Function) -> Tensor:
    """Of each number, float32; rounded to x's dtype, except time steps (softplus), which never are."""
    if function is Function.SOFTPLUS:
        return F.softplus(x_TC.float())
    return _FUNCTIONS[function](x_TC).float()


def times_mapped(x_TC: Tensor, function: Function, factor_TC: Tensor) -> Tensor:
    """The same times a factor of x's dtype, in that dtype."""
    return _FUNCTIONS[function](x_TC) * factor_TC


def gated_norm(y_TC: Tensor, gate_TC: Tensor, norm: GatedNorm, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
    """y [T,C] float32, to which goes, with `skip` (D [C], x_TC), D * x before all else. Returns the gate's dtype."""
    if skip is not None:
        D_C, x_TC = skip
        y_TC = y_TC + D_C * x_TC.float()
    if norm.rounds:
        y_TC = y_TC.to(gate_TC.dtype).float()
    gate = _FUNCTIONS[norm.gate](gate_TC.float())
    if norm.order is not Order.NORM_FIRST:
        y_TC = y_TC * gate
    if norm.order is not Order.NO_NORM:
        y_TC = _normed(y_TC, norm, gate_TC.dtype)
    if norm.order is Order.NORM_FIRST:
        y_TC = y_TC * gate
    return y_TC.to(gate_TC.dtype)


def _normed(y_TC: Tensor, norm: GatedNorm, dtype: torch.dtype) -> Tensor:
    assert norm.weight is not None, "a norm has a weight"
    groups = y_TC.unflatten(-1, (-1, norm.width))
    y_TC = (groups * torch.rsqrt(groups.square().mean(-1, keepdim=True) + norm.eps)).flatten(-2)
    if not norm.rounds:
        return y_TC * norm.weight
    return (y_TC.to(dtype).float() * norm.weight).to(dtype).float()
