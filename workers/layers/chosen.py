"""Attention to tokens that an index chooses, for each query its own (DeepSeek-V3.2, GLM-5, A.X-K2).

A layer's index keys lie in the pages of its latents: both are needed for the same tokens, all there are, so a group of
their own would hold the same blocks under another number. They are written with the latents. Then each query chooses
among the index keys of its row, and what it chose is gathered side by side, a page for each query, over which the
backend attends as over any other:

    chosen by query 7     0 2 3 7         gathered    [ 0 2 3 7 ]     a row of one query, with 4 keys
    chosen by query 8     2 3 7 8                     [ 2 3 7 8 ]

A row in which no query sees more tokens than it may choose needs no choice: all of it is attended to where it lies.

Suffixes beyond those of attention: N queries of a part    K chosen tokens of a query    I index heads
                                    E size of an index key
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import GroupBatch, GroupMeta, LayerParams, upload
from ...kernels.token_choice import Asked, ChoiceBatch, choose
from ...kvcache.plan import MemoryPlan
from ..pages import Pages
from .attention import PagedAttention

GATHERED_TOKENS = 1 << 16
"""Of all queries of a part: 72 MiB of DeepSeek's latents in 16 bits."""


@dataclass(frozen=True, slots=True, eq=False)
class Choice:
    """What the queries of a layer ask of its index. Layers that have none go by the choice of one before them."""

    q_TIE: Tensor
    weights_TI: Tensor  # float32
    keys_TE: Tensor  # of the new tokens
    most: int  # tokens that a query attends to
    chosen: list[Tensor] = field(default_factory=list[Tensor])  # [N,K] of each part, once the layer has attended


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Queries that choose together: of one row, or one each of several rows."""

    tokens: Tensor | slice  # which packed tokens they are: N
    batch: ChoiceBatch
    gathered: GroupMeta  # of attention over what they chose

    def take(self, entries: Tensor, chosen_NK: Tensor) -> Tensor:
        """[N,K,..]: what the pages [pages,tokens,..] have of the chosen tokens."""
        rows, tokens = len(self.batch.table_RP), self.batch.block_tokens
        blocks = (chosen_NK // tokens).view(rows, -1)
        pages_NK = self.batch.table_RP.gather(1, blocks).view(chosen_NK.shape)
        return entries[pages_NK, chosen_NK % tokens]


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """The rows of a step: those that see all, and those that choose."""

    whole: tuple[Tensor | slice, GroupMeta] | None
    parts: tuple[_Part, ...]


class ChoosingAttention(PagedAttention):
    """Attention of a model some of whose layers attend to chosen tokens."""

    _index_keys: dict[int, Tensor]
    _batches: Sequence[GroupBatch] = ()
    _splits: dict[tuple[int, int], _Split]

    def use(self, pages: Pages, plan: MemoryPlan) -> None:
        super().use(pages, plan)
        self._index_keys = pages.beside_tokens

    def forget_pages(self) -> None:
        super().forget_pages()
        self._index_keys = {}

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        super().begin_step(batches, positions_T)
        self._batches, self._splits = batches, {}

    @torch.compiler.disable
    def attend_chosen(
        self, q_THD: Tensor, keys_TKD: Tensor, layer: int, params: LayerParams, choice: Choice, *, asks: bool
    ) -> Tensor:
        """As `attend_packed`, of keys without values, to what `choice` says. asks: it is this layer's own."""
        if self._backend is None:
            return self.attend_packed(q_THD, keys_TKD, keys_TKD[..., :0], layer, params)
        place, view = self._mask_of[layer], self._views[layer]
        meta = self._metas[place]
        self._backend.write(view, keys_TKD, keys_TKD[..., :0], meta)
        if asks:
            self._index_keys[layer][meta.token_page, meta.token_offset] = choice.keys_TE
        out_THD = torch.empty((*q_THD.shape[:2], params.latent_values or 0), dtype=q_THD.dtype, device=q_THD.device)
        split = self._split(place, choice.most)
        # Rows that see no more than they may choose.
        if split.whole is not None:
            self._attend_to(view, q_THD, params, *split.whole, out_THD)
        # The others choose, unless a layer before has chosen, and attend to what is gathered.
        if asks:
            keys = self._index_keys[layer]
            choice.chosen[:] = [_chosen(choice, keys, part) for part in split.parts]
        for part, chosen_NK in zip(split.parts, choice.chosen, strict=True):
            self._attend_to(part.take(view, chosen_NK), q_THD, params, part.tokens, part.gathered, out_THD)
        return out_THD

    def _attend_to(
        self,
        entries: Tensor,
        q_THD: Tensor,
        params: LayerParams,
        tokens: Tensor | slice,
        meta: GroupMeta,
        out_THD: Tensor,
    ) -> None:
        """Some of the packed tokens, over pages [pages,tokens,1,D]."""
        q_NHD = q_THD[tokens].contiguous()
        found = torch.empty((*q_NHD.shape[:2], out_THD.shape[2]), dtype=q_THD.dtype, device=q_THD.device)
        self.backend.attend(q_NHD, entries, params, meta, found)
        out_THD[tokens] = found

    def _split(self, place: int, most: int) -> _Split:
        """Made once per step for all layers of a group that choose as many."""
        split = self._splits.get((place, most))
        if split is None:
            batch = _of_rows(self._batches[place])
            whole = np.flatnonzero(batch.kv_lens <= most)
            parts = tuple(self._part(batch, *each, most) for each in _queries_of_parts(batch, most))
            split = self._splits[place, most] = _Split(self._whole(place, batch, whole), parts)
        return split

    def _whole(self, place: int, batch: GroupBatch, rows: np.ndarray) -> tuple[Tensor | slice, GroupMeta] | None:
        if len(rows) == 0:
            return None
        if len(rows) == len(batch.kv_lens):
            return slice(None), self._metas[place]
        some = replace(
            batch, block_table=batch.block_table[rows], query_lens=batch.query_lens[rows], kv_lens=batch.kv_lens[rows]
        )
        firsts = np.repeat(batch.first_token()[rows] - some.first_token(), some.query_lens)
        tokens = upload(firsts + np.arange(len(firsts)), self._device)
        return tokens, self.backend.prepare(some, self._device)

    def _part(self, batch: GroupBatch, rows: np.ndarray, tokens: np.ndarray, positions: np.ndarray, most: int) -> _Part:
        longest = int(positions.max()) + 1
        table = batch.block_table[rows, : -(-longest // batch.block_tokens)].astype(np.int64)
        seen = np.minimum(positions + 1, most).astype(np.int32)
        gathered = GroupBatch(np.arange(len(tokens), dtype=np.int32)[:, None], np.ones_like(seen), seen, most)
        run = slice(int(tokens[0]), int(tokens[-1]) + 1)
        return _Part(
            tokens=run if run.stop - run.start == len(tokens) else upload(tokens, self._device),
            batch=ChoiceBatch(
                upload(np.ascontiguousarray(table), self._device),
                upload(positions, self._device),
                longest,
                batch.block_tokens,
            ),
            gathered=self.backend.prepare(gathered, self._device),
        )


def _chosen(choice: Choice, keys_PBE: Tensor, part: _Part) -> Tensor:
    return choose(Asked(choice.q_TIE[part.tokens], choice.weights_TI[part.tokens]), keys_PBE, part.batch, choice.most)


def _of_rows(batch: GroupBatch) -> GroupBatch:
    """With a block table of its own, where the host's whole table is given."""
    if batch.held is None:
        return batch
    return replace(batch, block_table=batch.block_table[batch.held.slots], held=None)


def _queries_of_parts(batch: GroupBatch, most: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Of rows that see more than `most`: rows, packed tokens and their positions. As many as are gathered at once."""
    together = max(1, GATHERED_TOKENS // most)
    firsts = batch.first_token()
    chooses = batch.kv_lens > most
    # One query each of several rows.
    single = np.flatnonzero(chooses & (batch.query_lens == 1))
    for start in range(0, len(single), together):
        rows = single[start : start + together]
        yield rows, firsts[rows], batch.kv_lens[rows].astype(np.int64) - 1
    # Several queries of one row.
    for row in np.flatnonzero(chooses & (batch.query_lens > 1)):
        count, end = int(batch.query_lens[row]), int(batch.kv_lens[row])
        for start in range(0, count, together):
            tokens = np.arange(start, min(start + together, count))
            yield np.array([row]), firsts[row] + tokens, end - count + tokens
