"""The Python client against a real server: chunks, typed errors, and an end when the caller has had enough."""

import socket

import pytest

from intarsia.deploy.client import Client, Usage
from intarsia.errors import (
    CorruptCheckpoint,
    EngineUnavailable,
    IntarsiaError,
    InvalidRequest,
    PoolExhausted,
    RequestTooLarge,
)
from intarsia.proto.reply import Delta, Rows, TokenLogprobs
from intarsia.proto.request import SamplingParams
from intarsia.tests.deploy.scripted import HANG, INFO

ROW = TokenLogprobs(7, -0.5, ((7, -0.5), (9, -1.5)))
FIRST, LAST = Delta((7,), Rows.of([ROW]), None, 2), Delta((8, 9), Rows.of([ROW, ROW]), "stop", 2)


def test_complete_joins_what_generate_streams(serve_script):
    engine, address = serve_script(FIRST, LAST)
    params = SamplingParams(logprobs=2, seed=5)
    with Client(address) as client:
        chunks = list(client.generate([1, 2, 3], params))
        whole = client.complete([1, 2, 3], params)
    assert [chunk.token_ids for chunk in chunks] == [(7,), (8, 9)]
    assert [chunk.finish_reason for chunk in chunks] == [None, "stop"]
    assert whole.token_ids == (7, 8, 9)
    assert whole.logprobs == (ROW, ROW, ROW)
    assert whole.usage == chunks[-1].usage == Usage(prompt_tokens=3, cached_tokens=2, completion_tokens=3)
    assert engine.asked[0][:2] == ([1, 2, 3], params)


def test_model_info_is_the_engines(serve_script):
    _, address = serve_script()
    with Client(address) as client:
        assert client.model_info() == INFO._replace(model_dir="")


@pytest.mark.parametrize(
    "cls", [InvalidRequest, RequestTooLarge, PoolExhausted, EngineUnavailable, CorruptCheckpoint, IntarsiaError]
)
def test_error_of_the_server_is_raised_as_its_own_class(serve_script, cls):
    _, address = serve_script(FIRST, cls("what, and what to do", field="prompt", asked=9))
    with Client(address) as client:
        chunks = client.generate([1])
        assert next(chunks).token_ids == (7,)  # what came before the error was delivered
        with pytest.raises(cls, match=r"^what, and what to do$") as error:
            next(chunks)
    assert type(error.value) is cls
    assert (error.value.field, error.value.details) == ("prompt", {"asked": "9"})


def test_where_no_server_listens_the_address_and_the_command_are_named():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        with Client(address) as client, pytest.raises(EngineUnavailable, match=rf"{address}.*intarsia serve"):
            client.complete([1])


@pytest.mark.parametrize("ending", ["close", "drop"])
def test_iterator_given_up_stops_the_generation(serve_script, ending):
    engine, address = serve_script(FIRST, HANG)
    with Client(address) as client:
        chunks = client.generate([1])
        next(chunks)
        if ending == "close":
            chunks.close()  # type: ignore[attr-defined]
        del chunks
        assert engine.closed.wait(5)


@pytest.mark.parametrize("prompt", [[-1], [2**32], [1.5], ["a"], "half a surrogate \udc80"])
def test_prompt_that_cannot_be_sent_is_an_invalid_request(prompt):
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequest) as refusal:
        client.complete(prompt)
    assert refusal.value.field == "prompt"


def test_prompt_beyond_the_message_limit_is_too_large(serve_script):
    _, address = serve_script(LAST)
    with Client(address) as client, pytest.raises(RequestTooLarge, match="larger than max"):
        client.complete("x" * (17 * 2**20))


def test_server_that_stops_in_the_middle_is_unavailable(loop, serve_script):
    engine, address = serve_script(FIRST, HANG)
    with Client(address) as client:
        chunks = client.generate([1])
        next(chunks)
        loop.run(engine.server.stop(grace_s=0))
        with pytest.raises(EngineUnavailable):
            next(chunks)
