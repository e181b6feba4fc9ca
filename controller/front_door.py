"""Where front ends (gRPC servers, Serve replicas, the offline API) connect to the engine.

A connection is also the front end's lease: when it closes, its requests are aborted and their blocks are free.

    front end -> engine   ["submit", handle, tokens, sampling, images, terms, stream_interval_s, prompt_tokens,
                           is_known]
                          ["abort", handle]   ["refused", requests]
                          ["load", handle, viewer]   ["cache", handle, viewer]   ["probe", handle, tokens, salt]
                          ["metrics", handle]   ["view", handle, look]
                          ["watch", handle, viewer]   ["unwatch", handle]
    engine -> front end   first the EngineInfo; then, per step, [handles, tokens, [[handle, tag, what], ...]], where
                          what is a delta, an error, the answer to a question, or events of the cache; handles
                          -1 and -2 are the engine itself, whose error ends it, for good or till it is back

Handles are numbers that the front end draws; a request for n answers takes n of them in a row. "refused" tells how many
requests the front end refused by itself, since the engine had just said that it is full. `tokens` are a prompt of
`prompt_tokens` tokens and, of an answer that began elsewhere, what is known of it. A viewer is the salt whose figures
and events are meant; none: all. "watch" is answered when all that is known has been told.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from ..errors import IntarsiaError
from ..kvcache.events import Cleared, Event, Events, Removed, Stored, parts
from ..kvcache.manager import RequestId
from ..proto.channel import Address, ChannelClosed, Stream, StreamServer
from .engine import Delivery, Engine, TokenDelta, TokenLogprobs, Watcher
from .images import Image
from .request import SamplingParams, Terms
from .view import Look

DELTA, ERROR, ANSWER, EVENTS = range(4)

ENGINE, BROKEN_ENGINE = -1, -2
"""Handles of what is said of the engine itself: the error that ends it for good, or that another one may take over
from."""

KINDS: tuple[type[Event], ...] = (Stored, Removed, Cleared)
"""Of events, by their number on the wire."""

QUESTIONS: Mapping[str, Callable[..., Any]] = {
    "load": Engine.load,
    "cache": Engine.cache_state,
    "probe": Engine.probe,
    "metrics": lambda engine: engine.metrics().to_wire(),
}
"""By verb. Answers are plain values and named tuples of them."""


class FrontDoor:
    """Listens for front ends on behalf of one engine."""

    def __init__(self, engine: Engine):
        self._engine = engine
        self._streams: set[Stream] = set()
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

        def outlet(delivery: Delivery) -> None:
            if self._engine.failure is not None:
                return  # `close` tells all at once, so that they can go on elsewhere
            others = [_encode(handle, item) for handle, item in delivery.others]
            stream.send_message([delivery.handles, delivery.tokens, others])
            for handle, item in delivery.others:
                if isinstance(item, IntarsiaError) or item.finish_reason is not None:
                    requests.pop(handle, None)

        try:
            while True:
                verb, handle, *rest = await stream.receive_message()
                if verb == "abort":
                    if handle in requests:
                        self._engine.abort(requests.pop(handle))
                    continue
                if verb == "refused":
                    self._engine.refused(handle)
                    continue
                if verb in QUESTIONS:
                    stream.send_message([[], [], [[handle, ANSWER, QUESTIONS[verb](self._engine, *rest)]]])
                    continue
                if verb == "view":
                    looking = asyncio.ensure_future(self._show(stream, handle, Look(*rest[0])))
                    looks.add(looking)
                    looking.add_done_callback(looks.discard)
                    continue
                if verb == "watch":
                    watchers[handle] = partial(_send_events, stream, handle)
                    _send_events(stream, handle, self._engine.watch_cache(watchers[handle], *rest))
                    stream.send_message([[], [], [[handle, ANSWER, None]]])
                    continue
                if verb == "unwatch":
                    self._engine.unwatch_cache(watchers.pop(handle))
                    continue
                try:
                    tokens, sampling, images, terms, stream_interval_s, prompt_tokens, is_known = rest
                    params = SamplingParams(**sampling)
                    pictures = [Image(*image) for image in images]
                    urgency = Terms(**terms)
                    ids = self._engine.submit(
                        tokens, params, handle, outlet, pictures, urgency, stream_interval_s, prompt_tokens, is_known
                    )
                    requests |= {handle + index: request_id for index, request_id in enumerate(ids)}
                except IntarsiaError as error:
                    stream.send_message([[], [], [_encode(handle, error)]])
        except ChannelClosed:
            pass
        finally:
            self._streams.discard(stream)
            for request_id in requests.values():
                self._engine.abort(request_id)
            for watcher in watchers.values():
                self._engine.unwatch_cache(watcher)
            for looking in looks:
                looking.cancel()

    async def _show(self, stream: Stream, handle: int, look: Look) -> None:
        stream.send_message([[], [], [[handle, ANSWER, await self._engine.view(look)]]])


def _send_events(stream: Stream, handle: int, events: Sequence[Event]) -> None:
    for part in parts(events):
        stream.send_message([[], [], [[handle, EVENTS, [[KINDS.index(type(event)), *event] for event in part]]]])


def _encode(handle: int, item: TokenDelta | IntarsiaError) -> list:
    if isinstance(item, IntarsiaError):
        return [handle, ERROR, item.to_wire()]
    return [handle, DELTA, item]


def decode_events(value: Sequence) -> Events:
    """For the other end."""
    return Events([KINDS[kind](*rest) for kind, *rest in value])


def decode(tag: int, value: Any) -> TokenDelta | IntarsiaError:
    """What came for an answer, for the other end."""
    if tag == ERROR:
        return IntarsiaError.from_wire(value)
    delta = TokenDelta(*value)
    return delta._replace(logprobs=_rows(delta.logprobs), prompt_logprobs=_rows(delta.prompt_logprobs))


def _rows(wire: tuple | None) -> tuple[TokenLogprobs, ...] | None:
    return None if wire is None else tuple(TokenLogprobs(*row) for row in wire)
