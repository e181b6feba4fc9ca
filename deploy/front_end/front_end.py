"""One engine as the outside meets it: texts and files in, text out. HTTP and gRPC are two ways to say the same."""

import asyncio
import contextlib
import math
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple, TypeVar

from ...controller.metrics import Metrics
from ...errors import (
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    InvalidSetting,
    Overloaded,
    RequestAborted,
    RequestTooLarge,
)
from ...kvcache.events import Events
from ...proto.request import USUAL_OPTIONS, Image, RequestOptions, SamplingParams
from ...proto.status import CacheState, EngineInfo, EngineLoad
from ...proto.tracing import INCOMING, Span, Tracer
from ..formats.chosen import chosen
from ..settings.limits import Limits
from .access import TENANT, VIEWER
from .answer_format import AnswerFormat
from .beside import Beside
from .borders import Borders
from .counted import Counted
from .detokenize import whole_answers, with_text
from .engine_client import Delta, EngineClient, Generation
from .image_fetch import ImageFetcher, check_hosts, is_address
from .images import ImageReader, check_images, read_images
from .json_pieces import CHARS_OF_A_VALUE, size_of, texts_in
from .leases import Leases
from .next_turns import NextTurns
from .probes import Probes
from .request_log import RECORD, Record
from .router import Router
from .text_bounds import TextBound, bytes_of
from .tokenizer import Tokenizer, encode_prompt
from .unread import LOOKS, Overdue

SHORT_TEXT_CHARS = 512
"""It takes the tokenizer a tenth of a millisecond; a longer one is read beside the loop."""

LONG_TEXT_CHARS = 1 << 16
"""It takes tens of milliseconds, and waits behind others of its length."""

FEW_VALUES = 500
"""What is made of them, or of so many hundred characters, takes a millisecond at most."""

FEW_TOKENS = 256
"""To be turned into text, they take a tenth of a millisecond."""

LONGEST_STREAM_INTERVAL_S = 10.0

MOST_UNTAKEN = 64
"""Pieces of several answers that wait for who takes them. Those behind them come in fewer and larger ones."""

Result = TypeVar("Result")


class Asked(NamedTuple):
    """A request as the engine takes it."""

    prompt: list[int]
    sampling: SamplingParams
    images: Sequence[Image] = ()
    options: RequestOptions = USUAL_OPTIONS
    request_id: str = ""
    markers: Mapping[int, str] | None = None  # special tokens that are wanted in the text, by id


@dataclass(frozen=True, slots=True)
class FrontEndSettings:
    """What a front end does with answers on their way."""

    stream_interval_s: float = 0.0  # from one piece of a streamed answer to its next; 0: each token by itself
    max_streams: int = 4096  # requests being answered, streamed or not
    image_hosts: tuple[str, ...] = ()  # from which images are fetched; none: nothing is
    open_objects: bool = False  # of JSON schemas: they may have properties that no schema names
    seeds_by_id: bool = False  # a request without a seed draws by its id, so that asked again it draws the same
    tool_call_parser: str | None = None  # the format of calls, by name; None: as the chat template shows
    reasoning_parser: str | None = None  # that of thoughts
    prepare_next_turns: bool = False  # of conversations, before they are asked for

    def __post_init__(self):
        if not 0 <= self.stream_interval_s <= LONGEST_STREAM_INTERVAL_S:
            raise InvalidSetting(
                f"stream_interval_s must be from 0 to {LONGEST_STREAM_INTERVAL_S:g} seconds, "
                f"got {self.stream_interval_s}",
                field="stream_interval_s",
            )
        check_hosts(self.image_hosts)
        chosen(None, self.tool_call_parser, self.reasoning_parser)
        if self.max_streams < 1:
            raise InvalidSetting(f"max_streams must be at least 1, got {self.max_streams}", field="max_streams")


