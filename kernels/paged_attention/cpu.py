"""Attention in C++ on a CPU: single queries straight from their pages, prompts in tiles of matrix products.

Both sum in one order (`cpu_attention.cpp`), so a query's result has the same bits in any company and however a prompt
was cut.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads
from ..toolchain import cpp
from ..toolchain.calls import Call
from ..transfer import Transfer
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams


class _Step(ctypes.Structure):
    """What all layers of one mask have in common."""

    _fields_ = [
        *((name, c_void_p) for name in ("page", "offset", "block_table", "queries", "kv_len")),
        *((name, c_int32) for name in ("tokens", "rows", "table_width", "block_tokens")),
        *((name, c_int32) for name in ("window", "chunk", "is_causal")),
    ]


class _Attend(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("step", "query", "pages", "out", "sinks", "slopes")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride", "value_offset")),
        *((name, c_int32) for name in ("heads", "kv_heads", "key_dim", "value_dim")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("kind", c_int32),
    ]


class _Write(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("step", "key", "value", "pages")),
        *((name, c_int64) for name in ("key_token_stride", "key_head_stride")),
        *((name, c_int64) for name in ("value_token_stride", "value_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride")),
        *((name, c_int32) for name in ("kv_heads", "key_bytes", "value_bytes", "itemsize")),
    ]


class _Plan:
    """The batch as C++ reads it."""

    def __init__(self, batch: GroupBatch, page: np.ndarray, offset: np.ndarray):
        table, queries, kv_len = (
            np.ascontiguousarray(array, dtype=np.int32)
            for array in (batch.block_table, batch.query_lens, batch.kv_lens)
        )
        arrays = page, offset, table, queries, kv_len
        self._arrays = arrays  # which C++ reads
        self._step = _Step(
            *(array.ctypes.data for array in arrays),
            len(page),
            *table.shape,
            batch.block_tokens,
            batch.window_tokens or 0,
            batch.chunk_tokens or 0,
            batch.is_causal,
        )
        self.address = ctypes.addressof(self._step)


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
        return GroupMeta(torch.from_numpy(page), torch.from_numpy(offset), _Plan(batch, page, offset))

    def frame(self, batch: GroupBatch, device: torch.device) -> None:
        return None  # on a CPU nothing is gained

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        raise AssertionError("there are no frames")

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        raise AssertionError("there are no frames")

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        places = meta.token_page.data_ptr(), meta.token_offset.data_ptr()  # an encoder's have no plan
        step = _Step(*places, None, None, None, len(meta.token_page))
        _run(self.write_call(kv_view, dense_heads(k_TKD), dense_heads(v_TKD)), ctypes.addressof(step))

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        _run(self.attend_call(dense_heads(q_THD), kv_view, params, out_THD), self.step_address(meta))

    # -- as calls of a `CallList`, whose tensors may have room for more tokens than a step has -------------------------

    def write_call(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Call:
        """To be set: step, to `step_address`. Numbers of a head lie side by side."""
        size = kv_view.itemsize
        arguments = _Write(
            None,
            *(tensor.data_ptr() for tensor in (k_TKD, v_TKD, kv_view)),
            *k_TKD.stride()[:2],
            *v_TKD.stride()[:2],
            *kv_view.stride()[:3],
            k_TKD.shape[1],
            k_TKD.shape[2] * size,
            v_TKD.shape[2] * size,
            size,
        )
        return Call(self._library.intarsia_write, arguments)

    def attend_call(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, out_THD: Tensor) -> Call:
        """To be set: step, to `step_address`. Numbers of a head lie side by side."""
        assert out_THD.is_contiguous(), "the kernel writes rows side by side"
        assert params.scale > 0, "the kernel finds the maximum before it scales"
        _, heads, key_dim = q_THD.shape
        of_heads = [None if each is None else each.float().contiguous() for each in (params.sinks, params.slopes)]
        arguments = _Attend(
            None,
            *(tensor.data_ptr() for tensor in (q_THD, kv_view, out_THD)),
            *(None if each is None else each.data_ptr() for each in of_heads),
            *q_THD.stride()[:2],
            *kv_view.stride()[:3],
            0 if params.latent_values is not None else key_dim,
            heads,
            kv_view.shape[2],
            key_dim,
            out_THD.shape[2],
            params.scale,
            params.softcap or 0.0,
            cpp.KINDS[q_THD.dtype],
        )
        arguments.of_heads = of_heads  # which C++ reads
        return Call(self._library.intarsia_attend, arguments)

    def step_address(self, meta: GroupMeta) -> int:
        """Valid as long as `meta` is there."""
        return meta.plan.address


def _run(call: Call, step: int) -> None:
    call.arguments.step = step
    call.function(ctypes.byref(call.arguments))
