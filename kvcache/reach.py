"""How far back a layer looks: the one question in which kinds of layers differ.

A reach answers for the query at position `length`, with the tokens 0 .. length-1 cached:

    window of 4:   0 1 2 3 4 5 6 7 | 8        <- the query (position 8 = length)
                             ^oldest_needed(8) == 5: it sees 5, 6, 7 and itself

Allocation, early release and the prefix-hit rule all follow from this answer, so a new kind of layer is one small
class here, its mask in `tests/kvcache/test_reach.py`, and a line in `workers/layers.py`. No other file asks which kind
a layer is.
"""

import sys
from dataclasses import dataclass
from typing import Protocol

NEVER = sys.maxsize
"""A length that no sequence reaches."""


class Reach(Protocol):
    """How far back the next token of a layer looks. Lengths and positions count tokens."""

    @property
    def name(self) -> str:
        """For people: "full", "sliding-1024"."""
        ...

    @property
    def window_tokens(self) -> int | None:
        """Visible tokens, the query itself included; None when there is no limit. What a kernel masks by."""
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


@dataclass(frozen=True, slots=True)
class Full:
    """Every earlier token is visible."""

    @property
    def name(self) -> str:
        return "full"

    @property
    def window_tokens(self) -> None:
        return None

    def oldest_needed(self, length: int) -> int:
        return 0

    def max_lookback(self, length: int) -> int:
        return length

    def passed_at(self, token: int) -> int:
        return NEVER


@dataclass(frozen=True, slots=True)
class Sliding:
    """The last `window` tokens are visible, the query itself included: key j to query i when i - window < j <= i.

    Models disagree about whether a window counts the query; whoever reads a config normalises it to this.
    """

    window: int

    def __post_init__(self):
        if self.window < 1:
            raise ValueError(f"a sliding window must show at least the token itself, got {self.window} tokens")

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
