"""The server over a real connection: what a caller meets besides plain answers."""

import logging
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.grpc.convert import logprobs_from_proto
from intarsia.deploy.grpc.server import GrpcServer, response_to_proto
from intarsia.errors import InvalidSetting, Overloaded, RequestTooLarge
from intarsia.proto import inference_pb2 as pb
from intarsia.proto import inference_pb2_grpc as pb_grpc
from intarsia.proto.reply import Delta, Rows, TokenLogprobs
from intarsia.proto.request import SamplingParams
from intarsia.tests.deploy.scripted import HANG, ScriptedEngine

TOKENS = pb.TokenIds(ids=[1, 2, 3])
DONE = Delta((7,), None, "length", 0)


def generate(address: str, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    with grpc.insecure_channel(address) as channel:
        return list(pb_grpc.InferenceStub(channel).Generate(request, timeout=10))


def details(error: grpc.RpcError) -> list:
    """The unpacked google.rpc details of a failed call."""
    status = rpc_status.from_call(error)  # type: ignore[arg-type]
    assert status is not None
    unpacked = []
    for packed in status.details:
        name = packed.TypeName().rpartition(".")[2]
        unpacked.append(getattr(error_details_pb2, name).FromString(packed.value))
    return unpacked


def test_deltas_stream_one_message_each_with_text_and_usage(serve_script, byte_tokenizer):
    ids = byte_tokenizer.encode("a🎉")  # 4 tokens; the emoji is the last 3
    engine, address = serve_script(
        Delta((ids[0],), None, None, 2),
        Delta((ids[1], ids[2]), None, None, 2),
        Delta((ids[3],), None, "length", 2),
        tokenizer=byte_tokenizer,
    )
    got = generate(address, pb.GenerateRequest(text="hi", sampling=pb.SamplingParams(max_tokens=4)))
    assert [(list(m.token_ids), m.text) for m in got] == [(ids[:1], "a"), (ids[1:3], ""), (ids[3:], "🎉")]
    assert [m.finish_reason for m in got] == [0, 0, pb.FINISH_REASON_LENGTH]
    assert got[-1].usage == pb.Usage(prompt_tokens=2, cached_tokens=2, completion_tokens=4)
    assert engine.asked[0][:2] == (byte_tokenizer.encode("hi"), SamplingParams(max_tokens=4))


def test_request_id_is_kept_or_drawn(serve_script):
    _, address = serve_script(DONE)
    assert generate(address, pb.GenerateRequest(token_ids=TOKENS, request_id="mine"))[0].request_id == "mine"
    drawn = {generate(address, pb.GenerateRequest(token_ids=TOKENS))[0].request_id for _ in range(2)}
    assert len(drawn) == 2 and "" not in drawn


def test_error_of_the_engine_arrives_with_class_numbers_and_field(serve_script):
    _, address = serve_script(RequestTooLarge("wants 9 of 8 blocks", field="prompt", asked=9, limit=8))
    with pytest.raises(grpc.RpcError) as refusal:
        generate(address, pb.GenerateRequest(token_ids=TOKENS))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    info, bad_request = details(refusal.value)
    assert (info.reason, info.domain) == ("RequestTooLarge", "intarsia")
    assert dict(info.metadata) == {"asked": "9", "limit": "8", "field": "prompt"}
    assert bad_request.field_violations[0].field == "prompt"


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (pb.GenerateRequest(), "prompt"),
        (pb.GenerateRequest(text="no tokenizer here"), "prompt"),
        (pb.GenerateRequest(token_ids=TOKENS, sampling=pb.SamplingParams(top_p=7)), "top_p"),
    ],
)
def test_bad_request_is_refused_before_the_engine_hears_of_it(serve_script, request_, field):
    engine, address = serve_script(DONE)
    with pytest.raises(grpc.RpcError) as refusal:
        generate(address, request_)
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert details(refusal.value)[1].field_violations[0].field == field
    assert engine.asked == []


