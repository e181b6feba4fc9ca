"""What a step brought is sent to the subscribers of its requests: one message per front end, whatever their number.

A subscriber is sent each token at once, or several tokens together: once an interval is over, or all of them at the end
of the answer. While more requests come than can be served the interval is `PRESSED_INTERVAL_S` at least: what is saved
on messages goes into answers. What a front end that stands still does not take waits in an `Outbox`, where it takes
little.
"""

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ..errors import IntarsiaError
from ..proto.channel import ChannelClosed, Stream
from ..proto.messages import FROM_ENGINE, Delivery
from ..proto.reply import Backlog, Delta, Rows, TokenLogprobs
from .request import Request
from .scheduling.outcome import Outcome, Progress

PRESSED_INTERVAL_S = 0.05
"""From one piece of an answer to its next, under pressure."""


MOST_UNSENT_BYTES = 256 * 1024
"""In the socket's buffer for a front end, beside what the kernel takes. What comes then is held back."""

MESSAGE_BYTES = 64 * 1024
"""About so much is sent at once of what was held back."""


class _Collected(NamedTuple):
    """Of one step, for one sink, while it is put together."""

    handles: list[int]
    tokens: list[int]
    deltas: list[tuple[int, Delta]]


Sink = Callable[[Delivery], None]
"""Takes what one step brought to the requests of one front end, by the handles that it gave them."""


class Subscriber:
    """Who is sent one answer, and what of it was not sent yet because several tokens are wanted at once."""

    __slots__ = ("due_s", "handle", "held", "interval_s", "sent", "sink")

    def __init__(self, sink: Sink, handle: int, interval_s: float, sent: int):
        self.sink = sink
        self.handle = handle
        self.interval_s = interval_s  # 0: each token is sent at once, and `sent` is not kept up to date
        self.sent = sent  # tokens of the sequence, the prompt among them
        self.due_s = 0.0 if interval_s != math.inf else math.inf  # when to send what was not sent
        self.held: list[Delta] = []  # of what was not sent, those with more to say than a token

    def slow_down(self, known_tokens: int) -> None:
        """From now on send several tokens at once. known_tokens: of the sequence."""
        if not self.interval_s:
            self.sent = known_tokens
        self.interval_s = max(self.interval_s, PRESSED_INTERVAL_S)

    def take(self, request: Request, now_s: float) -> Delta:
        """All that was not sent, in one."""
        tokens, held = tuple(request.tokens[self.sent :]), self.held
        self.sent, self.held, self.due_s = len(request.tokens), [], now_s + self.interval_s
        if not held:
            return Delta(tokens, num_cached_tokens=request.cached_tokens, queue_s=request.queue_s)
        logprobs = None
        if held[-1].logprobs is not None:
            logprobs = Rows(packed for delta in held for packed in Rows.of(delta.logprobs or ()).packed)
        return held[-1]._replace(
            token_ids=tokens, logprobs=logprobs, prompt_logprobs=held[0].prompt_logprobs, misses=held[0].misses
        )


