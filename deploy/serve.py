"""`intarsia serve`: an engine, a gRPC server in front of it, and an orderly end."""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator

from ..controller.launch import RunningEngine, start_engine
from ..controller.startup import EngineSettings
from .banner import print_banner
from .grpc_server import GrpcServer, check_loopback
from .loading_bar import loading_bar
from .tokenizer import Tokenizer


@contextlib.asynccontextmanager
async def serving(settings: EngineSettings, host: str, port: int) -> AsyncIterator[tuple[RunningEngine, str]]:
    """A started engine and the address where gRPC clients reach it; both end with the context."""
    check_loopback(host)  # what can be refused at once is refused before workers start
    tokenizer = Tokenizer.load(settings.model.model_dir, trust_remote_code=settings.model.trust_remote_code)
    with loading_bar() as watch:
        engine = await start_engine(settings, watch)
    try:
        server = GrpcServer(engine.client, tokenizer)
        address = await server.start(host, port)
        try:
            yield engine, address
        finally:
            await server.stop()
    finally:
        await engine.shutdown()


async def serve(settings: EngineSettings, host: str, port: int) -> None:
    """Serve until SIGINT or SIGTERM; running calls get a few seconds to end.

    Raises `EngineUnavailable` when the engine goes by itself, so that whoever watches the process can start it again.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    async with serving(settings, host, port) as (engine, address):
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop.set)
        print_banner(engine.client.info, address)
        print("ready; stop with Ctrl-C", flush=True)
        stopping, gone = asyncio.ensure_future(stop.wait()), asyncio.ensure_future(engine.client.wait_gone())
        await asyncio.wait((stopping, gone), return_when=asyncio.FIRST_COMPLETED)
        if gone.done():
            raise gone.result()
        gone.cancel()
        print("stopping ...", flush=True)
