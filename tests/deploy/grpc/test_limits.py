"""What the network may do to the gRPC server: much at once, half of it, and nothing for long. Real sockets."""

import asyncio
import contextlib
import gc
import logging
import random
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from intarsia.deploy.client import Asked, AsyncClient, Client
from intarsia.deploy.client.failures import typed
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import (
    ContextTooLong,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
)
from intarsia.proto import inference_pb2 as pb
from intarsia.proto import inference_pb2_grpc as pb_grpc
from intarsia.proto.reply import Delta
from intarsia.tests.deploy import http2
from intarsia.tests.deploy.scripted import HANG, ScriptedEngine

GENERATE = "/intarsia.v1.Inference/Generate"
DONE = Delta((7,), None, "length", 0)


class Served(NamedTuple):
    address: str
    engine: ScriptedEngine
    front_end: FrontEnd


Serve = Callable[..., Served]


@pytest.fixture
def serve(loop: Any) -> Iterator[Serve]:
    """A server in front of a scripted engine; limits by name."""
    servers: list[GrpcServer] = []

    def start(*script: Any, tokenizer: Any = None, keys: tuple[str, ...] = (), **limits: float) -> Served:
        engine = ScriptedEngine(script)

        async def listen() -> Served:
            front_end = FrontEnd(engine, tokenizer, limits=Limits(**limits))  # type: ignore[arg-type]
            servers.append(GrpcServer(front_end, Access(AccessSettings(api_key=keys))))
            return Served(await servers[-1].start(port=0), engine, front_end)

        return loop.run(listen())

    yield start
    for server in servers:
        loop.run(server.stop(grace_s=0))


def refused(address: str, request: pb.GenerateRequest) -> IntarsiaError:
    """As a client of ours would see it."""
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as refusal:
        list(pb_grpc.InferenceStub(channel).Generate(request, timeout=60))
    return typed(refusal.value, address)


def raw(address: str, method: str, message: bytes) -> grpc.RpcError:
    """What becomes of bytes."""
    with grpc.insecure_channel(address) as channel:
        multicall: Any = channel.unary_stream(f"/intarsia.v1.Inference/{method}")
        with pytest.raises(grpc.RpcError) as failed:
            list(multicall(message, timeout=60))
    return failed.value


# -- too much ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "field", "kind"),
    [
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1] * 1000)), "prompt", ContextTooLong),
        (pb.GenerateRequest(sampling=pb.SamplingParams(stop_token_ids=[1] * 1025)), "stop_token_ids", RequestTooLarge),
        (pb.GenerateRequest(sampling=pb.SamplingParams(stop=["a"] * 17)), "stop", RequestTooLarge),
        (
            pb.GenerateRequest(sampling=pb.SamplingParams(logit_bias={n: 1.0 for n in range(1025)})),
            "logit_bias",
            RequestTooLarge,
        ),
        (pb.GenerateRequest(sampling=pb.SamplingParams(choice=["a"] * 65537)), "choice", RequestTooLarge),
        (pb.GenerateRequest(images=[b"a"] * 65), "images", RequestTooLarge),
        (pb.GenerateRequest(request_id="a" * 129), "request_id", InvalidRequest),
        (pb.GenerateRequest(request_id="a\nb"), "request_id", InvalidRequest),
        (pb.GenerateRequest(request_id="ä"), "request_id", InvalidRequest),
        (pb.GenerateRequest(tenant="a" * 257), "tenant", InvalidRequest),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_list_longer_than_its_limit_is_refused_by_name(serve: Serve, request_: Any, field: str, kind: Any):
    here = serve(DONE)
    if not request_.WhichOneof("prompt"):
        request_.token_ids.ids.append(1)
    for batch in (False, True):
        if batch:
            with grpc.insecure_channel(here.address) as channel:
                stub: Any = pb_grpc.InferenceStub(channel)
                [*_, last] = stub.GenerateBatch(pb.GenerateBatchRequest(requests=[request_]), timeout=10)
            assert (last.error.reason, last.error.metadata["field"]) == (kind.__name__, field)
        else:
            error = refused(here.address, request_)
            assert (type(error), error.field) == (kind, field)
            assert len(error.message) < 300
    assert here.engine.asked == []


