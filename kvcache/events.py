"""What changed in the prefix cache, for those who keep a picture of it from outside: routers, consoles, other replicas.

Events are collected while somebody listens and handed over once per step. With nobody listening nothing is collected.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Stored(NamedTuple):
    """Blocks of a group became known, in the order of their sequence."""

    group: int
    kind: str
    block_tokens: int
    hashes: tuple[bytes, ...]  # of the prefix up to the end of each block


class Removed(NamedTuple):
    """Blocks of a group are known no longer."""

    group: int
    kind: str
    hashes: tuple[bytes, ...]


class Cleared(NamedTuple):
    """Nothing is known any more."""


Event = Stored | Removed | Cleared


class EventLog:
    """Events since they were last taken, neighbouring ones joined."""

    def __init__(self, groups: Sequence[tuple[str, int]]):
        """groups: kind and block tokens of each."""
        self._groups = groups
        self._events: list[Event] = []
        self._removed: dict[int, list[bytes]] = {}

    def stored(self, group: int, hashes: Sequence[bytes]) -> None:
        self._close_removed()
        kind, block_tokens = self._groups[group]
        self._events.append(Stored(group, kind, block_tokens, tuple(hashes)))

    def removed(self, group: int, prefix_hash: bytes) -> None:
        self._removed.setdefault(group, []).append(prefix_hash)

    def cleared(self) -> None:
        self._events, self._removed = [Cleared()], {}

    def take(self) -> list[Event]:
        """All events since the last call, oldest first."""
        self._close_removed()
        events, self._events = self._events, []
        return events

    def _close_removed(self) -> None:
        if self._removed:
            for group, hashes in self._removed.items():
                self._events.append(Removed(group, self._groups[group][0], tuple(hashes)))
            self._removed = {}
