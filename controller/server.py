"""Where front ends (gRPC servers, Serve replicas, the offline API) connect to the engine.

A connection is also the front end's lease: when it closes, its requests are aborted and their blocks are free.

    front end -> engine   ["submit", handle, tokens, sampling, images, terms, stream_interval_s, prompt_tokens,
                           is_known]
                          ["abort", handle]   ["refused", requests]
                          ["load", handle, viewer]   ["cache", handle, viewer]   ["probe", handle, tokens, salt]
                          ["metrics", handle]   ["view", handle, look]
                          ["watch", handle, viewer]   ["unwatch", handle]   ["pair", name]   ["idle", name]
    engine -> front end   first the EngineInfo; then, per step, [handles, tokens, [[handle, tag, what], ...]], where
                          what is a delta, an error, the answer to a question, or events of the cache; handles
                          -1 and -2 are the engine itself, whose error ends it, for good or till it is back

A front end has two connections, which end together: one for all of the above, and one on which nothing is under way. A
machine that is gone without a word is heard of there within three seconds; on the first it looks for a minute like a
front end that stands still. "pair", and "idle" on the second, tell which two belong together.

What a front end that stands still does not take waits in an `Outbox`, where it takes little.

Handles are numbers that the front end draws; a request for n answers takes n of them in a row. "refused" tells how many
requests the front end refused by itself, since the engine had just said that it is full. `tokens` are a prompt of
`prompt_tokens` tokens and, of an answer that began elsewhere, what is known of it. A viewer is the salt whose figures
and events are meant; none: all. "watch" is answered when all that is known has been told.
"""

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ..errors import IntarsiaError
from ..kvcache.events import Cleared, Event, Events, Removed, Stored, parts
from ..kvcache.manager import RequestId
from ..proto.channel import Address, ChannelClosed, Stream, StreamServer, reading
from ..proto.request import Image, SamplingParams, Terms
from .cache_watchers import Watcher
from .delivery import Delivery
from .deltas import Backlog, TokenDelta
from .engine import Engine
from .snapshot import Look
from .status import Status

DELTA, ERROR, ANSWER, EVENTS = range(4)

ENGINE, BROKEN_ENGINE = -1, -2
"""Handles of what is said of the engine itself: the error that ends it for good, or that another one may take over
from."""

KINDS: tuple[type[Event], ...] = (Stored, Removed, Cleared)
"""Of events, by their number on the wire."""

MOST_UNSENT_BYTES = 256 * 1024
"""In the socket's buffer for a front end, beside what the kernel takes. What comes then is held back."""

MESSAGE_BYTES = 64 * 1024
"""About so much is sent at once of what was held back."""

VERBS: Mapping[str, int] = dict.fromkeys(("abort", "refused", "metrics", "unwatch", "pair", "idle"), 2) | {
    "load": 3,
    "cache": 3,
    "watch": 3,
    "submit": 9,
    "probe": 4,
    "view": 3,
}
"""What a front end may say, and of how many parts."""

QUESTIONS: Mapping[str, Callable[..., Any]] = {
    "load": Status.load,
    "cache": Status.cache_state,
    "probe": Status.probe,
    "metrics": lambda status: status.metrics().to_wire(),
}
"""By verb. Answers are plain values and named tuples of them."""


