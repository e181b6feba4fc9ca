"""Paged attention in plain torch: gather pages into one workspace, then scaled_dot_product_attention on views of it.

A step is cut into parts; each part gathers once, and its tiles attend:

    decode    rows of similar length, one query each: all pages side by side, one tile with a mask for the ends
    prefill   one row alone: its pages once, tiles of 128 queries, each over only the keys its queries see

Only pages inside the window are gathered, so a windowed layer costs the same at any context length. What is gathered
and is no live token of the row (before the window, behind the end) is zeroed or cut off: see `protocol.py`.

Suffixes, beyond those of `protocol.py`:
    N rows of a part    L gathered tokens of a row    M queries of a row    G query heads per kv head    C = Dk+Dv
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..transfer import Transfer
from .biases import sinks_of
from .capabilities import Capabilities
from .protocol import GroupBatch, GroupMeta, LayerParams, upload, values_of

SPREAD_TOKENS = 256
"""Decode rows share a part while padding costs a row less than a part of its own: about 30 us, or 256 tokens."""
PART_TOKENS = 8192
"""Gathered tokens of a decode part: what fits a cache is read back from it. 32 rows of 2048 tokens take
17.4 ms in one part, 10.0 ms in eight. It also bounds the workspace."""
TILE_QUERIES = 128
"""Queries of a prefill row that share one range of keys. 2048 queries, window of 256: 42 ms in tiles of 512, 24 ms in
these; without a window they match one causal call over the whole prompt (65 ms), so there is no such call."""


@dataclass(frozen=True, slots=True, eq=False)
class Tile:
    """Queries that attend in one call. `mask` is 0 where they see and -inf where not; None if they see every key."""

    tokens: Tensor | slice  # which packed tokens: N*M of them, row by row
    keys: slice  # of the part's live tokens
    mask_NML: Tensor | None
    own_N: Tensor | None = None  # int64: which of the gathered keys is that of the row's query; None: the last


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Rows whose pages are gathered together."""

    pages: Tensor  # [N*pages of a row] int64
    rows: int
    live: slice  # of a row's gathered tokens: cuts off both ends (prefill) or keeps all, zeroed (decode)
    dirty: Tensor | None  # [..] int64: gathered tokens, counted over all rows, whose bytes may be anything
    is_dirty: Tensor | None  # [N*L] bool: the same where shapes are fixed
    tiles: tuple[Tile, ...]


