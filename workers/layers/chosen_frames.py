"""Chosen tokens in recorded steps: what a replay chooses by stays where it is, and is filled anew for each step.

Every row has one query, and every row chooses: one that sees no more tokens than it may choose takes all of them. So
which rows choose does not change what is launched. Tables are those that lie on the device (`HeldTables`). Rows go in
parts, for whose gathered entries memory has room.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta
from ...kernels.token_choice import ChoiceBatch
from ...kernels.transfer import Transfer
from .gathering import GATHERED_TOKENS


class Kind(NamedTuple):
    """What layers have in common for which the queries of a step are laid out in the same way."""

    most: int  # tokens that a query attends to
    choices: int = 1  # of a query: one for all heads, or one for each head of keys
    size: int = 1  # tokens that are chosen together
    is_of_whole: bool = False  # those behind the last that are complete are attended to unasked

    def counts(self, positions: np.ndarray) -> np.ndarray:
        """How many tokens queries attend to; the last block of each ends with the query."""
        if self.is_of_whole:
            pools = np.minimum((positions + 1) // self.size, self.most // self.size)
            return (pools * self.size + (positions + 1) % self.size).astype(np.int32)
        blocks = np.minimum(positions // self.size, self.most // self.size - 1)
        return (blocks * self.size + positions % self.size + 1).astype(np.int32)


class FramedPart:
    """Some rows of a frame, for all layers of a group that choose alike."""

    def __init__(self, rows: slice, kind: Kind, of_group: GroupBatch, backend: Backend, device: torch.device):
        assert of_group.held is not None, "frames are of tables that lie on the device"
        self.tokens = rows  # each row has one
        self._kind = kind
        self._backend = backend
        self._starts_R, self._positions_R = torch.zeros(2, rows.stop - rows.start, dtype=torch.int64, device=device)
        longest = of_group.held.width * of_group.block_tokens
        self.batch = ChoiceBatch(
            of_group.held.tables.numbers, self._positions_R, longest, of_group.block_tokens, self._starts_R
        )
        frame = backend.frame(self._attended(of_group), device)
        assert frame is not None, "only a backend with frames is asked"
        self.gathered: GroupMeta = frame

    def refill(self, of_group: GroupBatch, transfer: Transfer) -> bool:
        """False: it does not fit."""
        assert of_group.held is not None, "frames are of tables that lie on the device"
        transfer.put(self._positions_R, of_group.kv_lens[self.tokens].astype(np.int64) - 1)
        transfer.put(self._starts_R, of_group.held.starts[self.tokens])
        return self._backend.refill(self.gathered, self._attended(of_group), transfer)

    def _attended(self, of_group: GroupBatch) -> GroupBatch:
        """What was gathered for each choice, as a row of one page."""
        counts = np.repeat(self._kind.counts(of_group.kv_lens[self.tokens] - 1), self._kind.choices)
        own_pages = np.arange(len(counts), dtype=np.int32).reshape(-1, 1)
        return GroupBatch(own_pages, np.ones_like(counts), counts, self._kind.most)


class ChosenFrame:
    """Of recorded steps of so many rows."""

    def __init__(self, rows: int, backend: Backend, device: torch.device):
        self._rows = rows
        self._backend = backend
        self._device = device
        self._batches: Sequence[GroupBatch] = ()  # with which it was last filled
        self._parts: dict[tuple[int, Kind], tuple[FramedPart, ...]] = {}  # by group and kind

    def parts(self, place: int, kind: Kind) -> tuple[FramedPart, ...]:
        """They are made when a layer first asks: a step runs once before it is recorded."""
        if (place, kind) not in self._parts:
            together, batch = max(1, GATHERED_TOKENS // (kind.most * kind.choices)), self._batches[place]
            parts = tuple(
                FramedPart(slice(start, min(start + together, self._rows)), kind, batch, self._backend, self._device)
                for start in range(0, self._rows, together)
            )
            transfer = Transfer(self._device)
            fits = all([part.refill(batch, transfer) for part in parts])
            assert fits, "a frame has room for what it was made of"
            transfer.run()
            self._parts[place, kind] = parts
        return self._parts[place, kind]

    def refill(self, batches: Sequence[GroupBatch], transfer: Transfer) -> bool:
        """batches: of the frame's rows, one for each of `step_masks`. False: they do not fit."""
        self._batches = batches
        return all(part.refill(batches[place], transfer) for (place, _), parts in self._parts.items() for part in parts)
