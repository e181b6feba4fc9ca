"""The cost model of a decode step: what a kernel moves, and how long it takes for that. Nothing is timed.

A kernel takes a time of its own, however little it does, and the time of its bytes at the rate of its kind:

    us = own_us + weights / product rate + (keys and values * imbalance + others) / read rate + states / copy rate

All numbers are of the H100's rates or of single kernels that were timed on it (`measured.py`). None is of a whole step,
and none differs from model to model.
"""

import functools
import heapq
from collections.abc import Iterable
from enum import StrEnum
from typing import NamedTuple

import numpy as np

from intarsia.kernels.paged_attention import GroupBatch
from intarsia.kernels.paged_attention.worklist import Tiling, work_of

from .measured import COPY_GB_PER_S, PROCESSORS, READ_GB_PER_S

PRODUCT_GB_PER_S = 2880.0
"""At which cuBLAS reads large weights, without the time of its own."""


class Kind(StrEnum):
    PRODUCT = "product"
    ATTENTION = "attention"
    STATE = "state"
    SMALL = "small"  # norms, gates, merges, draws, and what torch does around them


OWN_US = {Kind.PRODUCT: 3.5, Kind.ATTENTION: 6.7, Kind.STATE: 2.45, Kind.SMALL: 2.45}
"""Of a kernel with nothing to do, the gap of about 1 us before the next one of its graph included.

product    Llama's queries, keys and values take 21 us, of which their bytes are 17.5
small      the chain of four takes 14.8 us, of which bytes are 5
attention  a row of 1k takes 14.8 us, of which the largest item's bytes are 5.7 and the merge is 2.5
"""


class Cost(NamedTuple):
    """What a kernel moves, in bytes."""

    kind: Kind
    weight_bytes: float = 0
    kv_bytes: float = 0
    state_bytes: float = 0  # read and written
    other_bytes: float = 0
    imbalance: float = 1.0  # keys and values of the processor that has most, over those of the average one
    launches: int = 1

    @property
    def bytes(self) -> float:
        return self.weight_bytes + self.kv_bytes + self.state_bytes + self.other_bytes

    @property
    def us(self) -> float:
        read = self.kv_bytes * self.imbalance + self.other_bytes
        at_rates = self.weight_bytes / PRODUCT_GB_PER_S + read / READ_GB_PER_S + self.state_bytes / COPY_GB_PER_S
        return OWN_US[self.kind] * self.launches + at_rates / 1e3


def step_us(costs: Iterable[Cost]) -> float:
    """Of kernels that run one after another."""
    return sum(cost.us for cost in costs)


# -- attention ---------------------------------------------------------------------------------------------------------


class Heads(NamedTuple):
    """A layer's attention, as its kernel is launched."""

    kv_heads: int
    group: int  # query heads of each
    key_dim: int
    value_dim: int
    itemsize: int
    tile_rows: int  # of a tile's matrix
    programs: int  # of each kv head
    window: int | None = None
    chunk: int | None = None

    @property
    def record_bytes(self) -> int:
        """Of a row of a tile's matrix that is to be merged, over all kv heads."""
        return 4 * self.kv_heads * (self.value_dim + 2)


@functools.cache
def attention_costs(heads: Heads, lengths: tuple[int, ...]) -> tuple[Cost, Cost | None]:
    """Of rows of one query which see so many keys, the new one included: their items, and the merge if rows are cut."""
    ends = np.array(lengths, dtype=np.int32)
    table, page = np.zeros((len(ends), 1), dtype=np.int32), int(ends.max())
    batch = GroupBatch(table, np.ones_like(ends), ends, page, window_tokens=heads.window, chunk_tokens=heads.chunk)
    tiling = Tiling(heads.group, heads.tile_rows, heads.tile_rows, heads.record_bytes)
    work, sizes = work_of(batch, tiling)
    items = work.singles[1:]
    keys = (items[:, 3] - items[:, 2]).astype(np.int64)
    per_key = heads.itemsize * (heads.key_dim + heads.value_dim)
    around = len(ends) * heads.kv_heads * heads.group * per_key
    merged = sizes.records * heads.record_bytes
    kv_bytes = int(keys.sum()) * heads.kv_heads * per_key
    imbalance = most_loaded(keys, heads.kv_heads, heads.programs)
    seen = Cost(Kind.ATTENTION, kv_bytes=kv_bytes, other_bytes=around + merged, imbalance=imbalance)
    return seen, Cost(Kind.SMALL, other_bytes=merged + around / 2) if sizes.merges else None


def most_loaded(keys: np.ndarray, kv_heads: int, programs: int) -> float:
    """Of each kv head a program takes every n-th item. The next program goes to the processor with the least to read.
    What the one with most reads, over the average of all."""
    loads = [0] * PROCESSORS
    for program in range(min(programs, len(keys))):
        load = int(keys[program::programs].sum())
        for _ in range(kv_heads):
            heapq.heapreplace(loads, loads[0] + load)
    return max(loads) * PROCESSORS / sum(loads)
