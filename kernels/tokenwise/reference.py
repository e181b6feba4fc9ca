"""Token-wise operations in plain torch: what the fast ones must equal."""

import torch
from torch import Tensor
from torch.nn import functional as F

from .protocol import Activation, Gating, Norm, Rotary

_ACTIVATE = {
    Activation.SILU: F.silu,
    Activation.GELU_TANH: lambda x: F.gelu(x, approximate="tanh"),
    Activation.GELU: F.gelu,
    Activation.SIGMOID: torch.sigmoid,
}


def normed(x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor:
    """x: [.., C]. Returns the same shape, and x's dtype or `dtype`; sums are in float32. Nothing is rounded on the way
    from one dtype to another."""
    dtype = dtype or x.dtype
    wide = x.float()
    if norm.is_centered:
        wide = wide - wide.mean(-1, keepdim=True)
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
    if norm.rounds_first and dtype == x.dtype:
        wide = wide.to(dtype)
    return (wide * norm.scale).to(dtype)


def add_norm(
    x: Tensor, added: Tensor, after: Norm | None = None, before: Norm | None = None, added_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    """x + added_scale * after(added), and `before` of that, each [.., C]. A norm that is None changes nothing.

    The sum is of x's dtype, which may be float32 where `added`, and what comes of `before`, are of 16 bits.
    """
    more = added.to(x.dtype) if after is None else normed(added, after, x.dtype)
    total = x + more * added_scale
    return total, total if before is None else normed(total, before, added.dtype)


def activate(x: Tensor, activation: Activation) -> Tensor:
    """Returns x's shape and dtype."""
    return _ACTIVATE[activation](x.float()).to(x.dtype)


def gate(gate_up: Tensor, gating: Gating) -> Tensor:
    """gate_up: [.., 2C], gates and others. Returns [.., C]. Each step is rounded, as transformers does it."""
    gates, others = (gate_up[..., ::2], gate_up[..., 1::2]) if gating.by_turns else gate_up.chunk(2, dim=-1)
    others = others.clamp(-gating.limit, gating.limit) + gating.added
    if not gating.is_cut_after:
        gates = gates.clamp(max=gating.limit)
    is_steep = gating.steepness != 1.0
    gates = (
        gates * activate(gates * gating.steepness, Activation.SIGMOID)
        if is_steep
        else activate(gates, gating.activation)
    )
    if gating.is_cut_after:
        gates = gates.clamp(max=gating.limit)
    return gates * others


def prepare_heads(
    qkv_TC: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    norms: tuple[Norm | None, Norm | None],
    cos_TR: Tensor | None,
    sin_TR: Tensor | None,
    rotary: Rotary,
    rotary_dim: int,
    query_factor_T: Tensor | None = None,
) -> None:
    """Norm and rotate the queries and keys of packed tokens, in place. What follows them in a token stays.

    norms       of queries and of keys, not centered; over one head or over all of them, as their scale is wide
    cos, sin    of as many numbers as are rotated, or of half as many where both halves have the same
    rotary_dim  the first of a head's numbers, which are rotated
    query_factor_T  float32: what all queries of a token are multiplied by in the end
    """
    for first, count, norm in ((0, heads, norms[0]), (heads, kv_heads, norms[1])):
        part = qkv_TC[:, first * head_dim : (first + count) * head_dim]
        if norm is not None:
            part.copy_(normed(part.unflatten(-1, (-1, len(norm.scale))), norm).flatten(-2))
        if rotary is not Rotary.NONE:
            assert cos_TR is not None and sin_TR is not None, "rotary positions need angles"
            part.copy_(_rotated(part.unflatten(-1, (count, head_dim)), cos_TR, sin_TR, rotary, rotary_dim).flatten(-2))
    if query_factor_T is not None:
        queries_TC = qkv_TC[:, : heads * head_dim]
        queries_TC.copy_(queries_TC.float() * query_factor_T.unsqueeze(1))


def _rotated(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor, rotary: Rotary, rotary_dim: int) -> Tensor:
    x_THR = x_THD[..., :rotary_dim].float()
    if cos_TR.shape[-1] < rotary_dim:
        cos_TR, sin_TR = cos_TR.repeat(1, 2), sin_TR.repeat(1, 2)
    if rotary is Rotary.HALVES:
        low, high = x_THR.chunk(2, dim=-1)
        crossed = torch.cat((-high, low), dim=-1)
    else:
        crossed = torch.stack((-x_THR[..., 1::2], x_THR[..., ::2]), dim=-1).flatten(-2)
    rotated = x_THR * cos_TR.unsqueeze(1) + crossed * sin_TR.unsqueeze(1)
    return torch.cat((rotated.to(x_THD.dtype), x_THD[..., rotary_dim:]), dim=-1)
