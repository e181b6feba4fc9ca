"""Paged attention in plain torch: one gather of whole pages into a reused workspace, SDPA on strided views of it.

Rows that decode share one gather and one SDPA call; a windowed row gathers from the first page its window touches, so
its cost does not grow with the context. Rows in prefill are attended one by one, over exactly the keys they see.

Pages change owner, so a gathered page may hold NaN where this row has no token, and a mask does not hide NaN in a value
(0 * NaN). Prefill slices such bytes off; decode zeroes them after the gather.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import Capabilities, GroupBatch, LayerParams

LONG_ROW_TOKENS = 256
"""Decode rows up to this long are padded to the longest of them: one more SDPA call costs more than the padding."""


@dataclass(frozen=True, slots=True, eq=False)
class _DecodeRows:
    """Rows with one query each, padded to the same number of pages."""

    rows: Tensor | slice  # which queries
    pages: Tensor  # [rows * width] to gather
    width_tokens: int
    strangers: Tensor  # flat places in the gathered tokens that are not visible; they are zeroed
    mask_R11N: Tensor | None  # True: visible; None: all are


@dataclass(frozen=True, slots=True, eq=False)
class _PrefillRow:
    """One row with several queries."""

    queries: slice
    pages: Tensor
    keys: slice  # of the gathered tokens: the visible ones
    mask_TN: Tensor | None  # None: every query sees the keys up to itself, and the first key is the first query


@dataclass(frozen=True, slots=True, eq=False)
class TorchMeta:
    """Shared by all layers of a group in one step."""

    pages: Tensor  # [T] int64: where the new tokens go
    offsets: Tensor  # [T] int64
    slots: Tensor  # [T] int64: page * block_tokens + offset
    decode: tuple[_DecodeRows, ...]
    prefill: tuple[_PrefillRow, ...]


class TorchBackend:
    """The default on CPUs; runs on GPUs too."""

    name = "torch"
    capabilities = Capabilities(devices=("cpu", "cuda"), dtypes=(torch.float32, torch.bfloat16, torch.float16))

    def __init__(self):
        self._workspace = torch.empty(0)

    def prepare(self, batch: GroupBatch, device: torch.device) -> TorchMeta:
        rows = np.repeat(np.arange(len(batch.query_lens)), batch.query_lens)
        ends = np.cumsum(batch.query_lens)
        positions = np.arange(len(rows)) + np.repeat(batch.kv_lens - ends, batch.query_lens)
        pages = batch.block_table[rows, positions // batch.block_tokens].astype(np.int64)
        offsets = positions % batch.block_tokens
        single = np.flatnonzero(batch.query_lens == 1)
        return TorchMeta(
            pages=_to(pages, device),
            offsets=_to(offsets, device),
            slots=_to(pages * batch.block_tokens + offsets, device),
            decode=tuple(_decode_rows(batch, bucket, ends, device) for bucket in _buckets(batch, single)),
            prefill=tuple(
                _prefill_row(batch, row, ends, device) for row in np.flatnonzero(batch.query_lens > 1).tolist()
            ),
        )

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: TorchMeta) -> None:
        new_TKE = torch.cat([k_TKD, v_TKD], dim=-1)
        if kv_view.is_contiguous():
            kv_view.view(-1, *kv_view.shape[2:]).index_copy_(0, meta.slots, new_TKE)
        else:
            kv_view.index_put_((meta.pages, meta.offsets), new_TKE)

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: TorchMeta, out_THD: Tensor) -> None:
        for bucket in meta.decode:
            out_THD[bucket.rows] = self._decode(q_THD[bucket.rows], kv_view, params, bucket)
        for row in meta.prefill:
            out_THD[row.queries] = self._prefill(q_THD[row.queries], kv_view, params, row)

    def _decode(self, q_RHD: Tensor, kv_view: Tensor, params: LayerParams, bucket: _DecodeRows) -> Tensor:
        rows, heads, key_dim = q_RHD.shape
        kv_heads = kv_view.shape[2]
        gathered = self._gather(kv_view, bucket.pages)
        gathered.index_fill_(0, bucket.strangers, 0)
        kv_RNKE = gathered.view(rows, bucket.width_tokens, *kv_view.shape[2:])
        k_RKND, v_RKND = kv_RNKE[..., :key_dim].transpose(1, 2), kv_RNKE[..., key_dim:].transpose(1, 2)
        q_RKGD = q_RHD.reshape(rows, kv_heads, heads // kv_heads, key_dim)  # heads that share keys are rows of queries
        out = _attend(q_RKGD, k_RKND, v_RKND, bucket.mask_R11N, params)
        return out.reshape(rows, heads, -1)

    def _prefill(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, row: _PrefillRow) -> Tensor:
        tokens, heads, key_dim = q_THD.shape
        kv_heads = kv_view.shape[2]
        kv_NKE = self._gather(kv_view, row.pages)[row.keys]
        k_KND, v_KND = kv_NKE[..., :key_dim].transpose(0, 1), kv_NKE[..., key_dim:].transpose(0, 1)
        if params.softcap is None and params.sinks is None:
            out_HTD = F.scaled_dot_product_attention(
                q_THD.transpose(0, 1).unsqueeze(0),
                k_KND.unsqueeze(0),
                v_KND.unsqueeze(0),
                attn_mask=row.mask_TN,
                is_causal=row.mask_TN is None,
                scale=params.scale,
                enable_gqa=heads != kv_heads,
            )[0]
            return out_HTD.transpose(0, 1)
        q_KGTD = q_THD.view(tokens, kv_heads, heads // kv_heads, key_dim).permute(1, 2, 0, 3)
        out_KGTD = _attend_by_hand(q_KGTD, k_KND.unsqueeze(1), v_KND.unsqueeze(1), row.mask_TN, params)
        return out_KGTD.permute(2, 0, 1, 3).reshape(tokens, heads, -1)

    def _gather(self, kv_view: Tensor, pages: Tensor) -> Tensor:
        """The tokens of `pages`, one after another: [tokens, K, E]. Valid until the next gather."""
        shape = (len(pages), *kv_view.shape[1:])
        size = pages.numel() * kv_view[0].numel()
        if self._workspace.numel() < size or self._workspace.dtype != kv_view.dtype:
            self._workspace = torch.empty(size, dtype=kv_view.dtype, device=kv_view.device)
        gathered = self._workspace[:size].view(shape)
        if kv_view.is_contiguous():
            torch.index_select(kv_view.view(len(kv_view), -1), 0, pages, out=gathered.view(len(pages), -1))
        else:
            torch.index_select(kv_view, 0, pages, out=gathered)
        return gathered.view(-1, *kv_view.shape[2:])


def _attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: LayerParams) -> Tensor:
    """q [R, K, G, D] over k, v [R, K, N, ...]; mask broadcastable to [R, K, G, N]."""
    if params.softcap is None and params.sinks is None:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=params.scale)
    kv_heads, group = q.shape[1:3]
    sinks = None if params.sinks is None else params.sinks.view(kv_heads, group, 1)
    return _softmax_by_hand(q, k, v, mask, params, sinks)


def _attend_by_hand(
    q_KGTD: Tensor, k_K1ND: Tensor, v_K1ND: Tensor, mask_TN: Tensor | None, params: LayerParams
) -> Tensor:
    tokens = q_KGTD.shape[2]
    if mask_TN is None:
        mask_TN = torch.ones(tokens, tokens, dtype=torch.bool, device=q_KGTD.device).tril()
    sinks = None if params.sinks is None else params.sinks.view(*q_KGTD.shape[:2], 1, 1)
    return _softmax_by_hand(q_KGTD, k_K1ND, v_K1ND, mask_TN, params, sinks)


def _softmax_by_hand(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, params: LayerParams, sinks: Tensor | None
) -> Tensor:
    """Softcap and sinks, which SDPA does not know. Scores and sums in float32."""
    scores = (q @ k.transpose(-1, -2)).float() * params.scale
    if params.softcap is not None:
        scores = params.softcap * torch.tanh(scores / params.softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    if sinks is None:
        weights = torch.softmax(scores, dim=-1)
    else:
        sinks = sinks.float()
        peak = torch.maximum(scores.amax(dim=-1, keepdim=True), sinks)
        unnormalised = torch.exp(scores - peak)
        weights = unnormalised / (unnormalised.sum(dim=-1, keepdim=True) + torch.exp(sinks - peak))
    return weights.to(v.dtype) @ v


def _buckets(batch: GroupBatch, rows: np.ndarray) -> Iterator[np.ndarray]:
    """Rows of similar length, so that padding at most doubles the work of long ones."""
    if len(rows) == 0:
        return
    pages = _page_counts(batch, rows)
    if pages.max() * batch.block_tokens <= LONG_ROW_TOKENS or pages.max() <= 2 * pages.min():
        yield rows
        return
    order = rows[np.argsort(-pages, kind="stable")]
    sorted_pages = np.sort(pages)[::-1]
    start = 0
    while start < len(order):
        short = sorted_pages[start:] * 2 < sorted_pages[start]
        long_enough = sorted_pages[start] * batch.block_tokens > LONG_ROW_TOKENS
        stop = start + int(np.argmax(short)) if long_enough and short.any() else len(order)
        yield order[start:stop]
        start = stop


def _first_keys(batch: GroupBatch, rows: np.ndarray) -> np.ndarray:
    """Position of the first key that each row's first query sees."""
    first_query = batch.kv_lens[rows] - batch.query_lens[rows]
    return (
        np.zeros_like(first_query)
        if batch.window_tokens is None
        else np.maximum(0, first_query + 1 - batch.window_tokens)
    )


