"""`intarsia serve`: an engine, an HTTP and a gRPC server in front of it, and an orderly end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from ...controller.startup import EngineSettings
from ...environment import freeze_startup_objects
from ...errors import IntarsiaError, InvalidSetting
from ...proto.tracing import tracer_of
from ...proto.worker import ModelSettings
from ..checkpoints.weights import weights_bar
from ..console import ConsoleSettings
from ..demo import demo_notes
from ..front_end.access import Access, AccessSettings
from ..front_end.answer_format import format_notes
from ..front_end.front_end import FrontEnd, FrontEndSettings
from ..front_end.request_log import FORMS, RequestLog
from ..front_end.served_models import ServedModels, models_of
from ..front_end.tokenizer import Tokenizer, text_notes
from ..http.server import SHUTDOWN_GRACE_S, HttpServer
from ..openai.stored import ResponseStore, StoreSettings
from ..settings.limits import Limits
from ..settings.setting import fields_of
from ..settings.table import SERVER
from ..terminal.banner import print_banner
from .ending import SIGNALS, leave_at_the_latest, say
from .local_servers import announced

if TYPE_CHECKING:
    from ..grpc.server import GrpcServer
    from .launch import RunningEngine

LAST_WORDS_S = 0.5
"""Time for the last answers to reach their clients."""

END_WITHIN_S = 1.5
"""Time for the process to end, from then on."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Where an engine is reached, and by whom. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000
    grpc_port: int = 50051
    access: AccessSettings = field(default_factory=AccessSettings)
    front_end: FrontEndSettings = field(default_factory=FrontEndSettings)
    console: ConsoleSettings = field(default_factory=ConsoleSettings)
    store: StoreSettings = field(default_factory=StoreSettings)
    drain_timeout_s: float = 60.0  # for requests that are being answered when the server is to stop
    limits: Limits = field(default_factory=Limits)
    allowed_origins: tuple[str, ...] = ()  # of pages in browsers that may ask; "*": any
    root_path: str = ""  # where a proxy shows the HTTP server; requests may bring it or not
    request_log: str | None = None  # a line of each request, in one of the log's forms

    def __post_init__(self):
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            raise InvalidSetting(
                f"root_path must begin with a slash and not end with one, as /llm does, got {self.root_path!r}",
                field="root_path",
            )
        if self.request_log is not None and self.request_log not in FORMS:
            raise InvalidSetting(
                f"request_log must be {' or '.join(FORMS)}, got {self.request_log!r}", field="request_log"
            )
        if self.drain_timeout_s < 0:
            raise InvalidSetting(
                f"drain_timeout_s must be at least 0 seconds, got {self.drain_timeout_s}", field="drain_timeout_s"
            )


def server_settings(**given: Any) -> ServerSettings:
    """Settings of a server, and limits, by their names. Raises `InvalidSetting`, naming the field."""
    components = fields_of(SERVER, given)
    return ServerSettings(
        access=AccessSettings(**components["access"]),
        front_end=FrontEndSettings(**components["front_end"]),
        console=ConsoleSettings(**components["console"]),
        store=StoreSettings(**components["store"]),
        limits=Limits(**components["limits"]),
        **components["server"],
    )


class ModelToServe(NamedTuple):
    """One model of a server."""

    engine: EngineSettings
    front_end: FrontEndSettings

    @property
    def name(self) -> str:
        return self.engine.served_model_name or self.engine.model.model_dir


class Started(NamedTuple):
    """Its engine, and what stands in front of it."""

    engine: "RunningEngine"
    front_end: FrontEnd
    settings: EngineSettings


