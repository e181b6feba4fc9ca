"""Entries of several tokens: DeepSeek-V4's compressed keys and values, index keys of pools of GLM-5.3 and Qwen4-Exp.

Each token gives a value and its weight to an entry, and where entries overlap to the one after it as well. An entry is
made when the last of its tokens is computed; until then what they gave is kept. Entries and what tokens give are
"layers" of their own in the plan (`Compression`), so blocks are taken, given back and found again as all others are.

Suffixes: N entries    S tokens that an entry is made of    C numbers that a token gives    R rows    P blocks of a row
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import GroupBatch, upload
from ...kernels.token_choice import Asked, ChoiceBatch, choose, has_frames
from ...kernels.transfer import Transfer
from ...kvcache.plan import MemoryPlan
from ...kvcache.spec import LayerSpec
from ..checkpoint.layer_specs import ENTRIES, GIVERS
from ..pages import Pages
from .attention import PagedAttention, step_masks
from .gathering import ragged
from .gathering_frames import GatheringFrame

Make = Callable[[Tensor, Tensor, Tensor], Sequence[Tensor]]
"""(what tokens gave [N,S,C], whether there are tokens before its own [N], first positions [N]) -> entries [N,D], and
their index keys [N,E] if there are such."""


class Entries(NamedTuple):
    """What layers have in common for which entries lie in the same places."""

    place: int  # of their group among the step's batches
    givers: int  # likewise, of what tokens give
    tokens: int  # of an entry


@dataclass(frozen=True, slots=True, eq=False)
class Making:
    """The entries whose last tokens a step computes, all on the device."""

    given_page_NS: Tensor
    given_offset_NS: Tensor
    has_before_N: Tensor
    first_N: Tensor  # positions of the first tokens
    page_N: Tensor
    place_N: Tensor  # of the entry in its page


class EntryAttention(PagedAttention):
    """Attention of a model some of whose layers keep entries."""

    gathers = True

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device):
        self._entries_of = {layer.index - ENTRIES: layer for layer in layers if layer.entry_tokens > 1}
        super().__init__([layer for layer in layers if layer.index < ENTRIES], dtype, device)
        self._batches: Sequence[GroupBatch] = ()
        self._makings: dict[Entries, Making | None] = {}
        self._lies: dict[int, Entries] = {}
        self._frame: GatheringFrame | None = None  # of a recorded step
        self._can_be_recorded = has_frames(device)
        self._places: dict[int, int] = {}  # layer, or number of its entries -> place of its group
        self._all_pages: Pages | None = None

    def use(self, pages: Pages, plan: MemoryPlan) -> None:
        super().use(pages, plan)
        self._all_pages = pages
        masks = step_masks(plan)
        places = {index: pages.place_of(index) for index in pages.tokens}
        self._places = {index: masks.index((g, plan.groups[g].mask_of(n))) for index, (g, n) in places.items()}
        self._lies = {index: self._lie(index) for index in self._entries_of}

    def forget_pages(self) -> None:
        super().forget_pages()
        self._all_pages = None

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        super().begin_step(batches, positions_T)
        self._batches, self._makings, self._frame = [of_rows(batch) for batch in batches], {}, None

    # -- recorded steps ----------------------------------------------------------------------------------------------

    @property
    def has_frames(self) -> bool:
        return self._can_be_recorded and self.backend.capabilities.held_tables

    def frame(self, rows: int, tokens: int) -> GatheringFrame:
        return GatheringFrame(rows, tokens, self.backend, self._device)

    def refill(self, frame: GatheringFrame, batches: Sequence[GroupBatch], transfer: Transfer) -> bool:
        return frame.refill(batches, transfer)

    def go_by(self, frame: GatheringFrame) -> None:
        self._batches, self._makings, self._frame = frame.batches, {}, frame

    # -- entries -----------------------------------------------------------------------------------------------------

    @property
    def pages(self) -> Pages:
        assert self._all_pages is not None, "allocate pages first"
        return self._all_pages

    def entries(self, layer: int) -> Tensor:
        """The entries of a layer, in pages: [pages,entries of a page,1,D]."""
        return self.pages.tokens[ENTRIES + layer]

    def give(self, layer: int, given_TC: Tensor, make: Make) -> None:
        """Write what the step's tokens give, and make the entries that are complete."""
        entries = self._lies[layer]
        givers, meta = self.pages.tokens[GIVERS + layer], self._metas[entries.givers]
        givers[meta.token_page, meta.token_offset, 0] = given_TC
        if entries not in self._makings:
            frame = self._frame
            self._makings[entries] = self._made_in_step(entries) if frame is None else self._made_in(frame, entries)
        making = self._makings[entries]
        if making is None:
            return
        given_NSC = givers[making.given_page_NS, making.given_offset_NS, 0]
        made = make(given_NSC, making.has_before_N, making.first_N)
        self.entries(layer)[making.page_N, making.place_N, 0] = made[0]
        if len(made) > 1:
            self.pages.beside_tokens[ENTRIES + layer][making.page_N, making.place_N] = made[1]

    def entry_table(self, layer: int, rows: np.ndarray, most: int) -> Tensor:
        """Blocks in which the entries of so many rows of the step lie, up to number `most`. int64 [R,P]"""
        entries = self._lies[layer]
        batch = self._batches[entries.place]
        table = batch.block_table[rows, : -(-most * entries.tokens // batch.block_tokens)]
        return upload(np.ascontiguousarray(table, dtype=np.int64), self._device)

    def entry_places(self, layer: int, table_RP: Tensor, row: Tensor, number: Tensor) -> tuple[Tensor, Tensor]:
        """Page, and place in it, of entries of rows of a table."""
        entries = self._lies[layer]
        block, place = _place_of(number, entries.tokens, self._batches[entries.place].block_tokens)
        return table_RP[row, block], place

    def choice_among(self, layer: int, table_RP: Tensor, seen_N: np.ndarray) -> ChoiceBatch:
        """For queries that see the first so many entries each, more than none."""
        entries, newest_N = self._lies[layer], np.maximum(seen_N.astype(np.int64) - 1, 0)
        size, longest = self._batches[entries.place].block_tokens, int(seen_N.max())
        if size % entries.tokens == 0:
            return ChoiceBatch(table_RP, upload(newest_N, self._device), longest, size // entries.tokens)
        return ChoiceBatch(table_RP, upload(newest_N, self._device), longest, 0)

    def entries_in(self, frame: GatheringFrame, layer: int, queries: slice) -> ChoiceBatch:
        """Among which queries of a recorded step choose. One that sees none is given the first, but its length says
        that it sees none."""
        tokens = self._lies[layer].tokens
        some = frame.queries(self._lies[layer].place).of(queries)
        newest_N = ((some.positions_N + 1) // tokens - 1).clamp_(min=0)
        return replace(some, positions_N=newest_N, longest=max(1, some.longest // tokens), entry_tokens=tokens)

    def choose_entries(self, layer: int, asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
        """[N,most]: numbers of entries, in order; zeros behind those of a query that sees fewer.

        keys: of entries, in their pages"""
        if batch.block_tokens:
            return choose(asked, keys_PBE, batch, most)
        # Blocks have not always as many entries: the keys of a row are laid side by side, as if in one block.
        rows = torch.arange(len(batch.table_RP), device=keys_PBE.device).unsqueeze(1)
        numbers = torch.arange(batch.longest, device=keys_PBE.device)
        keys_RLE = keys_PBE[self.entry_places(layer, batch.table_RP, rows, numbers)]
        one_block = replace(batch, table_RP=rows, block_tokens=batch.longest)
        return choose(asked, keys_RLE, one_block, most)

    def _lie(self, layer: int) -> Entries:
        tokens = self._entries_of[layer].entry_tokens
        return Entries(self._places[ENTRIES + layer], self._places[GIVERS + layer], tokens)

    def _made_in_step(self, entries: Entries) -> Making | None:
        """None: no entry is complete with this step."""
        batch, givers = self._batches[entries.place], self._batches[entries.givers]
        kv_lens, tokens = batch.kv_lens.astype(np.int64), entries.tokens
        known = (kv_lens - batch.query_lens) // tokens
        number, row = ragged(kv_lens // tokens - known)
        if len(number) == 0:
            return None
        number = number + known[row]
        first = number * tokens
        # Where entries overlap, those before give to them, too. Before the first of all there are none.
        behind = (givers.window_tokens or tokens) - tokens
        token = np.maximum(first[:, None] + np.arange(-behind, tokens), 0)
        block, offset = np.divmod(token, givers.block_tokens)
        own_block, place = _place_of(number, tokens, batch.block_tokens)
        places = (
            givers.block_table[row[:, None], block].astype(np.int64),
            offset,
            number > 0,
            first,
            batch.block_table[row, own_block].astype(np.int64),
            place,
        )
        return Making(*(upload(np.ascontiguousarray(each), self._device) for each in places))

    def _made_in(self, frame: GatheringFrame, entries: Entries) -> Making:
        """In a recorded step: as many as can be complete. Those that are not go into the null page."""
        tokens = entries.tokens
        last, givers = frame.queries(entries.place, tokens), frame.queries(entries.givers, tokens)
        assert last.starts_R is not None and givers.starts_R is not None, "tables lie on the device"
        known_N = last.positions_N + 1
        number_N = (known_N // tokens - 1).clamp_(min=0)
        first_N = number_N * tokens
        behind = (frame.batches[entries.givers].window_tokens or tokens) - tokens
        token_NS = (first_N[:, None] + torch.arange(-behind, tokens, device=self._device)).clamp_(min=0)
        given_page_NS = givers.table_RP[givers.starts_R[:, None] + token_NS // givers.block_tokens].long()
        own_block_N, place_N = _place_of(number_N, tokens, last.block_tokens)
        is_complete_N = known_N % tokens == 0
        page_N = last.table_RP[last.starts_R + own_block_N].long() * is_complete_N
        return Making(given_page_NS, token_NS % givers.block_tokens, number_N > 0, first_N, page_N, place_N)


def weighed(given_NSC: Tensor, bias_SC: Tensor, has_before_N: Tensor) -> Tensor:
    """[N,D]: of the values that tokens gave, the sum by their weights.

    bias: what is added to weights, by the place of a token. With twice as many numbers as an entry has, entries
    overlap: the first half is what a token gives to the entry after its own"""
    values, weights = given_NSC.chunk(2, dim=-1)
    tokens, size = len(bias_SC), bias_SC.shape[1] // (given_NSC.shape[1] // len(bias_SC))
    if given_NSC.shape[1] == tokens:
        weights = weights + bias_SC
    else:
        values = torch.cat((values[:, :tokens, :size], values[:, tokens:, size:]), dim=1)
        before = weights[:, :tokens, :size] + bias_SC[:, :size]
        before = before.masked_fill(~has_before_N[:, None, None], float("-inf"))
        weights = torch.cat((before, weights[:, tokens:, size:] + bias_SC[:, size:]), dim=1)
    # Along the last dimension torch sums up each row in an order of its own, however many rows there are.
    values_NDS, weights_NDS = values.mT.contiguous(), weights.mT.contiguous()
    return (values_NDS * weights_NDS.softmax(dim=-1, dtype=torch.float32).to(values.dtype)).sum(dim=-1)


def of_rows(batch: GroupBatch) -> GroupBatch:
    """With a block table of its own, where the host's whole table is given."""
    if batch.held is None:
        return batch
    return replace(batch, block_table=batch.block_table[batch.held.slots], held=None)


def _place_of(number: Any, tokens: int, block_tokens: int) -> tuple[Any, Any]:
    """The block of a sequence in which an entry lies, that of its last token, and its place there."""
    block = ((number + 1) * tokens - 1) // block_tokens
    return block, number - block * block_tokens // tokens