def _page_counts(batch: GroupBatch, rows: np.ndarray) -> np.ndarray:
    return (batch.kv_lens[rows] - 1) // batch.block_tokens - _first_keys(batch, rows) // batch.block_tokens + 1


def _decode_rows(batch: GroupBatch, rows: np.ndarray, ends: np.ndarray, device: torch.device) -> _DecodeRows:
    size = batch.block_tokens
    first, lengths = _first_keys(batch, rows), batch.kv_lens[rows]
    first_page = first // size
    width = int(_page_counts(batch, rows).max())
    columns = np.minimum(first_page[:, None] + np.arange(width), batch.block_table.shape[1] - 1)
    pages = batch.block_table[rows[:, None], columns].astype(np.int64)
    keys = first_page[:, None] * size + np.arange(width * size)
    visible = (keys >= first[:, None]) & (keys < lengths[:, None])
    queries = ends[rows] - 1
    in_order = bool((np.diff(queries) == 1).all())
    return _DecodeRows(
        rows=slice(int(queries[0]), int(queries[-1]) + 1) if in_order else _to(queries, device),
        pages=_to(pages.reshape(-1), device),
        width_tokens=width * size,
        strangers=_to(np.flatnonzero(~visible), device),
        mask_R11N=None if visible.all() else _to(visible[:, None, None, :], device),
    )


def _prefill_row(batch: GroupBatch, row: int, ends: np.ndarray, device: torch.device) -> _PrefillRow:
    size, window = batch.block_tokens, batch.window_tokens
    count, length = int(batch.query_lens[row]), int(batch.kv_lens[row])
    first = int(_first_keys(batch, np.array([row]))[0])
    first_page, last_page = first // size, (length - 1) // size
    mask = None
    if length > count or (window is not None and window < count):
        queries, keys = np.arange(length - count, length)[:, None], np.arange(first, length)
        mask = keys <= queries
        if window is not None:
            mask &= keys > queries - window
    return _PrefillRow(
        queries=slice(int(ends[row]) - count, int(ends[row])),
        pages=_to(batch.block_table[row, first_page : last_page + 1].astype(np.int64), device),
        keys=slice(first - first_page * size, length - first_page * size),
        mask_TN=None if mask is None else _to(mask, device),
    )


def _to(array: np.ndarray, device: torch.device) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    return tensor if device.type == "cpu" else tensor.to(device, non_blocking=True)