class FrontEnd:
    """Lives on the event loop of its engine's connection."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        settings: FrontEndSettings | None = None,
        router: Router | None = None,
        tracer: Tracer | None = None,
        limits: Limits | None = None,
    ):
        """router: to choose among for each request; None: there is but this engine. tracer: who is told of requests.
        limits: of what clients may send; both servers read them here."""
        self._tracer = tracer
        self.limits = limits or Limits()
        self.settings = settings or FrontEndSettings()
        self._watchers = Counted("watchers of the cache", self.limits.max_watchers, self.limits.max_key_watchers)
        self.probes = Probes(self.engines, engine.info, self.limits)
        self.tokenizer = tokenizer
        self.answer_format = AnswerFormat.of(tokenizer, self.settings.tool_call_parser, self.settings.reasoning_parser)
        waiting = self.settings.max_streams, self.limits.max_key_bodies_bytes
        self.beside = Beside(max_waiting=waiting[0], max_waiting_bytes=waiting[1])
        self._beside_short = Beside(max_waiting=waiting[0], max_waiting_bytes=waiting[1])
        self._engine = engine
        self._router = router
        self.leases = Leases(self.engines)
        self._images = ImageReader.of(engine.info)
        self.borders = Borders(engine.info)
        prepares = self.settings.prepare_next_turns and engine.info.enable_prefix_caching
        self.next_turns = NextTurns(engine, router) if prepares else None
        self._fetcher = ImageFetcher(self.settings.image_hosts) if self.settings.image_hosts else None
        self._running: dict[tuple[str, str], Answers] = {}  # by tenant of a key, and request id
        self._is_leaving = False
        self._changed = asyncio.Event()  # a request has been answered
        self._overdue = Overdue(self.limits)
        self._looking: asyncio.TimerHandle | None = None  # at clients that do not read, while requests are answered

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
        """Wait until no request is being answered."""
        while self._running:
            self._changed.clear()
            await self._changed.wait()

    async def check_ready(self) -> None:
        """Raises `EngineUnavailable` when new requests had better go elsewhere."""
        self._check_stays()
        await self._engine.questions.load()

    async def engine_gone(self) -> None:
        """Wait until the engine cannot be reached."""
        await self._engine.connection.away()

    async def engine_back(self) -> bool:
        """Wait until it can be, or never again. Whether it can."""
        return await self._engine.connection.back()

    def _check_stays(self) -> None:
        if self._is_leaving:
            raise EngineUnavailable("this server is stopping and takes no new requests; ask another one, or later")

    async def load(self) -> EngineLoad:
        """Of what the caller may see: a tenant's own requests."""
        return await self._engine.questions.load(VIEWER.get())

    async def measured(self) -> tuple[EngineLoad, CacheState | None, Metrics | None]:
        """What the engine has to say of itself over time. To a tenant: the counts of its own requests."""
        load = await self.load()
        if VIEWER.get() is not None:
            return load, None, None
        questions = self._engine.questions
        return load, await questions.cache_state(), await questions.metrics()

    def engines(self) -> Mapping[str, EngineClient]:
        """All engines that it sends requests to, its own first."""
        return {self.info.model: self._engine} if self._router is None else self._router.engines

    async def cache_state(self) -> CacheState:
        """Of what the caller may see: what a tenant's own requests hold."""
        return await self._engine.questions.cache_state(VIEWER.get())

    async def watch_cache(self) -> AsyncGenerator[Events, None]:
        """Of what the caller may see, as `CacheWatches.watch` has it. Raises `Overloaded` when as many watch as
        may."""
        with self._watchers.one():
            watch = self._engine.cache_watches.watch(VIEWER.get(), self.limits.max_unread_names)
            async with contextlib.aclosing(watch) as told:
                async for events in told:
                    yield events

    def check_room(self, tenant: str) -> None:
        """Raises `Overloaded` where all engines have just said that they take no request of `tenant`. Asked before the
        prompt is read, it spares this process work that would be in vain. tenant: as the request says it."""
        tenant = TENANT.get() or tenant  # the key says it better
        if all(engine.connection.refusals.is_full(tenant) for engine in self.engines().values()):
            self._engine.connection.refusals.check_room(tenant)

    def _text_bound(self) -> TextBound:
        """Of a prompt."""
        longest = self.tokenizer.longest_token_bytes if self.tokenizer is not None else None
        most = self.info.max_model_len
        return TextBound(most, None if longest is None else longest * most)

    async def encode(self, text: str, *, add_special_tokens: bool = True, only_counted: bool = False) -> list[int]:
        """Token ids of a text. only_counted: they are counted, and the model is asked nothing.

        Raises `InvalidRequest` when the model has no tokenizer, `RequestTooLarge` for a text of far more tokens than
        the model takes.
        """
        size_bytes, bound = bytes_of(text), self._text_bound()
        if only_counted:
            self._check_counted(size_bytes, bound, "prompt")
            if size_bytes <= self.limits.max_counted_text_bytes:
                bound = TextBound(max(size_bytes, bound.max_tokens), None)
        else:
            bound.check(size_bytes, "prompt")
        return await self._read(
            size_bytes, lambda: encode_prompt(self.tokenizer, text, self.info.model, add_special_tokens, bound)
        )

    def _check_counted(self, size_bytes: int, bound: TextBound, field: str) -> None:
        """Raises `RequestTooLarge` for texts that are longer than a prompt, and than what is read of others."""
        limit = self._most_read(bound)
        if limit is None or size_bytes <= limit:
            return
        raise RequestTooLarge(
            f"there are {size_bytes} bytes of text; at most {limit} are read at once",
            field=field,
            asked=size_bytes,
            limit=limit,
        )

    def _most_read(self, bound: TextBound) -> int | None:
        """Bytes of text that are read although a prompt cannot be as long; None: any number of them."""
        return None if bound.max_bytes is None else max(bound.max_bytes, self.limits.max_counted_text_bytes)

    async def encode_all(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids of several prompts, short ones together. Raises as `encode` does."""
        bound, found, together = self._text_bound(), [], []
        for text in texts:
            bound.check(bytes_of(text), "prompt")

        async def read(some: Sequence[str]) -> None:
            found.extend(
                await self._read(
                    sum(map(len, some)),
                    lambda: [encode_prompt(self.tokenizer, each, self.info.model, True, bound) for each in some],
                )
            )

        size = 0
        for text in texts:
            if together and size + len(text) > LONG_TEXT_CHARS:
                await read(together)
                together, size = [], 0
            together.append(text)
            size += len(text)
        await read(together)
        return found

    async def _read(self, size: int, work: Callable[[], Result]) -> Result:
        """What it takes a tokenizer to read `size` characters: at once if they are few, else beside this loop."""
        if size <= SHORT_TEXT_CHARS:
            return work()
        lane = self._beside_short if size <= LONG_TEXT_CHARS else self.beside
        return await lane.run(TENANT.get(), work, size)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text without special tokens. Raises `InvalidRequest` without a tokenizer, or for what is no token."""
        if self.tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer", field="tokens")
        size = self.info.vocab_size
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= size):
            strange = next(token for token in token_ids if not 0 <= token < size)
            raise InvalidRequest(
                f"token {strange} is not in the vocabulary of {size} tokens",
                field="tokens",
                asked=strange,
                limit=size - 1,
            )
        return self.tokenizer.decode(token_ids)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        """The same beside the loop. Raises `RequestTooLarge` for more tokens than the limits or the model have."""
        limit = max(self.limits.max_counted_tokens, self.info.max_model_len)
        if len(token_ids) > limit:
            raise RequestTooLarge(
                f"there are {len(token_ids)} tokens; at most {limit} are turned into text at once",
                field="tokens",
                asked=len(token_ids),
                limit=limit,
            )
        if len(token_ids) <= FEW_TOKENS:
            return self.decode(token_ids)
        return await self.beside.run(TENANT.get(), lambda: self.decode(token_ids), 8 * len(token_ids))

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        add_special_tokens: bool = False,
        is_cut: bool = False,
    ) -> list[int]:
        """Token ids of a conversation, up to where the model answers. variables: for the template. add_special_tokens:
        beside those that the template writes. is_cut: the model is given a part of them, so there may be more.

        Raises `InvalidRequest` when the model has no tokenizer or no template, or the template refuses,
        `ContextTooLong` when its texts are longer than the model takes.
        """
        tokenizer, bound, limits = self.tokenizer, self._text_bound(), self.limits
        if is_cut:
            counted = limits.max_counted_text_bytes
            most = None if bound.max_bytes is None else max(bound.max_bytes, counted)
            bound = TextBound(max(bound.max_tokens, counted), most)
        if tokenizer is None:
            raise InvalidRequest(f"{self.info.model} has no tokenizer, so it takes no messages", field="messages")
        variables = variables or {}
        tokenizer.check_variables(variables)

        def work() -> list[int]:
            # The template may leave out much of a conversation, so what is as short as any text may be is rendered.
            size_bytes, most = sum(map(bytes_of, texts_in([messages, tools, variables]))), self._most_read(bound)
            if most is not None and size_bytes > most:
                raise bound.too_long(f"the messages have {size_bytes} bytes of text", size_bytes, "messages")
            return tokenizer.chat(
                messages,
                tools,
                variables,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                add_special_tokens=add_special_tokens,
                bound=bound,
                limits=limits,
            )

        size = CHARS_OF_A_VALUE * size_of([messages, tools, variables], LONG_TEXT_CHARS // CHARS_OF_A_VALUE)
        lane = self._beside_short if size < LONG_TEXT_CHARS else self.beside
        return await lane.run(TENANT.get(), work, size)

    async def read_images(self, files: Sequence[bytes | str]) -> Sequence[Image]:
        """Files, data URLs, or addresses at hosts from which images are fetched. Raises `InvalidRequest` for what is no
        image, or where the model takes none."""
        if not files:
            return ()
        if self._fetcher is not None:
            files = await self._fetched(self._fetcher, files)
        size_bytes = sum(map(len, files))
        work = partial(read_images, self._images, files, self.info.model)
        return await self.beside.run(TENANT.get(), work, size_bytes)

    async def _fetched(self, fetcher: ImageFetcher, files: Sequence[bytes | str]) -> Sequence[bytes | str]:
        check_images(self._images, files, self.info.model)  # before anything is fetched for it
        for file in files:
            if is_address(file):
                fetcher.check(file)
        return [await fetcher.fetch(file) if is_address(file) else file for file in files]

    async def aside(self, size: int, work: Callable[[], Result]) -> Result:
        """What `work` returns: done at once if it is short, else beside this loop. size: values, or hundreds of
        characters, that it goes through."""
        return work() if size < FEW_VALUES else await self.beside.run(TENANT.get(), work)

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
                f"as many requests are being answered here as may be, and max_streams is {limit}; try again in "
                f"{Overloaded.retry_after_s:g} s",
                limit=limit,
            )
        interval_s = self.settings.stream_interval_s if is_streaming else math.inf
        if asked.sampling.stops:
            interval_s = 0.0  # to find a text to stop at, one has to read along
        if self.settings.seeds_by_id and asked.sampling.seed is None:
            asked = asked._replace(sampling=replace(asked.sampling, seed=_seed_of(asked.request_id)))
        span = None
        if self._tracer is not None:
            span = self._tracer.begin("request", INCOMING.get())
            asked = asked._replace(options=replace(asked.options, trace=span.traceparent))
        if tenant := TENANT.get():  # whatever the request says: the key says it better
            asked = asked._replace(options=replace(asked.options, tenant=tenant, salt=tenant))
        router = self._router
        with_room = None if router is None else partial(router.choose, asked.prompt, asked.options)
        engine = (with_room and await with_room()) or self._engine
        generation = engine.generate(
            asked.prompt,
            asked.sampling,
            asked.request_id or None,
            asked.images,
            asked.options,
            interval_s,
            None if router is None else router.instead,
            with_room,
        )
        if self._looking is None:
            self._look_again()
        if (record := RECORD.get()) is not None:
            record.asked(generation.request_id, asked.options.tenant, self.info.model, len(asked.prompt))
        return Answers(generation, self.tokenizer, asked, self._running, self._changed, is_streaming, span, record)

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
        answers = self._running.get((TENANT.get(), request_id))
        if answers is None:
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
        running: "dict[tuple[str, str], Answers]",
        changed: asyncio.Event,
        is_streaming: bool,
        span: Span | None = None,
        record: Record | None = None,
    ):
        """running: where this is found while it goes on; `changed` is set when it ends, and `span` ends with it.
        record: is told what comes."""
        self._span = span
        self.asked = asked
        self.request_id = generation.request_id
        self._name = TENANT.get(), self.request_id  # as `abort` looks for it
        self._running = running
        self._changed = changed
        self._running.setdefault(self._name, self)
        self._generation = generation
        self._tokenizer = tokenizer
        self._is_streaming = is_streaming
        self._record = record

    def __aiter__(self) -> AsyncGenerator[tuple[Delta, str], None]:
        asked = self.asked
        is_kept = asked.options.keep_s is not None
        pieces = with_text(self._generation, self._tokenizer, asked.sampling, asked.markers, is_kept=is_kept)
        if self._record is not None:
            pieces = self._record.watch(pieces)
        return pieces if self._is_streaming else whole_answers(pieces)

    @property
    def unread_bytes(self) -> int:
        """About what has come from the engine and has not been taken."""
        return self._generation.unread_bytes

    def abort(self, error: IntarsiaError) -> None:
        self._generation.abort(error)

    async def aclose(self) -> None:
        if self._running.get(self._name) is self:
            del self._running[self._name]
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

    They begin one by one, others of this loop between them. What is not taken is waited with: it is not heaped up.
    """
    inbox: asyncio.Queue[tuple[int, Result | IntarsiaError] | None] = asyncio.Queue(MOST_UNTAKEN)

    async def forward(number: int, stream: AsyncIterator[Result]) -> None:
        try:
            async for item in stream:
                await inbox.put((number, item))
        except IntarsiaError as error:
            await inbox.put((number, error))
        except Exception:
            await inbox.put(None)
            raise
        await inbox.put(None)

    tasks: list[asyncio.Task[None]] = []

    async def begin() -> None:
        for number, stream in enumerate(streams):
            tasks.append(asyncio.ensure_future(forward(number, stream)))
            await asyncio.sleep(0)

    beginning = asyncio.ensure_future(begin())
    try:
        running = len(streams)
        while running:
            item = await inbox.get()
            if item is None:
                running -= 1
            else:
                yield item
        for task in tasks:
            task.result()  # what is no error of ours is a bug, and must be seen
    finally:
        for task in (beginning, *tasks):
            task.cancel()
        await asyncio.gather(beginning, *tasks, return_exceptions=True)


def _seed_of(request_id: str) -> int:
    return int.from_bytes(sha256(request_id.encode()).digest()[:8], "big") >> 1