def test_what_is_as_long_as_its_limit_is_taken(serve: Serve):
    here = serve(DONE)
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[1] * 999),
        sampling=pb.SamplingParams(stop_token_ids=[1] * 1024, logit_bias=dict.fromkeys(range(299), 1.0)),
        request_id="~" * 128,
    )
    with grpc.insecure_channel(here.address) as channel:
        answers = list(pb_grpc.InferenceStub(channel).Generate(request, timeout=10))
    assert answers[-1].request_id == "~" * 128


def test_numbers_that_are_not_packed_are_counted_too(serve: Serve):
    here = serve(DONE)
    sampling = b"\x30\x01" * 2000  # stop_token_ids, one by one
    message = b"\x1a\x03\x0a\x01\x01" + b"\x22" + bytes((len(sampling) & 0x7F | 0x80, len(sampling) >> 7)) + sampling
    assert pb.GenerateRequest.FromString(message).sampling.stop_token_ids[0] == 1
    assert "1024 are taken" in str(raw(here.address, "Generate", message).details())


def test_a_batch_of_many_is_refused_before_it_is_parsed(serve: Serve):
    here = serve(DONE)
    one = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])).SerializeToString()
    began_s = time.process_time()  # the server is in this process
    failed = raw(here.address, "GenerateBatch", (b"\x0a" + bytes((len(one),)) + one) * 200_000)
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "at most 2048 are taken" in str(failed.details())
    assert time.process_time() - began_s < 5
    assert here.engine.asked == []


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("Generate", b"\x22\x00" * (4 << 20)),  # sampling, again and again
        ("Generate", b"\x30\x01" * (4 << 20)),  # priority
        ("Generate", b"\x7a\x00" * (4 << 20)),  # a field that is not known
        ("Generate", b"\x22\xff\xff\xff\x03" + b"\x6a\x00" * ((4 << 20) + 1)),  # biases
    ],
)
def test_a_message_of_millions_of_fields_is_not_parsed(serve: Serve, method: str, message: bytes):
    here = serve(DONE)
    failed = raw(here.address, method, message)
    assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "more than 262144 fields" in str(failed.details()) or "no message of its kind" in str(failed.details())


@pytest.mark.parametrize(
    "message",
    [b"\xff", b"\x0a", b"\x0a\x05a", b"\x13\x14", b"\x22\x02\x08", b"\x80" * 11, b"\x08" + b"\xff" * 11, b"\x07"],
)
def test_bytes_that_are_no_message_are_called_so(serve: Serve, message: bytes):
    here = serve(DONE)
    for padded in (message, b"\x12\x88\x27" + b"a" * 5000 + message):
        failed = raw(here.address, "Generate", padded)
        assert failed.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "no message of its kind" in str(failed.details())


