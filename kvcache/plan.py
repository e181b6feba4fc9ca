"""What a memory plan is: groups of layers, and where the pages of their blocks lie.

Every plan, whatever strategy made it (`strategies.py`), follows one address rule:

    block b of a group lies at byte  offset + b * page_bytes  of a buffer, for each layer of the group

and deals its bytes out in two levels. An *arena* is a run of *large pages* of one size. A large page belongs to one
group at a time and holds `pages_per_large` of its blocks, so bytes move between groups a large page at a time:

    large page        1                     2                     3
    full              [ 5 ][ 6 ][ 7 ][ 8 ][ 9 ]
    sliding                                 [      2      ]       [      3      ]

Block 0 of every group that keeps tokens is its null block. All of them lie at the start of large page 0; what is left
of that page belongs to the group with the smallest blocks, for good. A state has no null block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from ..errors import InvalidSetting
from .reach import Keeps, Reach, moves_on
from .spec import LayerSpec

MAX_BLOCKS = 2**31 - 1
"""Block ids travel and are stored as int32."""

STRATEGIES = ("auto", "layered", "packed", "partitioned", "uniform")

MOST_LEASED = 0.9
"""Of the memory, that leases may hold: requests need the rest."""

EXPECTED_TOKENS = 8192
"""Length of a usual request, by which strategies are compared, unless the model's own maximum is shorter."""


@dataclass(frozen=True, slots=True)
class PlanSettings:
    """How much memory there is, and in what pieces it is dealt out."""

    memory_bytes: int  # for keys and values, on one rank
    block_tokens: int = 16
    strategy: str = "auto"
    expected_average_seq_len: int | None = None  # tokens; None: what the strategy takes from the model
    encoder_tokens: int = 0  # of one request, for layers that attend to an encoder's output
    lease_share: float = 0.0  # of it, that leases may hold; no request counts on that

    def __post_init__(self):
        if not 0 <= self.lease_share <= MOST_LEASED:
            raise InvalidSetting(
                f"lease_share must be from 0 to {MOST_LEASED} of the cache memory, got {self.lease_share}",
                field="lease_share",
            )
        if self.block_tokens < 1:
            raise InvalidSetting(f"block_size must be at least 1 token, got {self.block_tokens}", field="block_size")
        if self.memory_bytes < 1:
            raise InvalidSetting(
                f"kv_cache_memory must be positive, got {self.memory_bytes} bytes", field="kv_cache_memory"
            )
        if self.strategy not in STRATEGIES:
            raise InvalidSetting(
                f"strategy must be one of {', '.join(STRATEGIES)}; got {self.strategy!r}", field="strategy"
            )
        expected = self.expected_average_seq_len
        if expected is not None and expected < 1:
            raise InvalidSetting(
                f"expected_average_seq_len must be a positive number of tokens, got {expected}",
                field="expected_average_seq_len",
            )


