"""What a state mixer does around its recurrence in C++, one call each. Arguments and results as in `reference.py`."""

import ctypes
import functools
import math
from collections.abc import Iterable
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import cpp
from .protocol import DeltaSizes, Function, GatedNorm, Mamba2Sizes


class _DeltaInputs(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("qkv", "a", "b", "A", "bias", "q", "k", "v", "g", "beta")),
        *((name, c_int64) for name in ("qkv_token", "a_token", "b_token", "tokens")),
        *((name, c_int32) for name in ("key_heads", "keys", "heads", "values", "decays")),
        *((name, c_float) for name in ("least", "query_scale")),
        ("kind", c_int32),
    ]


class _Mamba2Inputs(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("xBC", "dt", "A", "bias", "q", "k", "v", "g")),
        *((name, c_int64) for name in ("xBC_token", "dt_token", "tokens")),
        *((name, c_int32) for name in ("heads", "values", "groups", "keys")),
        *((name, c_float) for name in ("shortest", "longest")),
        ("kind", c_int32),
    ]


class _LruInputs(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "input", "forget", "rate", "positions", "out", "g")),
        *((name, c_int64) for name in ("x_token", "input_token", "forget_token", "tokens")),
        *((name, c_int32) for name in ("channels", "kind")),
    ]


class _Map(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "factor", "out")),
        *((name, c_int64) for name in ("x_token", "factor_token", "tokens")),
        *((name, c_int32) for name in ("channels", "function", "kind")),
    ]


class _GatedNorm(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("y", "gate", "skip", "weight", "D", "out")),
        *((name, c_int64) for name in ("gate_token", "skip_token", "tokens")),
        *((name, c_int32) for name in ("channels", "width", "order", "rounds", "gate_function")),
        ("eps", c_float),
        ("kind", c_int32),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    return cpp.library("mixers/cpu_mixers")


def delta_inputs(
    qkv_TC: Tensor, a_TD: Tensor, b_TH: Tensor, A_D: Tensor, bias_D: Tensor, sizes: DeltaSizes
) -> tuple[Tensor, ...]:
    key_heads, keys, heads, values, least = sizes
    tokens, decays = a_TD.shape
    key = tokens, key_heads, keys
    made = _floats(key, key, (tokens, heads, values), (tokens, decays), (tokens, heads))
    qkv_TC, a_TD, b_TH = (dense(x) for x in (qkv_TC, a_TD, b_TH))
    _library().intarsia_delta_inputs(
        ctypes.byref(
            _DeltaInputs(
                *_pointers(qkv_TC, a_TD, b_TH, A_D, bias_D, *made),
                *(x.stride(0) for x in (qkv_TC, a_TD, b_TH)),
                tokens,
                *sizes[:4],
                decays,
                least,
                keys**-0.5,
                cpp.KINDS[qkv_TC.dtype],
            )
        )
    )
    return made


def mamba2_inputs(xBC_TC: Tensor, dt_TH: Tensor, A_H: Tensor, bias_H: Tensor, sizes: Mamba2Sizes) -> tuple[Tensor, ...]:
    heads, values, groups, keys, limits = sizes
    tokens = len(xBC_TC)
    made = _floats((tokens, groups, keys), (tokens, groups, keys), (tokens, heads, values), (tokens, heads))
    if dt_TH.dtype != xBC_TC.dtype:  # one of them is float32
        xBC_TC, dt_TH = xBC_TC.float(), dt_TH.float()
    xBC_TC, dt_TH = dense(xBC_TC), dense(dt_TH)
    _library().intarsia_mamba2_inputs(
        ctypes.byref(
            _Mamba2Inputs(
                *_pointers(xBC_TC, dt_TH, A_H, bias_H, *made),
                xBC_TC.stride(0),
                dt_TH.stride(0),
                tokens,
                *sizes[:4],
                *limits,
                cpp.KINDS[xBC_TC.dtype],
            )
        )
    )
    return made


def lru_inputs(
    x_TC: Tensor, input_TC: Tensor, forget_TC: Tensor, rate_C: Tensor, positions_T: Tensor
) -> tuple[Tensor, Tensor]:
    x_TC, input_TC, forget_TC = dense(x_TC), dense(input_TC), dense(forget_TC)
    out_TC, g_TC = _floats(x_TC.shape, x_TC.shape)
    positions_T = positions_T.to(torch.int64).contiguous()
    _library().intarsia_lru_inputs(
        ctypes.byref(
            _LruInputs(
                *_pointers(x_TC, input_TC, forget_TC, rate_C, positions_T, out_TC, g_TC),
                *(x.stride(0) for x in (x_TC, input_TC, forget_TC)),
                *x_TC.shape,
                cpp.KINDS[x_TC.dtype],
            )
        )
    )
    return out_TC, g_TC


def mapped(x_TC: Tensor, function: Function) -> Tensor:
    out = torch.empty(x_TC.shape)
    _map(x_TC, function, None, out)
    return out


def times_mapped(x_TC: Tensor, function: Function, factor_TC: Tensor) -> Tensor:
    out = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    _map(x_TC, function, factor_TC, out)
    return out


def _map(x_TC: Tensor, function: Function, factor_TC: Tensor | None, out: Tensor) -> None:
    x_TC = dense(x_TC)
    factor_TC = dense(factor_TC).to(x_TC.dtype) if factor_TC is not None else None
    _library().intarsia_map(
        ctypes.byref(
            _Map(
                x_TC.data_ptr(),
                factor_TC.data_ptr() if factor_TC is not None else None,
                out.data_ptr(),
                x_TC.stride(0),
                factor_TC.stride(0) if factor_TC is not None else 0,
                *x_TC.shape,
                function,
                cpp.KINDS[x_TC.dtype],
            )
        )
    )


def gated_norm(y_TC: Tensor, gate_TC: Tensor, norm: GatedNorm, skip: tuple[Tensor, Tensor] | None = None) -> Tensor:
    if skip is not None and skip[1].dtype != gate_TC.dtype:  # one of them is float32
        return gated_norm(y_TC, gate_TC.float(), norm, (skip[0], skip[1].float())).to(gate_TC.dtype)
    D_C, x_TC = skip if skip is not None else (None, None)
    y_TC, gate_TC = y_TC.contiguous(), dense(gate_TC)
    out = torch.empty(y_TC.shape, dtype=gate_TC.dtype)
    _library().intarsia_gated_norm(
        ctypes.byref(
            _GatedNorm(
                y_TC.data_ptr(),
                gate_TC.data_ptr(),
                x_TC.data_ptr() if x_TC is not None else None,
                norm.weight.data_ptr() if norm.weight is not None else None,
                D_C.data_ptr() if D_C is not None else None,
                out.data_ptr(),
                gate_TC.stride(0),
                x_TC.stride(0) if x_TC is not None else 0,
                *y_TC.shape,
                norm.width,
                norm.order,
                norm.rounds,
                norm.gate,
                norm.eps,
                cpp.KINDS[gate_TC.dtype],
            )
        )
    )
    return out


def _floats(*shapes: tuple[int, ...]) -> tuple[Tensor, ...]:
    """Tensors of these shapes, in one piece of memory."""
    sizes = [math.prod(shape) for shape in shapes]
    parts = torch.empty(sum(sizes)).split(sizes)
    return tuple(part.view(shape) for part, shape in zip(parts, shapes, strict=True))


def _pointers(*tensors: Tensor) -> Iterable[int]:
    return (tensor.data_ptr() for tensor in tensors)
