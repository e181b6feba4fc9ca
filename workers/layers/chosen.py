"""Attention to tokens that an index chooses, for each query its own (DeepSeek-V3.2, GLM-5, A.X-K2, MiniMax-M3,
Qwen4-Exp).

A layer's index keys lie in the pages of its latents: both are needed for the same tokens, all there are, so a group of
their own would hold the same blocks under another number. They are written with the latents. Then each query chooses
among the index keys of its row, and what it chose is gathered side by side, a page for each query, over which the
backend attends as over any other:

    chosen by query 7     0 2 3 7         gathered    [ 0 2 3 7 ]     a row of one query, with 4 keys
    chosen by query 8     2 3 7 8                     [ 2 3 7 8 ]

A row in which no query sees more tokens than it may choose needs no choice: all of it is attended to where it lies.

Where each head of keys has a choice of its own (MiniMax-M3), a query has as many pages as there are such heads. Where
pools of tokens have one key each (GLM-5.3, Qwen4-Exp), these are entries (`entries.py`), made when a pool is whole.

Suffixes beyond those of attention: N queries of a part    J choices of a query    K chosen tokens    I index heads
                                    E size of an index key    C numbers of an entry
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...errors import UnsupportedModel
from ...kernels.paged_attention import GroupBatch, GroupMeta, LayerParams, upload
from ...kernels.token_choice import Asked, BlockRule, ChoiceBatch, choose, choose_blocks, gather, has_frames
from ...kvcache.plan import MemoryPlan
from ..checkpoint.layer_specs import ENTRIES, GIVERS
from ..pages import Pages
from .entries import EntryAttention, Make
from .gathering import Queries, gathered_batch, places_of, queries_of_parts
from .gathering_frames import FramedPart


class Kind(NamedTuple):
    """What layers have in common for which the queries of a step are laid out in the same way."""

    most: int  # tokens that a query attends to
    choices: int = 1  # of a query: one for all heads, or one for each head of keys
    size: int = 1  # tokens that are chosen together
    is_of_whole: bool = False  # those behind the last that are complete are attended to unasked

    def counts(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens queries attend to, for each choice; the last block of each ends with the query."""
        if self.is_of_whole:
            pools = np.minimum((positions + 1) // self.size, self.most // self.size)
            counts = pools * self.size + (positions + 1) % self.size
        else:
            blocks = np.minimum(positions // self.size, self.most // self.size - 1)
            counts = blocks * self.size + positions % self.size + 1
        return np.repeat(counts.astype(np.int32), self.choices)


class Choice:
    """What the queries of a layer ask of its index. Layers that have none go by the choice of one before them."""

    has_frames = False
    """Whether rows that decode choose by what lies on the device alone, so that their steps can be recorded."""

    def __init__(self, kind: Kind, keys_TE: Tensor):
        self.kind = kind
        self.keys_TE = keys_TE  # of the new tokens
        self.chosen: list[Tensor] = []  # [N,J,K] of each part, once the layer has attended

    def keep(self, paged: "ChoosingAttention", layer: int, meta: GroupMeta) -> None:
        """Write the keys of the new tokens."""
        paged.index_keys[layer][meta.token_page, meta.token_offset] = self.keys_TE

    def choose(self, paged: "ChoosingAttention", layer: int, part: "Part | FramedPart") -> Tensor:
        """[N,J,K]: positions, of some of the packed tokens."""
        raise NotImplementedError


class TokenChoice(Choice):
    def __init__(self, q_TIE: Tensor, weights_TI: Tensor, keys_TE: Tensor, most: int):
        """weights: float32"""
        super().__init__(Kind(most), keys_TE)
        self.has_frames = has_frames(keys_TE.device)
        self._q_TIE, self._weights_TI = q_TIE, weights_TI

    def choose(self, paged: "ChoosingAttention", layer: int, part: "Part | FramedPart") -> Tensor:
        asked = Asked(self._q_TIE[part.tokens], self._weights_TI[part.tokens])
        return choose(asked, paged.index_keys[layer], part.batch, self.kind.most).unsqueeze(1)


class PoolChoice(Choice):
    """Of pools of tokens, by a key that those of a pool have together (GLM-5.3, Qwen4-Exp). Tokens behind the last
    whole pool are attended to as well."""

    def __init__(self, asked: Asked, given_TC: Tensor, make: Make, size: int, pools: int):
        """given: what each token gives to its pool's key. pools: that a query attends to"""
        super().__init__(Kind((pools + 1) * size - 1, size=size, is_of_whole=True), given_TC)
        self.has_frames = has_frames(given_TC.device)
        self._asked, self._make, self._pools = asked, make, pools

    def keep(self, paged: "ChoosingAttention", layer: int, meta: GroupMeta) -> None:
        paged.give(layer, self.keys_TE, self._make)

    def choose(self, paged: "ChoosingAttention", layer: int, part: "Part | FramedPart") -> Tensor:
        size, device = self.kind.size, self.keys_TE.device
        asked, batch = Asked(*(each[part.tokens] for each in self._asked)), paged.entries_seen(layer, part)
        pools_NK = paged.choose_entries(layer, asked, paged.entries(layer)[:, :, 0], batch, self._pools)
        # Their tokens, and those behind the last whole pool; all tokens where no more pools are seen than are chosen.
        last_N1 = part.batch.positions_N.unsqueeze(1)
        seen_N1 = (last_N1 + 1) // size
        of_pools = (pools_NK.unsqueeze(2) * size + torch.arange(size, device=device)).flatten(1)
        behind = seen_N1 * size + torch.arange(size - 1, device=device)
        tokens = torch.cat((of_pools, behind), dim=1)
        tokens = torch.where(seen_N1 <= self._pools, torch.arange(self.kind.most, device=device), tokens)
        return tokens.masked_fill_(tokens > last_N1, 0).unsqueeze(1)


class BlockChoice(Choice):
    def __init__(self, q_TJE: Tensor, keys_TE: Tensor, rule: BlockRule):
        super().__init__(Kind(rule.most * rule.size, q_TJE.shape[1], rule.size), keys_TE)
        self.has_frames = has_frames(keys_TE.device, rule.size)
        self._q_TJE, self._rule = q_TJE, rule

    def choose(self, paged: "ChoosingAttention", layer: int, part: "Part | FramedPart") -> Tensor:
        return choose_blocks(self._q_TJE[part.tokens], paged.index_keys[layer], part.batch, self._rule)


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """Queries that choose together: of one row, or one each of several rows."""

    tokens: Tensor | slice  # which packed tokens they are: N
    rows: np.ndarray  # of the step: one for each query, or one for all
    positions: np.ndarray  # of the queries
    batch: ChoiceBatch
    gathered: GroupMeta  # of attention over what they chose: N*J rows


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """The rows of a step: those that see all, and those that choose."""

    whole: tuple[Tensor | slice, GroupMeta] | None
    parts: tuple[Part, ...] | tuple[FramedPart, ...]


class ChoosingAttention(EntryAttention):
    """Attention of a model some of whose layers attend to chosen tokens."""

    index_keys: dict[int, Tensor]  # by layer, in pages: [pages,tokens of a page,E]
    _splits: dict[tuple[int, Kind], _Split]

    def use(self, pages: Pages, plan: MemoryPlan) -> None:
        super().use(pages, plan)
        # Layers that share the pages of others have keys of their own in the same blocks.
        alone = {index: view[:, :, 0] for index, view in pages.tokens.items() if ENTRIES <= index < GIVERS}
        self.index_keys = pages.beside_tokens | {
            index - ENTRIES: view for index, view in alone.items() if index - ENTRIES not in self._entries_of
        }
        for layer in alone:
            if layer - ENTRIES in self.layers and self.layers[layer - ENTRIES].shares is not None:
                self._check_blocks(layer - ENTRIES, plan)

    def _check_blocks(self, layer: int, plan: MemoryPlan) -> None:
        if self._places[ENTRIES + layer] != self._mask_of[layer]:
            raise UnsupportedModel(
                f"layer {layer} shares the pages of another and has an index, which the plan ({plan.strategy}) keeps "
                "in other blocks. Use the strategy packed.",
                field="strategy",
            )

    def forget_pages(self) -> None:
        super().forget_pages()
        self.index_keys = {}

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        super().begin_step(batches, positions_T)
        self._splits = {}

    def attend_chosen(
        self,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        layer: int,
        params: LayerParams,
        choice: Choice,
        *,
        asks: bool = True,
    ) -> Tensor:
        """As `attend_packed`, to what `choice` says. asks: it is this layer's own."""
        if self.learnt is None:
            self._can_be_recorded &= choice.has_frames
            return self.attend_packed(q_THD, k_TKD, v_TKD, layer, params)
        place, view = self._mask_of[layer], self.views[layer]
        meta = self._metas[place]
        if self.layers[layer].shares is None:  # else its source has written them, in this very step
            self.learnt.write(view, k_TKD, v_TKD, meta)
        if asks:
            choice.keep(self, layer, meta)
        out_THV = q_THD.new_empty(*q_THD.shape[:2], params.latent_values or v_TKD.shape[2])
        split = self._split(place, choice.kind)
        # Rows that see no more than they may choose.
        if split.whole is not None:
            tokens, whole = split.whole
            out_THV[tokens] = self._attend_to(view, q_THD[tokens], params, whole, out_THV.shape[2])
        # The others choose, unless a layer before has chosen, and attend to what is gathered.
        if asks:
            choice.chosen = [choice.choose(self, layer, part) for part in split.parts]
        for part, chosen_NJK in zip(split.parts, choice.chosen, strict=True):
            q_NJHD = q_THD[part.tokens].unflatten(1, (choice.kind.choices, -1))
            entries = _taken(view, chosen_NJK, part.batch)
            found = self._attend_to(entries, q_NJHD.flatten(0, 1), params, part.gathered, out_THV.shape[2])
            out_THV[part.tokens] = found.view(len(q_NJHD), -1, out_THV.shape[2])
        return out_THV

    def entries_seen(self, layer: int, part: "Part | FramedPart") -> ChoiceBatch:
        """Among which the queries of a part choose pools."""
        if self._frame is not None and isinstance(part, FramedPart):
            return self.entries_in(self._frame, layer, part.tokens)
        assert isinstance(part, Part), "a frame's parts are those of recorded steps"
        seen_N = (part.positions + 1) // self._lies[layer].tokens
        return self.choice_among(layer, self.entry_table(layer, part.rows, int(seen_N.max())), seen_N)

    def _attend_to(
        self, entries: Tensor, q_NHD: Tensor, params: LayerParams, meta: GroupMeta, value_dim: int
    ) -> Tensor:
        """Over pages [pages,tokens,heads,C]. [N,H,V]"""
        found = q_NHD.new_empty(*q_NHD.shape[:2], value_dim)
        self.backend.attend(q_NHD.contiguous(), entries, params, meta, found)
        return found

    def _split(self, place: int, kind: Kind) -> _Split:
        """Made once per step for all layers of a group that choose alike."""
        if self._frame is not None:
            return _Split(None, self._frame.parts((place, kind), place, kind.most, kind.counts, kind.choices))
        split = self._splits.get((place, kind))
        if split is None:
            batch = self._batches[place]
            whole = np.flatnonzero(batch.kv_lens <= kind.most)
            widths = np.full(len(batch.kv_lens), kind.most * kind.choices)
            chosen = queries_of_parts(batch, batch.kv_lens > kind.most, widths)
            parts = tuple(self._part(batch, each, kind) for each in chosen)
            split = self._splits[place, kind] = _Split(self._whole(place, batch, whole), parts)
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

    def _part(self, batch: GroupBatch, queries: Queries, kind: Kind) -> Part:
        rows, tokens, positions = queries
        longest = int(positions.max()) + 1
        table = batch.block_table[rows, : -(-longest // batch.block_tokens)].astype(np.int64)
        return Part(
            tokens=places_of(tokens, self._device),
            rows=rows,
            positions=positions,
            batch=ChoiceBatch(
                upload(np.ascontiguousarray(table), self._device),
                upload(positions, self._device),
                longest,
                batch.block_tokens,
            ),
            gathered=self.backend.prepare(gathered_batch(kind.counts(positions), kind.most), self._device),
        )


def _taken(entries: Tensor, chosen_NJK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N*J,K,heads / J,C]: what the pages [pages,tokens,heads,C] have of the chosen tokens."""
    of_choices = entries.view(*entries.shape[:2], chosen_NJK.shape[1], -1)
    return gather(of_choices, chosen_NJK, batch).flatten(0, 1).unflatten(2, (-1, entries.shape[3]))
