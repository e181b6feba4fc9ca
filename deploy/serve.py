"""`intarsia serve`: an engine, an HTTP and a gRPC server in front of it, and an orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from typing import NamedTuple

from ..controller.launch import RunningEngine, start_engine
from ..controller.startup import EngineSettings
from .banner import print_banner
from .front_end import FrontEnd, check_stream_interval
from .grpc_server import GrpcServer, check_loopback
from .http_server import HttpServer
from .loading_bar import loading_bar
from .openai.app import make_app
from .tokenizer import Tokenizer


class Listening(NamedTuple):
    """Where clients reach an engine."""

    http: str  # a URL
    grpc: str  # host:port


@contextlib.asynccontextmanager
async def serving(
    settings: EngineSettings, host: str, http_port: int, grpc_port: int, stream_interval_s: float = 0.0
) -> AsyncIterator[tuple[RunningEngine, Listening]]:
    """A started engine with its servers; all of it ends with the context. Port 0 takes a free one."""
    check_loopback(host)  # what can be refused at once is refused before workers start
    check_stream_interval(stream_interval_s)
    tokenizer = Tokenizer.load(settings.model.model_dir, trust_remote_code=settings.model.trust_remote_code)
    with loading_bar() as watch:
        engine = await start_engine(settings, watch)
    try:
        front_end = FrontEnd.of(engine.client, tokenizer, stream_interval_s)
        http, grpc = HttpServer(make_app(lambda: front_end)), GrpcServer(front_end)
        try:
            yield engine, Listening(await http.start(host, http_port), await grpc.start(host, grpc_port))
        finally:
            await asyncio.gather(http.stop(), grpc.stop())
    finally:
        await engine.shutdown()


async def serve(
    settings: EngineSettings, host: str, http_port: int, grpc_port: int, stream_interval_s: float = 0.0
) -> None:
    """Serve until SIGINT or SIGTERM; running calls get a few seconds to end.

    Raises `EngineUnavailable` when the engine goes by itself, so that whoever watches the process can start it again.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with serving(settings, host, http_port, grpc_port, stream_interval_s) as (engine, listening):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        print_banner(engine.client.info, *listening)
        print("ready; stop with Ctrl-C", flush=True)
        stopping, gone = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(engine.client.wait_gone())
        await asyncio.wait((stopping, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise gone.result()
        gone.cancel()
        print("stopping ...", flush=True)
