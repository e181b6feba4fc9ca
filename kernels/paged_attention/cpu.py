"""Attention in C++ on a CPU: single queries straight from their pages, prompts in tiles of matrix products.

Nothing is padded or masked but the ends of what a tile sees. Where the processor multiplies 16-bit matrices in hardware
(AMX), prompts in bfloat16 go the way of `TorchBackend`, which knows how to use it.
"""

import ctypes
from ctypes import c_float, c_int32, c_int64, c_void_p
from dataclasses import dataclass, field
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense_heads
from ..toolchain import cpp
from .capabilities import Capabilities
from .plain_torch import Part, TorchBackend
from .protocol import GroupBatch, GroupMeta, LayerParams

PIECE_TOKENS = 1024
"""A longer row is cut, so that few rows keep all threads busy."""

TILE_ROWS = 384
"""Queries times the heads that share their keys: what is summed for a tile should stay in a core's second cache."""


class _Attention(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "pages", "out", "sinks", "block_table", "token_of")),
        *((name, c_void_p) for name in ("piece_row", "piece_first", "piece_end", "row_pieces", "partial")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride", "value_offset")),
        *((name, c_int32) for name in ("rows", "pieces", "heads", "kv_heads", "key_dim", "value_dim")),
        *((name, c_int32) for name in ("block_tokens", "table_width")),
        *((name, c_float) for name in ("scale", "softcap")),
        ("kind", c_int32),
    ]


class _Prefill(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("query", "pages", "out", "sinks", "block_table")),
        *((name, c_void_p) for name in ("first_token", "queries", "kv_len", "tile_row", "tile_first")),
        *((name, c_int64) for name in ("query_token_stride", "query_head_stride")),
        *((name, c_int64) for name in ("page_stride", "page_token_stride", "page_head_stride", "value_offset")),
        *((name, c_int32) for name in ("tiles", "tile_queries", "heads", "kv_heads", "key_dim", "value_dim")),
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
class _Decode:
    """The rows with one query, cut into pieces. Arrays are named as in `cpu_decode.cpp`."""

    block_table: np.ndarray
    token_of: np.ndarray
    piece_row: np.ndarray
    piece_first: np.ndarray
    piece_end: np.ndarray
    row_pieces: np.ndarray
    block_tokens: int

    @property
    def is_cut(self) -> bool:
        return len(self.piece_row) > len(self.token_of)


class _Tiles(NamedTuple):
    row: np.ndarray
    first: np.ndarray  # of its queries


@dataclass(frozen=True, slots=True, eq=False)
class _Prompts:
    """The rows with several queries. Arrays are named as in `cpu_prefill.cpp`."""

    block_table: np.ndarray
    first_token: np.ndarray
    queries: np.ndarray
    kv_len: np.ndarray
    batch: GroupBatch
    tiles: dict[int, _Tiles] = field(default_factory=dict)  # by the most queries of a tile
    parts: list[Part] = field(default_factory=list)  # for the other way

    def tiles_of(self, tile_queries: int) -> _Tiles:
        """Those that see most come first, so that no thread is left alone with one of them."""
        if tile_queries not in self.tiles:
            counts = -(-self.queries // tile_queries)
            row = np.repeat(np.arange(len(counts)), counts)
            first = (np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)) * tile_queries
            order = np.argsort(-(self.kv_len - self.queries)[row] - first, kind="stable")
            self.tiles[tile_queries] = _Tiles(row[order].astype(np.int32), first[order].astype(np.int32))
        return self.tiles[tile_queries]