class Place(NamedTuple):
    """Where block 0 of one layer starts."""

    buffer: int
    offset_bytes: int


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that share block ids, because they need the same tokens."""

    reach: Reach
    layers: tuple[int, ...]  # layer indices in the model
    block_tokens: int
    page_bytes: int = 64  # from one block to the next, in every buffer it lies in
    pages_per_large: int = 1
    block_bytes: int = 64  # what a block takes of the memory: its pages in all buffers, padding included
    content_bytes: int = 64  # what its layers fill of that
    places: tuple[Place, ...] = ()  # one per layer
    arena: int = 0
    is_draft: bool = False
    encoder_tokens: int = 0
    masks: tuple[Reach, ...] = ()  # how far each layer looks, where that is less than the group keeps; else empty

    def mask_of(self, place: int) -> Reach:
        """How far the layer at that place looks back. The group keeps at least as much."""
        return self.masks[place] if self.masks else self.reach

    def blocks_between(self, length: int) -> int:
        """Blocks a request of `length` tokens holds between two steps."""
        match self.reach.keeps:
            case Keeps.STATE:
                return 1
            case Keeps.ENCODER:
                return -(-self.encoder_tokens // self.block_tokens)
        return max(1, -(-length // self.block_tokens) - self.reach.oldest_needed(length) // self.block_tokens)

    def blocks_spanning(self, length: int, chunk_tokens: int) -> int:
        """Most blocks a request of up to `length` tokens holds while a step appends up to `chunk_tokens`."""
        if self.reach.keeps is not Keeps.TOKENS:
            return self.blocks_between(length)
        live = min(length, self.reach.max_lookback(length) + chunk_tokens)
        at_worst_offset = (live - 2) // self.block_tokens + 2  # blocks that a run of `live` tokens can touch
        return min(at_worst_offset, -(-length // self.block_tokens))

    def large_pages_spanning(self, length: int, chunk_tokens: int) -> int:
        """Most large pages those blocks take up. A window that moves on leaves its first and last one partly used."""
        blocks = self.blocks_spanning(length, chunk_tokens)
        return min(blocks, -(-blocks // self.pages_per_large) + (moves_on(self.reach) and self.pages_per_large > 1))


class Arena(NamedTuple):
    """Memory that the groups which name it share, in large pages."""

    num_pages: int  # large ones, the null page included
    page_bytes: int  # of a large page, over all buffers
    leasable: int = 0  # large pages that leases may hold: no request counts on them

    @property
    def usable(self) -> int:
        return self.num_pages - 1


class BesideNull(NamedTuple):
    """Blocks first .. end - 1 of a group lie in large page 0."""

    group: int
    first: int
    end: int


class StrategyCost(NamedTuple):
    """What a strategy would have cost, or why it was not possible."""

    strategy: str
    bytes_per_request: int | None  # expected; None: refused
    refused: str | None = None


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Where every layer keeps its tokens. Plain numbers: the same value runs the pool and lays out the tensors."""

    strategy: str
    groups: tuple[Group, ...]
    arenas: tuple[Arena, ...]
    buffers: tuple[int, ...]  # bytes of each
    padding_fraction: float = 0.0  # bytes held for no layer, of all bytes a request of the expected length holds
    expected_tokens: int = EXPECTED_TOKENS
    why: tuple[StrategyCost, ...] = ()
    notes: tuple[str, ...] = ()  # what was decided otherwise than asked, for people

    @property
    def num_buffers(self) -> int:
        return len(self.buffers)

    @property
    def num_blocks(self) -> int:
        """Large pages, the null page included."""
        return sum(arena.num_pages for arena in self.arenas)

    @property
    def usable_blocks(self) -> int:
        return sum(arena.usable for arena in self.arenas)

    @property
    def leasable_blocks(self) -> int:
        """Large pages that leases may hold."""
        return sum(arena.leasable for arena in self.arenas)

    @property
    def block_tokens(self) -> int:
        return self.groups[0].block_tokens

    @property
    def memory_bytes(self) -> int:
        return sum(self.buffers)

    def blocks_of(self, group: Group) -> int:
        """Blocks a group could have if all of its arena were its own, the null block included."""
        return self.arenas[group.arena].num_pages * group.pages_per_large

    def beside_null(self, arena: int) -> "BesideNull | None":
        """Blocks of large page 0 that no null block covers."""
        tokens = [
            (group.pages_per_large, -g)
            for g, group in enumerate(self.groups)
            if group.arena == arena and group.reach.keeps is not Keeps.STATE
        ]
        count, g = max(tokens, default=(1, 0))
        if count == 1:
            return None
        null_bytes = max(self.groups[-g].block_bytes for _, g in tokens)
        first = -(-null_bytes // self.groups[-g].block_bytes)
        return BesideNull(-g, first, count) if first < count else None

    def blocks_alone(self, length: int, chunk_tokens: int = 1) -> int:
        """Most large pages that a request growing to `length` tokens holds at once, in all groups."""
        return sum(self._alone(length, chunk_tokens))

    def fits(self, length: int, chunk_tokens: int = 1) -> bool:
        """Could a request grow to `length` tokens if it had the memory to itself, but for what leases may hold?"""
        alone = self._alone(length, chunk_tokens)
        return all(pages <= arena.usable - arena.leasable for pages, arena in zip(alone, self.arenas, strict=True))

    def with_leases(self, share: float) -> "MemoryPlan":
        """The same, of whose memory leases may hold a share."""
        arenas = tuple(arena._replace(leasable=int(arena.usable * share)) for arena in self.arenas)
        return replace(self, arenas=arenas)

    def bytes_held(self, length: int) -> int:
        """What a request of `length` tokens holds between two steps, padding included."""
        return sum(group.blocks_between(length) * group.block_bytes for group in self.groups)

    def concurrency(self, length: int) -> float:
        """How many requests of `length` tokens the memory holds at once, while each grows by a token at a time."""
        shares = [0.0] * len(self.arenas)  # of each arena's usable large pages, for one request
        for group in self.groups:
            pages = group.blocks_spanning(length, 1) / group.pages_per_large
            beside = self.beside_null(group.arena)
            left = (beside.end - beside.first) / beside.end if beside is not None else 0
            shares[group.arena] += pages / max(1, self.arenas[group.arena].usable + left)
        return 1 / max(shares)

    def _alone(self, length: int, chunk_tokens: int) -> list[int]:
        alone = [0] * len(self.arenas)
        for group in self.groups:
            alone[group.arena] += group.large_pages_spanning(length, chunk_tokens)
        return alone


def exact_bytes(layers: Sequence[LayerSpec], length: int, block_tokens: int, encoder_tokens: int = 0) -> int:
    """The bound no plan can beat: what the layers fill while a request of `length` tokens grows, block by block."""
    total = 0
    for layer in layers:
        if layer.shares is None:
            group = Group(layer.reach, (layer.index,), block_tokens, encoder_tokens=encoder_tokens)
            total += group.blocks_spanning(length, 1) * layer.block_bytes(block_tokens)
    return total