def test_a_prompt_that_would_never_be_computed_is_not_read(serve_script):
    engine, address = serve_script(DONE)
    engine.full = Overloaded("its turn would come late", retry_after_s=3.0)
    for request, code in (
        (pb.GenerateRequest(text="no tokenizer here"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (pb.GenerateRequest(text="", sampling=pb.SamplingParams(top_p=7)), grpc.StatusCode.INVALID_ARGUMENT),
    ):
        with pytest.raises(grpc.RpcError) as refusal:
            generate(address, request)
        assert refusal.value.code() is code
    assert engine.asked == []


def test_unknown_exception_is_logged_once_and_not_told(serve_script, caplog):
    _, address = serve_script(ZeroDivisionError("inside matter"))
    with caplog.at_level(logging.ERROR), pytest.raises(grpc.RpcError) as failure:
        generate(address, pb.GenerateRequest(token_ids=TOKENS))
    assert failure.value.code() is grpc.StatusCode.INTERNAL
    assert "inside matter" not in str(failure.value.details())
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [ZeroDivisionError]


def test_overlong_error_message_still_reaches_the_caller(serve_script):
    _, address = serve_script(RequestTooLarge("é" * 50_000, field="prompt"))
    with pytest.raises(grpc.RpcError) as refusal:
        generate(address, pb.GenerateRequest(token_ids=TOKENS))
    assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_cancelled_call_closes_the_generator(serve_script):
    engine, address = serve_script(Delta((7,), None, None, 0), HANG)
    with grpc.insecure_channel(address) as channel:
        call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=TOKENS))
        next(call)
        assert not engine.closed.is_set()
        call.cancel()
        assert engine.closed.wait(5)


def test_vanished_client_closes_the_generator(serve_script):
    engine, address = serve_script(Delta((7,), None, None, 0), HANG)
    channel = grpc.insecure_channel(address)
    call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=TOKENS))
    next(call)
    channel.close()
    assert engine.closed.wait(5)


def test_client_that_stops_reading_and_leaves_closes_the_generator(serve_script):
    """The server then waits for the window of the connection to open, not for the engine."""
    engine, address = serve_script(*[Delta(tuple(range(10_000)), None, None, 0)] * 500, HANG)
    channel = grpc.insecure_channel(address)
    call = pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=TOKENS))
    next(call)
    assert not engine.closed.wait(0.3)
    channel.close()
    assert engine.closed.wait(5)


def test_expired_deadline_closes_the_generator(serve_script):
    engine, address = serve_script(HANG)
    with grpc.insecure_channel(address) as channel, pytest.raises(grpc.RpcError) as failure:
        list(pb_grpc.InferenceStub(channel).Generate(pb.GenerateRequest(token_ids=TOKENS), timeout=0.2))
    assert failure.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert engine.closed.wait(5)


@pytest.mark.parametrize("service", ["", "intarsia.v1.Inference"])
def test_health_says_serving(serve_script, service):
    _, address = serve_script()
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
    assert answer.status == health_pb2.HealthCheckResponse.SERVING


def test_reflection_lists_the_service(serve_script):
    _, address = serve_script()
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with grpc.insecure_channel(address) as channel:
        stub: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        answer = next(stub.ServerReflectionInfo(iter([ask]), timeout=5))
    names = {service.name for service in answer.list_services_response.service}
    assert {"intarsia.v1.Inference", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org", ""])
def test_host_beyond_this_machine_is_refused(loop, host):
    async def start():
        await GrpcServer(FrontEnd(ScriptedEngine([]), None)).start(host, 0)  # type: ignore[arg-type]

    with pytest.raises(InvalidSetting, match="loopback") as refusal:
        loop.run(start())
    assert refusal.value.field == "host"


def test_port_in_use_is_refused_with_a_way_out(serve_script, loop, capfd):
    _, address = serve_script()

    async def start():
        await GrpcServer(FrontEnd(ScriptedEngine([]), None)).start("127.0.0.1", int(address.rpartition(":")[2]))  # type: ignore[arg-type]

    with pytest.raises(InvalidSetting, match="in use") as refusal:
        loop.run(start())
    assert refusal.value.field == "grpc_port"
    assert capfd.readouterr().err == ""  # gRPC itself has nothing to add


def test_logprobs_survive_the_trip():
    rows = (TokenLogprobs(5, -0.5, ((5, -0.5), (9, -1.25))), TokenLogprobs(6, float("-inf"), ()))
    response = response_to_proto("r", Delta((5, 6), Rows.of(rows), None, 0), "", 3, 2)
    assert logprobs_from_proto(response.logprobs) == rows


def test_usage_comes_with_the_last_message_only():
    running = response_to_proto("r", Delta((5,), None, None, 2), "a", 3, 1)
    last = response_to_proto("r", Delta((6,), None, "stop", 2), "b", 3, 2)
    assert not running.HasField("usage")
    assert (last.usage.prompt_tokens, last.usage.cached_tokens, last.usage.completion_tokens) == (3, 2, 2)
