"""How far back a layer looks: the one question in which kinds of layers differ.

A reach answers for the query at position `length`, with the tokens 0 .. length-1 cached:

    window of 4:   0 1 2 3 4 5 6 7 | 8        <- the query (position 8 = length)
                             ^oldest_needed(8) == 5: it sees 5, 6, 7 and itself

    chunks of 4:   0 1 2 3|4 5 6 7 | 8        <- the first query of a chunk sees itself alone: oldest_needed(8) == 8

Allocation, early release and the prefix-hit rule all follow from this answer, so a new kind of layer is one small
class here, its mask in `tests/kvcache/test_reach.py`, and a line in `workers/checkpoint/layer_specs.py`. No other file
asks which kind a layer is. What a layer keeps is one of three `Keeps`: an entry per token, one state for the whole
sequence, or an entry per token of an encoder. Only the planner and the tables of this folder, and the memory that a
worker lays out by the plan, ask which one.
"""

import enum
import sys
from dataclasses import dataclass, field
from typing import ClassVar

from ..errors import InvalidSetting

NEVER = sys.maxsize
"""A length that no sequence reaches."""


class Keeps(enum.Enum):
    """What the memory of a layer grows with."""

    TOKENS = "tokens"  # an entry per token of the sequence
    STATE = "state"  # one state, overwritten token by token
    ENCODER = "encoder"  # an entry per token of an encoder's output, written once


@dataclass(frozen=True, slots=True)
class Reach:
    """How far back the next token of a layer looks. Lengths and positions count tokens.

    What is said here holds for a kind that says nothing else: every earlier token is visible, and has an entry.
    """

    kind: ClassVar[str]  # as configs and reports call it
    keeps: ClassVar[Keeps] = Keeps.TOKENS
    keeps_tokens: ClassVar[bool] = True  # attention over an entry per token of the sequence
    # What a kernel masks by. None: no limit.
    window_tokens: int | None = field(default=None, init=False, repr=False)  # visible ones, the query itself included
    chunk_tokens: int | None = field(default=None, init=False, repr=False)  # between borders that no query looks across

    @property
    def name(self) -> str:
        """For people: "full", "sliding-1024"."""
        return self.kind

    def oldest_needed(self, length: int) -> int:
        """Oldest cached token that the query at position `length` still reads (== length: none)."""
        return 0

    def max_lookback(self, length: int) -> int:
        """Most cached tokens that any query at a position up to `length` reads."""
        return length

    def passed_at(self, token: int) -> int:
        """Shortest length from which on no query reads `token`; `NEVER` if every later one does."""
        return NEVER

    def slots_for(self, length: int, encoder_tokens: int) -> int:
        """Entries in the table of a sequence of `length` tokens, those given back included."""
        return length


def moves_on(reach: Reach) -> bool:
    """Does it keep an entry per token, and pass tokens that no later query reads?"""
    return reach.keeps_tokens and reach.passed_at(0) < NEVER


@dataclass(frozen=True, slots=True)
class Full(Reach):
    """Every earlier token is visible."""

    kind = "full"


@dataclass(frozen=True, slots=True)
class Sliding(Reach):
    """The last `window_tokens` are visible, the query itself included: key j to query i when i - window < j <= i.

    Models disagree about whether a window counts the query; whatever reads a config normalises it to this.
    """

    window_tokens: int
    kind = "sliding"

    def __post_init__(self):
        if self.window_tokens < 1:
            raise InvalidSetting(
                f"a sliding window must show at least the token itself, got {self.window_tokens} tokens", field="window"
            )

    @property
    def name(self) -> str:
        return f"sliding-{self.window_tokens}"

    def oldest_needed(self, length: int) -> int:
        return max(0, length - self.window_tokens + 1)

    def max_lookback(self, length: int) -> int:
        return min(length, self.window_tokens - 1)

    def passed_at(self, token: int) -> int:
        return token + self.window_tokens


@dataclass(frozen=True, slots=True)
class Chunked(Reach):
    """Tokens of the query's own chunk are visible: key j to query i when j <= i and j // chunk == i // chunk."""

    chunk_tokens: int
    kind = "chunked"

    def __post_init__(self):
        if self.chunk_tokens < 1:
            raise InvalidSetting(
                f"an attention chunk must hold at least 1 token, got {self.chunk_tokens}", field="chunk"
            )

    @property
    def name(self) -> str:
        return f"chunked-{self.chunk_tokens}"

    def oldest_needed(self, length: int) -> int:
        return length - length % self.chunk_tokens

    def max_lookback(self, length: int) -> int:
        return min(length, self.chunk_tokens - 1)

    def passed_at(self, token: int) -> int:
        return token - token % self.chunk_tokens + self.chunk_tokens


@dataclass(frozen=True, slots=True)
class State(Reach):
    """Everything is seen through a state (Mamba, linear attention, short convolution) that each token overwrites.

    To go on at a length, the state exactly at that length is needed; it cannot be cut back.
    """

    kind = "state"
    keeps = Keeps.STATE
    keeps_tokens = False

    def oldest_needed(self, length: int) -> int:
        return max(0, length - 1)

    def max_lookback(self, length: int) -> int:
        return min(length, 1)

    def passed_at(self, token: int) -> int:
        return token + 2

    def slots_for(self, length: int, encoder_tokens: int) -> int:
        return 1


@dataclass(frozen=True, slots=True)
class Cross(Reach):
    """All tokens of an encoder's output (an image) are visible, the same ones to every query."""

    kind = "cross"
    keeps = Keeps.ENCODER
    keeps_tokens = False

    def slots_for(self, length: int, encoder_tokens: int) -> int:
        return encoder_tokens
