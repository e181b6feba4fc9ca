"""From the layers of a model and a number of bytes to a memory plan: groups, buffers, pages.

The `layered` plan, drawn for 2 full and 4 sliding layers:

                     group 0      group 1      group 2
    buffer 0         full L2      sliding L0   sliding L3       one raw tensor, one page per block
    buffer 1         full L5      sliding L1   sliding L4

Layers of the same reach form groups of at most `m` layers; `m` buffers are shared by all groups, the i-th layer of
every group living in buffer i. A block belongs to one group at a time and names the same page in each buffer: block b
lies at byte b * page_bytes. All groups draw from the same block ids, so memory moves freely between full and sliding
layers. A group of fewer than m layers leaves the last buffers of its blocks unused: the plan's padding. `m` is chosen
to keep it small (`_group_size`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import InvalidSetting
from .reach import Reach

NULL_BLOCK = 0
"""Stands in block tables for positions nobody needs any more. Never allocated; its page holds garbage."""

PAGE_ALIGNMENT_BYTES = 64
"""Page sizes are multiples of this, so that views of any dtype and vector loads stay aligned."""

GROUP_PRICE = 0.01
"""What one more group costs, as a share of a request's bytes: every group needs its own tables, slots and metadata at
each step. It makes one group of 20 layers win over 20 groups of one, and never buys real padding."""

MAX_BLOCKS = 2**31 - 1
"""Block ids travel and are stored as int32."""


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps per token, on one rank."""

    index: int  # of the layer in the model
    reach: Reach
    kv_heads: int
    key_dim: int  # of one head
    value_dim: int
    item_bytes: int  # of one number

    @property
    def token_bytes(self) -> int:
        return self.kv_heads * (self.key_dim + self.value_dim) * self.item_bytes


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How much memory there is, and in what pieces it is dealt out."""

    memory_bytes: int  # for keys and values, on one rank
    block_tokens: int = 16

    def __post_init__(self):
        if self.block_tokens < 1:
            raise InvalidSetting(f"block_size must be at least 1 token, got {self.block_tokens}", field="block_size")
        if self.memory_bytes < 1:
            raise InvalidSetting(
                f"kv_cache_memory must be positive, got {self.memory_bytes} bytes", field="kv_cache_memory"
            )


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block ids, because they need the same tokens."""

    reach: Reach
    layers: tuple[int, ...]  # layer indices in the model; the i-th lives in buffer i
    block_tokens: int

    def blocks_spanning(self, length: int, chunk_tokens: int) -> int:
        """Most blocks a request of up to `length` tokens holds while a step appends up to `chunk_tokens`."""
        live = min(length, self.reach.max_lookback(length) + chunk_tokens)
        at_worst_offset = (live - 2) // self.block_tokens + 2  # blocks that a run of `live` tokens can touch
        return min(at_worst_offset, -(-length // self.block_tokens))


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every layer keeps its tokens. Plain numbers: the same value runs the pool and lays out the tensors."""

    strategy: str
    groups: tuple[Group, ...]
    num_buffers: int
    page_bytes: int  # of one block in one buffer
    num_blocks: int  # the null block included
    padding_fraction: float  # bytes held for no layer, of all bytes a request of the expected length holds

    @property
    def buffer_bytes(self) -> int:
        return self.num_blocks * self.page_bytes

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def usable_blocks(self) -> int:
        return self.num_blocks - 1

    def blocks_alone(self, length: int, chunk_tokens: int = 1) -> int:
        """Most blocks that a request growing to `length` tokens holds at once, in all groups."""
        return sum(group.blocks_spanning(length, chunk_tokens) for group in self.groups)


def plan_layered(layers: Sequence[LayerSpec], settings: PlanSettings, expected_tokens: int) -> MemoryPlan:
    """The `layered` plan (see the top of this file) for `layers` within `settings.memory_bytes`.

    expected_tokens: the length of a usual request; decides how full and sliding layers weigh in the choice of `m`.

    Raises `InvalidSetting` when not even one block of every group fits.
    """
    by_reach: dict[Reach, list[LayerSpec]] = {}
    for layer in layers:
        by_reach.setdefault(layer.reach, []).append(layer)
    size = _group_size({reach: len(alike) for reach, alike in by_reach.items()}, settings, expected_tokens)
    groups = tuple(
        Group(reach, tuple(layer.index for layer in alike[start : start + size]), settings.block_tokens)
        for reach, alike in by_reach.items()
        for start in range(0, len(alike), size)
    )
    widest_bytes = max(layer.token_bytes for layer in layers) * settings.block_tokens
    page_bytes = -(-widest_bytes // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
    num_blocks = settings.memory_bytes // (page_bytes * size)
    if num_blocks < 1 + len(groups):
        raise InvalidSetting(
            f"kv_cache_memory of {settings.memory_bytes} bytes holds {num_blocks} blocks of {page_bytes * size} bytes; "
            f"at least {1 + len(groups)} are needed: one for each of {len(groups)} groups and the null block. "
            "Give more memory or a smaller block_size.",
            field="kv_cache_memory",
            asked=settings.memory_bytes,
            needed=(1 + len(groups)) * page_bytes * size,
        )
    if num_blocks > MAX_BLOCKS:
        raise InvalidSetting(
            f"kv_cache_memory of {settings.memory_bytes} bytes makes {num_blocks} blocks, more than the "
            f"{MAX_BLOCKS} that block tables can name. Use a larger block_size.",
            field="block_size",
        )
    held = sum(size * page_bytes * _live_blocks(group.reach, settings, expected_tokens) for group in groups)
    used = sum(
        layer.token_bytes * settings.block_tokens * _live_blocks(layer.reach, settings, expected_tokens)
        for layer in layers
    )
    return MemoryPlan("layered", groups, size, page_bytes, num_blocks, 1 - used / held)


def _group_size(layer_counts: dict[Reach, int], settings: PlanSettings, expected_tokens: int) -> int:
    """Layers per group that make a request of the expected length cheapest, padding and group price included."""
    exact = sum(n * _live_blocks(reach, settings, expected_tokens) for reach, n in layer_counts.items())

    def cost(size: int) -> float:
        groups = {reach: -(-n // size) for reach, n in layer_counts.items()}
        pages = sum(n * size * _live_blocks(reach, settings, expected_tokens) for reach, n in groups.items())
        return pages / exact + GROUP_PRICE * sum(groups.values())

    return min(range(max(layer_counts.values()), 0, -1), key=cost)


def _live_blocks(reach: Reach, settings: PlanSettings, length: int) -> int:
    """Blocks that a request holds between two steps, once it has `length` tokens."""
    first = reach.oldest_needed(length) // settings.block_tokens
    return max(1, -(-length // settings.block_tokens) - first)
