"""Attention in C++ on a CPU: single queries straight from their pages, prompts in tiles of matrix products.

Both sum in one order (`cpu_attention.cpp`), so a query's result has the same bits in any company and however a prompt
was cut.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads
from ..toolchain import cpp
from ..transfer import Transfer
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams


class _Attention(ctypes.Structure):
    _fields_ = [
        *(
            (name, c_void_p)
            for name in ("query", "pages", "out", "sinks", "slopes", "block_table", "queries", "kv_len")
        ),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride", "value_offset")),
        *((name, c_int32) for name in ("rows", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("block_tokens", "table_width", "window", "chunk", "is_causal")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("kind", c_int32),
    ]


class _Write(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("key", "value", "pages", "page", "offset")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride")),
        *((name, c_int32) for name in ("tokens", "kv_heads", "key_bytes", "value_bytes", "itemsize")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class _Plan:
    """The batch as C++ reads it."""

    block_table: np.ndarray  # [R,P] int32
    queries: np.ndarray  # [R] int32
    kv_len: np.ndarray  # [R] int32
    addresses: tuple[int, int, int]  # of the three: numpy takes longer to tell one than to make a view
    batch: GroupBatch


class NativeBackend:
    """The default on a CPU with a C++ compiler."""

    name: ClassVar[str] = "native"
    by_name_only: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(cpp.KINDS),
        slopes=True,
    )

    @classmethod
    def lacks(cls) -> str | None:
        found = cpp.library("paged_attention/cpu_attention")
        return f"could not be compiled: {found}" if isinstance(found, str) else None

    def __init__(self) -> None:
        self._library: Any = cpp.library("paged_attention/cpu_attention")

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        table, queries, kv_len = (
            np.ascontiguousarray(array, dtype=np.int32)
            for array in (batch.block_table, batch.query_lens, batch.kv_lens)
        )
        addresses = table.ctypes.data, queries.ctypes.data, kv_len.ctypes.data
        plan = _Plan(table, queries, kv_len, addresses, batch)
        return GroupMeta(torch.from_numpy(page), torch.from_numpy(offset), plan)

    def frame(self, batch: GroupBatch, device: torch.device) -> None:
        return None  # on a CPU nothing is gained

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        raise AssertionError("there are no frames")

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        raise AssertionError("there are no frames")

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        k_TKD, v_TKD = dense_heads(k_TKD), dense_heads(v_TKD)
        size = kv_view.itemsize
        self._library.intarsia_write(
            ctypes.byref(
                _Write(
                    *(tensor.data_ptr() for tensor in (k_TKD, v_TKD, kv_view, meta.token_page, meta.token_offset)),
                    *k_TKD.stride()[:2],
                    *v_TKD.stride()[:2],
                    *kv_view.stride()[:3],
                    len(meta.token_page),
                    k_TKD.shape[1],
                    k_TKD.shape[2] * size,
                    v_TKD.shape[2] * size,
                    size,
                )
            )
        )

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        plan: _Plan = meta.plan
        batch, q_THD = plan.batch, dense_heads(q_THD)
        assert out_THD.is_contiguous(), "the kernel writes rows side by side"
        assert params.scale > 0, "the kernel finds the maximum before it scales"
        _, heads, key_dim = q_THD.shape
        rows, table_width = batch.block_table.shape
        of_heads = [None if each is None else each.float().contiguous() for each in (params.sinks, params.slopes)]
        self._library.intarsia_attend(
            ctypes.byref(
                _Attention(
                    *(tensor.data_ptr() for tensor in (q_THD, kv_view, out_THD)),
                    *(None if each is None else each.data_ptr() for each in of_heads),
                    *plan.addresses,
                    *q_THD.stride()[:2],
                    *kv_view.stride()[:3],
                    0 if params.latent_values is not None else key_dim,
                    rows,
                    heads,
                    kv_view.shape[2],
                    key_dim,
                    out_THD.shape[2],
                    batch.block_tokens,
                    table_width,
                    batch.window_tokens or 0,
                    batch.chunk_tokens or 0,
                    batch.is_causal,
                    params.scale,
                    params.softcap or 0.0,
                    cpp.KINDS[q_THD.dtype],
                )
            )
        )
