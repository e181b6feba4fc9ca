"""`intarsia serve`: an engine, an HTTP and a gRPC server in front of it, and an orderly end."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable
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


class Served(NamedTuple):
    """A started engine and what stands in front of it."""

    engine: "RunningEngine"
    front_end: FrontEnd
    grpc: "GrpcServer"
    at: "Listening"

    async def drain(self, within_s: float) -> None:
        """Take no new requests, report that as our health, and wait for the requests that are being answered."""
        self.front_end.leave()
        await self.grpc.leave()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.front_end.idle(), within_s)


class Listening(NamedTuple):
    """Where clients reach an engine."""

    http: str  # a URL
    grpc: str  # host:port
    console: str  # a URL, with the admin key if it was drawn


@contextlib.asynccontextmanager
async def serving(settings: EngineSettings, server: ServerSettings) -> AsyncIterator[Served]:
    """A started engine with its servers; all of it ends with the context."""
    access = Access(server.access)
    access.check_host(server.host)  # what can be refused at once is refused before workers start
    async with _store(server) as store:
        engine, tokenizer = await _engine_and_tokenizer(settings)
        from ..anthropic.app import add_messages  # the tokenizer's thread has imported them
        from ..grpc.server import GrpcServer
        from ..openai.app import make_app
        from ..openai.kept import KeptResponses

        try:
            tracer = tracer_of("front-end", settings.model.traces_endpoint)
            front_end = FrontEnd(engine.client, tokenizer, server.front_end, tracer=tracer, limits=server.limits)
            log = RequestLog(server.request_log) if server.request_log else None
            kept = KeptResponses(store, server.limits, log) if store is not None else None
            about = server.console, server.limits, server.root_path, server.allowed_origins, log
            app = make_app(lambda: front_end, access, *about, kept=kept, interfaces=(add_messages,))
            http, grpc = HttpServer(app, access, server.limits), GrpcServer(front_end, access, log)
            try:
                url, target = (
                    await http.start(server.host, server.port),
                    await grpc.start(server.host, server.grpc_port),
                )
                drawn = access.draw_admin_key()
                with announced(url, drawn):
                    at = Listening(url, target, f"{url}/console" + (f"#key={drawn}" if drawn else ""))
                    yield Served(engine, front_end, grpc, at)
            finally:
                within_s = SHUTDOWN_GRACE_S if front_end.num_running else LAST_WORDS_S
                await asyncio.wait([asyncio.ensure_future(each.stop()) for each in (http, grpc)], timeout=within_s)
                if kept is not None:
                    await kept.stop()
                for each in filter(None, (tracer, log)):
                    await asyncio.to_thread(each.close)
        finally:
            await engine.shutdown()


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


async def serve(settings: EngineSettings, server: ServerSettings) -> None:
    """Serve until SIGINT or SIGTERM. Requests that are being answered then have `drain_timeout_s` to end, or until the
    second signal.

    Raises `EngineUnavailable` when the engine ends by itself and does not come back, so that a supervisor of the
    process can start it again.
    """
    stops = asyncio.Semaphore(0)
    loop = asyncio.get_running_loop()
    async with serving(settings, server) as served:
        for number in SIGNALS:
            loop.add_signal_handler(number, stops.release)
        freeze_startup_objects()
        info = served.engine.client.info
        notes = (
            *info.notes,
            *demo_notes(settings.model.model_dir),
            *text_notes(served.front_end.tokenizer),
            *format_notes(served.front_end.answer_format, served.front_end.tokenizer),
        )
        print_banner(info._replace(notes=notes), *served.at)
        say("ready; stop with Ctrl-C")
        gone = asyncio.ensure_future(served.engine.client.connection.wait_failed())
        await _first(stops.acquire(), gone)
        if not gone.done() and (running := served.front_end.num_running):
            say(f"stopping when {running} requests have their answers; Ctrl-C stops at once")
            await _first(served.drain(server.drain_timeout_s), stops.acquire(), gone)
        if gone.done():
            raise gone.result()
        gone.cancel()
        say("stopping ...")
        running = served.front_end.num_running
        leave_at_the_latest(END_WITHIN_S + (SHUTDOWN_GRACE_S if running else 0.0), 0)


async def _first(*works: Awaitable[object]) -> None:
    """Wait until one of them is done; those that began here are given up."""
    tasks = [asyncio.ensure_future(work) for work in works]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task, work in zip(tasks, works, strict=True):
        if task is not work:
            task.cancel()
