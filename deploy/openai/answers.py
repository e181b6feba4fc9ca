"""What both ways to ask for text share: collecting and streaming answers, usage, log-probabilities."""

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import pydantic
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from ...errors import IntarsiaError
from ...kvcache.misses import Miss
from ...proto.leases import LeaseReceipt
from ...proto.reply import Delta
from ..front_end.front_end import FEW_VALUES, Asked, FrontEnd, side_by_side
from ..front_end.json_pieces import json_pieces, size_of
from ..front_end.leases import told as told_lease
from ..front_end.misses import told
from ..front_end.request_log import CLIENT_CLOSED as CLIENT_CLOSED
from .lease_bodies import LeaseBody
from .protocol import CompletionDetails, NotCached, PromptDetails, StreamOptions, Usage

Result = TypeVar("Result")


THOUGHTS = ("reasoning_content", "reasoning")
"""Where clients look for what the model thought: DeepSeek and most servers, and OpenRouter and newer ones."""

EXTENSIONS = {"lease", "token_ids", "prompt_token_ids", "prompt_logprobs", "tool_calls", "index", *THOUGHTS}
"""Fields of answers that are left out where they are null; the others stand there as null, as OpenAI has them."""


class Piece(NamedTuple):
    """What came for one answer of one prompt."""

    prompt: int  # which one, when a request has several
    delta: Delta
    text: str


class Counter:
    """Usage over all prompts and answers of a request, as it grows."""

    def __init__(self, asked: Sequence[Asked]):
        self._prompt_tokens = sum(len(one.prompt) for one in asked)
        self._cached = [0] * len(asked)
        self._misses: list[tuple[Miss, ...]] = [()] * len(asked)
        self.lease: LeaseReceipt | None = None  # of the conversation, of which there is one then
        self._completion_tokens = 0
        self._thought_tokens = 0

    def add_thoughts(self, tokens: int) -> None:
        """Of the tokens that were added, so many are thoughts."""
        self._thought_tokens += tokens

    def add(self, piece: Piece) -> None:
        self._completion_tokens += len(piece.delta.token_ids)
        self._cached[piece.prompt] = max(self._cached[piece.prompt], piece.delta.num_cached_tokens)
        self._misses[piece.prompt] = self._misses[piece.prompt] or piece.delta.misses
        self.lease = piece.delta.lease or self.lease

    def usage(self, unsent: int = 0) -> Usage:
        """unsent: tokens that have been counted, and are left out."""
        completion_tokens = self._completion_tokens - unsent
        return Usage(
            prompt_tokens=self._prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=self._prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptDetails(
                cached_tokens=sum(self._cached),
                not_cached=[NotCached(**miss) for miss in told(chain.from_iterable(self._misses))],
            ),
            completion_tokens_details=CompletionDetails(reasoning_tokens=min(self._thought_tokens, completion_tokens)),
            lease=LeaseBody(**told_lease(self.lease)) if self.lease is not None else None,
        )


class StreamUsage:
    """The usage that a stream tells, as its `stream_options` have it."""

    def __init__(self, options: StreamOptions | None, counter: Counter):
        self._at_end = bool(options and options.include_usage)
        self._always = bool(self._at_end and options and options.continuous_usage_stats)
        self._counter = counter

    def put_into(self, event: dict[str, Any], unsent: int = 0) -> dict[str, Any]:
        """Any event but the last. unsent: tokens that have come, and are told by a later event."""
        if self._at_end:
            event["usage"] = self._counter.usage(unsent).model_dump() if self._always else None
        return event

    def last(self, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """The last one, which has no choices, if it is wanted, or tells of a lease."""
        if self._at_end or self._counter.lease is not None:
            yield event | {"usage": self._counter.usage().model_dump()}


async def pieces(front_end: FrontEnd, asked: Sequence[Asked], *, is_streaming: bool) -> AsyncGenerator[Piece, None]:
    """All that comes for several prompts, computed side by side, in the order in which it comes. Not streamed, each
    answer is one piece."""

    async def of(prompt: int, one: Asked) -> AsyncGenerator[Piece, None]:
        async with contextlib.aclosing(await front_end.generate(one, is_streaming=is_streaming)) as answers:
            async for delta, text in answers:
                yield Piece(prompt, delta, text)

    streams = [of(prompt, one) for prompt, one in enumerate(asked)]
    if len(streams) == 1:
        async with contextlib.aclosing(streams[0]) as stream:
            async for piece in stream:
                yield piece
        return
    async with contextlib.aclosing(side_by_side(streams)) as together:
        async for _, item in together:
            if isinstance(item, IntarsiaError):
                raise item
            yield item


async def json_response(front_end: FrontEnd, answer: pydantic.BaseModel | Mapping[str, Any]) -> Response:
    """An answer as JSON; a long one is written beside the loop."""
    body = await front_end.aside(
        size_of(answer, FEW_VALUES), lambda: b"".join(piece.encode() for piece in json_pieces(plain(answer)))
    )
    return Response(body, media_type="application/json")


def plain(value: Any) -> Any:
    """Turn a model into plain values, in many small steps where pydantic takes one long one. Null extensions are left
    out."""
    if isinstance(value, pydantic.BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, dict):
        return {name: plain(inner) for name, inner in value.items() if inner is not None or name not in EXTENSIONS}
    if not isinstance(value, list | tuple) or not value or isinstance(value[0], str | int | float):
        return value
    return [plain(inner) for inner in value]


def as_json(value: Any) -> str:
    return "".join(json_pieces(value))


async def while_connected(request: Request, work: Awaitable[Result]) -> Result | None:
    """The result, or None when the client left before it was there; then the work has been cancelled."""
    task = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(request))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        return None
    finally:
        for each in (task, leaving):
            each.cancel()
        await asyncio.gather(task, leaving, return_exceptions=True)


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def event_stream(events: AsyncGenerator[dict[str, Any] | str, None], error_event: Any) -> StreamingResponse:
    """Server-sent events. What is refused before the first one is refused as usual, with a status of its own; what
    fails later is told as an event, made by `error_event`."""
    try:
        first = await anext(events)
    except StopAsyncIteration:
        first = None
    except BaseException:
        await events.aclose()
        raise

    async def lines() -> AsyncIterator[str]:
        async with contextlib.aclosing(events):
            try:
                if first is not None:
                    yield _line(first)
                async for event in events:
                    yield _line(event)
            except IntarsiaError as error:
                yield _line(error_event(error))

    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
    return StreamingResponse(lines(), media_type="text/event-stream", headers=headers)


def _line(event: dict[str, Any] | str) -> str:
    if isinstance(event, str):
        return f"data: {event}\n\n"
    name = f"event: {event['type']}\n" if "type" in event else ""
    return f"{name}data: {as_json(event)}\n\n"


def now_s() -> int:
    return int(time.time())