class Served(NamedTuple):
    """Started engines, and the servers in front of them."""

    models: Sequence[Started]
    grpc: "GrpcServer"
    at: "Listening"

    @property
    def engine(self) -> "RunningEngine":
        """The first one."""
        return self.models[0].engine

    @property
    def front_end(self) -> FrontEnd:
        """Of the first model."""
        return self.models[0].front_end

    @property
    def num_running(self) -> int:
        """Requests that are being answered."""
        return sum(each.front_end.num_running for each in self.models)

    async def drain(self, within_s: float) -> None:
        """Take no new requests, report that as our health, and wait for the requests that are being answered."""
        for each in self.models:
            each.front_end.leave()
        await self.grpc.leave()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(within_s):
                for each in self.models:
                    await each.front_end.idle()

    async def gone(self) -> IntarsiaError:
        """Wait until no engine is left that could come back. Why the last one is gone."""

        async def one(each: Started) -> IntarsiaError:
            error = await each.engine.client.connection.wait_failed()
            if len(self.models) > 1:
                say(f"{each.front_end.info.model} is gone, and the others go on: {error}")
            return error

        return (await asyncio.gather(*map(one, self.models)))[-1]


class Listening(NamedTuple):
    """Where clients reach an engine."""

    http: str  # a URL
    grpc: str  # host:port
    console: str  # a URL, with the admin key if it was drawn


def serving(settings: EngineSettings, server: ServerSettings) -> "contextlib.AbstractAsyncContextManager[Served]":
    """As `serving_all`, of one model."""
    return serving_all([ModelToServe(settings, server.front_end)], server)


@contextlib.asynccontextmanager
async def serving_all(models: Sequence[ModelToServe], server: ServerSettings) -> AsyncIterator[Served]:
    """Started engines with their servers; all of it ends with the context. Of several models one that does not start is
    told, and the others go on. Raises what the first one failed of when none starts."""
    access = Access(server.access)
    access.check_host(server.host)  # what can be refused at once is refused before workers start
    async with _store(server) as store, contextlib.AsyncExitStack() as ending:
        started, failed = await _start_all(models, server, ending)
        front_ends = [each.front_end for each in started]
        from ..anthropic.app import add_messages  # the tokenizer's thread has imported them
        from ..grpc.server import GrpcServer
        from ..openai.app import make_app
        from ..openai.kept import KeptResponses

        named = ServedModels(front_ends, failed) if len(models) > 1 else models_of(front_ends[0])
        log = RequestLog(server.request_log) if server.request_log else None
        kept = KeptResponses(store, server.limits, log) if store is not None else None
        about = server.console, server.limits, server.root_path, server.allowed_origins, log
        app = make_app(named, access, *about, kept=kept, interfaces=(add_messages,))
        http, grpc = HttpServer(app, access, server.limits), GrpcServer(named, access, log)
        try:
            url = await http.start(server.host, server.port)
            target = await grpc.start(server.host, server.grpc_port)
            drawn = access.draw_admin_key()
            with announced(url, drawn):
                at = Listening(url, target, f"{url}/console" + (f"#key={drawn}" if drawn else ""))
                yield Served(started, grpc, at)
        finally:
            within_s = SHUTDOWN_GRACE_S if any(each.num_running for each in front_ends) else LAST_WORDS_S
            await asyncio.wait([asyncio.ensure_future(each.stop()) for each in (http, grpc)], timeout=within_s)
            if kept is not None:
                await kept.stop()
            if log is not None:
                await asyncio.to_thread(log.close)


async def _start_all(
    models: Sequence[ModelToServe], server: ServerSettings, ending: contextlib.AsyncExitStack
) -> tuple[list[Started], list[str]]:
    """The engines that start, one after another, and the names of the models whose do not. ending: ends them."""
    if len(models) > 1:  # one Ray for all of them, which none of them ends
        from .launch import ensured_ray, stop_ray

        workers = sum(each.engine.model.tensor_parallel_size for each in models)
        own_ray = await ensured_ray(workers, any(each.engine.insecure_ray for each in models))
        if own_ray is not None:
            ending.push_async_callback(stop_ray, own_ray)
    started: list[Started] = []
    errors: dict[str, IntarsiaError] = {}
    for each in models:
        try:
            engine, tokenizer = await _engine_and_tokenizer(each.engine)
        except IntarsiaError as error:
            if len(models) == 1:
                raise
            say(f"{each.name} does not start: {error}")
            errors[each.name] = error
            continue
        ending.push_async_callback(engine.shutdown)
        tracer = tracer_of("front-end", each.engine.model.traces_endpoint)
        if tracer is not None:
            ending.push_async_callback(asyncio.to_thread, tracer.close)
        front_end = FrontEnd(engine.client, tokenizer, each.front_end, tracer=tracer, limits=server.limits)
        started.append(Started(engine, front_end, each.engine))
    if not started:
        raise next(iter(errors.values()))
    return started, list(errors)


