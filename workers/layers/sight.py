"""What the tokens of a step see of an encoder's output, such as an image.

The tokens of a row fall into stretches. All tokens of a stretch see the same, and those in front of the first image see
nothing. Each stretch is a row of its own to attention, whose keys are the tokens of the encoder that it sees:

    a prompt with two images      t t t t I t t t I t t t
    stretches                     0 keys  5 keys  10 keys

Steps in which no token sees anything have no sight: they pass cross layers by. Of other steps, only tokens that see
something go through these layers. A recorded step cannot choose among its tokens: all go through, and those that see
nothing keep what they had before.

Suffixes: T packed tokens    S stretches    C hidden size
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta, upload
from ...kernels.transfer import Transfer
from ...proto.step import View
from ..launched import Rows
from ..slots import SlotTables

NOTHING = View(0, 0, 0)
"""What tokens see that come before the first view."""


class Sight(NamedTuple):
    """Of a step in which some token sees something. Host memory."""

    sees_T: np.ndarray  # bool
    batches: Mapping[int, GroupBatch]  # by group; a row for each stretch, without keys where it sees nothing


class Seen(Protocol):
    """What a cross layer computes in a forward pass."""

    @property
    def metas(self) -> Mapping[int, GroupMeta]:
        """By group."""
        ...

    def taken(self, hidden_1TC: Tensor) -> Tensor:
        """Hidden states of the tokens that go through the layer."""
        ...

    def put(self, hidden_1TC: Tensor, new: Tensor) -> Tensor:
        """All hidden states, with the new ones of those tokens."""
        ...


class SeenOnce(NamedTuple):
    """Of one step: tokens that see something, and no others."""

    tokens: Tensor
    metas: Mapping[int, GroupMeta]

    def taken(self, hidden_1TC: Tensor) -> Tensor:
        return hidden_1TC[0, self.tokens]

    def put(self, hidden_1TC: Tensor, new: Tensor) -> Tensor:
        return hidden_1TC.index_copy(1, self.tokens, new.unsqueeze(0))


class SeenInFrame(NamedTuple):
    """Of steps that are recorded: all tokens. Its tensors stay where they are, and attention computes nothing for
    tokens that see nothing."""

    sees_T1: Tensor  # bool
    metas: Mapping[int, GroupMeta]

    def taken(self, hidden_1TC: Tensor) -> Tensor:
        return hidden_1TC[0]

    def put(self, hidden_1TC: Tensor, new: Tensor) -> Tensor:
        return torch.where(self.sees_T1, new, hidden_1TC)


def sight_of(rows: Rows, slot_tables: SlotTables, groups: Sequence[int], block_tokens: int) -> Sight | None:
    """None: no token of the step sees anything."""
    views = [slot_tables[slot].views for slot in rows.slots]
    if not any(views):
        return None
    stops = (rows.computed + rows.query_lens).tolist()
    asked = enumerate(zip(rows.computed.tolist(), stops, views, strict=True))
    found = [(row, tokens, *view[1:]) for row, of_row in asked for tokens, view in _stretches(*of_row)]
    row_S, tokens_S, first_block_S, seen_S = np.array(found, dtype=np.int32).T
    if not seen_S.any():
        return None
    slots_S = rows.slots[row_S]
    block_SP = first_block_S[:, None] + np.arange(-(-int(seen_S.max()) // block_tokens))
    batches = {}
    for g in groups:
        table = slot_tables.block_tables[g]
        blocks = table[slots_S[:, None], np.minimum(block_SP, table.shape[1] - 1)]
        batches[g] = GroupBatch(blocks, tokens_S, seen_S, block_tokens, is_causal=False)
    return Sight(np.repeat(seen_S > 0, tokens_S), batches)


def _stretches(first: int, stop: int, views: Sequence[View]) -> Iterator[tuple[int, View]]:
    """Of tokens first .. stop - 1 of a sequence: how many see the same, and what."""
    ends = [*(view.position for view in views), stop]
    for view, end in zip((NOTHING, *views), ends, strict=True):
        tokens = min(end, stop) - max(view.position, first)
        if tokens > 0:
            yield tokens, view


def seen_once(sight: Sight, backend: Backend, device: torch.device) -> SeenOnce:
    """Of a step that goes the usual way."""
    metas = {g: backend.prepare(_with_keys(batch), device) for g, batch in sight.batches.items()}
    return SeenOnce(upload(np.flatnonzero(sight.sees_T), device), metas)


def _with_keys(batch: GroupBatch) -> GroupBatch:
    some = batch.kv_lens > 0
    return replace(
        batch,
        block_table=batch.block_table[some],
        query_lens=batch.query_lens[some],
        kv_lens=batch.kv_lens[some],
    )


class SightFrames:
    """Where recorded steps read what their tokens see. Frames of a kind lie in the memory of the largest.

    A row of a decode step is one stretch. In a step with prompts each token may be one.
    """

    def __init__(
        self,
        backend: Backend,
        widths: Mapping[int, int],
        block_tokens: int,
        device: torch.device,
        most_rows: int,
        most_tokens: int,
    ):
        """backend: with frames of any width and mixture of rows
        widths: blocks of an encoder's output, by group
        most_rows, most_tokens: of decode steps, and of steps with prompts"""
        self._backend = backend
        self._widths = widths
        self._block_tokens = block_tokens
        self._device = device
        self._most = {True: most_rows, False: most_tokens}
        self._largest: dict[bool, SeenInFrame] = {}  # by: of decode steps?

    def frame(self, rows: int, tokens: int, *, is_decode: bool) -> SeenInFrame:
        """Of steps of one shape. Undefined before `refill`."""
        if is_decode not in self._largest:
            self._largest[is_decode] = self._make_largest(self._most[is_decode], is_decode=is_decode)
        largest, stretches = self._largest[is_decode], rows if is_decode else tokens
        metas = {g: self._backend.narrow(meta, stretches, tokens) for g, meta in largest.metas.items()}
        return SeenInFrame(largest.sees_T1[:tokens], metas)

    def _make_largest(self, stretches: int, *, is_decode: bool) -> SeenInFrame:
        lens = np.ones(stretches, dtype=np.int32)
        if not is_decode:
            lens[0] += 1  # so that stretches may have any number of tokens
        batches = {
            g: GroupBatch(np.zeros((stretches, width), np.int32), lens, 0 * lens, self._block_tokens, is_causal=False)
            for g, width in self._widths.items()
        }
        made = {g: self._backend.frame(batch, self._device) for g, batch in batches.items()}
        sees_T1 = torch.zeros(stretches, 1, dtype=torch.bool, device=self._device)
        return SeenInFrame(sees_T1, {g: meta for g, meta in made.items() if meta is not None})

    def refill(self, frame: SeenInFrame, sight: Sight, transfer: Transfer) -> bool:
        """Have another step put into a frame. False: it does not fit."""
        more = len(frame.sees_T1) - len(sight.sees_T)
        transfer.put(frame.sees_T1, np.pad(sight.sees_T, (0, more)))
        return all(self._backend.refill(meta, sight.batches[g], transfer) for g, meta in frame.metas.items())
