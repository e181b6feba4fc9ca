"""The choice in C++ on a CPU: scores have one order of sums, so a query chooses the same in any company."""

import ctypes
import functools
from ctypes import c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..toolchain import cpp
from .protocol import Asked, ChoiceBatch


class _Choice(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "keys", "weights", "table", "positions", "chosen")),
        *((name, c_int64) for name in ("page_stride", "token_stride")),
        *((name, c_int32) for name in ("queries", "rows", "heads", "size", "table_width", "block_tokens")),
        *((name, c_int32) for name in ("most", "kind")),
    ]


def is_available() -> bool:
    return not isinstance(_library(), str)


@functools.cache
def _library() -> Any:
    return cpp.library("token_choice/cpu_choice")


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Arguments and result as in `reference.py`."""
    q_NIE, weights_NI = asked.q_NIE.contiguous(), asked.weights_NI.contiguous()
    queries, heads, size = q_NIE.shape
    assert keys_PBE.stride(2) == 1 and keys_PBE.dtype == q_NIE.dtype, "keys lie as the kernel reads them"
    chosen_NK = torch.empty(queries, most, dtype=torch.int64)
    read = (q_NIE, keys_PBE, weights_NI, batch.table_RP, batch.positions_N, chosen_NK)
    _library().intarsia_choose(
        ctypes.byref(
            _Choice(
                *(tensor.data_ptr() for tensor in read),
                *keys_PBE.stride()[:2],
                queries,
                len(batch.table_RP),
                heads,
                size,
                batch.table_RP.shape[1],
                batch.block_tokens,
                most,
                cpp.KINDS[q_NIE.dtype],
            )
        )
    )
    return chosen_NK