class TorchBackend:
    """Where there is no compiler; runs unchanged on a GPU. Its only state is the workspace, reused by every layer."""

    name: ClassVar[str] = "torch"
    by_name_only: ClassVar[bool] = False
    capabilities: ClassVar[Capabilities] = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
        slopes=True,
        biases=True,
    )

    @classmethod
    def lacks(cls) -> str | None:
        return None

    def __init__(self) -> None:
        self._workspace = torch.empty(0, dtype=torch.uint8)

    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupMeta:
        page, offset = batch.token_places()
        parts = (*_decode_parts(batch, device), *_prefill_parts(batch, device))
        return GroupMeta(upload(page, device), upload(offset, device), plan=parts)

    def frame(self, batch: GroupBatch, device: torch.device) -> GroupMeta | None:
        rows, pages = len(batch.kv_lens), _most_pages(batch)
        place = torch.zeros(rows, dtype=torch.int64, device=device)
        part = Part(
            pages=torch.zeros(rows * pages, dtype=torch.int64, device=device),
            rows=rows,
            live=slice(None),
            dirty=None,
            is_dirty=torch.zeros(rows * pages * batch.block_tokens, dtype=torch.bool, device=device),
            tiles=(
                Tile(
                    slice(0, rows),
                    slice(None),
                    torch.zeros(rows, 1, pages * batch.block_tokens, device=device),
                    torch.zeros(rows, dtype=torch.int64, device=device),
                ),
            ),
        )
        return GroupMeta(place, place.clone(), plan=(part,))

    def narrow(self, frame: GroupMeta, rows: int, tokens: int | None = None) -> GroupMeta:
        raise AssertionError("there are no wide frames")

    def refill(self, frame: GroupMeta, batch: GroupBatch, transfer: Transfer) -> bool:
        (part,) = frame.plan
        rows = np.arange(part.rows)
        first_page, pages = _page_span(batch, rows)
        blocks, dirty, padding = _gathered(batch, rows, first_page, pages, len(part.pages) // part.rows)
        dead = dirty | padding[..., None]
        for buffer, values in (
            *zip((frame.token_page, frame.token_offset), batch.token_places(), strict=True),
            (part.pages, blocks),
            (part.is_dirty, dead),
            (part.tiles[0].own_N, batch.kv_lens - 1 - first_page * batch.block_tokens),
            (part.tiles[0].mask_NML, np.where(dead, np.float32("-inf"), np.float32(0))),
        ):
            transfer.put(buffer, values)
        return True

    def write(self, kv_view: Tensor, k_TKD: Tensor, v_TKD: Tensor, meta: GroupMeta) -> None:
        kv_view[meta.token_page, meta.token_offset] = torch.cat((k_TKD, v_TKD), dim=-1)

    def attend(self, q_THD: Tensor, kv_view: Tensor, params: LayerParams, meta: GroupMeta, out_THD: Tensor) -> None:
        extras = params.softcap, params.sinks, params.slopes, params.biases
        attention = _fused if all(extra is None for extra in extras) else _by_hand
        for part in meta.plan:
            kv_NKLC = self._gather(kv_view, part)
            for tile in part.tiles:
                q_NKGMD = _by_kv_head(q_THD[tile.tokens], part.rows, kv_view.shape[2])
                result = attention(q_NKGMD, kv_NKLC[:, :, tile.keys], params, tile)
                out_THD[tile.tokens] = _by_token(result)

    def _gather(self, kv_view: Tensor, part: Part) -> Tensor:
        """[N,K,L,C]: the live tokens of the part's pages, side by side and clean."""
        shape = (len(part.pages), *kv_view.shape[1:])
        pages = self._scratch(shape, kv_view)
        torch.index_select(kv_view, 0, part.pages, out=pages)
        if part.dirty is not None:
            pages.view(-1, *shape[2:]).index_fill_(0, part.dirty, 0)
        if part.is_dirty is not None:
            pages.view(-1, *shape[2:]).masked_fill_(part.is_dirty[:, None, None], 0)
        return pages.view(part.rows, -1, *shape[2:])[:, part.live].transpose(1, 2)

    def _scratch(self, shape: tuple[int, ...], like: Tensor) -> Tensor:
        """A tensor of this shape whose bytes are anything. Grows and never shrinks: fresh memory is slow."""
        if like.is_cuda and torch.cuda.is_current_stream_capturing():  # what is recorded keeps its memory
            return torch.empty(shape, dtype=like.dtype, device=like.device)
        scratch_bytes = math.prod(shape) * like.itemsize
        if self._workspace.numel() < scratch_bytes or self._workspace.device != like.device:
            self._workspace = torch.empty(scratch_bytes, dtype=torch.uint8, device=like.device)
        return self._workspace[:scratch_bytes].view(like.dtype).view(shape)


# Plan, once per group and step


def _decode_parts(batch: GroupBatch, device: torch.device) -> Iterator[Part]:
    """Rows with one query, longest first, a new part wherever padding would cost more than another part."""
    rows = np.flatnonzero(batch.query_lens == 1)
    first_page, pages = _page_span(batch, rows)
    waiting = np.argsort(-pages, kind="stable")
    while len(waiting):
        longest = pages[waiting[0]]
        similar = np.count_nonzero((longest - pages[waiting]) * batch.block_tokens <= SPREAD_TOKENS)
        count = min(similar, max(1, PART_TOKENS // int(longest * batch.block_tokens)))
        some = np.sort(waiting[:count])  # in row order again: rows side by side need no index
        yield _decode_part(batch, rows[some], first_page[some], pages[some], device)
        waiting = waiting[count:]


def _decode_part(
    batch: GroupBatch, rows: np.ndarray, first_page: np.ndarray, pages: np.ndarray, device: torch.device
) -> Part:
    """A shorter row is padded with copies of its own first page, so that only its own bytes can do harm.

    window of 6, pages of 4, length 11:   . . . . | . x x x | x x x .      x live
    gathered with one page of padding:              . x x x | x x x . | . x x x
    masked (dead):                                  #                 # # # # #
    zeroed (dirty):                                 0               0 | 0
    """
    blocks, dirty, padding = _gathered(batch, rows, first_page, pages, int(pages.max()))
    # Masked keys get no weight; dirty ones are zeroed too, since NaN times zero is NaN.
    dead = (dirty | padding[..., None]).reshape(len(rows), 1, -1)
    tokens = batch.first_token()[rows]
    tile = Tile(
        tokens=_as_slice(tokens) or upload(tokens, device),
        keys=slice(None),
        mask_NML=upload(np.where(dead, np.float32("-inf"), np.float32(0)), device) if dead.any() else None,
        own_N=upload(batch.kv_lens[rows].astype(np.int64) - 1 - first_page * batch.block_tokens, device),
    )
    return Part(
        pages=upload(blocks.ravel(), device),
        rows=len(rows),
        live=slice(None),
        dirty=upload(np.flatnonzero(dirty), device) if dirty.any() else None,
        is_dirty=None,
        tiles=(tile,),
    )


def _gathered(
    batch: GroupBatch, rows: np.ndarray, first_page: np.ndarray, pages: np.ndarray, width: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """What is gathered for N rows of one query: pages [N,W]; which of their tokens are no live ones of the row
    [N,W,tokens]; which pages are there for the width alone [N,W]."""
    column = np.arange(width)
    padding = column >= pages[:, None]
    block = first_page[:, None] + np.where(padding, 0, column)
    position = block[..., None] * batch.block_tokens + np.arange(batch.block_tokens)
    end = batch.kv_lens[rows, None, None]
    dirty = (position < batch.oldest_visible(end - 1)) | (position >= end)
    return batch.block_table[rows[:, None], block].astype(np.int64), dirty, padding


def _most_pages(batch: GroupBatch) -> int:
    """That one query of the group may see part of, as wide as the block table is."""
    span = batch.window_tokens or batch.chunk_tokens
    width = batch.block_table.shape[1]
    return width if span is None else min(width, (span - 2) // batch.block_tokens + 2)


def _prefill_parts(batch: GroupBatch, device: torch.device) -> Iterator[Part]:
    """Each row with several queries by itself, cut to its live tokens: nothing to pad, nothing to zero."""
    rows = np.flatnonzero(batch.query_lens > 1)
    if len(rows) == 0:
        return
    # Keys of an encoder have no order, so there is nothing to cut.
    if not batch.is_causal:
        yield from (_whole_part(batch, int(row), device) for row in rows)
        return
    # One mask serves all tiles of the step.
    spans = [list(_tile_spans(batch, row)) for row in rows]
    mask = _band_mask([span for row_spans in spans for span in row_spans], batch.window_tokens, device)
    starts = zip(rows, *_page_span(batch, rows), batch.first_token()[rows])
    for (row, first_page, pages, first_token), row_spans in zip(starts, spans):
        context, _, oldest = row_spans[0]
        to_token, to_page = int(first_token) - context, int(first_page) * batch.block_tokens
        tiles = (
            Tile(
                tokens=slice(start + to_token, end + to_token),
                keys=slice(key - oldest, end - oldest),
                mask_NML=mask[None, start - end :, key - end :],
            )
            for start, end, key in row_spans
        )
        yield Part(
            pages=upload(batch.block_table[row, first_page : first_page + pages].astype(np.int64), device),
            rows=1,
            live=slice(oldest - to_page, int(batch.kv_lens[row]) - to_page),
            dirty=None,
            is_dirty=None,
            tiles=tuple(tiles),
        )


def _whole_part(batch: GroupBatch, row: int, device: torch.device) -> Part:
    """Queries that see all keys of a row: no mask, no order."""
    keys, queries = int(batch.kv_lens[row]), int(batch.query_lens[row])
    first = int(batch.first_token()[row])
    pages = batch.block_table[row, : -(-keys // batch.block_tokens)].astype(np.int64)
    tile = Tile(tokens=slice(first, first + queries), keys=slice(None), mask_NML=None)
    return Part(pages=upload(pages, device), rows=1, live=slice(0, keys), dirty=None, is_dirty=None, tiles=(tile,))


def _tile_spans(batch: GroupBatch, row: np.intp) -> Iterator[tuple[int, int, int]]:
    """(first query, end, oldest key any of them sees) of each tile, as positions in the sequence."""
    kv_len = int(batch.kv_lens[row])
    start = kv_len - int(batch.query_lens[row])
    while start < kv_len:
        end = min(start + TILE_QUERIES, kv_len)
        if batch.chunk_tokens is not None:  # queries of one tile see the same border
            end = min(end, start - start % batch.chunk_tokens + batch.chunk_tokens)
        yield start, end, int(batch.oldest_visible(start))
        start = end


def _band_mask(spans: list[tuple[int, int, int]], window_tokens: int | None, device: torch.device) -> Tensor:
    """One mask whose bottom right corners serve every tile: a tile ends with its last query, which sees its last key.

    window of 3:   x x x . . .      a tile of 2 queries and 4 keys:   x x x .
                   . x x x . .                                        . x x x
                   . . x x x .
                   . . . x x x
    """
    queries = max(end - start for start, end, _ in spans)
    keys = max(end - oldest for _, end, oldest in spans)
    from_end = torch.arange(keys - 1, -1, -1, device=device)
    distance = from_end - torch.arange(queries - 1, -1, -1, device=device)[:, None]
    hidden = distance < 0
    if window_tokens is not None:
        hidden |= distance >= window_tokens
    return torch.zeros(queries, keys, device=device).masked_fill_(hidden, float("-inf"))


def _page_span(batch: GroupBatch, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First page that some query of each row still sees, and how many there are up to its end."""
    kv_lens = batch.kv_lens[rows].astype(np.int64)
    first_page = batch.oldest_visible(kv_lens - batch.query_lens[rows]) // batch.block_tokens
    return first_page, -(-kv_lens // batch.block_tokens) - first_page


def _as_slice(tokens: np.ndarray) -> slice | None:
    """The same tokens as a slice, which copies nothing, if they lie side by side."""
    first, last = int(tokens[0]), int(tokens[-1])
    return slice(first, last + 1) if last - first + 1 == len(tokens) else None


# Arithmetic, once per layer


def _by_kv_head(q_THD: Tensor, rows: int, kv_heads: int) -> Tensor:
    tokens, heads, dim = q_THD.shape
    return q_THD.reshape(rows, tokens // rows, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)


def _by_token(out_NKGMD: Tensor) -> Tensor:
    return out_NKGMD.permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)


def _fused(q_NKGMD: Tensor, kv_NKLC: Tensor, params: LayerParams, tile: Tile) -> Tensor:
    """Torch's fused attention. It knows four axes, so M or N, whichever is 1, steps aside."""
    mask_NML = tile.mask_NML
    key_dim, group = q_NKGMD.shape[-1], q_NKGMD.shape[2]
    keys, values = kv_NKLC[..., :key_dim], values_of(kv_NKLC, key_dim, params)
    mask = None if mask_NML is None else mask_NML[:, None].to(q_NKGMD.dtype)
    if q_NKGMD.shape[3] == 1:  # decode: the query heads of a kv head are its query rows
        out = F.scaled_dot_product_attention(q_NKGMD[..., 0, :], keys, values, mask, scale=params.scale)
        return out.unsqueeze(3)
    keys, values = (half[0, :, None].expand(-1, group, -1, -1) for half in (keys, values))  # copies nothing
    return F.scaled_dot_product_attention(q_NKGMD[0], keys, values, mask, scale=params.scale)[None]


def _by_hand(q_NKGMD: Tensor, kv_NKLC: Tensor, params: LayerParams, tile: Tile) -> Tensor:
    """The same with softcap, sinks and biases, which the fused form does not know. Float32 throughout."""
    _, kv_heads, group, queries, key_dim = q_NKGMD.shape
    kv = kv_NKLC.float()
    logits = q_NKGMD.flatten(2, 3).float() @ kv[..., :key_dim].mT * params.scale
    logits = logits.unflatten(2, (group, queries))
    if params.softcap is not None:
        logits = logits.div_(params.softcap).tanh_().mul_(params.softcap)
    if params.slopes is not None or params.biases is not None:
        logits += _bias(tile, params, logits.shape).unflatten(1, (kv_heads, group))
    if tile.mask_NML is not None:
        logits += tile.mask_NML[:, None, None]
    top = logits.amax(-1, keepdim=True)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    sinks = _sinks(tile, params, logits.shape)
    if sinks is not None:  # a sink far above every logit makes this inf, and the result the 0 it should be
        total += (sinks - top).exp()
    out = weights.flatten(2, 3) @ values_of(kv, key_dim, params)
    return out.unflatten(2, (group, queries)) / total


def _sinks(tile: Tile, params: LayerParams, shape: torch.Size) -> Tensor | None:
    """[N,K,G,M,1], or the same of all rows and queries."""
    rows, kv_heads, group, queries, _ = shape
    sinks = sinks_of(params.sinks, params.biases, tile.tokens)
    if sinks is None or sinks.dim() == 1:
        return None if sinks is None else sinks.view(kv_heads, group, 1, 1)
    return sinks.view(rows, queries, kv_heads, group, 1).permute(0, 2, 3, 1, 4)


def _bias(tile: Tile, params: LayerParams, shape: torch.Size) -> Tensor:
    """[N,H,M,L], by how far keys are from queries."""
    rows, *_, queries, keys = shape
    device = params.slopes.device if params.biases is None else params.biases.mixtures_THR.device  # type: ignore[union-attr]
    # The last query of a tile is the last key, unless it is said where its own is.
    own_N1 = torch.full((1, 1), keys - 1, device=device) if tile.own_N is None else tile.own_N[:, None]
    own_NM1 = (own_N1 - torch.arange(queries - 1, -1, -1, device=device)).unsqueeze(-1)
    far_NML = own_NM1 - torch.arange(keys, device=device)
    if params.slopes is not None:
        return -params.slopes.float()[:, None, None] * far_NML[:, None]
    assert params.biases is not None
    bias_NHME = params.biases.of(tile.tokens).unflatten(0, (rows, queries)).transpose(1, 2)
    extent = bias_NHME.shape[-1]
    nearest = far_NML.clamp(0, extent - 1)[:, None].expand(rows, bias_NHME.shape[1], -1, -1)
    is_far = ((far_NML < 0) | (far_NML >= extent))[:, None]
    return bias_NHME.gather(-1, nearest).masked_fill_(is_far, 0.0)
