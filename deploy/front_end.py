"""One engine as the outside meets it: texts and files in, text out. HTTP and gRPC are two ways to say the same."""

import asyncio
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from ..controller.client import EngineClient, Generation, TokenDelta
from ..controller.images import Image
from ..controller.info import CacheState, EngineInfo, EngineLoad
from ..controller.metrics import Metrics
from ..controller.request import USUAL_TERMS, SamplingParams, Terms
from ..errors import (
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    InvalidSetting,
    Overloaded,
    RequestAborted,
)
from ..kvcache.events import Event
from ..proto.tracing import INCOMING, Span, Tracer
from .access import TENANT
from .fleet import Fleet
from .images import ImageReader, read_images
from .limits import Limits
from .text import whole_answers, with_text
from .tokenizer import Tokenizer, encode_prompt
from .unread import LOOKS, Overdue

LONG_TEXT_CHARS = 4096
"""A longer text takes the tokenizer more than a millisecond, so other streams go on beside it."""

LONGEST_STREAM_INTERVAL_S = 10.0

MOST_WAITING = 64
"""Items of several streams together that wait to be taken. Others wait where they take less."""

Result = TypeVar("Result")


class Asked(NamedTuple):
    """A request as the engine takes it."""

    prompt: list[int]
    sampling: SamplingParams
    images: Sequence[Image] = ()
    terms: Terms = USUAL_TERMS
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    """What a front end does with answers on their way."""

    stream_interval_s: float = 0.0  # from one piece of a streamed answer to its next; 0: each token by itself
    max_streams: int = 4096  # requests being answered, streamed or not
    seeds_by_id: bool = False  # a request without a seed draws by its id, so that asked again it draws the same

    def __post_init__(self):
        if not 0 <= self.stream_interval_s <= LONGEST_STREAM_INTERVAL_S:
            raise InvalidSetting(
                f"stream_interval_s must be from 0 to {LONGEST_STREAM_INTERVAL_S:g} seconds, "
                f"got {self.stream_interval_s}",
                field="stream_interval_s",
            )
        if self.max_streams < 1:
            raise InvalidSetting(f"max_streams must be at least 1, got {self.max_streams}", field="max_streams")