class NativeBackend(TorchBackend):
    """The default on a CPU with a C++ compiler."""

    name: ClassVar[str] = "native"
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu"}),
        dtypes=frozenset(cpp.KINDS),
    )

    @classmethod
    def lacks(cls) -> str | None:
        for name in ("paged_attention/cpu_decode", "paged_attention/cpu_prefill"):
            found = cpp.library(name)
            if isinstance(found, str):
                return f"could not be compiled: {found}"
        return None

    def __init__(self) -> None:
        super().__init__()
        self._library: Any = cpp.library("paged_attention/cpu_decode")
        self._prefill: Any = cpp.library("paged_attention/cpu_prefill")

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        return GroupMeta(torch.from_numpy(page), torch.from_numpy(offset), plan=(_cut(batch), _prompts(batch)))

    def frame(self, batch: GroupBatch, device: torch.device) -> None:
        return None  # on a CPU nothing is gained

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
        decode, prompts = meta.plan
        q_THD = dense_heads(q_THD)
        if decode is not None:
            self._attend_singles(q_THD, kv_view, params, decode, out_THD)
        if prompts is None:
            return
        if q_THD.dtype != torch.float32 and has_matrix_units():
            if not prompts.parts:
                prompts.parts.extend(self.prefill_parts(prompts.batch, q_THD.device))
            self.attend_parts(q_THD, kv_view, params, prompts.parts, out_THD)
        else:
            self._attend_prompts(q_THD, kv_view, params, prompts, out_THD)

    def _attend_prompts(
        self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, prompts: _Prompts, out_THD: Tensor
    ) -> None:
        assert out_THD.is_contiguous(), "the kernel writes rows side by side"
        _, heads, key_dim = q_THD.shape
        batch = prompts.batch
        tile_queries = max(1, TILE_ROWS * kv_view.shape[2] // heads)
        tiles = prompts.tiles_of(tile_queries)
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        arrays = (prompts.block_table, prompts.first_token, prompts.queries, prompts.kv_len, *tiles)
        self._prefill.intarsia_prefill(
            ctypes.byref(
                _Prefill(
                    q_THD.data_ptr(),
                    kv_view.data_ptr(),
                    out_THD.data_ptr(),
                    None if sinks is None else sinks.data_ptr(),
                    *(array.ctypes.data for array in arrays),
                    *q_THD.stride()[:2],
                    *kv_view.stride()[:3],
                    0 if params.latent_values is not None else key_dim,
                    len(tiles.row),
                    tile_queries,
                    heads,
                    kv_view.shape[2],
                    key_dim,
                    out_THD.shape[2],
                    batch.block_tokens,
                    prompts.block_table.shape[1],
                    batch.window_tokens or 0,
                    batch.chunk_tokens or 0,
                    batch.is_causal,
                    params.scale,
                    params.softcap or 0.0,
                    cpp.KINDS[q_THD.dtype],
                )
            )
        )

    def _attend_singles(
        self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, decode: _Decode, out_THD: Tensor
    ) -> None:
        assert out_THD.is_contiguous(), "the kernel writes rows side by side"
        _, heads, key_dim = q_THD.shape
        value_dim = out_THD.shape[2]
        sinks = None if params.sinks is None else params.sinks.float().contiguous()
        pieces = len(decode.piece_row)
        partial = torch.empty(pieces * heads * (value_dim + 2)) if decode.is_cut else None
        self._library.intarsia_attend(
            ctypes.byref(
                _Attention(
                    q_THD.data_ptr(),
                    kv_view.data_ptr(),
                    out_THD.data_ptr(),
                    None if sinks is None else sinks.data_ptr(),
                    decode.block_table.ctypes.data,
                    decode.token_of.ctypes.data,
                    decode.piece_row.ctypes.data,
                    decode.piece_first.ctypes.data,
                    decode.piece_end.ctypes.data,
                    decode.row_pieces.ctypes.data,
                    None if partial is None else partial.data_ptr(),
                    *q_THD.stride()[:2],
                    *kv_view.stride()[:3],
                    0 if params.latent_values is not None else key_dim,
                    len(decode.token_of),
                    pieces,
                    heads,
                    kv_view.shape[2],
                    key_dim,
                    value_dim,
                    decode.block_tokens,
                    decode.block_table.shape[1],
                    params.scale,
                    params.softcap or 0.0,
                    cpp.KINDS[q_THD.dtype],
                )
            )
        )


@cache
def has_matrix_units() -> bool:
    """Whether this processor multiplies matrices of bfloat16 in hardware."""
    return torch.cpu._is_amx_tile_supported()


def _prompts(batch: GroupBatch) -> _Prompts | None:
    rows = np.flatnonzero(batch.query_lens > 1)
    if len(rows) == 0:
        return None
    return _Prompts(
        np.ascontiguousarray(batch.block_table[rows], dtype=np.int32),
        batch.first_token()[rows],
        batch.query_lens[rows].astype(np.int32),
        batch.kv_lens[rows].astype(np.int32),
        batch,
    )


def _cut(batch: GroupBatch) -> _Decode | None:
    """The rows with one query, in pieces of `PIECE_TOKENS` from the first token their query sees."""
    rows = np.flatnonzero(batch.query_lens == 1)
    if len(rows) == 0:
        return None
    end = batch.kv_lens[rows].astype(np.int64)
    first = np.asarray(batch.oldest_visible(end - 1), dtype=np.int64)
    pieces = np.maximum(1, -(-(end - first) // PIECE_TOKENS))
    row_pieces = np.concatenate([[0], np.cumsum(pieces)])
    piece_row = np.repeat(np.arange(len(rows)), pieces)
    within = np.arange(row_pieces[-1]) - row_pieces[piece_row]
    piece_first = first[piece_row] + within * PIECE_TOKENS
    return _Decode(
        np.ascontiguousarray(batch.block_table[rows], dtype=np.int32),
        batch.first_token()[rows],
        piece_row.astype(np.int32),
        piece_first.astype(np.int32),
        np.minimum(piece_first + PIECE_TOKENS, end[piece_row]).astype(np.int32),
        row_pieces.astype(np.int32),
        batch.block_tokens,
    )
