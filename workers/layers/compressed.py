"""Attention to a window, and to entries of several tokens each: DeepSeek-V4.

One vector per token serves all heads as key and as value. Beside a window of them, a layer keeps one entry for every
few tokens, made of what each of these gives: a value and its weight. Until an entry is made, what its tokens gave is
kept as well; both are "layers" of their own in the plan (`Compression`). A query attends to its window and to entries
of tokens that it sees: to all of them, or to those that an index chooses. All of it is gathered side by side, a page
for each query, over which the backend attends as over any other:

    window of 4, entries of 3      tokens 0 .. 8, the query is 8       gathered    [ 5 6 7 8 | 0-2 3-5 6-8 ]

Suffixes beyond those of attention: N queries of a part, or entries    S tokens that an entry is made of
                                    C numbers that a token gives    E size of an index key    L numbers of all tokens
                                    that are gathered for the queries of a part
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import GroupBatch, GroupMeta, LayerParams, upload
from ...kernels.token_choice import Asked, ChoiceBatch, choose
from ...kvcache.plan import MemoryPlan
from ...kvcache.spec import LayerSpec
from ..checkpoint.layer_specs import entries_layer, givers_layer
from ..pages import Pages
from .attention import PagedAttention
from .chosen import GATHERED_TOKENS, of_rows

WIDTH = 16
"""Gathered pages have a multiple of so many tokens, which every backend takes."""

Turns = tuple[Tensor, Tensor]
"""Cosines and sines."""


class Kind(NamedTuple):
    """What layers have in common for which a step is laid out in the same way."""

    window: int  # places of their groups among the step's batches
    entries: int
    givers: int
    tokens: int  # of an entry
    overlaps: bool
    most: int | None  # entries that a query attends to; None: all that it sees


class Index(NamedTuple):
    """What the queries of a layer ask of the index keys of entries, [T,..] each."""

    q_TIE: Tensor
    weights_TI: Tensor  # float32
    most: int


Entries = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]
"""(what tokens gave [N,S,C], whether there is an entry before [N], first positions [N]) -> entries [N,D], and their
index keys [N,E] if there are such."""


# -- what a step is ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class _Making:
    """The entries whose last tokens a step computes, all on the device."""

    given_page_NS: Tensor
    given_offset_NS: Tensor
    has_before_N: Tensor
    first_N: Tensor  # positions of the first tokens
    page_N: Tensor
    place_N: Tensor  # of the entry in its page


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


class _Rows(NamedTuple):
    """Of one step, the batches of a kind's groups, and their rows."""

    window: GroupBatch
    entries: GroupBatch
    givers: GroupBatch


