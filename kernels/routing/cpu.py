"""In C++, one call for all tokens."""

import ctypes
import functools
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..toolchain import cpp
from .protocol import Routing, check


class _Routing(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "bias", "expert_scale", "experts", "shares")),
        *((name, c_int64) for name in ("tokens", "row_stride")),
        *((name, c_int32) for name in ("count", "most", "scoring", "is_of_chosen", "rounds")),
        *((name, c_int32) for name in ("groups", "most_groups", "normalizes", "kind", "shares_kind")),
        *((name, c_float) for name in ("least", "scale")),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    return cpp.library("routing/cpu_routing")


def route(logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """As `Operations.route`. Each sum is in one order, that the number of experts alone gives."""
    check(logits_TE, routing)
    if logits_TE.stride(1) != 1:
        logits_TE = logits_TE.contiguous()
    tokens, count = logits_TE.shape
    shares_TK = torch.empty((tokens, routing.most), dtype=routing.dtype or logits_TE.dtype)
    experts_TK = torch.empty((tokens, routing.most), dtype=torch.int64)
    arguments = _Routing(
        logits_TE.data_ptr(),
        *(None if x is None else x.data_ptr() for x in (routing.bias_E, routing.scale_E)),
        *(experts_TK.data_ptr(), shares_TK.data_ptr(), tokens, logits_TE.stride(0)),
        *(count, routing.most, routing.scoring, routing.is_of_chosen, routing.rounds),
        *(routing.groups, routing.most_groups, routing.least is not None),
        *(cpp.KINDS[logits_TE.dtype], cpp.KINDS[shares_TK.dtype], routing.least or 0.0, routing.scale),
    )
    _library().intarsia_route(ctypes.byref(arguments))
    return shares_TK, experts_TK
