"""What a state mixer does around its recurrence on a GPU, one launch each. Arguments and results as in `reference.py`,
but that queries and keys of Mamba-2 stay as they are."""

import functools
from typing import Any

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two, row_warps
from .protocol import DeltaSizes, Function, GatedNorm, Mamba2Sizes, Order

BLOCK = 1024
"""Numbers of a program where rows may be cut."""


def is_available() -> bool:
    return gpu.missing() is None


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # here and not above: triton may be missing

    return triton_kernels


def delta_inputs(
    qkv_TC: Tensor, a_TD: Tensor, b_TH: Tensor, A_D: Tensor, bias_D: Tensor, sizes: DeltaSizes
) -> tuple[Tensor, ...]:
    key_heads, keys, heads, values, least = sizes
    qkv_TC, a_TD, b_TH = dense(qkv_TC), dense(a_TD), dense(b_TH)
    tokens, decays = a_TD.shape
    q_TGK, k_TGK = (_new(qkv_TC, tokens, key_heads, keys) for _ in range(2))
    v_THV, g_TD = _new(qkv_TC, tokens, heads, values), _new(qkv_TC, tokens, decays)
    beta_TH = _new(qkv_TC, tokens, heads)
    if tokens:
        _kernels().delta_inputs[tokens, 2 * key_heads + heads](
            qkv_TC, a_TD, b_TH, A_D, bias_D, q_TGK, k_TGK, v_THV, g_TD, beta_TH,
            qkv_TC.stride(0), a_TD.stride(0), b_TH.stride(0), keys**-0.5, least,
            KEY_HEADS=key_heads, KEYS=keys, KEYS_PADDED=power_of_two(keys),
            HEADS=heads, VALUES=values, VALUES_PADDED=power_of_two(values),
            DECAYS=decays // heads, DECAYS_PADDED=power_of_two(decays // heads), HAS_LEAST=least != 0.0, num_warps=1,
        )  # fmt: skip
    return q_TGK, k_TGK, v_THV, g_TD, beta_TH


def mamba2_inputs(xBC_TC: Tensor, dt_TH: Tensor, A_H: Tensor, bias_H: Tensor, sizes: Mamba2Sizes) -> tuple[Tensor, ...]:
    inner = sizes.heads * sizes.values
    xBC_TC, dt_TH = dense(xBC_TC), dense(dt_TH)
    tokens = len(xBC_TC)
    v_THV, g_TH = _new(xBC_TC, tokens, sizes.heads, sizes.values), _new(xBC_TC, tokens, sizes.heads)
    if tokens:
        _kernels().mamba2_inputs[tokens, -(-inner // BLOCK)](
            xBC_TC, dt_TH, A_H, bias_H, v_THV, g_TH, xBC_TC.stride(0), dt_TH.stride(0), *sizes.limits,
            INNER=inner, VALUES=sizes.values, BLOCK=BLOCK,
        )  # fmt: skip
    # Kernels of a GPU read half the bytes where these are of bfloat16, and nothing is rounded.
    k_TGK, q_TGK = xBC_TC[:, inner:].unflatten(-1, (2, sizes.groups, -1)).unbind(1)
    return q_TGK, k_TGK, v_THV, g_TH


def lru_inputs(
    x_TC: Tensor, input_TC: Tensor, forget_TC: Tensor, rate_C: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    x_TC, input_TC, forget_TC = dense(x_TC), dense(input_TC), dense(forget_TC)
    tokens, channels = x_TC.shape
    out_TC, g_TC = _new(x_TC, tokens, channels), _new(x_TC, tokens, channels)
    if tokens:
        _kernels().lru_inputs[tokens, -(-channels // BLOCK)](
            x_TC, input_TC, forget_TC, rate_C, positions_T.contiguous(), out_TC, g_TC,
            *(x.stride(0) for x in (x_TC, input_TC, forget_TC)), CHANNELS=channels, BLOCK=BLOCK,
        )  # fmt: skip
    return out_TC, g_TC


def mapped(x_TC: Tensor, function: Function) -> Tensor:
    return _mapped(x_TC, function, None)


def times_mapped(x_TC: Tensor, function: Function, factor_TC: Tensor) -> Tensor:
    return _mapped(x_TC, function, factor_TC)


def _mapped(x_TC: Tensor, function: Function, factor_TC: Tensor | None) -> Tensor:
    x_TC, width = dense(x_TC), x_TC.shape[-1]
    factor = x_TC if factor_TC is None else dense(factor_TC)
    out = _new(x_TC, len(x_TC), width) if factor_TC is None else x_TC.new_empty(len(x_TC), width)
    if len(x_TC):
        _kernels().mapped[len(x_TC), -(-width // BLOCK)](
            x_TC, factor, out, x_TC.stride(0), factor.stride(0),
            WIDTH=width, FUNCTION=int(function), HAS_FACTOR=factor_TC is not None, BLOCK=BLOCK,
        )  # fmt: skip
    return out


def gated_norm(y_TC: Tensor, gate_TC: Tensor, norm: GatedNorm, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
    y_TC, gate_TC, channels = dense(y_TC), dense(gate_TC), y_TC.shape[-1]
    out = torch.empty(y_TC.shape, dtype=gate_TC.dtype, device=y_TC.device)
    if not len(y_TC):
        return out
    D_C, x_TC = (y_TC, y_TC) if skip is None else (skip[0], dense(skip[1]))
    width = BLOCK if norm.order is Order.NO_NORM else norm.width
    block = power_of_two(width)
    weight = y_TC if norm.weight is None else norm.weight
    _kernels().gated_norm[len(y_TC), -(-channels // width)](
        y_TC, gate_TC, weight, D_C, x_TC, out, y_TC.stride(0), gate_TC.stride(0), x_TC.stride(0), norm.eps,
        CHANNELS=channels, WIDTH=width, BLOCK=block, ORDER=int(norm.order), HAS_SKIP=skip is not None,
        ROUNDS=norm.rounds, GATE=int(norm.gate), num_warps=row_warps(block),
    )  # fmt: skip
    return out


def _new(like: Tensor, *shape: int) -> Tensor:
    return torch.empty(shape, dtype=torch.float32, device=like.device)
