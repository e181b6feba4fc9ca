"""What recorded steps gather: where it lies is kept in tensors that stay where they are, and are filled for each step.

Every token of a step is a query with a row of its own, also where several are of one prompt; and every query gathers:
one that sees no more tokens than it may choose takes all of them. So what is launched is the same in each step. Tables
are those that lie on the device (`HeldTables`). Queries go in parts, for whose gathered entries memory has room.

    step of 3 rows     a c c c             queries    a c c c . . . .    each with its place among all tables' numbers
"""

from collections.abc import Callable, Hashable, Sequence

import numpy as np
import torch

from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta
from ...kernels.token_choice import ChoiceBatch
from ...kernels.transfer import Transfer
from .gathering import GATHERED_TOKENS, gathered_batch, ragged

Lengths = Callable[[np.ndarray], np.ndarray]
"""Positions of queries -> how many tokens each of what they gather has, int32."""


class FramedQueries:
    """Queries of a frame, each in the table that its row has in one group. Those that fill up have null blocks."""

    def __init__(self, count: int, of_group: GroupBatch, device: torch.device, every: int = 1):
        """count: the most there may be
        every: of the queries those alone with which so many more tokens are complete"""
        assert of_group.held is not None, "frames are of tables that lie on the device"
        starts_N, positions_N = torch.zeros(2, count, dtype=torch.int64, device=device)
        numbers, tokens = of_group.held.tables.numbers, of_group.block_tokens
        self.whole = ChoiceBatch(numbers, positions_N, of_group.held.width * tokens, tokens, starts_N)
        self.positions_N = np.zeros(count, dtype=np.int64)  # the same in the host's memory
        self._every = every

    def refill(self, of_group: GroupBatch, transfer: Transfer) -> None:
        assert of_group.held is not None and self.whole.starts_R is not None, "frames are of tables on the device"
        starts_R = of_group.held.padded(len(of_group.kv_lens) + 1).starts
        in_row_T, row_T = ragged(of_group.query_lens)
        positions_T = (of_group.kv_lens.astype(np.int64) - of_group.query_lens)[row_T] + in_row_T
        is_one_T = (positions_T + 1) % self._every == 0
        starts, positions = starts_R[row_T[is_one_T]], positions_T[is_one_T]
        more = 0, len(self.positions_N) - len(positions)
        self.positions_N = np.pad(positions, more)
        transfer.put(self.whole.starts_R, np.pad(starts, more, constant_values=starts_R[-1]))
        transfer.put(self.whole.positions_N, self.positions_N)


class FramedPart:
    """Some queries of a frame, and attention over what they gather: a page for each."""

    def __init__(self, tokens: slice, batch: ChoiceBatch, width: int, lengths: Lengths, backend: Backend):
        """batch: of these queries. width: tokens that are gathered at most"""
        self.tokens = tokens
        self.batch = batch
        self.width = width
        self._lengths = lengths
        self._backend = backend
        frame = backend.frame(self._attended(np.zeros(tokens.stop - tokens.start)), batch.positions_N.device)
        assert frame is not None, "only a backend with frames is asked"
        self.gathered: GroupMeta = frame

    def refill(self, positions_N: np.ndarray, transfer: Transfer) -> bool:
        """positions: of all queries. False: it does not fit."""
        return self._backend.refill(self.gathered, self._attended(positions_N[self.tokens]), transfer)

    def _attended(self, positions: np.ndarray) -> GroupBatch:
        return gathered_batch(self._lengths(positions.astype(np.int64)), self.width)


class GatheringFrame:
    """Of recorded steps of so many rows and tokens. Its parts are made when layers first ask for them, because a step
    runs once before it is recorded."""

    def __init__(self, rows: int, tokens: int, backend: Backend, device: torch.device):
        self.batches: Sequence[GroupBatch] = ()  # with which it was last filled
        self._rows = rows
        self._tokens = tokens
        self._backend = backend
        self._device = device
        self._queries: dict[tuple[int, int], FramedQueries] = {}  # by place of their group, and which they are
        self._parts: dict[Hashable, tuple[int, tuple[FramedPart, ...]]] = {}  # with the place of their group

    def queries(self, place: int, every: int = 1) -> ChoiceBatch:
        """All queries in the tables of one group; or those alone with which `every` more tokens of a row are complete,
        and some with which none are. place: of the group among the step's batches"""
        if (place, every) not in self._queries:
            most = self._tokens if every == 1 else min(self._tokens, self._rows + self._tokens // every)
            queries = self._queries[place, every] = FramedQueries(most, self.batches[place], self._device, every)
            transfer = Transfer(self._device)
            queries.refill(self.batches[place], transfer)
            transfer.run()
        return self._queries[place, every].whole

    def parts(
        self, key: Hashable, place: int, width: int, lengths: Lengths, choices: int = 1
    ) -> tuple[FramedPart, ...]:
        """Of layers with one key. place: of the group that says how long rows are. choices: of a query"""
        if key not in self._parts:
            whole, together = self.queries(place), max(1, GATHERED_TOKENS // (width * choices))
            some = [slice(start, min(start + together, self._tokens)) for start in range(0, self._tokens, together)]
            parts = tuple(FramedPart(tokens, whole.of(tokens), width, lengths, self._backend) for tokens in some)
            transfer = Transfer(self._device)
            fits = all([part.refill(self._positions(place), transfer) for part in parts])
            assert fits, "a frame has room for what it was made of"
            transfer.run()
            self._parts[key] = place, parts
        return self._parts[key][1]

    def refill(self, batches: Sequence[GroupBatch], transfer: Transfer) -> bool:
        """batches: of the frame's rows, one for each of `step_masks`. False: they do not fit."""
        self.batches = batches
        for (place, _), queries in self._queries.items():
            queries.refill(batches[place], transfer)
        parts = ((part, place) for place, some in self._parts.values() for part in some)
        return all(part.refill(self._positions(place), transfer) for part, place in parts)

    def _positions(self, place: int) -> np.ndarray:
        return self._queries[place, 1].positions_N