class CompressingAttention(PagedAttention):
    """Attention of a model whose layers keep entries of several tokens."""

    gathers = True

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device):
        self._entries = {layer.index: layer for layer in layers if layer.entry_tokens > 1}
        self._count = len(layers) - 2 * len(self._entries)
        super().__init__([layer for layer in layers if layer.index < self._count], dtype, device)
        self._batches: Sequence[GroupBatch] = ()
        self._makings: dict[Kind, _Making | None] = {}
        self._parts: dict[Kind, list[_Part]] = {}
        self._kinds: dict[tuple[int, int | None], Kind] = {}
        self._pages: Pages | None = None
        self._places: dict[int, int] = {}  # of the groups of entries, and of what tokens give

    def use(self, pages: Pages, plan: MemoryPlan) -> None:
        super().use(pages, plan)
        self._pages, self._kinds = pages, {}
        self._places = {index: self._place(index, pages, plan) for index in pages.tokens}

    def forget_pages(self) -> None:
        super().forget_pages()
        self._pages = None

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        super().begin_step(batches, positions_T)
        self._batches, self._makings, self._parts = [of_rows(batch) for batch in batches], {}, {}

    def attend_compressed(
        self,
        layer: int,
        q_THD: Tensor,
        kv_T1D: Tensor,
        given_TC: Tensor,
        make: Entries,
        index: Index | None,
        params: LayerParams,
    ) -> Tensor:
        """Write what is new of one layer, make the entries that are complete, then attend. [T,H,D]"""
        if self._backend is None:
            return self.attend_packed(q_THD, kv_T1D, kv_T1D[..., :0], layer, params)
        assert self._pages is not None, "allocate pages first"
        kind = self._kind(layer, None if index is None else index.most)
        views = self._pages.tokens
        givers, entries = givers_layer(layer, self._count), entries_layer(layer, self._count)
        # Tokens are written first: entries are made of them, and queries see both.
        self._backend.write(views[layer], kv_T1D, kv_T1D[..., :0], self._metas[kind.window])
        meta = self._metas[kind.givers]
        views[givers][meta.token_page, meta.token_offset, 0] = given_TC
        making = self._making(kind)
        if making is not None:
            given_NSC = views[givers][making.given_page_NS, making.given_offset_NS, 0]
            made = make(given_NSC, making.has_before_N, making.first_N)
            views[entries][making.page_N, making.place_N, 0] = made[0]
            if index is not None:
                self._pages.beside_tokens[entries][making.page_N, making.place_N] = made[1]
        out_THD = torch.empty_like(q_THD)
        for part in self._parts_of(kind):
            chosen_L = self._chosen(part, entries, index, kind)
            out_THD[part.tokens] = self._attend_part(part, q_THD, views[layer], views[entries], chosen_L, kind, params)
        return out_THD

    def _attend_part(
        self,
        part: _Part,
        q_THD: Tensor,
        window: Tensor,
        entries: Tensor,
        chosen_L: Tensor,
        kind: Kind,
        params: LayerParams,
    ) -> Tensor:
        """Over pages [pages,tokens,1,D]. [N,H,D]"""
        q_NHD = q_THD[part.tokens].contiguous()
        pages = window.new_zeros(len(q_NHD) * part.width, 1, window.shape[3])
        pages[part.window_to_L] = window[part.window_page_L, part.window_offset_L]
        block_tokens = self._batches[kind.entries].block_tokens
        block_L = ((chosen_L + 1) * kind.tokens - 1) // block_tokens
        place_L = chosen_L - block_L * block_tokens // kind.tokens
        pages[part.entry_to_L] = entries[part.table_RP[part.entry_row_L, block_L], place_L]
        out_NHD = torch.empty_like(q_NHD)
        self.backend.attend(q_NHD, pages.unflatten(0, (-1, part.width)), params, part.gathered, out_NHD)
        return out_NHD

    def _chosen(self, part: _Part, entries: int, index: Index | None, kind: Kind) -> Tensor:
        """Which entries are gathered: [L]."""
        if part.choice is None or index is None:
            return part.entry_L
        assert self._pages is not None, "allocate pages first"
        keys_PBE, batch = self._pages.beside_tokens[entries], part.choice
        if batch.block_tokens == batch.longest:  # blocks are no multiple of what an entry is of: see `_choice`
            block_tokens = self._batches[kind.entries].block_tokens
            numbers = torch.arange(batch.longest, device=keys_PBE.device)
            block = ((numbers + 1) * kind.tokens - 1) // block_tokens
            keys_PBE = keys_PBE[part.table_RP[:, block], numbers - block * block_tokens // kind.tokens]
        asked = Asked(index.q_TIE[part.tokens], index.weights_TI[part.tokens])
        return choose(asked, keys_PBE, batch, index.most).view(-1)[part.entry_L]

    # -- once per step and kind of layers ------------------------------------------------------------------------------

    @staticmethod
    def _place(index: int, pages: Pages, plan: MemoryPlan) -> int:
        from .attention import step_masks

        g, n = pages.place_of(index)
        return step_masks(plan).index((g, plan.groups[g].mask_of(n)))

    def _kind(self, layer: int, most: int | None) -> Kind:
        kind = self._kinds.get((layer, most))
        if kind is None:
            entries = entries_layer(layer, self._count)
            places = (self._places[each] for each in (layer, entries, givers_layer(layer, self._count)))
            kind = Kind(*places, self._entries[entries].entry_tokens, most is not None, most)
            self._kinds[layer, most] = kind
        return kind

    def _rows(self, kind: Kind) -> _Rows:
        return _Rows(self._batches[kind.window], self._batches[kind.entries], self._batches[kind.givers])

    def _making(self, kind: Kind) -> _Making | None:
        """None: no entry is complete with this step."""
        if kind not in self._makings:
            self._makings[kind] = _making(self._rows(kind), kind, self._device)
        return self._makings[kind]

    def _parts_of(self, kind: Kind) -> list[_Part]:
        if kind not in self._parts:
            rows = self._rows(kind)
            self._parts[kind] = [
                self._part(rows, *queries, kind) for queries in _queries_of_parts(rows, kind)
            ]
        return self._parts[kind]

    def _part(self, rows: _Rows, of: np.ndarray, tokens: np.ndarray, positions: np.ndarray, kind: Kind) -> _Part:
        """of: the rows of the step, one for each query or one for all."""
        device, size = self._device, rows.entries.block_tokens
        row_N = np.arange(len(tokens)) if len(of) > 1 else np.zeros(len(tokens), dtype=np.int64)
        seen_N, oldest_N = (positions + 1) // kind.tokens, rows.window.oldest_visible(positions)
        window_N, entries_N = positions - oldest_N + 1, seen_N if kind.most is None else np.minimum(seen_N, kind.most)
        width = -(-int((window_N + entries_N).max()) // WIDTH) * WIDTH
        # Windows come first, and behind each of them its entries.
        in_window, of_window = _ragged(window_N)
        in_entries, of_entry = _ragged(entries_N)
        block, offset = np.divmod(oldest_N[of_window] + in_window, rows.window.block_tokens)
        longest = max(1, int(seen_N.max()))
        table = rows.entries.block_table[of, : -(-longest * kind.tokens // size)].astype(np.int64)
        chooses = kind.most is not None and longest > kind.most
        own_pages = np.arange(len(tokens), dtype=np.int32).reshape(-1, 1)
        lengths = (window_N + entries_N).astype(np.int32)
        run = slice(int(tokens[0]), int(tokens[-1]) + 1)
        table_RP = upload(np.ascontiguousarray(table), device)
        return _Part(
            tokens=run if run.stop - run.start == len(tokens) else upload(tokens, device),
            width=width,
            window_page_L=upload(rows.window.block_table[of[row_N[of_window]], block].astype(np.int64), device),
            window_offset_L=upload(offset, device),
            window_to_L=upload(of_window * width + in_window, device),
            table_RP=table_RP,
            entry_row_L=upload(row_N[of_entry], device),
            entry_L=upload(of_entry * kind.most + in_entries if chooses else in_entries, device),
            entry_to_L=upload(of_entry * width + window_N[of_entry] + in_entries, device),
            choice=_choice(table_RP, np.maximum(seen_N - 1, 0), longest, size, kind, device) if chooses else None,
            gathered=self.backend.prepare(GroupBatch(own_pages, np.ones_like(lengths), lengths, width), device),
        )


def _choice(
    table_RP: Tensor, newest_N: np.ndarray, longest: int, size: int, kind: Kind, device: torch.device
) -> ChoiceBatch:
    """Entries in the place of tokens. Where a block has not always as many of them, the keys of a row are laid side by
    side before, as one block."""
    positions_N = upload(newest_N.astype(np.int64), device)
    if size % kind.tokens == 0 and size // kind.tokens != longest:
        return ChoiceBatch(table_RP, positions_N, longest, size // kind.tokens)
    rows = torch.arange(len(table_RP), device=device).unsqueeze(1)
    return ChoiceBatch(rows, positions_N, longest, longest)


def _making(rows: _Rows, kind: Kind, device: torch.device) -> _Making | None:
    kv_lens, size = rows.entries.kv_lens.astype(np.int64), rows.entries.block_tokens
    known = (kv_lens - rows.entries.query_lens) // kind.tokens
    number, row = _ragged(kv_lens // kind.tokens - known)
    if len(number) == 0:
        return None
    number = number + known[row]
    first, last = number * kind.tokens, (number + 1) * kind.tokens - 1
    # What tokens give to an entry, those before it included where entries overlap. Before the first there are none.
    behind = kind.tokens if kind.overlaps else 0
    token = np.maximum(first[:, None] + np.arange(-behind, kind.tokens), 0)
    block, offset = np.divmod(token, rows.givers.block_tokens)
    places = (
        rows.givers.block_table[row[:, None], block].astype(np.int64),
        offset,
        number > 0,
        first,
        rows.entries.block_table[row, last // size].astype(np.int64),
        number - last // size * size // kind.tokens,
    )
    return _Making(*(upload(np.ascontiguousarray(place), device) for place in places))


def _ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[2, 0, 3] -> [0, 1, 0, 1, 2] and [0, 0, 2, 2, 2]."""
    of = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(of)) - (np.cumsum(counts) - counts)[of], of


def _queries_of_parts(rows: _Rows, kind: Kind) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rows, packed tokens and their positions, as many as are gathered at once."""
    batch = rows.window
    firsts, kv_lens = batch.first_token(), batch.kv_lens.astype(np.int64)
    entries = kv_lens // kind.tokens
    widths = (batch.window_tokens or 0) + (entries if kind.most is None else np.minimum(entries, kind.most))
    # One query each of several rows.
    single = np.flatnonzero(batch.query_lens == 1)
    together = max(1, GATHERED_TOKENS // int(widths[single].max(initial=1)))
    for start in range(0, len(single), together):
        some = single[start : start + together]
        yield some, firsts[some], kv_lens[some] - 1
    # Several queries of one row.
    for row in np.flatnonzero(batch.query_lens > 1):
        count, end = int(batch.query_lens[row]), int(kv_lens[row])
        together = max(1, GATHERED_TOKENS // int(widths[row]))
        for start in range(0, count, together):
            tokens = np.arange(start, min(start + together, count))
            yield np.array([row]), firsts[row] + tokens, end - count + tokens


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
        grouped = out_1THD.flatten(2).unflatten(-1, (module.o_a_proj.n_groups, -1))
        return module.o_b_proj(module.o_a_proj(grouped).flatten(2)), None

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
        """[N,D]: the sum of values by their weights, normed, and turned by the position of its first token.

        module: a compressor, or an indexer"""
        values, gates = given_NSC.chunk(2, dim=-1)
        size, bias = module.head_dim, module.position_bias
        if values.shape[-1] == size:
            gates = gates + bias
        else:  # of the tokens before, what they give to the entry after theirs
            tokens = len(bias)
            values = torch.cat((values[:, :tokens, :size], values[:, tokens:, size:]), dim=1)
            before = (gates[:, :tokens, :size] + bias[:, :size]).masked_fill(
                ~has_before_N[:, None, None], float("-inf")
            )
            gates = torch.cat((before, gates[:, tokens:, size:] + bias[:, size:]), dim=1)
        weights = gates.softmax(dim=1, dtype=torch.float32).to(values.dtype)
        entry_ND = module.kv_norm((values * weights).sum(dim=1))
        cos, sin = module.rotary_emb(
            entry_ND.unsqueeze(0), position_ids=first_N.unsqueeze(0), layer_type=module.rope_layer_type
        )
        return self._turn(entry_ND[None, None], cos, sin)[0, 0]

    def _asked(self, hidden_states: Tensor, low_1TR: Tensor, turns: Turns) -> Index:
        indexer, scorer = self._indexer, self._indexer.scorer
        q_1TIE = indexer.q_b_proj(low_1TR).unflatten(-1, (-1, indexer.head_dim))
        q_1TIE = self._turn(q_1TIE, *turns, unsqueeze_dim=2)
        scale = scorer.softmax_scale * scorer.weights_scaling
        return Index(q_1TIE[0], scorer.weights_proj(hidden_states)[0].float() * scale, indexer.index_topk)
