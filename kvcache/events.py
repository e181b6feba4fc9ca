"""What changed in the prefix cache, for those who keep a picture of it from outside: routers, consoles, other replicas.

Events are collected while there is a listener, and handed over once per step. Without one nothing is collected.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

MOST_NAMES = 4096
"""Of blocks in one message of events: a pool's names at once would hold up the tokens behind them."""


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


class Events(list[Event]):
    """Some that are told together. message: the same as a message, once it was made."""

    __slots__ = ("message",)

    def __init__(self, events: Sequence[Event] = ()):
        super().__init__(events)
        self.message: Any = None


def parts(events: Sequence[Event]) -> Iterator[Events]:
    """The same in messages of bounded size."""
    part = Events()
    room = MOST_NAMES
    for event in events:
        names = () if isinstance(event, Cleared) else event.hashes
        for start in range(0, max(1, len(names)), MOST_NAMES):
            piece = event if isinstance(event, Cleared) else event._replace(hashes=names[start : start + MOST_NAMES])
            room -= 1 + len(names[start : start + MOST_NAMES])
            if room < 0 and part:
                yield part
                part, room = Events(), MOST_NAMES
            part.append(piece)
    if part:
        yield part


def of_owner(events: Sequence[Event], mark: bytes) -> list[Event]:
    """What is told to one tenant of what happens: their own blocks alone. mark: ends the names of theirs."""
    own: list[Event] = []
    for event in events:
        if isinstance(event, Cleared):
            own.append(event)
        elif names := tuple(name for name in event.hashes if name.endswith(mark)):
            own.append(event._replace(hashes=names))
    return own


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
