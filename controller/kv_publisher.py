"""Sends cache events to subscribers over ZeroMQ, as vLLM does. Off unless it is asked for.

    engine's loop ──► queue, bounded ──► thread ──► PUB      topic, number of the batch, batch
                                            ▲  └──► ROUTER   the last batches again, for who missed some
                                            └────── number of the first batch that is wanted

The engine never waits for a subscriber. A batch that finds the queue full is dropped and keeps its number, so
subscribers see the gap. ZeroMQ itself drops what one subscriber does not take, which looks the same to that one; it may
ask for the last batches again. It is sent them, and then an empty batch whose number is -1.
"""

import contextlib
import importlib
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from importlib.util import find_spec
from typing import Any
from urllib.parse import urlsplit

from ..errors import InvalidSetting
from ..kvcache.events import Event, parts
from ..kvcache.name_tokens import NameTokens
from ..proto.status import EngineInfo
from .cache_watchers import CacheWatchers
from .kv_events import Translator

END_OF_REPLAY = (-1).to_bytes(8, "big", signed=True)

MOST_HELD_BYTES = 64 * 2**20
"""Of batches that wait to be sent; and of those that are kept for who asks for them again."""

LONGEST_QUESTION_BYTES = 256
"""On the replay socket. A number has eight."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

END_WITHIN_S = 1.0


@dataclass(frozen=True, slots=True)
class KvEventsSettings:
    """Under vLLM's names, as `--kv-events-config` has them.

    Raises `InvalidSetting`, naming `kv_events_config`.
    """

    enable_kv_cache_events: bool = False
    publisher: str = ""  # "zmq", "null"; empty: "zmq" where events are enabled
    endpoint: str = "tcp://127.0.0.1:5557"  # where subscribers connect
    replay_endpoint: str | None = None  # where they ask for the last batches again; None: nowhere
    buffer_steps: int = 10_000  # batches that are kept for that
    hwm: int = 100_000  # batches that ZeroMQ holds for one subscriber
    max_queue_size: int = 10_000  # batches that wait for ZeroMQ
    topic: str = ""
    insecure: bool = False  # listen beyond loopback, where anyone may read the tokens of all prompts

    def __post_init__(self):
        for name in ("buffer_steps", "hwm", "max_queue_size"):
            value = getattr(self, name)
            if type(value) is not int or not 1 <= value <= 1_000_000:
                raise _refusal(f"{name} must be a whole number from 1 to 1,000,000, got {str(value)[:40]}")
        if self.publisher not in ("", "zmq", "null"):
            raise _refusal(f'publisher must be "zmq" or "null", got {str(self.publisher)[:40]!r}')
        if not isinstance(self.topic, str) or len(self.topic) > 256:
            raise _refusal("topic must be a text of at most 256 characters")
        for name in ("endpoint", "replay_endpoint"):
            address = getattr(self, name)
            if address is not None:
                self._check_address(name, address)
        if self.endpoint == self.replay_endpoint:
            raise _refusal(f"endpoint and replay_endpoint are both {self.endpoint}; they need an address each")

    @property
    def is_on(self) -> bool:
        return self.enable_kv_cache_events and self.publisher != "null"

    def _check_address(self, name: str, address: Any) -> None:
        if not isinstance(address, str) or not address.startswith(("tcp://", "ipc://")):
            raise _refusal(f"{name} must be tcp://HOST:PORT or ipc://PATH, got {str(address)[:80]!r}")
        if address.startswith("ipc://"):
            return
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        if not host or not port.isdigit() or not 1 <= int(port) <= 65535:
            raise _refusal(f"{name} must be tcp://HOST:PORT with a port from 1 to 65535, got {address[:80]!r}")
        if host not in LOOPBACK and not self.insecure:
            raise _refusal(
                f"{name} {address[:80]} is beyond loopback, where anyone who connects reads the tokens of all prompts; "
                f'use tcp://127.0.0.1:{port}, or say "insecure": true if the network itself keeps strangers out'
            )


def _refusal(message: str) -> InvalidSetting:
    return InvalidSetting(f"kv_events_config: {message}", field="kv_events_config")


def kv_events_settings(given: Mapping[str, Any]) -> KvEventsSettings:
    """Raises `InvalidSetting` for a name that is none, a value that is not possible, or without pyzmq."""
    known = {each.name for each in fields(KvEventsSettings)}
    if unknown := sorted(set(map(str, given)) - known):
        raise _refusal(f"{unknown[0][:40]} is no field of it; there are {', '.join(sorted(known))}")
    settings = KvEventsSettings(**given)
    if settings.is_on and find_spec("zmq") is None:
        raise _refusal("events are sent with pyzmq, which is not installed: pip install 'intarsia[kv-events]'")
    return settings


class KvPublisher:
    """A thread with two sockets. `publish` and `close` are called from one thread, that of the engine's loop."""

    def __init__(self, settings: KvEventsSettings):
        """Raises `InvalidSetting` if an address cannot be had."""
        self._zmq: Any = importlib.import_module("zmq")
        self._settings = settings
        self._topic = settings.topic.encode()
        self._context = self._zmq.Context()
        self._lock = threading.Lock()
        self._queue: deque[tuple[int, bytes]] = deque()
        self._queued_bytes = 0
        self._next = 0
        self.dropped = 0  # batches, since the start
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=settings.buffer_steps)
        self._kept_bytes = 0
        self._is_over = False
        wake = "inproc://wake"
        try:
            self._pub = self._bound(self._zmq.PUB, settings.endpoint, SNDHWM=settings.hwm)
            # A whole replay fits: ZeroMQ hears only of every other half of its mark what was taken.
            self._replay = self._bound(
                self._zmq.ROUTER,
                settings.replay_endpoint,
                SNDHWM=2 * (settings.buffer_steps + 1),
                MAXMSGSIZE=LONGEST_QUESTION_BYTES,
            )
            self._woken = self._bound(self._zmq.PULL, wake)
        except InvalidSetting:
            self._context.destroy(linger=0)
            raise
        self._wake = self._context.socket(self._zmq.PUSH)
        self._wake.connect(wake)
        self._thread = threading.Thread(target=self._run, name="cache-events", daemon=True)
        self._thread.start()

    def publish(self, batch: bytes) -> None:
        """Send it to who listens, as soon as may be. It is dropped where as many wait as may."""
        number, self._next = self._next, self._next + 1
        with self._lock:
            is_full = self._queued_bytes + len(batch) > MOST_HELD_BYTES
            if len(self._queue) >= self._settings.max_queue_size or (is_full and self._queue):
                self.dropped += 1
                return
            self._queue.append((number, batch))
            self._queued_bytes += len(batch)
            is_first = len(self._queue) == 1
        if is_first:
            self._poke()

    def close(self) -> None:
        """Send what waits, and end."""
        self._is_over = True
        self._poke()
        self._thread.join(END_WITHIN_S)
        self._wake.close(linger=0)
        if not self._thread.is_alive():
            self._context.term()

    def _poke(self) -> None:
        with contextlib.suppress(self._zmq.Again):  # it is awake
            self._wake.send(b"", self._zmq.NOBLOCK)

    def _bound(self, kind: int, address: str | None, **options: int) -> Any:
        """A socket that listens; None if there is no address."""
        if address is None:
            return None
        made = self._context.socket(kind)
        made.linger = 0
        if urlsplit(address).hostname == "::1":
            made.setsockopt(self._zmq.IPV6, 1)
        for name, value in options.items():
            made.setsockopt(getattr(self._zmq, name), value)
        try:
            made.bind(address)
        except self._zmq.ZMQError as error:
            made.close()
            raise _refusal(f"nothing can listen at {address}: {error}; choose another address") from None
        return made

    # -- the thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        zmq = self._zmq
        poller = zmq.Poller()
        for each in filter(None, (self._woken, self._replay)):
            poller.register(each, zmq.POLLIN)
        while not self._is_over:
            ready = dict(poller.poll())
            if self._woken in ready:
                self._woken.recv()
            self._send_all()
            if self._replay is not None and self._replay in ready:
                self._answer()
        self._send_all()
        for each in filter(None, (self._pub, self._replay, self._woken)):
            each.close(linger=round(END_WITHIN_S * 500))

    def _send_all(self) -> None:
        while batch := self._taken():
            number, payload = batch
            self._pub.send_multipart((self._topic, number.to_bytes(8, "big"), payload))
            self._keep(number, payload)

    def _taken(self) -> tuple[int, bytes] | None:
        with self._lock:
            if not self._queue:
                return None
            batch = self._queue.popleft()
            self._queued_bytes -= len(batch[1])
            return batch

    def _keep(self, number: int, payload: bytes) -> None:
        if len(self._kept) == self._kept.maxlen:
            self._kept_bytes -= len(self._kept.popleft()[1])
        self._kept.append((number, payload))
        self._kept_bytes += len(payload)
        while self._kept_bytes > MOST_HELD_BYTES and len(self._kept) > 1:
            self._kept_bytes -= len(self._kept.popleft()[1])

    def _answer(self) -> None:
        """A subscriber asks for what it missed: [its identity, nothing, the number of the first batch]."""
        asked = self._replay.recv_multipart()
        if len(asked) != 3 or len(asked[2]) != 8:
            return
        whom, first = asked[0], int.from_bytes(asked[2], "big")
        for frames in self._again(first):
            with contextlib.suppress(self._zmq.Again):  # it does not read, and sees the gap
                self._replay.send_multipart((whom, b"", *frames), self._zmq.NOBLOCK)

    def _again(self, first: int) -> Iterator[tuple[bytes, bytes, bytes]]:
        for number, payload in self._kept:
            if number >= first:
                yield self._topic, number.to_bytes(8, "big"), payload
        yield b"", END_OF_REPLAY, b""


class KvEvents:
    """A watcher of an engine's cache whose events go to subscribers, from now until it is closed."""

    def __init__(self, settings: KvEventsSettings, info: EngineInfo, watchers: CacheWatchers):
        """Raises `InvalidSetting` if an address cannot be had."""
        self.note = f"cache events are sent at {settings.endpoint}, with the tokens of all prompts"
        self._publisher = KvPublisher(settings)
        self._watchers, self._namer = watchers, watchers.namer
        self._namer.notes = notes = NameTokens()
        self._translator = Translator(info, notes, self._namer.mark(b""))
        self._watcher = self._hear  # the very object, by which it is removed
        self._hear(watchers.add(self._watcher))

    def _hear(self, events: list[Event]) -> None:
        for part in parts(events):
            if (batch := self._translator.batch(part)) is not None:
                self._publisher.publish(batch)

    def close(self) -> None:
        self._watchers.remove(self._watcher)
        self._namer.notes = None
        self._publisher.close()


def kv_events(settings: KvEventsSettings | None, info: EngineInfo, watchers: CacheWatchers) -> KvEvents | None:
    """None: they are not asked for. Raises as `KvEvents`."""
    return KvEvents(settings, info, watchers) if settings is not None and settings.is_on else None
