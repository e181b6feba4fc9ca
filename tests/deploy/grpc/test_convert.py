"""Values survive the trip through protobuf; names on both sides agree."""

from dataclasses import fields

import pytest

from intarsia.deploy.grpc import convert
from intarsia.errors import ERRORS, EngineUnavailable, IntarsiaError, InvalidRequest, ModelError, PoolExhausted
from intarsia.proto import inference_pb2 as pb
from intarsia.proto.request import FinishReason, SamplingParams
from intarsia.proto.status import EngineInfo, GroupInfo
from intarsia.tests.deploy.scripted import INFO


def names(message: type) -> set[str]:
    return {field.name for field in message.DESCRIPTOR.fields}  # type: ignore[attr-defined]


def test_messages_have_the_fields_of_our_values():
    assert names(pb.SamplingParams) == {field.name for field in fields(SamplingParams)}
    assert names(pb.ModelInfo) == set(EngineInfo._fields) - {"model_dir"}
    assert names(pb.LayerGroup) == set(GroupInfo._fields)


def test_every_finish_reason_has_a_number():
    assert set(convert.FINISH_REASONS) == {None, *(reason.value for reason in FinishReason)}
    assert set(convert.FINISH_REASONS.values()) == set(pb.FinishReason.values())


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(),
        SamplingParams(temperature=0.0, top_k=-1, logprobs=0, seed=0, ignore_eos=True),  # zeros are given, not absent
        SamplingParams(temperature=0.7, top_p=0.1, top_k=40, seed=2**63 - 1, max_tokens=7, stop_token_ids=(3, 2)),
    ],
)
def test_sampling_params_survive_the_trip(params: SamplingParams):
    message = pb.SamplingParams.FromString(convert.sampling_to_proto(params).SerializeToString())
    assert convert.sampling_from_proto(message, INFO) == params


def test_sampling_params_not_given_take_our_defaults():
    assert convert.sampling_from_proto(pb.SamplingParams(), INFO) == SamplingParams()


def test_sampling_params_not_given_are_those_the_checkpoint_asks_for():
    info = INFO._replace(sampling_defaults=(("temperature", 0.6), ("top_k", 64)))
    said = pb.SamplingParams(temperature=0.0, max_tokens=3)
    assert convert.sampling_from_proto(said, info) == SamplingParams(temperature=0.0, top_k=64, max_tokens=3)
    assert convert.sampling_from_proto(pb.SamplingParams(), info) == SamplingParams(temperature=0.6, top_k=64)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", float("nan")), ("temperature", -1.0), ("top_p", 0.0), ("max_tokens", 0), ("seed", -1)],
)
def test_sampling_params_out_of_range_name_the_field(field: str, value: float):
    with pytest.raises(InvalidRequest) as refusal:
        convert.sampling_from_proto(pb.SamplingParams(**{field: value}), INFO)  # type: ignore[arg-type]
    assert refusal.value.field == field


def test_model_info_survives_the_trip_but_for_the_servers_folder():
    message = pb.ModelInfo.FromString(convert.info_to_proto(INFO).SerializeToString())
    assert convert.info_from_proto(message) == INFO._replace(model_dir="")


@pytest.mark.parametrize("cls", ERRORS.values())
def test_every_error_comes_back_as_its_own_class(cls: type[IntarsiaError]):
    error = convert.error_from_status(convert.error_to_status(cls("what, and what to do", field="prompt", asked=12)))
    assert error is not None and type(error) is cls
    assert (error.message, error.field, error.details) == ("what, and what to do", "prompt", {"asked": "12"})


@pytest.mark.parametrize(
    ("cls", "code"),
    [(InvalidRequest, 3), (PoolExhausted, 8), (ModelError, 9), (IntarsiaError, 13), (EngineUnavailable, 14)],
)
def test_error_classes_have_their_grpc_codes(cls: type[IntarsiaError], code: int):
    assert convert.error_to_status(cls("sentence")).code == code


def test_overlong_error_still_fits_the_headers_of_a_response():
    """HTTP/2 peers refuse headers beyond 8 KiB, and then the client learns nothing at all."""
    status = convert.error_to_status(InvalidRequest("é" * 100_000, field="request_id", asked="x" * 100_000))
    assert len(status.SerializeToString()) < 4096
    assert len(status.message.encode()) < 1500
