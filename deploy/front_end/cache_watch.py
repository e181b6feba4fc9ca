"""Watching the prefix cache from a front end: one subscription at the engine, however many watch here.

    engine ──► Subscription ──► Mirror            what is known now, for those who come later
                           └──► Watch, Watch ...  what each has not taken yet: bounded

Who comes is told all that is known, then what changes. Who does not keep up is told to begin anew, and what waited for
it is given back at once.
"""

import asyncio
from collections import deque
from collections.abc import Iterator, Sequence

from ...errors import IntarsiaError, Overloaded
from ...kvcache.events import Cleared, Event, Events, Removed, Stored, parts

MOST_UNREAD_NAMES = 65_536
"""The most names of blocks that wait for a watcher who gives no number."""


class Mirror:
    """A copy of what the engine's cache knows, kept up to date by its events."""

    def __init__(self) -> None:
        self._groups: dict[int, tuple[str, int, dict[bytes, None]]] = {}  # kind, block tokens and names

    def hear(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Stored(group, kind, block_tokens, hashes):
                    self._groups.setdefault(group, (kind, block_tokens, {}))[2].update(dict.fromkeys(hashes))
                case Removed(group, _, hashes):
                    names = self._groups[group][2] if group in self._groups else {}
                    for name in hashes:
                        names.pop(name, None)
                case Cleared():
                    self._groups.clear()

    def known(self) -> list[Event]:
        """All of it, as if it had just become known."""
        groups = self._groups.items()
        return [
            Cleared(),
            *(Stored(group, kind, size, tuple(names)) for group, (kind, size, names) in groups if names),
        ]


class Watch:
    """What one watcher has not taken yet. What is known when it comes is read from one copy, piece by piece."""

    def __init__(self, known: Sequence[Event], most_unread_names: int):
        self._known: Iterator[Events] = parts(known)
        self._most = most_unread_names
        self._changes: deque[Events] = deque()
        self._unread = 0  # names in changes, and one for each message of them
        self._end: IntarsiaError | None = None
        self._wake = asyncio.Event()

    def hear(self, events: Events) -> None:
        if self._end is not None:
            return
        size = _size(events)
        if self._changes and self._unread + size > self._most:
            self.end(
                Overloaded(
                    f"{self._unread + size} names of blocks wait to be read, and {self._most} may "
                    "(max_unread_names); watch it anew, and read faster",
                    asked=self._unread + size,
                    limit=self._most,
                )
            )
            return
        self._changes.append(events)
        self._unread += size
        self._wake.set()

    def end(self, error: IntarsiaError) -> None:
        """Nothing more comes; what waits is not kept."""
        self._end = self._end or error
        self.drop()
        self._wake.set()

    def drop(self) -> None:
        """Keep nothing for a reader that takes no more."""
        self._known = iter(())
        self._changes.clear()
        self._unread = 0

    async def take(self) -> Events:
        """What comes next. Raises what it was ended with."""
        while True:
            if self._end is not None:
                raise self._end
            if (piece := next(self._known, None)) is not None:
                return piece
            if self._changes:
                events = self._changes.popleft()
                self._unread -= _size(events)
                return events
            self._wake.clear()
            await self._wake.wait()


class Subscription:
    """What the engine tells a front end, and those here who watch. Ends with its engine."""

    def __init__(self) -> None:
        self.watches: set[Watch] = set()
        self.begun = asyncio.get_running_loop().create_future()  # all that was known at the beginning has come
        self._mirror = Mirror()

    def hear(self, events: Events) -> None:
        self._mirror.hear(events)
        for watch in self.watches:
            watch.hear(events)

    async def watch(self, most_unread_names: int) -> Watch:
        """One more. Raises why the subscription ended, if it did."""
        await asyncio.shield(self.begun)
        watch = Watch(self._mirror.known(), most_unread_names)
        self.watches.add(watch)
        return watch

    def leave(self, watch: Watch | None) -> None:
        if watch is not None:
            self.watches.discard(watch)
            watch.drop()

    def end(self, error: IntarsiaError) -> None:
        if not self.begun.done():
            self.begun.set_exception(error)
            self.begun.exception()  # it may be that no caller waits
        for watch in self.watches:
            watch.end(error)


def _size(events: Sequence[Event]) -> int:
    return 1 + sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in events)
