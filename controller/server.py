"""Where front ends (gRPC servers, Serve replicas, the offline API) connect to the engine. `proto/messages.py` says what
they say to each other.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import IntarsiaError
from ..kvcache.events import Event, parts
from ..kvcache.ids import RequestId
from ..proto.channel import Address, Stream, StreamServer, reading
from ..proto.codec import read
from ..proto.messages import (
    CACHE_EVENTS,
    FROM_ENGINE,
    FROM_FRONT_END,
    Abort,
    Answer,
    AskCacheState,
    AskLeases,
    AskLoad,
    AskMetrics,
    AskProbe,
    AskSnapshot,
    CacheEvents,
    Delivery,
    EngineLost,
    Enough,
    Idle,
    Pair,
    Prepare,
    Refused,
    ReleaseLease,
    Submit,
    UnwatchCache,
    WatchCache,
)
from ..proto.request import GenerateRequest
from ..proto.status import PreparedEnd, PreparedPrompt
from .cache_watchers import Watcher
from .delivery import Outbox
from .engine import Engine
from .status import Status

QUESTIONS: Mapping[type, Callable[..., Any]] = {
    AskLoad: Status.load,
    AskCacheState: Status.cache_state,
    AskProbe: Status.probe,
    AskMetrics: Status.metrics,
    AskLeases: Status.leases,
    ReleaseLease: Status.release_lease,
}
"""That are answered at once. What is behind the handle of a question is what the engine is asked with."""


class EngineServer:
    """Listens for front ends on behalf of one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._streams: set[Stream] = set()
        self._pairs = _Pairs()
        self._server = StreamServer(self._serve)

    async def start(self, host: str) -> Address:
        return await self._server.start(host)

    async def close(self, failure: IntarsiaError | None = None) -> None:
        """failure: why the engine cannot go on; None: it is stopped."""
        if failure is not None:
            for stream in self._streams:
                stream.send_message(FROM_ENGINE.plain(EngineLost(failure, self._engine.is_broken)))
        await self._server.close()

    async def _serve(self, stream: Stream) -> None:
        stream.send_message(self._engine.info)
        self._streams.add(stream)
        connection = _Connection(self._engine, stream, self._pairs)
        try:
            while True:
                value = await stream.receive_message()
                with reading("what a front end says"):
                    message = FROM_FRONT_END.read(value)
                    _check_handle(message)
                connection.take(message)
        finally:
            self._streams.discard(stream)
            self._pairs.part(stream)
            connection.close()


