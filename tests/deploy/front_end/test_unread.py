"""Clients that do not read, over real connections: they cost themselves."""

import asyncio
import json
import socket
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import grpc
import httpx
import pytest

from intarsia.deploy.front_end.front_end import FrontEnd, side_by_side
from intarsia.deploy.front_end.unread import Overdue
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import DeadlineExceeded
from intarsia.proto import inference_pb2 as pb
from intarsia.proto import inference_pb2_grpc as pb_grpc
from intarsia.proto.reply import Delta, Rows, TokenLogprobs
from intarsia.tests.deploy.scripted import HANG, ScriptedEngine

LIMITS = Limits(unread_timeout_s=1.0)

ROWS = Rows.of([TokenLogprobs(7, -1.0, tuple((n, -float(n)) for n in range(20)))])

LONG = [Delta((7,), ROWS)] * 20_000
"""Megabytes of an answer: more than the kernel takes for a client."""

SMALL_WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16 * 1024)]


def deaf(url: str, body: dict[str, Any]) -> socket.socket:
    """A client that asks, and reads nothing of what comes."""
    host, port = url.removeprefix("http://").split(":")
    payload = json.dumps(body).encode()
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    client.connect((host, int(port)))
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: {len(payload)}"
    )
    client.sendall(head.encode() + b"\r\n\r\n" + payload)
    return client


BODY = {"model": "tiny-hybrid", "prompt": [1, 2, 3], "max_tokens": 900, "logprobs": 20, "ignore_eos": True}


def served(script: list[Any], scenario: Callable[[HttpServer, str, ScriptedEngine], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        engine: Any = ScriptedEngine(script)
        front_end = FrontEnd(engine, None, limits=LIMITS)
        server = HttpServer(make_app(lambda: front_end), limits=LIMITS)
        url = await server.start(port=0)
        try:
            return await asyncio.wait_for(scenario(server, url, engine), 60)
        finally:
            await server.stop()

    return asyncio.run(run())


async def no_connection_is_left(server: HttpServer) -> None:
    while server._server.server_state.connections:
        await asyncio.sleep(0.01)


@pytest.mark.parametrize("is_streaming", [True, False])
def test_http_connection_of_which_nothing_is_read_is_closed_and_others_go_on(
    is_streaming: bool, caplog: pytest.LogCaptureFixture
):
    script = LONG if is_streaming else [*LONG[:3000], Delta((7,), ROWS, "length")]

    async def scenario(server: HttpServer, url: str, engine: ScriptedEngine) -> float:
        clients = [deaf(url, BODY | {"stream": is_streaming}) for _ in range(3)]
        longest_s = 0.0
        async with httpx.AsyncClient() as probe:
            while not server._server.server_state.connections:
                await asyncio.sleep(0.01)
            closing = asyncio.ensure_future(no_connection_is_left_but_one(server))
            while not closing.done():
                begun_s = time.monotonic()
                assert (await probe.get(f"{url}/health")).status_code == 200
                longest_s = max(longest_s, time.monotonic() - begun_s)
                await asyncio.sleep(0.05)
        for client in clients:
            client.settimeout(10)
            with pytest.raises(ConnectionResetError):
                while client.recv(1 << 20):
                    pass
            client.close()
        return longest_s

    served(script, scenario)
    told = [record.message for record in caplog.records if "has not read for 1 s" in record.message]
    assert len(told) == 3
    assert not [record for record in caplog.records if record.exc_info]


async def no_connection_is_left_but_one(server: HttpServer) -> None:
    """The probe's."""
    while len(server._server.server_state.connections) < 4:
        await asyncio.sleep(0.01)
    while len(server._server.server_state.connections) > 1:
        await asyncio.sleep(0.01)


def test_http_client_that_reads_slowly_gets_all_of_its_answer():
    answer = [*LONG[:2500], Delta((7,), ROWS, "length")]

    async def scenario(server: HttpServer, url: str, engine: ScriptedEngine) -> bytes:
        client = deaf(url, BODY | {"stream": True})
        got = b""

        def read() -> bytes:
            nonlocal got
            begun_s = time.monotonic()
            while not got.endswith(b"0\r\n\r\n"):
                piece = client.recv(2048)
                assert piece, "it was closed"
                got += piece
                if time.monotonic() - begun_s < 3 * LIMITS.unread_timeout_s:
                    time.sleep(0.1)
            return got

        return await asyncio.to_thread(read)

    got = served(answer, scenario)
    assert got.count(b"data: ") == 2502 and b"[DONE]" in got


def test_rest_of_a_short_answer_that_is_not_read_is_not_kept():
    """Less than makes the server wait: the answer is over as far as the application goes."""

    async def scenario(server: HttpServer, url: str, engine: ScriptedEngine) -> None:
        with deaf(url, BODY | {"stream": False}):
            await asyncio.sleep(0.2)
            (connection,) = server._server.server_state.connections
            sending = connection.transport.get_extra_info("socket")
            sending.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection.transport.write(bytes(30_000))
            connection.transport.close()
            await no_connection_is_left(server)

    served([Delta((7,), ROWS, "length")], scenario)


@pytest.fixture
def serve(loop: Any) -> Iterator[Callable[..., tuple[ScriptedEngine, str]]]:
    servers: list[GrpcServer] = []

    def start(script: list[Any]) -> tuple[ScriptedEngine, str]:
        engine: Any = ScriptedEngine(script)

        async def listen() -> str:
            servers.append(GrpcServer(FrontEnd(engine, None, limits=LIMITS)))
            return await servers[-1].start(port=0)

        return engine, loop.run(listen())

    yield start
    for server in servers:
        loop.run(server.stop(grace_s=0))


@pytest.mark.parametrize("is_batch", [False, True])
def test_grpc_call_of_which_nothing_is_read_is_ended_and_told_why(serve: Any, is_batch: bool):
    engine, address = serve(LONG)
    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3]))
    with grpc.insecure_channel(address, SMALL_WINDOW) as channel:
        stub = pb_grpc.InferenceStub(channel)
        if is_batch:
            call = stub.GenerateBatch(pb.GenerateBatchRequest(requests=[request] * 3), timeout=60)
        else:
            call = stub.Generate(request, timeout=60)
        next(call)
        assert engine.closed.wait(30), "the engine is told that the client has left"
        with pytest.raises(grpc.RpcError) as caught:
            for _ in call:
                pass
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "has not read for 1 s" in (caught.value.details() or "")


