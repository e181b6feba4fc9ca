"""Token-wise operations in C++, one call each. Arguments and results as in `reference.py`.

What `.._call` returns can be put into a `CallList`: its addresses and its number of rows are to be set before it runs.
"""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..toolchain import cpp
from ..toolchain.calls import Call
from .protocol import Activation, Gating, Norm, Rotary


class _Norm(ctypes.Structure):
    _fields_ = [("scale", c_void_p), ("eps", c_float), ("rounds_first", c_int32), ("is_centered", c_int32)]


_NO_NORM = _Norm()


class _AddNorm(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("x", "added", "sum", "out")),
        ("rows", c_int64),
        *((name, _Norm) for name in ("after", "before")),
        ("added_scale", c_float),
        *((name, c_int32) for name in ("width", "kind", "x_kind")),
    ]


class _Gating(ctypes.Structure):
    _fields_ = [
        *((name, c_float) for name in ("limit", "steepness", "added")),
        *((name, c_int32) for name in ("is_cut_after", "by_turns", "is_plain")),
    ]


class _Gate(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("gate_up", "out")),
        ("rows", c_int64),
        ("gating", _Gating),
        *((name, c_int32) for name in ("width", "activation", "kind")),
    ]


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "query_scale", "key_scale", "cos", "sin", "query_factor")),
        *((name, c_int64) for name in ("rows", "token_stride")),
        *((name, c_int32) for name in ("heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("query_norm_width", "key_norm_width")),
        *((name, c_int32) for name in ("rotary_dim", "angles", "in_pairs", "rounds_first")),
        ("eps", c_float),
        *((name, c_int32) for name in ("kind", "angle_kind")),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    library: Any = cpp.library("tokenwise/cpu_tokenwise")
    if not isinstance(library, str):
        library.intarsia_activate.argtypes = [c_void_p] * 2 + [c_int64, c_int32, c_int32]
    return library


def _run(call: Call) -> None:
    call.function(ctypes.byref(call.arguments))


# -- norms and sums --------------------------------------------------------------------------------------------------


def normed(x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x, dtype=dtype or x.dtype)
    # Not by `add_norm_call`: norms of layers that are in no list come one by one, dozens in a step.
    width, kinds = x.shape[-1], (cpp.KINDS[out.dtype], cpp.KINDS[x.dtype])
    tensors = x.data_ptr(), None, None, out.data_ptr()
    arguments = _AddNorm(*tensors, x.numel() // width, _NO_NORM, _norm(norm), 1.0, width, *kinds)
    _library().intarsia_add_norm(ctypes.byref(arguments))
    return out


def add_norm(
    x: Tensor, added: Tensor, after: Norm | None = None, before: Norm | None = None, added_scale: float = 1.0
) -> tuple[Tensor, Tensor]:
    x, added = x.contiguous(), added.contiguous()
    total = torch.empty_like(x)
    out = total if before is None else torch.empty_like(added)
    call = add_norm_call(x.shape[-1], added.dtype, after, before, added_scale, x.dtype)
    arguments = call.arguments
    arguments.x, arguments.added, arguments.sum = x.data_ptr(), added.data_ptr(), total.data_ptr()
    arguments.out = None if before is None else out.data_ptr()
    arguments.rows = x.numel() // x.shape[-1]
    _run(call)
    return total, out


def add_norm_call(
    width: int,
    dtype: torch.dtype,
    after: Norm | None = None,
    before: Norm | None = None,
    added_scale: float = 1.0,
    x_dtype: torch.dtype | None = None,
) -> Call:
    """To be set: x, added, sum, out, rows. The norms' scales are to be kept. x_dtype: of x and sum, where it is float32
    and the others are not"""
    norms = _norm(after), _norm(before)
    kinds = cpp.KINDS[dtype], cpp.KINDS[x_dtype or dtype]
    arguments = _AddNorm(None, None, None, None, 0, *norms, added_scale, width, *kinds)
    return Call(_library().intarsia_add_norm, arguments)


def _norm(norm: Norm | None) -> _Norm:
    return _NO_NORM if norm is None else _Norm(norm.scale.data_ptr(), *norm[1:])


# -- activations -----------------------------------------------------------------------------------------------------


def activate(x: Tensor, activation: Activation) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _library().intarsia_activate(x.data_ptr(), out.data_ptr(), x.numel(), activation, cpp.KINDS[x.dtype])
    return out


def gate(gate_up: Tensor, gating: Gating) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    call = gate_call(width, out.dtype, gating)
    call.arguments.gate_up, call.arguments.out = gate_up.data_ptr(), out.data_ptr()
    call.arguments.rows = out.numel() // width
    _run(call)
    return out


def gate_call(width: int, dtype: torch.dtype, gating: Gating) -> Call:
    """To be set: gate_up, out, rows."""
    numbers = gating.limit, gating.steepness, gating.added
    how = _Gating(*numbers, gating.is_cut_after, gating.by_turns, gating.is_plain)
    return Call(_library().intarsia_gate, _Gate(None, None, 0, how, width, gating.activation, cpp.KINDS[dtype]))


# -- queries and keys ------------------------------------------------------------------------------------------------


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
    assert qkv_TC.stride(1) == 1, "the numbers of a token lie side by side"
    call = prepare_heads_call(heads, kv_heads, head_dim, norms, rotary, qkv_TC.dtype)
    arguments = call.arguments
    arguments.tokens, arguments.rows, arguments.token_stride = qkv_TC.data_ptr(), len(qkv_TC), qkv_TC.stride(0)
    # Angles are read only where heads are rotated.
    if rotary:
        assert cos_TR is not None and sin_TR is not None, "rotary positions need angles"
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
        arguments.angle_kind = angle_kind(cos_TR, qkv_TC.dtype)
        arguments.cos, arguments.sin = cos_TR.data_ptr(), sin_TR.data_ptr()
        arguments.rotary_dim, arguments.angles = rotary_dim, cos_TR.shape[-1]
    if query_factor_T is not None:
        arguments.query_factor = query_factor_T.data_ptr()
    _run(call)


def angle_kind(cos_TR: Tensor, dtype: torch.dtype) -> int:
    assert cos_TR.dtype in (dtype, torch.float32), "angles are of the tokens' dtype or float32"
    return cpp.KINDS[cos_TR.dtype]


def prepare_heads_call(
    heads: int,
    kv_heads: int,
    head_dim: int,
    norms: tuple[Norm | None, Norm | None],
    rotary: Rotary,
    dtype: torch.dtype,
) -> Call:
    """To be set: tokens, rows, token_stride; cos, sin, rotary_dim, angles, angle_kind where heads are rotated; and
    query_factor where queries are multiplied by theirs."""
    query_norm, key_norm = norms
    some_norm = query_norm or key_norm
    arguments = _Heads(
        query_scale=query_norm.scale.data_ptr() if query_norm else None,
        key_scale=key_norm.scale.data_ptr() if key_norm else None,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        query_norm_width=len(query_norm.scale) if query_norm else 0,
        key_norm_width=len(key_norm.scale) if key_norm else 0,
        in_pairs=rotary is Rotary.PAIRS,
        rounds_first=some_norm.rounds_first if some_norm else False,
        eps=some_norm.eps if some_norm else 0.0,
        kind=cpp.KINDS[dtype],
    )
    return Call(_library().intarsia_prepare_heads, arguments)