class FrontDoor:
    """Listens for front ends on behalf of one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._streams: set[Stream] = set()
        self._pairs = _Pairs()
        self._server = StreamServer(self._serve)

    async def start(self, host: str) -> Address:
        return await self._server.start(host)

    async def close(self, failure: IntarsiaError | None = None) -> None:
        """failure: why the engine can not go on; None: it is stopped."""
        if failure is not None:
            handle = BROKEN_ENGINE if self._engine.is_broken else ENGINE
            for stream in self._streams:
                stream.send_message([[], [], [_encode(handle, failure)]])
        await self._server.close()

    async def _serve(self, stream: Stream) -> None:
        stream.send_message(self._engine.info)
        self._streams.add(stream)
        requests: dict[int, RequestId] = {}
        watchers: dict[int, Watcher] = {}
        looks: set[asyncio.Future[None]] = set()

        outbox = Outbox(stream)

        def sink(delivery: Delivery) -> None:
            if self._engine.failure is not None:
                return  # `close` tells all at once, so that they can go on elsewhere
            outbox.deliver(delivery)
            for handle, item in delivery.others:
                if isinstance(item, IntarsiaError) or item.finish_reason is not None:
                    requests.pop(handle, None)

        try:
            while True:
                verb, handle, *rest = _said(await stream.receive_message())
                if verb in ("pair", "idle"):
                    if verb == "idle":
                        stream.be_idle()
                    self._pairs.meet(handle, stream)
                    continue
                if verb == "abort":
                    if handle in requests:
                        self._engine.abort(requests.pop(handle))
                    continue
                if verb == "refused":
                    self._engine.refused(handle)
                    continue
                if verb in QUESTIONS:
                    stream.send_message([[], [], [[handle, ANSWER, QUESTIONS[verb](self._engine.status, *rest)]]])
                    continue
                if verb == "view":
                    with reading("a look"):
                        look = Look(*rest[0])
                        _check_types(look, Look())
                    looking = asyncio.ensure_future(self._show(stream, handle, look))
                    looks.add(looking)
                    looking.add_done_callback(looks.discard)
                    continue
                if verb == "watch":
                    watchers[handle] = partial(_send_events, stream, handle)
                    _send_events(stream, handle, self._engine.cache_watchers.add(watchers[handle], *rest))
                    stream.send_message([[], [], [[handle, ANSWER, None]]])
                    continue
                if verb == "unwatch":
                    self._engine.cache_watchers.remove(watchers.pop(handle))
                    continue
                try:
                    asked = _Submitted.read(rest)
                    ids = self._engine.submit(
                        asked.tokens,
                        asked.sampling,
                        handle,
                        sink,
                        asked.images,
                        asked.terms,
                        asked.stream_interval_s,
                        asked.prompt_tokens,
                        asked.is_known,
                    )
                    requests |= {handle + index: request_id for index, request_id in enumerate(ids)}
                except IntarsiaError as error:
                    stream.send_message([[], [], [_encode(handle, error)]])
        finally:
            self._streams.discard(stream)
            self._pairs.part(stream)
            outbox.close()
            for request_id in requests.values():
                self._engine.abort(request_id)
            for watcher in watchers.values():
                self._engine.cache_watchers.remove(watcher)
            for looking in looks:
                looking.cancel()

    async def _show(self, stream: Stream, handle: int, look: Look) -> None:
        stream.send_message([[], [], [[handle, ANSWER, await self._engine.status.view(look)]]])


def _send_events(stream: Stream, handle: int, events: Sequence[Event]) -> None:
    for part in parts(events):
        stream.send_message([[], [], [[handle, EVENTS, [[KINDS.index(type(event)), *event] for event in part]]]])


class Outbox:
    """What one front end is to be told: a message per step. While it stands still, what is new waits here, and takes
    little: an answer's tokens are one piece, however many steps they are of."""

    def __init__(self, stream: Stream):
        self._stream = stream
        self._stream.hold_above(MOST_UNSENT_BYTES)
        self._held = Backlog()  # by handle
        self._errors: list[tuple[int, IntarsiaError]] = []
        self._sending: asyncio.Task[None] | None = None  # while something is held

    @property
    def held_bytes(self) -> int:
        return self._held.num_bytes

    def deliver(self, delivery: Delivery) -> None:
        """In the order of deliveries."""
        if self._sending is not None:
            self._hold(delivery)
            return
        others = [_encode(handle, item) for handle, item in delivery.others]
        self._stream.send_message([delivery.handles, delivery.tokens, others])
        if self._stream.unsent_bytes > MOST_UNSENT_BYTES:
            self._sending = asyncio.create_task(self._send_held())

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def _hold(self, delivery: Delivery) -> None:
        for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
            self._held.put(TokenDelta((token,), answer=handle))
        for handle, item in delivery.others:
            if isinstance(item, IntarsiaError):
                self._errors.append((handle, item))
            else:
                self._held.put(item._replace(answer=handle))

    async def _send_held(self) -> None:
        """As it is taken. What came with each answer is told before its error."""
        with contextlib.suppress(ChannelClosed):
            await self._stream.drain()
            while self._held or self._errors:
                others, size = [], 0
                while self._held and size < MESSAGE_BYTES:
                    piece = self._held.take()
                    others.append(_encode(piece.answer, piece))
                    size += piece.num_bytes
                if not self._held:
                    others += [_encode(handle, error) for handle, error in self._errors]
                    self._errors = []
                self._stream.send_message([[], [], others])
                await self._stream.drain()
            self._sending = None


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


