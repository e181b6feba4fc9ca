"""Which tokens a name stands for, for those who tell the outside of more than names.

    n0 ──► n1 ──► n2        of each name: the one before it, and the tokens of its own block

Names are digests, from which no tokens can be read. So what chains compute is noted as they grow, where subscribers
want to know. The oldest notes are forgotten beyond a bound: prompts that wait for long may have been noted long ago.
"""

from array import array
from collections.abc import Sequence
from typing import NamedTuple

MOST_NAMES = 1 << 18
"""Of 16 tokens each, four million tokens: some 64 MiB."""


class NamedTokens(NamedTuple):
    """What a name adds to the one before it."""

    before: bytes | None  # None: it is the first of its sequence
    packed: bytes  # tokens, four bytes each

    @property
    def tokens(self) -> list[int]:
        return array("I", self.packed).tolist()


class NameTokens:
    """The latest names of full blocks. Invariant: there are at most `most` of them, those noted last."""

    def __init__(self, most: int = MOST_NAMES):
        self._most = most
        self._of: dict[bytes, NamedTokens] = {}  # the oldest first

    def __len__(self) -> int:
        return len(self._of)

    def note(self, names: Sequence[bytes], first: int, packed: bytes) -> None:
        """names: of a sequence; those from `first` on are new. packed: their tokens, four bytes each."""
        size = len(packed) // max(1, len(names) - first)
        for number in range(first, len(names)):
            start = (number - first) * size
            self._of.pop(names[number], None)
            before = names[number - 1] if number else None
            self._of[names[number]] = NamedTokens(before, packed[start : start + size])
        while len(self._of) > self._most:
            del self._of[next(iter(self._of))]

    def of(self, name: bytes) -> NamedTokens | None:
        """None: it is no name of a full block, or was noted too long ago."""
        return self._of.get(name)