@contextlib.asynccontextmanager
async def _store(server: ServerSettings) -> AsyncIterator[ResponseStore | None]:
    """Where responses are kept; None where they are not. Raises `InvalidSetting` for a folder that was named and is of
    no use; the usual one may be missing."""
    store = None
    if server.store.store_responses:
        try:
            store = ResponseStore(server.store, server.port, server.limits)
        except InvalidSetting as error:
            if server.store.folder is not None:
                raise
            say(f"no responses are kept: {error}")
    if store is None:
        yield None
        return
    await store.open()
    try:
        yield store
    finally:
        await store.close()


async def _engine_and_tokenizer(settings: EngineSettings) -> "tuple[RunningEngine, Tokenizer | None]":
    """Started and read side by side: each waits for other processes or imports for seconds. Raises what either does;
    nothing is left then."""
    from .launch import start_engine  # and with it Ray, before the other thread imports anything

    with weights_bar(settings.model) as watch:
        starting = asyncio.ensure_future(start_engine(settings, watch))
        try:
            tokenizer = await asyncio.to_thread(_read_tokenizer, settings.model)
        except BaseException:
            await _given_up(starting)
            raise
        return await starting, tokenizer


def _read_tokenizer(model: ModelSettings) -> Tokenizer | None:
    tokenizer = Tokenizer.of(model)
    from ..grpc import server as grpc_server  # noqa: F401  the servers are made next
    from ..openai import app  # noqa: F401

    return tokenizer


async def _given_up(starting: "asyncio.Future[RunningEngine]") -> None:
    """End an engine that starts, or has just started."""
    starting.cancel()
    with contextlib.suppress(asyncio.CancelledError, IntarsiaError):
        await (await starting).shutdown()


async def serve(models: Sequence[ModelToServe], server: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Requests that are being answered then have `drain_timeout_s` to end, or until the
    second signal.

    Raises `EngineUnavailable` when the engines end by themselves and do not come back, so that a supervisor of the
    process can start it again.
    """
    stops = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    async with serving_all(models, server) as served:
        for number in SIGNALS:
            loop.add_signal_handler(number, stops.release)
        freeze_startup_objects()
        for each in served.models:
            at = served.at if each is served.models[-1] else ()
            print_banner(each.front_end.info._replace(notes=_notes(each)), *at)
        say("ready; stop with Ctrl-C")
        gone = asyncio.ensure_future(served.gone())
        await _first(stops.acquire(), gone)
        if not gone.done() and (running := served.num_running):
            say(f"stopping when {running} requests have their answers; Ctrl-C stops at once")
            await _first(served.drain(server.drain_timeout_s), stops.acquire(), gone)
        if gone.done():
            raise gone.result()
        gone.cancel()
        say("stopping ...")
        leave_at_the_latest(END_WITHIN_S + (SHUTDOWN_GRACE_S if served.num_running else 0.0), 0)


def _notes(started: Started) -> tuple[str, ...]:
    """What was decided about a model otherwise than one may think, for people."""
    front_end = started.front_end
    return (
        *front_end.info.notes,
        *demo_notes(started.settings.model.model_dir),
        *text_notes(front_end.tokenizer),
        *format_notes(front_end.answer_format, front_end.tokenizer),
    )


async def _first(*works: Awaitable[object]) -> None:
    """Wait until one of them is done; those that began here are given up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, work in zip(tasks, works, strict=True):
        if task is not work:
            task.cancel()
