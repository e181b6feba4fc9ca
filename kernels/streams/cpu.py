"""In C++, one call for all tokens."""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..toolchain import cpp
from .protocol import Mixing, check


class _Streams(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("streams", "product", "base", "scale", "collapsed", "after", "mixed")),
        ("tokens", c_int64),
        *((name, c_int32) for name in ("count", "channels", "rounds", "kind")),
        *((name, c_float) for name in ("norm_eps", "eps")),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    return cpp.library("streams/cpu_streams")


def collapse(streams_TNC: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `reference.collapse`. Each sum is in one order, that the widths alone give."""
    check(streams_TNC, mixing)
    streams_TNC = streams_TNC.contiguous()
    tokens, count, channels = streams_TNC.shape
    collapsed_TC = streams_TNC.new_empty((tokens, channels))
    after_TN = mixed_TNN = None
    if mixing.parts > 1:
        after_TN = streams_TNC.new_empty((tokens, count), dtype=torch.float32)
        mixed_TNN = streams_TNC.new_empty((tokens, count, count), dtype=torch.float32)
    arguments = _Streams(
        *(x.data_ptr() for x in (streams_TNC, mixing.product_MD, mixing.base_M, mixing.scale, collapsed_TC)),
        *(None if x is None else x.data_ptr() for x in (after_TN, mixed_TNN)),
        *(tokens, count, channels, mixing.rounds, cpp.KINDS[streams_TNC.dtype], mixing.norm_eps, mixing.eps),
    )
    _library().intarsia_collapse_streams(ctypes.byref(arguments))
    return collapsed_TC, after_TN, mixed_TNN