class FrontEnd:
    """Lives on the event loop of its engine's connection."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        settings: FrontEndSettings | None = None,
        fleet: Fleet | None = None,
        tracer: Tracer | None = None,
        limits: Limits | None = None,
    ):
        """fleet: to choose among for each request; None: there is but this engine. tracer: who is told of requests.
        limits: of what clients may send; both servers read them here."""
        self._tracer = tracer
        self.limits = limits or Limits()
        self.settings = settings or FrontEndSettings()
        self.tokenizer = tokenizer
        self._engine = engine
        self._fleet = fleet
        self._images = ImageReader.of(engine.info)
        self._running: dict[str, Answers] = {}  # by request id
        self._is_leaving = False
        self._changed = asyncio.Event()  # somebody has been answered
        self._overdue = Overdue(self.limits)
        self._looking: asyncio.TimerHandle | None = None  # at those who do not read, while anybody is answered

    @property
    def info(self) -> EngineInfo:
        return self._engine.info

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return len(self._running)

    def leave(self) -> None:
        """Take no new requests from now on."""
        self._is_leaving = True

    async def idle(self) -> None:
        """Wait until nobody is being answered."""
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    async def check_ready(self) -> None:
        """Raises `EngineUnavailable` when new requests had better go elsewhere."""
        self._check_stays()
        await self._engine.load()

    def _check_stays(self) -> None:
        if self._is_leaving:
            raise EngineUnavailable("this server is stopping and takes no new requests; ask another one, or later")

    async def load(self) -> EngineLoad:
        return await self._engine.load()

    async def measured(self) -> tuple[EngineLoad, CacheState, Metrics]:
        """What the engine has to say of itself over time."""
        return await self._engine.load(), await self._engine.cache_state(), await self._engine.metrics()

    def engines(self) -> Mapping[str, EngineClient]:
        """All engines that it sends requests to, its own first."""
        return {self.info.model: self._engine} if self._fleet is None else self._fleet.engines

    async def cache_state(self) -> CacheState:
        return await self._engine.cache_state()

    def watch_cache(self) -> AsyncGenerator[list[Event], None]:
        return self._engine.watch_cache()

    def check_room(self, tenant: str) -> None:
        """Raises `Overloaded` where all engines have just said that they take nobody of `tenant`: whoever asks before
        the prompt is read spares this process what nobody would go on with. tenant: as the request says it."""
        tenant = TENANT.get() or tenant  # the key says it better
        if all(engine.is_full(tenant) for engine in self.engines().values()):
            self._engine.check_room(tenant)

    async def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text. Raises `InvalidRequest` when the model has no tokenizer."""
        return await _beside(
            len(text), lambda: encode_prompt(self.tokenizer, text, self.info.model, add_special_tokens)
        )

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Raises `InvalidRequest` without a tokenizer, or for what is no token."""
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer", field="tokens")
        strange = next((token for token in token_ids if not 0 <= token < self.info.vocab_size), None)
        if strange is not None:
            raise InvalidRequest(
                f"token {strange} is not in the vocabulary of {self.info.vocab_size} tokens",
                field="tokens",
                asked=strange,
                limit=self.info.vocab_size - 1,
            )
        return self.tokenizer.decode(token_ids)

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = (), **options: Any
    ) -> list[int]:
        """Token ids of a conversation, up to where the model answers. options: for the template.

        Raises `InvalidRequest` when the model has no tokenizer or no template, or the template refuses.
        """
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer, so it takes no messages", field="messages")
        size = sum(len(str(message)) for message in messages)
        return await _beside(size, lambda: tokenizer.chat(messages, tools, **options))

    async def read_images(self, files: Sequence[bytes]) -> Sequence[Image]:
        """Raises `InvalidRequest` for what is none, or where the model takes none."""
        if not files:
            return ()
        return await asyncio.to_thread(read_images, self._images, files, self.info.model)

    async def generate(self, asked: Asked, *, is_streaming: bool = True) -> "Answers":
        """The answers to a request, each in one delta if they are not streamed. The engine hears of it when the first
        delta is awaited.

        Raises `Overloaded` when as many are being answered as the settings allow, `EngineUnavailable` when this front
        end is to stop.
        """
        self._check_stays()
        limit = self.settings.max_streams
        if len(self._running) >= limit:
            raise Overloaded(
                f"{len(self._running)} requests are being answered here, and max_streams is {limit}; try again in "
                f"{Overloaded.retry_after_s:g} s",
                limit=limit,
            )
        interval_s = self.settings.stream_interval_s if is_streaming else math.inf
        if asked.sampling.stops:
            interval_s = 0.0  # whoever looks for a text to stop at has to read along
        if self.settings.seeds_by_id and asked.sampling.seed is None:
            asked = asked._replace(sampling=replace(asked.sampling, seed=_seed_of(asked.request_id)))
        span = None
        if self._tracer is not None:
            span = self._tracer.begin("request", INCOMING.get())
            asked = asked._replace(terms=replace(asked.terms, trace=span.traceparent))
        if tenant := TENANT.get():  # whatever the request says: the key says it better
            asked = asked._replace(terms=replace(asked.terms, tenant=tenant, salt=tenant))
        fleet = self._fleet
        with_room = None if fleet is None else partial(fleet.choose, asked.prompt, asked.terms)
        engine = (with_room and await with_room()) or self._engine
        generation = engine.generate(
            asked.prompt,
            asked.sampling,
            asked.request_id or None,
            asked.images,
            asked.terms,
            interval_s,
            None if fleet is None else fleet.instead,
            with_room,
        )
        if self._looking is None:
            self._look_again()
        return Answers(generation, self.tokenizer, asked, self._running, self._changed, is_streaming, span)

    def _look_again(self) -> None:
        loop = asyncio.get_running_loop()
        self._looking = loop.call_later(self.limits.unread_timeout_s / LOOKS, self._look)

    def _look(self) -> None:
        self._looking = None
        self._overdue.look(self._running.values())
        if self._running:
            self._look_again()

    def abort(self, request_id: str) -> bool:
        """Stop a request of any client of this front end; of another tenant's key, none. False if there is none of that
        name."""
        answers = self._running.get(request_id)
        if answers is None or answers.salt != TENANT.get():
            return False
        answers.abort(RequestAborted(f"request {request_id!r} was aborted"))
        return True


class Answers:
    """The deltas of a request with their text, those of all its answers in one stream. `aclose` aborts what goes on;
    use it in `contextlib.aclosing`, since that is what frees the blocks of a client that has gone."""

    def __init__(
        self,
        generation: Generation,
        tokenizer: Tokenizer | None,
        asked: Asked,
        running: "dict[str, Answers]",
        changed: asyncio.Event,
        is_streaming: bool,
        span: Span | None = None,
    ):
        """running: where this is found while it goes on; `changed` is set when it ends, and `span` ends with it."""
        self._span = span
        self.asked = asked
        self.request_id = generation.request_id
        self.salt = asked.terms.salt
        self._running = running
        self._changed = changed
        self._running.setdefault(self.request_id, self)
        self._generation = generation
        self._tokenizer = tokenizer
        self._is_streaming = is_streaming

    def __aiter__(self) -> AsyncGenerator[tuple[TokenDelta, str], None]:
        pieces = with_text(self._generation, self._tokenizer, self.asked.sampling)
        return pieces if self._is_streaming else whole_answers(pieces)

    @property
    def unread_bytes(self) -> int:
        """About what has come from the engine, and nobody has taken."""
        return self._generation.unread_bytes

    def abort(self, error: IntarsiaError) -> None:
        self._generation.abort(error)

    async def aclose(self) -> None:
        if self._running.get(self.request_id) is self:
            del self._running[self.request_id]
            self._changed.set()
        await self._generation.aclose()
        if self._span is not None:
            sampling = self.asked.sampling
            about = {
                "gen_ai.request.max_tokens": sampling.max_tokens,
                "gen_ai.request.temperature": sampling.temperature,
                "gen_ai.request.choice.count": sampling.n,
                "gen_ai.response.id": self.request_id,
            }
            self._span.end(about)
            self._span = None


async def side_by_side(
    streams: Sequence[AsyncIterator[Result]],
) -> AsyncGenerator[tuple[int, Result | IntarsiaError], None]:
    """What several streams bring, as it comes, each with the number of its stream. One that fails with an error of ours
    ends with it; the others go on. Leaving this ends them all.

    Of all of them together `MOST_WAITING` items are kept for whoever is slow to take them."""
    inbox: asyncio.Queue[tuple[int, Result | IntarsiaError] | None] = asyncio.Queue()
    room = asyncio.Semaphore(MOST_WAITING)

    async def forward(number: int, stream: AsyncIterator[Result]) -> None:
        try:
            async for item in stream:
                await room.acquire()
                inbox.put_nowait((number, item))
        except IntarsiaError as error:
            inbox.put_nowait((number, error))
        finally:
            inbox.put_nowait(None)

    tasks = [asyncio.ensure_future(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            item = await inbox.get()
            if item is None:
                running -= 1
            else:
                if not isinstance(item[1], IntarsiaError):
                    room.release()
                yield item
        for task in tasks:
            task.result()  # what is no error of ours is a bug, and must be seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _seed_of(request_id: str) -> int:
    return int.from_bytes(sha256(request_id.encode()).digest()[:8], "big") >> 1


async def _beside(chars: int, work: Callable[[], Result]) -> Result:
    """In a thread, if it would hold up others."""
    return work() if chars <= LONG_TEXT_CHARS else await asyncio.to_thread(work)
