"""What recorded steps gather: where it lies is kept in tensors that stay where they are, and are filled for each step.

Every row has one query, and every row gathers: one that sees no more tokens than it may choose takes all of them. So
what is launched is the same in each step. Tables are those that lie on the device (`HeldTables`). Rows go in parts, for
whose gathered entries memory has room.
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta
from ...kernels.token_choice import ChoiceBatch
from ...kernels.transfer import Transfer
from .gathering import GATHERED_TOKENS, gathered_batch

Lengths = Callable[[np.ndarray], np.ndarray]
"""Positions of queries -> how many tokens each of what they gather has, int32."""


class FramedRows:
    """Rows of a frame in the tables of one group."""

    def __init__(self, rows: int, of_group: GroupBatch, device: torch.device):
        assert of_group.held is not None, "frames are of tables that lie on the device"
        starts_R, positions_R = torch.zeros(2, rows, dtype=torch.int64, device=device)
        numbers, tokens = of_group.held.tables.numbers, of_group.block_tokens
        self.whole = ChoiceBatch(numbers, positions_R, of_group.held.width * tokens, tokens, starts_R)

    def refill(self, of_group: GroupBatch, transfer: Transfer) -> None:
        assert of_group.held is not None and self.whole.starts_R is not None, "frames are of tables on the device"
        transfer.put(self.whole.starts_R, of_group.held.starts)
        transfer.put(self.whole.positions_N, of_group.kv_lens.astype(np.int64) - 1)


class FramedPart:
    """Some rows of a frame, and attention over what they gather: a page for each."""

    def __init__(self, rows: slice, batch: ChoiceBatch, width: int, lengths: Lengths, backend: Backend):
        """batch: of these rows. width: tokens that are gathered at most"""
        self.tokens = rows  # each row has one
        self.batch = batch
        self.width = width
        self._lengths = lengths
        self._backend = backend
        frame = backend.frame(self._attended(np.zeros(rows.stop - rows.start)), batch.positions_N.device)
        assert frame is not None, "only a backend with frames is asked"
        self.gathered: GroupMeta = frame

    def refill(self, of_group: GroupBatch, transfer: Transfer) -> bool:
        """False: it does not fit."""
        positions = of_group.kv_lens[self.tokens] - 1
        return self._backend.refill(self.gathered, self._attended(positions), transfer)

    def _attended(self, positions: np.ndarray) -> GroupBatch:
        return gathered_batch(self._lengths(positions.astype(np.int64)), self.width)


class GatheringFrame:
    """Of recorded steps of so many rows. Its parts are made when layers first ask for them, because a step runs once
    before it is recorded."""

    def __init__(self, rows: int, backend: Backend, device: torch.device):
        self.batches: Sequence[GroupBatch] = ()  # with which it was last filled
        self._rows = rows
        self._backend = backend
        self._device = device
        self._of_groups: dict[int, FramedRows] = {}
        self._parts: dict[Hashable, tuple[int, tuple[FramedPart, ...]]] = {}  # with the place of their group

    def rows_of(self, place: int) -> ChoiceBatch:
        """All rows in the tables of one group. place: of the group among the step's batches"""
        if place not in self._of_groups:
            rows = self._of_groups[place] = FramedRows(self._rows, self.batches[place], self._device)
            transfer = Transfer(self._device)
            rows.refill(self.batches[place], transfer)
            transfer.run()
        return self._of_groups[place].whole

    def parts(
        self, key: Hashable, place: int, width: int, lengths: Lengths, choices: int = 1
    ) -> tuple[FramedPart, ...]:
        """Of layers with one key. place: of the group that says how long rows are. choices: of a query"""
        if key not in self._parts:
            whole, together = self.rows_of(place), max(1, GATHERED_TOKENS // (width * choices))
            some = [slice(start, min(start + together, self._rows)) for start in range(0, self._rows, together)]
            parts = tuple(FramedPart(rows, whole.of(rows), width, lengths, self._backend) for rows in some)
            transfer = Transfer(self._device)
            fits = all([part.refill(self.batches[place], transfer) for part in parts])
            assert fits, "a frame has room for what it was made of"
            transfer.run()
            self._parts[key] = place, parts
        return self._parts[key][1]

    def refill(self, batches: Sequence[GroupBatch], transfer: Transfer) -> bool:
        """batches: of the frame's rows, one for each of `step_masks`. False: they do not fit."""
        self.batches = batches
        for place, rows in self._of_groups.items():
            rows.refill(batches[place], transfer)
        return all(part.refill(batches[place], transfer) for place, parts in self._parts.values() for part in parts)