class Subscribers:
    """The subscribers of an engine's requests; each is `Request.subscriber`. Times are of the engine's clock."""

    def __init__(self) -> None:
        self._is_pressed = False  # more requests came lately than can be served

    def add(self, request: Request, sink: Sink, handle: int, interval_s: float) -> None:
        """Send the tokens that `request` gets from now on. interval_s: from one delta to the next, in seconds; 0: each
        token at once; infinite: all at the end."""
        if self._is_pressed:
            interval_s = max(interval_s, PRESSED_INTERVAL_S)
        request.subscriber = Subscriber(sink, handle, interval_s, sent=len(request.tokens))

    def press(self, is_pressed: bool, live: Iterable[Request]) -> None:
        """Under pressure every subscriber is sent less often, earlier ones too: hundreds may still wait, and each of
        their tokens would be a message."""
        begins, self._is_pressed = is_pressed and not self._is_pressed, is_pressed
        if begins:
            for request in live:
                request.subscriber.slow_down(len(request.tokens))

    def send(self, outcome: Outcome, now_s: float) -> None:
        """One call per sink. The requests know their tokens already."""
        deliveries: dict[Sink, _Collected] = {}
        self._add_columns(outcome, deliveries, now_s)
        for entry in outcome.notable:
            self._add_notable(entry, deliveries, now_s)
        for sink, delivery in deliveries.items():
            sink(Delivery(*delivery))

    def send_error(self, request: Request, error: IntarsiaError) -> None:
        subscriber = request.subscriber
        subscriber.sink(Delivery((), (), errors=[(subscriber.handle, error)]))

    def _add_columns(self, outcome: Outcome, deliveries: dict[Sink, _Collected], now_s: float) -> None:
        """Requests that got a token and nothing else. Most are next to others of the same sink."""
        sink, handles, tokens = None, [], []
        for request, token in zip(outcome.requests, outcome.tokens, strict=True):
            subscriber = request.subscriber
            if subscriber.interval_s:
                if now_s >= subscriber.due_s:
                    deltas = deliveries.setdefault(subscriber.sink, _Collected([], [], [])).deltas
                    deltas.append((subscriber.handle, subscriber.take(request, now_s)))
                continue
            if subscriber.sink is not sink:
                sink = subscriber.sink
                handles, tokens, _ = deliveries.setdefault(sink, _Collected([], [], []))
            handles.append(subscriber.handle)
            tokens.append(token)

    def _add_notable(self, entry: Progress, deliveries: dict[Sink, _Collected], now_s: float) -> None:
        """First and last tokens, and those with log-probabilities."""
        subscriber, delta = entry.request.subscriber, _delta(entry)
        if subscriber.interval_s:
            subscriber.held.append(delta)
            if entry.finish_reason is None and now_s < subscriber.due_s:
                return
            delta = subscriber.take(entry.request, now_s)
        deliveries.setdefault(subscriber.sink, _Collected([], [], [])).deltas.append((subscriber.handle, delta))


def _delta(entry: Progress) -> Delta:
    request, token, reason, logprobs = entry
    about_prompt = None
    if request.prompt_logprobs is not None and request.has_just_begun:
        prompt = request.tokens[1 : request.prompt_tokens]
        rows = zip(prompt, request.prompt_logprobs, strict=True)
        about_prompt = Rows.of(TokenLogprobs(token, *row) for token, row in rows)
    return Delta(
        token_ids=(token,),
        logprobs=Rows.of((TokenLogprobs(token, *logprobs),)) if logprobs is not None else None,
        finish_reason=reason.value if reason else None,
        num_cached_tokens=request.cached_tokens,
        prompt_logprobs=about_prompt,
        queue_s=request.queue_s,
        misses=request.misses if request.has_just_begun else (),
        lease=request.lease,
    )


class Outbox:
    """What one front end is to be told: a message per step. While it stands still, what is new waits here, and takes
    little: an answer's tokens are one piece, however many steps they are of."""

    def __init__(self, stream: Stream, may_send: Callable[[Delivery], bool]):
        """may_send: hears of each delivery that says more than tokens, before it is sent; False: it is not sent"""
        self._stream = stream
        self._may_send = may_send
        self._stream.hold_above(MOST_UNSENT_BYTES)
        self._held = Backlog()  # by handle
        self._errors: list[tuple[int, IntarsiaError]] = []
        self._sending: asyncio.Task[None] | None = None  # while something is held

    @property
    def held_bytes(self) -> int:
        return self._held.num_bytes

    def deliver(self, delivery: Delivery) -> None:
        """Send it, or hold it back behind what is held back."""
        if (delivery.deltas or delivery.errors) and not self._may_send(delivery):
            return
        if self._sending is not None:
            self._hold(delivery)
            return
        self._stream.send_message(FROM_ENGINE.plain(delivery))
        if self._stream.unsent_bytes > MOST_UNSENT_BYTES:
            self._sending = asyncio.create_task(self._send_held())

    def close(self) -> None:
        if self._sending is not None:
            self._sending.cancel()

    def _hold(self, delivery: Delivery) -> None:
        for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
            self._held.put(Delta((token,), answer=handle))
        for handle, delta in delivery.deltas:
            self._held.put(delta._replace(answer=handle))
        self._errors += delivery.errors

    async def _send_held(self) -> None:
        """As it is taken. What came with each answer is told before its error."""
        with contextlib.suppress(ChannelClosed):
            await self._stream.drain()
            while self._held or self._errors:
                deltas, size = [], 0
                while self._held and size < MESSAGE_BYTES:
                    piece = self._held.take()
                    deltas.append((piece.answer, piece))
                    size += piece.num_bytes
                errors = ()
                if not self._held:
                    errors, self._errors = self._errors, []
                self._stream.send_message(FROM_ENGINE.plain(Delivery((), (), deltas, errors)))
                await self._stream.drain()
            self._sending = None