def test_grpc_client_that_waits_for_the_engine_is_not_said_to_read_nothing(serve: Any):
    engine, address = serve([Delta((7,)), HANG])
    with grpc.insecure_channel(address) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(
            pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1, 2, 3])), timeout=60
        )
        next(call)
        assert not engine.closed.wait(3 * LIMITS.unread_timeout_s)
        call.cancel()
    assert engine.closed.wait(10)


class Kept:
    """An answer of which so much waits."""

    def __init__(self, unread_bytes: int):
        self.request_id = "r"
        self.unread_bytes = unread_bytes
        self.error: DeadlineExceeded | None = None

    def abort(self, error: DeadlineExceeded) -> None:
        self.error = error


def test_answer_of_which_too_much_waits_for_too_long_is_ended():
    overdue = Overdue(LIMITS)
    much, little, better = Kept(2**20 + 1), Kept(2**20), Kept(2**21)
    for n in range(10):
        overdue.look([much, little, better])
        assert much.error is None, n
        better.unread_bytes = 2**21 if n != 5 else 0
    overdue.look([much, little, better])
    assert "more than 1048576 bytes of the answer waited" in str(much.error)
    assert little.error is None and better.error is None


def test_streams_side_by_side_do_not_pile_up_before_one_who_takes_nothing():
    made = 0

    async def stream() -> AsyncGenerator[int, None]:
        nonlocal made
        for n in range(1000):
            made += 1
            yield n

    async def scenario() -> tuple[int, list[tuple[int, Any]]]:
        together = side_by_side([stream() for _ in range(5)])
        got = [await anext(together)]
        await asyncio.sleep(0.05)
        before = made
        got += [item async for item in together]
        return before, got

    before, got = asyncio.run(scenario())
    assert before < 100
    for number in range(5):
        assert [item for n, item in got if n == number] == list(range(1000))
