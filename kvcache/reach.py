"""How far back a layer looks: the one question in which kinds of layers differ.

A reach answers for the query at position `length`, with the tokens 0 .. length-1 cached:

    window of 4:   0 1 2 3 4 5 6 7 | 8        <- the query (position 8 = length)
                             ^oldest_needed(8) == 5: it sees 5, 6, 7 and itself

    chunks of 4:   0 1 2 3|4 5 6 7 | 8        <- the first query of a chunk sees itself alone: oldest_needed(8) == 8

Allocation, early release and the prefix-hit rule all follow from this answer, so a new kind of layer is one small
class here, its mask in `tests/kvcache/test_reach.py`, and a line in `workers/checkpoint/layer_specs.py`. No other file
asks which kind a layer is. What a layer keeps is one of three `Keeps`: an entry per token, one state for the whole
sequence, or an entry per token of an encoder.
"""

import enum
import sys
from dataclasses import dataclass
from typing import Protocol

from ..errors import InvalidSetting

NEVER = sys.maxsize
"""A length that no sequence reaches."""


class Keeps(enum.Enum):
    """What the memory of a layer grows with."""

    TOKENS = "tokens"  # an entry per token of the sequence
    STATE = "state"  # one state, overwritten token by token
    ENCODER = "encoder"  # an entry per token of an encoder's output, written once


class Reach(Protocol):
    """How far back the next token of a layer looks. Lengths and positions count tokens."""

    @property
    def kind(self) -> str:
        """As configs and reports call it: "full", "sliding", "chunked", "state", "cross"."""
        ...

    @property
    def name(self) -> str:
        """For people: "full", "sliding-1024"."""
        ...

    @property
    def keeps(self) -> Keeps: ...

    @property
    def window_tokens(self) -> int | None:
        """Visible tokens, the query itself included; None when there is no limit. What a kernel masks by."""
        ...

    @property
    def chunk_tokens(self) -> int | None:
        """Tokens between two borders that no query looks across; None when there are none."""
        ...

    def oldest_needed(self, length: int) -> int:
        """Oldest cached token that the query at position `length` still reads (== length: none)."""
        ...

    def max_lookback(self, length: int) -> int:
        """Most cached tokens that any query at a position up to `length` reads."""
        ...

    def passed_at(self, token: int) -> int:
        """Shortest length from which on no query reads `token`; `NEVER` if every later one does."""
        ...


def moves_on(reach: Reach) -> bool:
    """Does it keep an entry per token, and pass tokens that no later query reads?"""
    return reach.keeps is Keeps.TOKENS and reach.passed_at(0) < NEVER


class _Kind:
    """What most kinds answer: an entry per token, and no limit to mask by."""

    __slots__ = ()

    @property
    def keeps(self) -> Keeps:
        return Keeps.TOKENS

    @property
    def window_tokens(self) -> int | None:
        return None

    @property
    def chunk_tokens(self) -> int | None:
        return None


@dataclass(frozen=True, slots=True)
class Full(_Kind):
    """Every earlier token is visible."""

    @property
    def kind(self) -> str:
        return "full"

    @property
    def name(self) -> str:
        return "full"

    def oldest_needed(self, length: int) -> int:
        return 0

    def max_lookback(self, length: int) -> int:
        return length

    def passed_at(self, token: int) -> int:
        return NEVER


@dataclass(frozen=True, slots=True)
class Sliding(_Kind):
    """The last `window` tokens are visible, the query itself included: key j to query i when i - window < j <= i.

    Models disagree about whether a window counts the query; whoever reads a config normalises it to this.
    """

    window: int

    def __post_init__(self):
        if self.window < 1:
            raise InvalidSetting(
                f"a sliding window must show at least the token itself, got {self.window} tokens", field="window"
            )

    @property
    def kind(self) -> str:
        return "sliding"

    @property
    def name(self) -> str:
        return f"sliding-{self.window}"

    @property
    def window_tokens(self) -> int:
        return self.window

    def oldest_needed(self, length: int) -> int:
        return max(0, length - self.window + 1)

    def max_lookback(self, length: int) -> int:
        return min(length, self.window - 1)

    def passed_at(self, token: int) -> int:
        return token + self.window


@dataclass(frozen=True, slots=True)
class Chunked(_Kind):
    """Tokens of the query's own chunk are visible: key j to query i when j <= i and j // chunk == i // chunk."""

    chunk: int

    def __post_init__(self):
        if self.chunk < 1:
            raise InvalidSetting(f"an attention chunk must hold at least 1 token, got {self.chunk}", field="chunk")

    @property
    def kind(self) -> str:
        return "chunked"

    @property
    def name(self) -> str:
        return f"chunked-{self.chunk}"

    @property
    def chunk_tokens(self) -> int:
        return self.chunk

    def oldest_needed(self, length: int) -> int:
        return length - length % self.chunk

    def max_lookback(self, length: int) -> int:
        return min(length, self.chunk - 1)

    def passed_at(self, token: int) -> int:
        return token - token % self.chunk + self.chunk


@dataclass(frozen=True, slots=True)
class State(_Kind):
    """Everything is seen through a state (Mamba, linear attention, short convolution) that each token overwrites.

    To go on at a length, the state exactly at that length is needed; it can not be cut back.
    """

    @property
    def kind(self) -> str:
        return "state"

    @property
    def name(self) -> str:
        return "state"

    @property
    def keeps(self) -> Keeps:
        return Keeps.STATE

    def oldest_needed(self, length: int) -> int:
        return max(0, length - 1)

    def max_lookback(self, length: int) -> int:
        return min(length, 1)

    def passed_at(self, token: int) -> int:
        return token + 2


@dataclass(frozen=True, slots=True)
class Cross(_Kind):
    """All tokens of an encoder's output (an image) are visible, the same ones to every query."""

    @property
    def kind(self) -> str:
        return "cross"

    @property
    def name(self) -> str:
        return "cross"

    @property
    def keeps(self) -> Keeps:
        return Keeps.ENCODER

    def oldest_needed(self, length: int) -> int:
        return 0

    def max_lookback(self, length: int) -> int:
        return length

    def passed_at(self, token: int) -> int:
        return NEVER
