"""Watching the prefix cache from a front end: one subscription at the engine, however many watch here.

    engine ──► Subscription ──► Mirror            what is known now, for those who come later
                           └──► Watch, Watch ...  what each has not taken yet: bounded

A new watcher is told all that is known, then what changes. A watcher that does not keep up is told to begin anew, and
what waited for it is dropped at once.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any

from ...errors import IntarsiaError, Overloaded
from ...kvcache.events import Cleared, Event, Events, Removed, Stored, parts
from ...proto.messages import CACHE_EVENTS, UnwatchCache, WatchCache
from .connection import Connection

UNWATCH_AFTER_S = 1.0
"""How long a subscription outlives its last watcher. To begin anew costs the engine more than to go on."""

MOST_UNREAD_NAMES = 65_536
"""Names of blocks that may wait for a watcher, where it does not say how many."""


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
    """What the engine tells a front end, and the watchers here. Ends with its engine."""

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


class CacheWatches:
    """The subscriptions of a front end at one engine: one for each viewer, from its first watcher to its last."""

    def __init__(self, connection: Connection):
        self._connection = connection
        self._subscriptions: dict[int, Subscription] = {}  # by handle
        self._handles: dict[str | None, int] = {}  # by viewer

    async def watch(
        self, viewer: str | None = None, most_unread_names: int = MOST_UNREAD_NAMES
    ) -> AsyncGenerator[Events, None]:
        """What becomes known in the prefix cache and what is forgotten, as it happens. All that is known already comes
        first, after a `Cleared`. Close it to stop. The engine tells it once, however many watch here.

        viewer: of the blocks of this salt. None: of all.
        Raises `Overloaded` when more has happened than the caller has taken: what is known must be asked for anew.
        Raises `EngineUnavailable` when the engine is lost.
        """
        if viewer not in self._handles:
            self._handles[viewer] = handle = self._connection.ask(WatchCache, viewer)
            self._subscriptions[handle] = Subscription()
        subscription = self._subscriptions[self._handles[viewer]]
        watch: Watch | None = None
        try:
            watch = await subscription.watch(most_unread_names)
            while True:
                yield await watch.take()
        finally:
            subscription.leave(watch)
            if not subscription.watches:
                asyncio.get_running_loop().call_later(UNWATCH_AFTER_S, self._unwatch, viewer, subscription)

    def _unwatch(self, viewer: str | None, subscription: Subscription) -> None:
        """If no watcher has come meanwhile."""
        handle = self._handles.get(viewer)
        if handle is None or self._subscriptions.get(handle) is not subscription or subscription.watches:
            return
        del self._handles[viewer], self._subscriptions[handle]
        self._connection.send(UnwatchCache(handle))

    def hear(self, handle: int, events: Sequence[Sequence[Any]]) -> None:
        """What has changed. A subscription may have ended before the engine heard of it."""
        if (subscription := self._subscriptions.get(handle)) is not None:
            subscription.hear(Events(list(map(CACHE_EVENTS.read, events))))

    def begin(self, handle: int) -> bool:
        """All that was known has been told. False if the handle is of no subscription."""
        subscription = self._subscriptions.get(handle)
        if subscription is not None and not subscription.begun.done():
            subscription.begun.set_result(None)
        return subscription is not None

    def end(self, error: IntarsiaError) -> None:
        """The engine is lost."""
        subscriptions, self._subscriptions, self._handles = self._subscriptions, {}, {}
        for subscription in subscriptions.values():
            subscription.end(error)


def _size(events: Sequence[Event]) -> int:
    return 1 + sum(1 if isinstance(event, Cleared) else len(event.hashes) for event in events)