class _Submitted(NamedTuple):
    """A request as a front end sends it."""

    tokens: Sequence[int]
    sampling: SamplingParams
    images: list[Image]
    terms: Terms
    stream_interval_s: float
    prompt_tokens: int
    is_known: bool

    @classmethod
    def read(cls, parts: Sequence[Any]) -> "_Submitted":
        """Raises `CorruptFrame`, or `InvalidRequest` for values that a user may have given."""
        with reading("a request"):
            tokens, sampling, images, terms, stream_interval_s, prompt_tokens, is_known = parts
            pictures = [Image(*image) for image in images]
            _check_types((tokens, prompt_tokens, is_known), ((), 0, False))
            for picture in pictures:
                _check_types(picture, (b"", 0))
            if not stream_interval_s >= 0 or not isinstance(terms.get("trace", ""), str):
                raise ValueError("its interval is below 0, or its trace no text")
            params, urgency = SamplingParams(**sampling), Terms(**terms)
        return cls(tokens, params, pictures, urgency, float(stream_interval_s), prompt_tokens, is_known)


def _said(message: Any) -> Sequence[Any]:
    """A message of a front end. Raises `CorruptFrame` for anything else."""
    with reading("what a front end says"):
        verb, handle, *rest = message
        if VERBS.get(verb) != len(message):
            raise ValueError(f"{len(message)} parts, and the first is {verb!r:.40}")
        is_named = type(handle) is bytes if verb in ("pair", "idle") else type(handle) is int and handle >= 0
        if not is_named:
            raise ValueError(f"{verb} of {handle!r:.40}")
        if verb == "probe":
            _check_prompt(*rest)
    return message


def _check_prompt(tokens: Any, salt: Any) -> None:
    """Raises `ValueError`."""
    _check_types((tokens, salt), ((), ""))
    if tokens and (set(map(type, tokens)) != {int} or min(tokens) < 0 or max(tokens) >= 2**31):
        raise ValueError("tokens that are none")


def _check_types(given: Sequence[Any], usual: Sequence[Any]) -> None:
    """Raises `ValueError`."""
    if list(map(type, given)) != list(map(type, usual)):
        raise ValueError(f"{', '.join(type(each).__name__ for each in given)} are no {type(usual).__name__}")


def _encode(handle: int, item: TokenDelta | IntarsiaError) -> list:
    if isinstance(item, IntarsiaError):
        return [handle, ERROR, item.to_wire()]
    return [handle, DELTA, item.to_wire()]


def decode_events(value: Sequence) -> Events:
    """For the other end."""
    return Events([KINDS[kind](*rest) for kind, *rest in value])


def decode(tag: int, value: Any) -> TokenDelta | IntarsiaError:
    """What came for an answer, for the other end."""
    if tag == ERROR:
        return IntarsiaError.from_wire(value)
    return TokenDelta.from_wire(value)