REFUSED = {
    "too many stops": ("Generate", lambda: pb.GenerateRequest(sampling=pb.SamplingParams(stop_token_ids=[5] * MANY))),
    "no tokenizer": ("Generate", lambda: pb.GenerateRequest(text="x " * (MANY // 2))),
    "too many tokens": ("Detokenize", lambda: pb.TokenIds(ids=[72] * MANY)),
    "too many images": ("Generate", lambda: pb.GenerateRequest(text="x", images=[b""] * (MANY // 2))),
}
MANY = 8 << 20


@pytest.mark.parametrize("why", REFUSED)
def test_what_was_refused_is_not_kept(serve: Serve, why: str):
    here = serve(DONE)
    method, request = REFUSED[why]
    message = request().SerializeToString()
    raw(here.address, method, message)
    gc.collect()
    gc.disable()
    try:
        before = resident_bytes()
        for _ in range(20):
            raw(here.address, method, message)
        assert resident_bytes() - before < 10 * len(message)
    finally:
        gc.enable()


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_many_tokens_are_not_turned_into_text(serve: Serve, byte_tokenizer: Any):
    here = serve(tokenizer=byte_tokenizer, max_counted_tokens=5000)
    with Client(here.address) as client:
        assert client.detokenize([65] * 5000) == byte_tokenizer.decode([65] * 5000)
        with pytest.raises(RequestTooLarge, match="at most 5000"):
            client.detokenize([65] * 5001)


def test_other_streams_go_on_while_a_long_batch_begins(serve: Serve, loop: Any):
    here = serve(DONE)

    async def longest_silence_s() -> float:
        silence_s, stop = 0.0, asyncio.Event()

        async def watch() -> None:
            nonlocal silence_s
            while not stop.is_set():
                started = time.monotonic()
                await asyncio.sleep(0.002)
                silence_s = max(silence_s, time.monotonic() - started)

        watching = asyncio.ensure_future(watch())
        requests = [pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))] * 2048
        channel = grpc.aio.insecure_channel(here.address)
        stub: Any = pb_grpc.InferenceStub(channel)  # type: ignore[arg-type]
        came = [each.request async for each in stub.GenerateBatch(pb.GenerateBatchRequest(requests=requests))]
        stop.set()
        await watching
        await channel.close()
        assert sorted(came) == list(range(2048))
        return silence_s

    assert loop.run(longest_silence_s()) < 1.0


# -- half of it -------------------------------------------------------------------------------------------------------


def head(key: str | None = None) -> tuple[bytes, ...]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return http2.PREFACE, http2.frame(http2.SETTINGS, 0, 0), http2.call(GENERATE, headers)


def test_half_a_message_is_waited_for_so_long_and_no_longer(serve: Serve):
    here = serve(DONE, idle_timeout_s=1.0)
    with http2.connect(here.address, *head(), http2.half_message(1 << 20, b"a" * 1000)) as half:
        kind, _, payload = http2.frames_until(half, {http2.HEADERS})
        assert kind == http2.HEADERS and b"no whole message came" in payload
        assert http2.ends_within(half, 10)  # it is idle then
    with Client(here.address) as client:
        assert client.complete([1]).token_ids == (7,)


def test_a_call_without_a_message_is_told_so(serve: Serve):
    here = serve(DONE)
    with http2.connect(here.address, *head(), http2.frame(http2.DATA, http2.END_STREAM, 1)) as empty:
        assert b"without a message" in http2.frames_until(empty, {http2.HEADERS})[2]


def test_who_has_no_key_is_refused_before_a_message_is_read(serve: Serve):
    here = serve(DONE, keys=("oak",))
    with http2.connect(here.address, *head(), http2.half_message(1 << 20, b"a" * 1000)) as half:
        assert b"a key is wanted" in http2.frames_until(half, {http2.HEADERS})[2]


def test_messages_that_come_slowly_are_few_per_key(serve: Serve):
    here = serve(DONE, keys=("oak", "ash"), max_message_bytes=1 << 20, max_key_bodies_bytes=2 << 20)
    halves = [http2.connect(here.address, *head("oak"), http2.half_message(1 << 20, b"a")) for _ in range(4)]
    others = [http2.connect(here.address, *head("ash"), http2.half_message(1 << 20, b"a")) for _ in range(2)]
    time.sleep(2.0)
    ended = [not http2_waits(each) for each in (*halves, *others)]
    assert (sum(ended[:4]), sum(ended[4:])) == (2, 0)
    for each in (*halves, *others):
        each.close()


def http2_waits(opened: Any) -> bool:
    try:
        payload = http2.frames_until(opened, {http2.HEADERS}, 0.5)[2]
    except TimeoutError:
        return True
    assert b"messages that are not whole yet" in payload
    return False


SILENCES = (
    b"",
    http2.PREFACE,
    http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0),
    http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0) + http2.frame(http2.HEADERS, 0, 1, b"\x83"),  # half a head
)


def test_connections_without_a_call_are_closed_and_a_quiet_stream_is_not(serve: Serve):
    here = serve(Delta((7,), None, None, 0), HANG, head_timeout_s=1.0, idle_timeout_s=1.0)
    with Client(here.address) as client:
        quiet: Any = client.generate([1])
        next(quiet)
        silent = [http2.connect(here.address, sent) for sent in SILENCES for _ in range(20)]
        assert all([http2.ends_within(each, 10) for each in silent])
        time.sleep(1.0)
        assert here.front_end.num_running == 1 and not here.engine.closed.is_set()
        quiet.close()


def test_no_more_connections_than_may_be(serve: Serve):
    here = serve(DONE, max_connections=20)
    preface = http2.PREFACE + http2.frame(http2.SETTINGS, 0, 0)
    opened = [http2.connect(here.address) for _ in range(60)]
    time.sleep(0.3)
    for each in opened:
        with contextlib.suppress(OSError):
            each.sendall(preface)
    ended = sum(http2.ends_within(each, 0.05) for each in opened)
    assert 35 <= ended <= 45  # a few more are let in while others are counted
    for each in opened:
        each.close()
    until_s = time.monotonic() + 30
    while True:  # the server notices one by one that they have gone
        try:
            with Client(here.address, timeout_s=10) as client:
                assert client.complete([1]).token_ids == (7,)
            return
        except EngineUnavailable:
            assert time.monotonic() < until_s


# -- unread -----------------------------------------------------------------------------------------------------------


def test_a_call_whose_client_does_not_read_is_ended(serve: Serve):
    here = serve(*[Delta(tuple(range(10_000)), None, None, 0)] * 500, HANG, unread_timeout_s=1.0)
    with grpc.insecure_channel(here.address) as channel:
        call: Any = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
        next(call)
        assert here.engine.closed.wait(10)
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "not read for 1 s" in str(ended.value.details())


def test_a_client_that_reads_slowly_and_steadily_is_not_ended(serve: Serve):
    here = serve(*[Delta(tuple(range(10_000)), None, None, 0)] * 100, DONE, unread_timeout_s=1.0)
    with grpc.insecure_channel(here.address) as channel:
        call: Any = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1])))
        count = 0
        for response in call:
            count += len(response.token_ids)
            time.sleep(0.001)
    assert count == 100 * 10_000 + len(DONE.token_ids)


