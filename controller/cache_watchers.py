"""Who is told what changes in the prefix cache: routers, consoles, other replicas.

While there are no watchers nothing is collected, and a step costs one look at `is_watched`.
"""

from collections.abc import Callable

from ..kvcache.events import Cleared, Event, EventLog, of_owner
from ..kvcache.manager import CacheManager
from ..kvcache.prefix import Namer

Watcher = Callable[[list[Event]], None]
"""Takes what changed in the prefix cache since it was last called."""


class CacheWatchers:
    """The watchers of one engine. Invariant: the cache manager collects events if and only if there are watchers."""

    def __init__(self, manager: CacheManager):
        self.is_watched = False
        self._manager = manager
        self._watchers: list[tuple[Watcher, bytes | None]] = []  # with the mark of the salt it may see; None: all
        self._events: EventLog | None = None

    @property
    def namer(self) -> Namer:
        """Who makes the names that watchers are told."""
        return self._manager.namer

    def add(self, watcher: Watcher, viewer: str | None = None) -> list[Event]:
        """Send `watcher` what changes from now on. Returns what is known now.

        viewer: the salt whose blocks it is sent; None: those of all
        """
        self._events, self.is_watched = self._manager.pool.listen(), True
        self.send()  # what the others have not been sent yet is part of what is known now
        mark = None if viewer is None else self._manager.namer.mark(viewer.encode())
        self._watchers.append((watcher, mark))
        return _visible([Cleared(), *self._manager.pool.stored()], mark)

    def remove(self, watcher: Watcher) -> None:
        self._watchers = [(each, mark) for each, mark in self._watchers if each is not watcher]
        if not self._watchers:
            self._events, self.is_watched = None, False
            self._manager.pool.stop_listening()
        assert self.is_watched == bool(self._watchers), "events are collected if and only if they are sent somewhere"

    def send(self) -> None:
        """Send each watcher what has changed since the last call, if it may see any of that."""
        events = self._events.take() if self._events is not None else []
        if not events:
            return
        for watcher, mark in self._watchers:
            if visible := _visible(events, mark):
                watcher(visible)


def _visible(events: list[Event], mark: bytes | None) -> list[Event]:
    return events if mark is None else of_owner(events, mark)
