"""Token-wise operations in C++, one call each. Arguments and results as in `reference.py`."""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..toolchain import cpp
from .protocol import Activation, Norm, Rotary


class _Heads(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("tokens", "query_scale", "key_scale", "cos", "sin")),
        ("token_stride", c_int64),
        *((name, c_int32) for name in ("count", "heads", "kv_heads", "head_dim")),
        *((name, c_int32) for name in ("query_norm_width", "key_norm_width")),
        *((name, c_int32) for name in ("rotary_dim", "angles", "in_pairs", "rounds_first")),
        ("eps", c_float),
        ("kind", c_int32),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    library: Any = cpp.library("tokenwise/cpu_tokenwise")
    if not isinstance(library, str):
        library.intarsia_rms_norm.argtypes = [c_void_p] * 3 + [c_int64, c_int32, c_float, c_int32, c_int32]
        library.intarsia_activate.argtypes = [c_void_p] * 2 + [c_int64, c_int32, c_int32]
        library.intarsia_gate.argtypes = [c_void_p] * 2 + [c_int64, c_int32, c_int32, c_int32]
    return library


def rms_norm(x: Tensor, norm: Norm) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    width = x.shape[-1]
    _library().intarsia_rms_norm(
        x.data_ptr(),
        norm.scale.data_ptr(),
        out.data_ptr(),
        x.numel() // width,
        width,
        norm.eps,
        norm.rounds_first,
        cpp.KINDS[x.dtype],
    )
    return out


def activate(x: Tensor, activation: Activation) -> Tensor:
    x = x.contiguous()
    out = torch.empty_like(x)
    _library().intarsia_activate(x.data_ptr(), out.data_ptr(), x.numel(), activation, cpp.KINDS[x.dtype])
    return out


def gate(gate_up: Tensor, activation: Activation) -> Tensor:
    gate_up = gate_up.contiguous()
    width = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], width))
    _library().intarsia_gate(
        gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width, activation, cpp.KINDS[out.dtype]
    )
    return out


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
) -> None:
    assert qkv_TC.stride(1) == 1, "the numbers of a token lie side by side"
    query_norm, key_norm = norms
    # Angles are read only where heads are rotated.
    if rotary:
        assert cos_TR is not None and sin_TR is not None, "rotary positions need angles"
        assert cos_TR.dtype == sin_TR.dtype == qkv_TC.dtype, "angles are read as numbers of the tokens' dtype"
        cos_TR, sin_TR = cos_TR.contiguous(), sin_TR.contiguous()
    some_norm = query_norm or key_norm
    _library().intarsia_prepare_heads(
        ctypes.byref(
            _Heads(
                qkv_TC.data_ptr(),
                query_norm.scale.data_ptr() if query_norm else None,
                key_norm.scale.data_ptr() if key_norm else None,
                cos_TR.data_ptr() if rotary and cos_TR is not None else None,
                sin_TR.data_ptr() if rotary and sin_TR is not None else None,
                qkv_TC.stride(0),
                len(qkv_TC),
                heads,
                kv_heads,
                head_dim,
                len(query_norm.scale) if query_norm else 0,
                len(key_norm.scale) if key_norm else 0,
                rotary_dim,
                cos_TR.shape[-1] if cos_TR is not None else 0,
                rotary is Rotary.PAIRS,
                some_norm.rounds_first if some_norm else False,
                some_norm.eps if some_norm else 0.0,
                cpp.KINDS[qkv_TC.dtype],
            )
        )
    )