# -- a batch, from its client -----------------------------------------------------------------------------------------


def test_one_of_a_batch_that_is_too_long_is_refused_alone(serve: Serve, loop: Any):
    here = serve(DONE)

    async def ask() -> Any:
        async with AsyncClient(here.address) as client:
            return await client.complete_batch([Asked([1]), Asked([1] * 1000), Asked([1, 2])])

    first, second, third = loop.run(ask())
    assert (first.token_ids, third.token_ids) == ((7,), (7,))
    assert isinstance(second, RequestTooLarge) and second.field == "prompt"


def test_more_streams_of_reflection_than_a_key_may_have_are_refused(serve: Serve):
    here = serve(DONE, max_key_watchers=2)
    method = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
    with grpc.insecure_channel(here.address) as channel:
        talk: Any = channel.stream_stream(method)
        calls = [talk(_never()) for _ in range(3)]
        time.sleep(0.3)
        refusals = [call for call in calls if call.done()]
        assert [call.code() for call in refusals] == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        for call in calls:
            call.cancel()


def _never() -> Iterator[bytes]:
    time.sleep(5)
    yield b""


def test_overloaded_is_what_a_typed_client_sees(serve: Serve):
    here = serve(DONE)
    here.engine.full = Overloaded("its turn would come late", retry_after_s=3.0)
    assert isinstance(refused(here.address, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]))), Overloaded)


def test_clients_that_leave_while_they_are_refused_leave_no_word_in_the_log(
    serve: Serve, loop: Any, caplog: pytest.LogCaptureFixture
):
    here = serve(DONE)
    payload = pb.GenerateRequest(text="a", images=[b"x"] * 2000).SerializeToString()
    rng = random.Random(3)

    async def ask(channel: Any) -> None:
        call = channel.unary_stream(GENERATE)(payload, timeout=10)
        await asyncio.sleep(rng.random() * 0.004)
        call.cancel()

    async def scenario() -> None:
        async with grpc.aio.insecure_channel(here.address) as channel:
            for _ in range(100):
                await asyncio.gather(*(ask(channel) for _ in range(4)))

    asyncio.run(scenario())
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
