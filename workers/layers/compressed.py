"""Attention to a window, and to entries of several tokens each: DeepSeek-V4.

One vector per token serves all heads as key and as value. Beside a window of them, a layer keeps one entry for every
few tokens, made of what each of these gives: a value and its weight. Until an entry is made, what its tokens gave is
kept as well; both are "layers" of their own in the plan (`Compression`). A query attends to its window and to entries
of tokens that it sees: to all of them, or to those that an index chooses. All of it is gathered side by side, a page
for each query, over which the backend attends as over any other:

    window of 4, entries of 3      tokens 0 .. 8, the query is 8       gathered    [ 5 6 7 8 | 0-2 3-5 6-8 ]

Suffixes beyond those of attention: N queries of a part, or entries    S tokens that an entry is made of
                                    C numbers that a token gives    E size of an index key    L what is gathered for
                                    the queries of a part, entry by entry
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import GroupBatch, GroupMeta, LayerParams, upload
from ...kernels.token_choice import Asked, ChoiceBatch, Sight, gather_sight
from ..checkpoint.layer_specs import ENTRIES
from .attention import PagedAttention
from .entries import Entries, EntryAttention, Make, weighed
from .gathering import Queries, gathered_batch, places_of, queries_of_parts, ragged
from .gathering_frames import FramedPart, GatheringFrame
from .head_products import HeadProduct, head_product

WIDTH = 16
"""Gathered pages have a multiple of so many tokens, which every backend takes."""

Turns = tuple[Tensor, Tensor]
"""Cosines and sines."""


class Index(NamedTuple):
    """What the queries of a layer ask of the index keys of entries, [T,..] each."""

    asked: Asked
    most: int  # entries that a query attends to


class Kind(NamedTuple):
    """What layers have in common for which the queries of a step are laid out in the same way."""

    window: int  # place of the group among the step's batches
    entries: Entries
    most: int | None  # entries that a query attends to; None: all that it sees

    def attended(self, seen: np.ndarray) -> np.ndarray:
        return seen if self.most is None else np.minimum(seen, self.most)


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """Queries of one row, or one each of several rows."""

    tokens: Tensor | slice  # which packed tokens they are: N
    width: int  # of their pages
    window_page_L: Tensor
    window_offset_L: Tensor
    window_to_L: Tensor  # where in all pages of the part
    table_RP: Tensor  # of entries
    entry_row_L: Tensor
    entry_L: Tensor  # which entry; where entries are chosen, at which place of all choices it is said
    entry_to_L: Tensor
    choice: ChoiceBatch | None  # None: all are attended to
    gathered: GroupMeta


class CompressingAttention(EntryAttention):
    """Attention of a model whose layers attend to entries."""

    _parts: dict[Kind, list[_Part]]

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        super().begin_step(batches, positions_T)
        self._parts = {}

    def attend_compressed(
        self,
        layer: int,
        q_THD: Tensor,
        kv_T1D: Tensor,
        given_TC: Tensor,
        make: Make,
        index: Index | None,
        params: LayerParams,
    ) -> Tensor:
        """Write what is new of one layer, make the entries that are complete, then attend. [T,H,D]"""
        if self.learnt is None:
            return self.attend_packed(q_THD, kv_T1D, kv_T1D[..., :0], layer, params)
        kind = Kind(self._places[layer], self._lies[layer], None if index is None else index.most)
        self.learnt.write(self.views[layer], kv_T1D, kv_T1D[..., :0], self._metas[kind.window])
        self.give(layer, given_TC, make)
        frame, out_THD = self._frame, torch.empty_like(q_THD)
        gathered = self._gathered(layer, kind, index) if frame is None else self._in_frame(frame, layer, kind, index)
        for part, pages in gathered:
            q_NHD = q_THD[part.tokens].contiguous()
            out_NHD = torch.empty_like(q_NHD)
            self.learnt.attend(q_NHD, pages, params, part.gathered, out_NHD)
            out_THD[part.tokens] = out_NHD
        return out_THD

    def _gathered(self, layer: int, kind: Kind, index: Index | None) -> Iterator[tuple[_Part, Tensor]]:
        """Each part of a step, and a page for each of its queries: [N,width,1,D]."""
        if kind not in self._parts:
            window = self._batches[kind.window]
            widths = (window.window_tokens or 0) + kind.attended(window.kv_lens.astype(np.int64) // kind.entries.tokens)
            parts = queries_of_parts(window, np.ones(len(widths), dtype=bool), widths)
            self._parts[kind] = [self._part(layer, kind, queries) for queries in parts]
        for part in self._parts[kind]:
            yield part, self._pages_of(layer, part, self._attended(layer, part, index))

    def _in_frame(
        self, frame: GatheringFrame, layer: int, kind: Kind, index: Index | None
    ) -> Iterator[tuple[FramedPart, Tensor]]:
        """The same of a recorded step: what a query attends to is laid out where its tables are."""
        queries, window_tokens = frame.queries(kind.window), frame.batches[kind.window].window_tokens
        assert window_tokens is not None, "these layers have windows"
        most = queries.longest // kind.entries.tokens if kind.most is None else kind.most
        sight = Sight(window_tokens, most, -(-(window_tokens + most) // WIDTH) * WIDTH)
        window, entries = self.views[layer][:, :, 0], self.entries(layer)[:, :, 0]

        def lengths(positions: np.ndarray) -> np.ndarray:
            in_window = np.minimum(positions + 1, window_tokens)
            return (in_window + kind.attended((positions + 1) // kind.entries.tokens)).astype(np.int32)

        for part in frame.parts(kind, kind.window, sight.width, lengths):
            of_entries, chosen_NK = self.entries_in(frame, layer, part.tokens), None
            if index is not None:
                asked, keys_PBE = Asked(*(each[part.tokens] for each in index.asked)), self._index_keys(layer)
                chosen_NK = self.choose_entries(layer, asked, keys_PBE, of_entries, index.most)
            yield part, gather_sight(window, entries, part.batch, of_entries, chosen_NK, sight).unsqueeze(2)

    def _index_keys(self, layer: int) -> Tensor:
        """Of entries, in their pages."""
        return self.pages.beside_tokens[ENTRIES + layer]

    def _attended(self, layer: int, part: _Part, index: Index | None) -> Tensor:
        """Numbers of entries: [L]."""
        if part.choice is None or index is None:
            return part.entry_L
        asked = Asked(*(each[part.tokens] for each in index.asked))
        keys_PBE = self._index_keys(layer)
        return self.choose_entries(layer, asked, keys_PBE, part.choice, index.most).view(-1)[part.entry_L]

    def _pages_of(self, layer: int, part: _Part, entry_L: Tensor) -> Tensor:
        """A page for each query: [N,width,1,D]."""
        window, entries = self.views[layer], self.entries(layer)
        pages = window.new_zeros(len(part.gathered.token_page) * part.width, 1, window.shape[3])
        pages[part.window_to_L] = window[part.window_page_L, part.window_offset_L]
        pages[part.entry_to_L] = entries[self.entry_places(layer, part.table_RP, part.entry_row_L, entry_L)]
        return pages.unflatten(0, (-1, part.width))

    def _part(self, layer: int, kind: Kind, queries: Queries) -> _Part:
        rows, tokens, positions = queries
        device, window = self._device, self._batches[kind.window]
        row_N = np.arange(len(tokens)) if len(rows) > 1 else np.zeros(len(tokens), dtype=np.int64)
        seen_N, oldest_N = (positions + 1) // kind.entries.tokens, window.oldest_visible(positions)
        window_N, entries_N = positions - oldest_N + 1, kind.attended(seen_N)
        lengths = (window_N + entries_N).astype(np.int32)
        width = -(-int(lengths.max()) // WIDTH) * WIDTH
        # Windows come first, and behind each of them its entries.
        in_window, of_window = ragged(window_N)
        in_entries, of_entry = ragged(entries_N)
        block, offset = np.divmod(oldest_N[of_window] + in_window, window.block_tokens)
        page = window.block_table[rows[row_N[of_window]], block].astype(np.int64)
        table_RP = self.entry_table(layer, rows, max(1, int(seen_N.max())))
        choice = None
        if kind.most is not None and seen_N.max() > kind.most:
            choice = self.choice_among(layer, table_RP, seen_N)
            in_choices = of_entry * kind.most + in_entries
        else:
            in_choices = in_entries
        return _Part(
            tokens=places_of(tokens, device),
            width=width,
            window_page_L=upload(page, device),
            window_offset_L=upload(offset, device),
            window_to_L=upload(of_window * width + in_window, device),
            table_RP=table_RP,
            entry_row_L=upload(row_N[of_entry], device),
            entry_L=upload(in_choices, device),
            entry_to_L=upload(of_entry * width + window_N[of_entry] + in_entries, device),
            choice=choice,
            gathered=self.backend.prepare(gathered_batch(lengths, width), device),
        )


# -- the module --------------------------------------------------------------------------------------------------------


class CompressedAttention:
    """The forward pass of DeepSeek-V4's attention, from hidden states [1,T,D] to [1,T,D]."""

    def __init__(self, module: Any, paged: PagedAttention):
        assert isinstance(paged, CompressingAttention), "layers that keep entries were found in the config"
        self._module = module
        self._paged = paged
        self._turn: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
        self._compressor: Any = module.compressor
        self._indexer: Any = getattr(module.compressor, "indexer", None)
        self._of_groups: HeadProduct | None = None

    def __call__(
        self, hidden_states: Tensor, position_embeddings: dict[str, Turns], *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        module = self._module
        cos, sin = position_embeddings[module.rope_layer_type]
        low_1TR = module.q_a_norm(module.q_a_proj(hidden_states))
        q_1THD = module.q_b_norm(module.q_b_proj(low_1TR).unflatten(-1, (-1, module.head_dim)))
        q_THD = self._turn(q_1THD, cos, sin, unsqueeze_dim=2)[0]
        kv_1T1D = module.kv_norm(module.kv_proj(hidden_states)).unsqueeze(2)
        kv_T1D = self._turn(kv_1T1D, cos, sin, unsqueeze_dim=2)[0]
        params = LayerParams(module.scaling, sinks=module.sinks, latent_values=module.head_dim)
        out_THD = self._attend(hidden_states, low_1TR, q_THD, kv_T1D, (cos, sin), params)
        # Values were turned as keys are: turned back by the query's position, what is left is their distance.
        out_1THD = self._turn(out_THD.unsqueeze(0), cos, -sin, unsqueeze_dim=2)
        grouped_TGI = out_1THD[0].flatten(1).unflatten(-1, (module.o_a_proj.n_groups, -1))
        return module.o_b_proj(self._product()(grouped_TGI).flatten(1).unsqueeze(0)), None

    def _product(self) -> HeadProduct:
        """Of each group of heads; made of the weights once."""
        if self._of_groups is None:
            first = self._module.o_a_proj
            weight_GOI = first.weight.detach().unflatten(0, (first.n_groups, -1))
            self._of_groups = head_product(weight_GOI, self._module.o_b_proj)
        return self._of_groups

    def _attend(
        self, hidden_states: Tensor, low_1TR: Tensor, q_THD: Tensor, kv_T1D: Tensor, turns: Turns, params: LayerParams
    ) -> Tensor:
        layer, compressor = self._module.layer_idx, self._compressor
        if compressor is None:  # a window alone
            return self._paged.attend_packed(q_THD, kv_T1D, kv_T1D[..., :0], layer, params)
        gives = [compressor.kv_proj, compressor.gate_proj]
        if self._indexer is not None:
            gives += [self._indexer.kv_proj, self._indexer.gate_proj]
        given_TC = torch.cat([project(hidden_states)[0] for project in gives], dim=-1)
        index = None if self._indexer is None else self._asked(hidden_states, low_1TR, turns)
        return self._paged.attend_compressed(layer, q_THD, kv_T1D, given_TC, self._entries, index, params)

    def _entries(self, given_NSC: Tensor, has_before_N: Tensor, first_N: Tensor) -> Sequence[Tensor]:
        own = 2 * self._compressor.kv_proj.out_features
        made = [self._entry(self._compressor, given_NSC[..., :own], has_before_N, first_N)]
        if self._indexer is not None:
            made.append(self._entry(self._indexer, given_NSC[..., own:], has_before_N, first_N))
        return made

    def _entry(self, module: Any, given_NSC: Tensor, has_before_N: Tensor, first_N: Tensor) -> Tensor:
        """[N,D]: what tokens gave together, normed, and turned by the position of the first of them.

        module: a compressor, or an indexer"""
        entry_ND = module.kv_norm(weighed(given_NSC, module.position_bias, has_before_N))
        cos, sin = module.rotary_emb(
            entry_ND.unsqueeze(0), position_ids=first_N.unsqueeze(0), layer_type=module.rope_layer_type
        )
        return self._turn(entry_ND[None, None], cos, sin)[0, 0]

    def _asked(self, hidden_states: Tensor, low_1TR: Tensor, turns: Turns) -> Index:
        indexer, scorer = self._indexer, self._indexer.scorer
        q_1TIE = indexer.q_b_proj(low_1TR).unflatten(-1, (-1, indexer.head_dim))
        q_1TIE = self._turn(q_1TIE, *turns, unsqueeze_dim=2)
        scale = scorer.softmax_scale * scorer.weights_scaling
        weights_TI = scorer.weights_proj(hidden_states)[0].float() * scale
        return Index(Asked(q_1TIE[0], weights_TI), indexer.index_topk)