class _Connection:
    """What one front end has asked for, and what it is to be told."""

    def __init__(self, engine: Engine, stream: Stream, pairs: "_Pairs"):
        self._engine = engine
        self._stream = stream
        self._pairs = pairs
        self._outbox = Outbox(stream, self._note_ends)
        self._requests: dict[int, RequestId] = {}  # by handle
        self._watchers: dict[int, Watcher] = {}  # by handle
        self._snapshots: set[asyncio.Future[None]] = set()  # that are being taken
        self._is_closed = False
        self._verbs: Mapping[type, Callable[[Any], None]] = {
            Submit: self._submit,
            Abort: self._abort,
            Enough: self._enough,
            Refused: lambda message: engine.telemetry.refused(message.requests),
            AskSnapshot: self._snapshot,
            Prepare: self._prepare,
            WatchCache: self._watch,
            UnwatchCache: lambda message: engine.cache_watchers.remove(self._watchers.pop(message.handle)),
            Pair: lambda message: pairs.meet(message.name, stream),
            Idle: self._be_idle,
        } | dict.fromkeys(QUESTIONS, self._answer)

    def take(self, message: Any) -> None:
        """Do what a front end says."""
        self._verbs[type(message)](message)

    def close(self) -> None:
        """The front end has left: what it asked for ends."""
        self._is_closed = True
        self._outbox.close()
        for request_id in self._requests.values():
            self._engine.abort(request_id)
        for watcher in self._watchers.values():
            self._engine.cache_watchers.remove(watcher)
        for taking in self._snapshots:
            taking.cancel()

    def _submit(self, message: Submit) -> None:
        try:
            with reading("a request"):
                request = read(message.request, GenerateRequest, checked=True)
                _check_request(request)
            ids = self._engine.submit(request, message.handle, self._outbox.deliver)
            self._requests |= {message.handle + index: request_id for index, request_id in enumerate(ids)}
        except IntarsiaError as error:
            self._send(Delivery((), (), errors=[(message.handle, error)]))

    def _note_ends(self, delivery: Delivery) -> bool:
        """Forget the answers that end with it. False if the engine has failed: `close` tells that to all at once, so
        that their requests can go on elsewhere."""
        if self._engine.failure is not None:
            return False
        for handle, delta in delivery.deltas:
            if delta.finish_reason is not None:
                self._requests.pop(handle, None)
        for handle, _ in delivery.errors:
            self._requests.pop(handle, None)
        return True

    def _abort(self, message: Abort) -> None:
        if message.handle in self._requests:
            self._engine.abort(self._requests.pop(message.handle))

    def _enough(self, message: Enough) -> None:
        if message.handle in self._requests:
            self._engine.end_soon(self._requests[message.handle])

    def _answer(self, message: Any) -> None:
        handle, *about = message
        self._send(Answer(handle, QUESTIONS[type(message)](self._engine.status, *about)))

    def _prepare(self, message: Prepare) -> None:
        told = partial(self._tell_prepared, message.handle)
        try:
            self._engine.preparing.take(message, told)
        except IntarsiaError:
            told(PreparedPrompt(PreparedEnd.REFUSED, 0, 0))

    def _tell_prepared(self, handle: int, prepared: PreparedPrompt) -> None:
        if not self._is_closed:
            self._send(Answer(handle, prepared))

    def _snapshot(self, message: AskSnapshot) -> None:
        taking = asyncio.ensure_future(self._send_snapshot(message))
        self._snapshots.add(taking)
        taking.add_done_callback(self._snapshots.discard)

    async def _send_snapshot(self, message: AskSnapshot) -> None:
        self._send(Answer(message.handle, await self._engine.status.snapshot(message.query)))

    def _watch(self, message: WatchCache) -> None:
        self._watchers[message.handle] = partial(self._send_events, message.handle)
        self._send_events(
            message.handle, self._engine.cache_watchers.add(self._watchers[message.handle], message.viewer)
        )
        self._send(Answer(message.handle, None))

    def _send_events(self, handle: int, events: Sequence[Event]) -> None:
        for part in parts(events):
            self._send(CacheEvents(handle, [CACHE_EVENTS.plain(event) for event in part]))

    def _be_idle(self, message: Idle) -> None:
        self._stream.be_idle()
        self._pairs.meet(message.name, self._stream)

    def _send(self, message: Any) -> None:
        self._stream.send_message(FROM_ENGINE.plain(message))


class _Pairs:
    """Which two connections are of one front end. When one ends, so does the other."""

    def __init__(self) -> None:
        self._waiting: dict[bytes, Stream] = {}  # by the name of the pair, for the other one
        self._twins: dict[Stream, Stream] = {}

    def meet(self, name: Any, stream: Stream) -> None:
        twin = self._waiting.pop(name, None)
        if twin is None:
            self._waiting[name] = stream
        elif twin is not stream:
            self._twins[twin], self._twins[stream] = stream, twin

    def part(self, stream: Stream) -> None:
        self._waiting = {name: waits for name, waits in self._waiting.items() if waits is not stream}
        twin = self._twins.pop(stream, None)
        if twin is not None:
            self._twins.pop(twin, None)
            twin.drop()


def _check_handle(message: Any) -> None:
    """Raises `ValueError` for numbers that no front end draws."""
    number = message[0]
    if type(number) is int and number < 0:
        raise ValueError(f"{type(message).__name__} of {number}")
    for tokens in _tokens_of(message):
        if tokens and not 0 <= min(tokens) <= max(tokens) < 2**31:
            raise ValueError("tokens that are none")
    if type(message) is Prepare and message.kept < 0:
        raise ValueError(f"{message.kept} tokens")


def _tokens_of(message: Any) -> Sequence[Sequence[int]]:
    match message:
        case AskProbe():
            return (message.tokens,)
        case Prepare():
            return message.tokens, message.passed
    return ()


def _check_request(request: GenerateRequest) -> None:
    """Raises `ValueError` for what no user could have given."""
    if not request.stream_interval_s >= 0 or not isinstance(request.options.trace, str):
        raise ValueError("its interval is below 0, or its trace no text")
