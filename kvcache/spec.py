"""What one layer of a model keeps in the cache, on one rank."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from ..errors import InvalidSetting
from .reach import Keeps, Reach

PAGE_ALIGNMENT_BYTES = 64
"""Pages, and what lies in them, start at multiples of this: views of any dtype and vector loads stay aligned."""


class StateTensor(NamedTuple):
    """One tensor of a state, per sequence: a convolution's last inputs, or what a recurrence has summed up."""

    shape: tuple[int, ...]
    item_bytes: int

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.item_bytes


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """What one layer keeps per token, or as its state, on one rank.

    A layer that has both attention and a state (Falcon-H1) is two of these with the same index. Multi-head latent
    attention is one "head" of the latent's width with no values of its own (`value_dim` 0).

    Where an entry stands for several tokens (DeepSeek-V4), it lies in the block of the last of them, and there is one
    after each `entry_tokens` of them:

        entries of 4, blocks of 6    0 1 2 3 4 5 | 6 7 8 9 10 11 | 12 13 14 ..
                                           ^0          ^1     ^2             each block has room for two
    """

    index: int  # of the layer in the model
    reach: Reach
    kv_heads: int = 0
    key_dim: int = 0  # of one head
    value_dim: int = 0
    item_bytes: int = 0  # of one number
    extra_token_bytes: int = 0  # beside keys and values: the keys of a sparse indexer
    state: tuple[StateTensor, ...] = ()
    entry_tokens: int = 1  # tokens that have one entry together
    shares: int | None = None  # reads the pages of that layer, and owns nothing
    is_draft: bool = False  # of a drafter: it keeps one token less than the model knows

    def __post_init__(self):
        sizes = (self.kv_heads, self.key_dim, self.value_dim, self.item_bytes, self.extra_token_bytes)
        if min(sizes) < 0 or any(t.item_bytes < 1 or min(t.shape, default=0) < 1 for t in self.state):
            raise InvalidSetting(f"layer {self.index} has a negative or empty size: {self}", field="layers")
        if self.entry_tokens < 1:
            raise InvalidSetting(
                f"layer {self.index} has an entry for each {self.entry_tokens} tokens; it must be 1 at least",
                field="layers",
            )
        if self.is_draft and self.reach.keeps is not Keeps.TOKENS:
            raise InvalidSetting(
                f"layer {self.index}: a drafter's layer keeps tokens, no {self.reach.name}", field="layers"
            )
        if self.shares is None and self.block_bytes(1) == 0:
            raise InvalidSetting(f"layer {self.index} ({self.reach.name}) keeps nothing: {self}", field="layers")

    @property
    def entry_bytes(self) -> int:
        """Of one token's keys and values, or of those that several have together."""
        return self.kv_heads * (self.key_dim + self.value_dim) * self.item_bytes + self.extra_token_bytes

    @property
    def token_bytes(self) -> int:
        """A token's share of its entry."""
        return -(-self.entry_bytes // self.entry_tokens)

    def entries_in(self, block_tokens: int) -> int:
        """Entries that a block has room for."""
        return -(-block_tokens // self.entry_tokens)

    @property
    def state_bytes(self) -> int:
        return sum(_aligned(tensor.bytes) for tensor in self.state)

    @property
    def state_offsets(self) -> tuple[int, ...]:
        """Where each tensor of the state begins, in bytes from the first one."""
        return tuple(accumulate((_aligned(tensor.bytes) for tensor in self.state[:-1]), initial=0))

    def block_bytes(self, block_tokens: int) -> int:
        """What a block of this layer holds; a block of a state is the whole state."""
        if self.reach.keeps is Keeps.STATE:
            return self.state_bytes
        return self.entry_bytes * self.entries_in(block_tokens)

    def page_bytes(self, block_tokens: int) -> int:
        """`block_bytes`, aligned."""
        return _aligned(self.block_bytes(block_tokens))


def check_layers(layers: Sequence[LayerSpec]) -> None:
    """Raises `InvalidSetting` for layers that cannot be one model's."""
    owners = {layer.index: layer for layer in layers if layer.shares is None}
    if not owners:
        raise InvalidSetting("a model needs at least one layer that keeps something", field="layers")
    kept = [(layer.index, layer.reach) for layer in layers]
    if len(set(kept)) < len(kept):
        twice = next(entry for entry in kept if kept.count(entry) > 1)
        raise InvalidSetting(f"layer {twice[0]} ({twice[1].name}) is described twice", field="layers")
    for layer in layers:
        if layer.shares is not None and layer.shares not in owners:
            raise InvalidSetting(
                f"layer {layer.index} shares the pages of layer {layer.shares}, which owns none", field="layers"
            )


def _aligned(size: int) -> int:
    return -(-size // PAGE_ALIGNMENT_BYTES) * PAGE_ALIGNMENT_BYTES
