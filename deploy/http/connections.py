"""Who is connected to a server, and how much of what they send is held: counted, so that each limit holds."""

import resource
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from ...errors import Overloaded, OverQuota
from ..settings.limits import Limits

FILES_PER_CONNECTION = 2
"""Files that the process may open, for each connection: the engine, its files and gRPC need some, too."""


class Connection(Protocol):
    """What is known of one connection."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is being answered on it."""
        ...

    def end(self) -> None:
        """Close it at once."""
        ...


class Connections:
    """The connections of one server. A connection that has not shown a key makes room for a new one while it is
    idle."""

    def __init__(self, limits: Limits, *, wants_key: bool):
        self._most = min(limits.max_connections, max(1, _files(limits.max_connections) // FILES_PER_CONNECTION))
        self._most_keyless = min(self._most, limits.max_keyless_connections) if wants_key else self._most
        self._most_of_key = limits.max_key_connections
        self._keyless: dict[Connection, None] = {}  # the longest open one first
        self._keys: dict[Connection, bytes] = {}
        self._by_key: Counter[bytes] = Counter()

    def __len__(self) -> int:
        return len(self._keyless) + len(self._keys)

    def add(self, connection: Connection) -> bool:
        """Whether there is room for it; one that is idle may have been ended to make some."""
        is_full = len(self._keyless) >= self._most_keyless or len(self) >= self._most
        if is_full and not self.make_room():
            return False
        self._keyless[connection] = None
        return True

    def remove(self, connection: Connection) -> None:
        self._keyless.pop(connection, None)
        key = self._keys.pop(connection, None)
        if key is not None:
            self._by_key[key] -= 1
            if not self._by_key[key]:
                del self._by_key[key]

    def name(self, connection: Connection, key: bytes) -> None:
        """It has shown a key. Raises `OverQuota` if that one has too many."""
        if connection in self._keys or connection not in self._keyless:
            return  # its first key counts; one that has gone, not at all
        if self._by_key[key] >= self._most_of_key:
            raise OverQuota(
                f"this key has {self._most_of_key} connections open, which is the most it may have "
                "(max_key_connections); close some, or use one for several requests",
                limit=self._most_of_key,
            )
        del self._keyless[connection]
        self._keys[connection] = key
        self._by_key[key] += 1

    def make_room(self) -> bool:
        """End the longest open one that is idle and has shown no key. Whether there was one."""
        found = next((connection for connection in self._keyless if connection.is_idle), None)
        if found is None:
            return False
        del self._keyless[found]
        found.end()
        return True


def _files(connections: int) -> int:
    """How many files this process may open: as many as that many connections want, where that can be had."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = connections * FILES_PER_CONNECTION
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        return most
    return wanted if soft == resource.RLIM_INFINITY else soft


class Held:
    """Bytes of heads and bodies that are being read or parsed, by key and in sum."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._by_key: Counter[bytes] = Counter()
        self.total_bytes = 0

    def take(self, key: bytes, count: int) -> None:
        """Raises `Overloaded` where that would be too much; then nothing was taken."""
        limits = self._limits
        for held, limit, whose, refusal in (
            (self._by_key[key], limits.max_key_bodies_bytes, "of this key", OverQuota),
            (self.total_bytes, limits.max_bodies_bytes, "of all clients together", Overloaded),
        ):
            if held + count > limit:
                raise refusal(
                    f"{held + count} bytes of bodies {whose} are being read, and at most {limit} may be; send fewer "
                    f"at once, or again in {Overloaded.retry_after_s:g} s",
                    limit=limit,
                )
        self._by_key[key] += count
        self.total_bytes += count

    def give_back(self, key: bytes, count: int) -> None:
        self.total_bytes -= count
        self._by_key[key] -= count
        if not self._by_key[key]:
            del self._by_key[key]

    @contextmanager
    def share(self, key: bytes) -> Iterator["Share"]:
        """A share for one request; all of it is given back at the end."""
        share = Share(self, key)
        try:
            yield share
        finally:
            share.give_back()


class Share:
    """The bytes that one request holds of `Held`."""

    def __init__(self, held: Held, key: bytes):
        self._held = held
        self._key = key
        self._count = 0

    def take(self, count: int) -> None:
        """Raises `Overloaded`."""
        self._held.take(self._key, count)
        self._count += count

    def give_back(self) -> None:
        self._held.give_back(self._key, self._count)
        self._count = 0
