"""What the programs of a launch share out among them: items of about equal work.

A tile is some queries of one row with the query heads that share a kv head. Its keys are cut at fixed places, counted
from the first that it sees. An item is one tile over one such cut:

    row of 1 query, 2,500 keys     |  0 .. 511  |  512 .. 1,023  | .. |  2,048 .. 2,499  |      5 items, merged
    row of 300 queries, 300 keys   one item for each tile, over the keys that it sees             nothing to merge

Where a row is cut depends on that row alone: on how many keys it sees and how many tiles it has. So its bits are the
same in any company, in a decode step and a mixed one, recorded or not. Each item is summed afresh, and the items of a
tile are merged in their order, whichever programs computed them.

The cuts grow with a root of the keys. So do their number and the memory for what is merged, while the longest item
stays a small part of its row.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..tensors import spread, table_of
from .protocol import GroupBatch, upload

LEAST_CUT_TOKENS = 256
"""A shorter cut costs more to merge than it gains."""

SINGLE_CUTS = 25
"""Keys of a cut over the cube root of those that a row of one query sees: 1,024 keys in 4 cuts, 65,536 in 64."""
LONGER_CUTS = 8
"""Keys of a cut over the square root of keys times tiles, of rows with more queries. They have more numbers to merge,
and tiles to keep processors busy: 128 queries on 65,536 keys are cut into 16, a prompt of 16,384 is not."""

MERGED_ROWS = 16
"""Query heads and queries that one entry of the list of merges has at most."""

MOST_RECORD_BYTES = 64 << 20
"""What items may leave to be merged. A step with more is attended to in parts, or does not fit into a frame."""

COLUMNS = 8
"""Numbers of an entry, some unused: entries begin at multiples of 32 bytes. Entry 0 of a list says how many follow."""


class Tiling(NamedTuple):
    """What the lists depend on beside the step: some facts of a layer, and the tiles it is computed in."""

    group: int  # query heads of a kv head
    single_rows: int  # of a tile's matrix, for rows of one query
    longer_rows: int  # for others
    record_bytes: int  # of what an item leaves to be merged, for one row of its matrix, over all kv heads


class Sizes(NamedTuple):
    """Entries of each list, or the most that a frame may have; records: what there is to merge, in rows of matrices."""

    singles: int
    longer: int
    merges: int
    records: int


Array = TypeVar("Array", np.ndarray, Tensor)


class Work(NamedTuple, Generic[Array]):
    """Lists [1 + n, COLUMNS] int32, on the host or on a device.

    singles, longer  items: row, number of the tile, first key, end of keys, first record (-1: is not merged)
    merges           row, first row of the row's matrix, its first record, cuts, records from cut to cut, how many rows
    """

    singles: Array
    longer: Array
    merges: Array


def cut_of_single(keys: np.ndarray) -> np.ndarray:
    """Keys of a cut of rows of one query that see so many: the least power of two that is not below `SINGLE_CUTS`
    times their cube root."""
    return _least_cut(SINGLE_CUTS**3 * keys, 3)


def cut_of_longer(keys: np.ndarray, tiles: np.ndarray) -> np.ndarray:
    """Likewise of rows with more queries, `LONGER_CUTS` and the square root of keys times tiles."""
    return _least_cut(LONGER_CUTS**2 * keys * tiles, 2)


def _least_cut(product: np.ndarray, power: int) -> np.ndarray:
    """The least power of two whose square or cube is not below the product."""
    exponent = np.frexp(np.maximum(product - 1, 0).astype(np.float64))[1].astype(np.int64)
    return np.maximum(LEAST_CUT_TOKENS, 1 << -(-exponent // power))


def most_cuts(keys: int, *, is_single: bool) -> int:
    """Of a tile that sees at most so many keys."""
    least_cut = SINGLE_CUTS * keys ** (1 / 3) if is_single else LONGER_CUTS * keys**0.5
    return max(1, min(-(-keys // LEAST_CUT_TOKENS), int(keys / max(least_cut, 1)) + 1))


def work_of(batch: GroupBatch, tiling: Tiling, rows: np.ndarray | None = None) -> tuple[Work[np.ndarray], Sizes]:
    """All items of a step, or of some rows of it, the largest first, so that a late start costs little; and what is
    merged of them."""
    rows = np.arange(len(batch.query_lens)) if rows is None else rows
    queries = batch.query_lens[rows]
    lists, merges, records = [], [], 0
    for is_single, tile_rows in ((True, tiling.single_rows), (False, tiling.longer_rows)):
        some = rows[queries == 1] if is_single else rows[queries > 1]
        tiles = _tiles(batch, some, tiling.group, tile_rows, is_single=is_single)
        held = np.where(tiles.cuts > 1, tiles.live * tiles.cuts, 0)
        first_record = records + np.cumsum(held) - held
        records += int(held.sum())
        lists.append(_items(tiles, first_record))
        merges.append(_merges(tiles, tile_rows, first_record))
    merged = np.concatenate(merges)
    sizes = Sizes(len(lists[0]), len(lists[1]), len(merged), records)
    return Work(*(_with_count(entries) for entries in (*lists, merged))), sizes


class _Tiles(NamedTuple):
    """[tiles] int64 each."""

    row: np.ndarray
    number: np.ndarray  # within the row
    first: np.ndarray  # key that some query sees
    end: np.ndarray
    live: np.ndarray  # rows of the matrix
    cut: np.ndarray  # keys
    cuts: np.ndarray


def _tiles(batch: GroupBatch, rows: np.ndarray, group: int, tile_rows: int, *, is_single: bool) -> _Tiles:
    queries, ends = batch.query_lens[rows].astype(np.int64), batch.kv_lens[rows].astype(np.int64)
    counts = -(-queries * group // tile_rows) * (ends > 0)
    which, number = spread(counts)
    context, last = (ends - queries)[which], queries[which] - 1
    if batch.is_causal:
        first = batch.oldest_visible(context + number * tile_rows // group)
        end = context + np.minimum((number * tile_rows + tile_rows - 1) // group, last) + 1
        keys = ends - batch.oldest_visible(ends - queries)
    else:
        first, end, keys = 0 * which, ends[which], ends
    cut = (cut_of_single(keys) if is_single else cut_of_longer(keys, counts))[which]
    live = np.minimum(tile_rows, queries[which] * group - number * tile_rows)
    return _Tiles(rows[which], number, first, end, live, cut, np.maximum(1, -(-(end - first) // cut)))


def _items(tiles: _Tiles, first_record: np.ndarray) -> np.ndarray:
    which, cut = spread(tiles.cuts)
    low = tiles.first[which] + cut * tiles.cut[which]
    high = np.minimum(low + tiles.cut[which], tiles.end[which])
    record = np.where(tiles.cuts[which] > 1, first_record[which] + cut * tiles.live[which], -1)
    items = table_of(COLUMNS, tiles.row[which], tiles.number[which], low, high, record)
    return items[np.argsort(low - high, kind="stable")]


def _merges(tiles: _Tiles, tile_rows: int, first_record: np.ndarray) -> np.ndarray:
    cut = np.flatnonzero(tiles.cuts > 1)
    which, part = spread(-(-tiles.live[cut] // MERGED_ROWS))
    tile, start = cut[which], part * MERGED_ROWS
    live = tiles.live[tile]
    return table_of(
        COLUMNS,
        tiles.row[tile],
        tiles.number[tile] * tile_rows + start,
        first_record[tile] + start,
        tiles.cuts[tile],
        live,
        np.minimum(MERGED_ROWS, live - start),
    )


def _with_count(entries: np.ndarray) -> np.ndarray:
    head = np.zeros((1, COLUMNS), dtype=np.int32)
    head[0, 0] = len(entries)
    return np.concatenate([head, entries])


class Lists(NamedTuple):
    """The work of a step on the device, and how much of it there is, or may be in a frame."""

    work: Work[Tensor]
    sizes: Sizes


@dataclass(slots=True, eq=False)
class StepWork:
    """The lists of one step. They are made when a layer first asks for its tiling, as layers of one group may differ in
    their query heads."""

    batch: GroupBatch
    _lists: dict[Tiling, list[Lists]] = field(default_factory=dict)

    def lists(self, tiling: Tiling, device: torch.device) -> list[Lists]:
        if tiling not in self._lists:
            self._lists[tiling] = list(self._parts(tiling, np.arange(len(self.batch.query_lens)), device))
        return self._lists[tiling]

    def _parts(self, tiling: Tiling, rows: np.ndarray, device: torch.device) -> Iterator[Lists]:
        work, sizes = work_of(self.batch, tiling, rows)
        if sizes.records * tiling.record_bytes <= MOST_RECORD_BYTES or len(rows) == 1:
            sent = upload(np.concatenate(work), device)
            yield Lists(Work(*sent.split([len(entries) for entries in work])), sizes)
        else:
            for half in np.array_split(rows, 2):
                yield from self._parts(tiling, half, device)


class FrameShape(NamedTuple):
    rows: int
    tokens: int
    most_keys: int  # that a row sees
    is_mixed: bool  # rows may have more than one query

    def sizes(self, tiling: Tiling) -> Sizes:
        """The most of everything, whatever mixture of rows comes."""
        group = tiling.group
        singles = self.rows * -(-group // tiling.single_rows)
        cuts = most_cuts(self.most_keys, is_single=True)
        is_cut = cuts > 1
        merges = self.rows * -(-group // MERGED_ROWS)
        sizes = Sizes(singles * cuts, 0, is_cut * merges, is_cut * self.rows * group * cuts)
        if not self.is_mixed:
            return sizes
        longer = self.tokens * group // tiling.longer_rows + min(self.rows, self.tokens // 2)
        cuts = most_cuts(self.most_keys, is_single=False)
        is_cut = cuts > 1
        return Sizes(
            sizes.singles,
            longer * cuts,
            sizes.merges + is_cut * (self.tokens * group // MERGED_ROWS + longer),
            sizes.records + is_cut * self.tokens * group * cuts,
        )


@dataclass(slots=True, eq=False)
class FrameWork:
    """Lists that stay where they are. Frames of fewer rows or tokens have theirs in the same memory, `buffers`."""

    shape: FrameShape
    largest: FrameShape
    buffers: dict[Tiling, Lists] = field(default_factory=dict)
    batch: GroupBatch | None = None  # what the frame was last filled with

    def narrowed(self, rows: int, tokens: int) -> "FrameWork":
        return FrameWork(self.shape._replace(rows=rows, tokens=tokens), self.largest, self.buffers)

    def lists(self, tiling: Tiling, device: torch.device) -> list[Lists]:
        if tiling not in self.buffers:  # a step runs once before it is recorded
            self._add(tiling, device)
        lists = self.buffers[tiling]
        sizes = self.shape.sizes(tiling)
        return [Lists(lists.work, sizes._replace(records=min(sizes.records, lists.sizes.records)))]

    def _add(self, tiling: Tiling, device: torch.device) -> None:
        assert self.batch is not None, "a frame is filled before layers look at it"
        work, needed = work_of(self.batch, tiling)
        most = self.largest.sizes(tiling)
        records = min(most.records, max(needed.records, MOST_RECORD_BYTES // tiling.record_bytes))
        buffers = [torch.zeros(1 + size, COLUMNS, dtype=torch.int32, device=device) for size in most[:3]]
        for buffer, entries in zip(buffers, work, strict=True):
            buffer[: len(entries)].copy_(upload(entries, device))
        self.buffers[tiling] = Lists(Work(*buffers), most._replace(records=records))

    def refilled(self, batch: GroupBatch) -> list[tuple[Tensor, np.ndarray]] | None:
        """Buffers and what is to be put into them. None: there is more to merge than there is room for."""
        self.batch = batch
        puts: list[tuple[Tensor, np.ndarray]] = []
        for tiling, lists in self.buffers.items():
            work, sizes = work_of(batch, tiling)
            if sizes.records > lists.sizes.records:
                return None
            puts += [(buffer[: len(entries)], entries) for buffer, entries in zip(lists.work, work, strict=True)]
        return puts
