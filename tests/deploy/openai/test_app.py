"""What HTTP says where no client library is in between."""

import contextlib
import http.client
import json
import logging
import re
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import pytest

from intarsia.errors import Overloaded
from intarsia.tests.deploy.openai.conftest import Api

ASK = [{"role": "user", "content": "Which wood?"}]


def call(api: Api, path: str, body: Any = None, **headers: str) -> tuple[int, Any, Any]:
    """Status, body and headers of an answer."""
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    request = urllib.request.Request(api.url + path, data, {"Content-Type": "application/json", **headers})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            text, status, back = answer.read().decode(), answer.status, answer.headers
    except urllib.error.HTTPError as error:
        text, status, back = error.read().decode(), error.code, error.headers
    return status, json.loads(text) if text[:1] in "{[" and text else text, back


def curl(api: Api, path: str, *arguments: str) -> str:
    done = subprocess.run(
        ["curl", "-sS", "--max-time", "60", api.url + path, *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout


def test_curl_streams_server_sent_events(api: Api):
    body = {"prompt": "oak", "max_tokens": 5, "stream": True, "temperature": 0, "ignore_eos": True}
    printed = curl(api, "/v1/completions", "-N", "-H", "Content-Type: application/json", "-d", json.dumps(body))
    lines = [line for line in printed.split("\n\n") if line]
    assert lines[-1] == "data: [DONE]" and all(line.startswith("data: ") for line in lines)
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]
    assert events[-1]["choices"][0]["finish_reason"] == "length"


def test_a_client_that_leaves_before_its_body_is_whole_is_no_error(api: Api, caplog: pytest.LogCaptureFixture):
    address = urllib.parse.urlsplit(api.url)
    log = logging.getLogger("uvicorn")
    log.addHandler(caplog.handler)
    try:
        with socket.create_connection((address.hostname, address.port)) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 50\r\nContent-Type: application/json"
            client.sendall(f'{head}\r\n\r\n{{"prompt": '.encode())
        assert call(api, "/v1/completions", {"prompt": "oak", "max_tokens": 3})[0] == 200
    finally:
        log.removeHandler(caplog.handler)
    assert caplog.text == ""


def test_a_connection_stays_open_for_longer_than_clients_keep_one(api: Api):
    address = urllib.parse.urlsplit(api.url)
    assert address.hostname is not None
    connection = http.client.HTTPConnection(address.hostname, address.port, timeout=60)
    with contextlib.closing(connection):
        for pause_s in (5.5, 0):  # httpx, and OpenAI's client with it, keeps one for 5 s
            connection.request("GET", "/health")
            answer = connection.getresponse()
            assert answer.status == 200 and answer.read() is not None
            assert connection.sock is not None
            time.sleep(pause_s)


def test_health_and_metrics(api: Api):
    call(api, "/v1/completions", {"prompt": "oak", "max_tokens": 3})
    assert call(api, "/health")[0] == 200
    status, text, headers = call(api, "/metrics")
    assert status == 200 and headers["Content-Type"].startswith("text/plain")
    values = dict(re.findall(r'^(vllm:\w+)\{engine="0",model_name="talker"\} (\S+)$', text, re.M))
    assert float(values["vllm:num_requests_running"]) == 0
    assert float(values["vllm:generation_tokens_total"]) >= 3
    assert 0 <= float(values["vllm:kv_cache_usage_perc"]) <= 1


def test_text_to_tokens_and_back(api: Api):
    status, found, _ = call(api, "/tokenize", {"prompt": "äsche", "return_token_strs": True})
    assert status == 200 and found["count"] == 6 == len(found["tokens"]) == len(found["token_strs"])
    assert call(api, "/detokenize", {"tokens": found["tokens"]})[1] == {"prompt": "äsche"}
    chat = call(api, "/tokenize", {"messages": [{"role": "user", "content": "hi"}]})[1]
    assert call(api, "/detokenize", {"tokens": chat["tokens"]})[1] == {"prompt": "user: hi\nassistant: "}


def test_a_probe_reads_texts_tokens_and_messages_as_requests_are_read(api: Api):
    call(api, "/v1/chat/completions", {"messages": ASK, "max_tokens": 2})
    status, found, _ = call(api, "/v1/probe", {"model": "talker", "messages": ASK})
    assert status == 200 and found["model"] == "talker", found
    [engine] = found["engines"]
    assert engine["engine"] == "talker" and 0 < engine["figures"]["cached_tokens"] < found["prompt_tokens"]
    tokens = call(api, "/tokenize", {"messages": ASK})[1]["tokens"]
    assert call(api, "/v1/probe", {"prompt": tokens})[1]["prompt_tokens"] == found["prompt_tokens"] == len(tokens)
    assert call(api, "/v1/probe", {"prompt": "oak"})[1]["prompt_tokens"] == 3


def test_a_request_id_is_kept(api: Api):
    answer = call(api, "/v1/completions", {"prompt": "oak", "max_tokens": 1}, **{"X-Request-Id": "mine"})[1]
    assert answer["id"] == "cmpl-mine"


@pytest.mark.parametrize(
    ("path", "body", "status", "param", "message"),
    [
        ("/v1/completions", b"{", 400, None, "the body is no JSON"),
        ("/v1/completions", b"[]", 400, None, "the body"),
        ("/v1/completions", {}, 400, "prompt", "Missing required parameter: 'prompt'."),
        ("/v1/completions", {"prompt": "x", "tempature": 1}, 400, "tempature", "Did you mean temperature?"),
        ("/v1/completions", {"prompt": [[1], "x"]}, 400, "prompt.0", "prompt.0: "),
        ("/v1/chat/completions", {"messages": []}, 400, "messages", "Invalid 'messages': empty array."),
        ("/v1/chat/completions", {"messages": [{"role": "king", "content": "x"}]}, 400, "messages.0.role", "'king'"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x/y"}}]}]},
            400,
            "messages",
            "this server fetches nothing",
        ),
        ("/v1/chat/completions", {"messages": ASK, "top_logprobs": 2}, 400, "top_logprobs", "needs logprobs"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"uri": "x"}}]}]},
            400,
            "messages.0.content.0.image_url.url",
            "Missing required parameter: 'messages.0.content.0.image_url.url'.",
        ),
        ("/v1/responses", {"input": [{"type": "function_call", "name": "x"}]}, 400, "input.0.call_id", "Missing"),
        ("/v1/responses", {"input": "x", "previous_response_id": "resp_1"}, 400, "previous_response_id", "leave it"),
        ("/v1/probe", {"prompt": [1, 400]}, 400, "prompt", "not in the vocabulary of 320"),
        ("/v1/probe", {"prompt": [1] * 600}, 400, "prompt", "maximum context length"),
        ("/v1/probe", {"prompt": "x", "model": "gpt-9"}, 404, "model", "does not exist here"),
        ("/tokenize", {}, 400, "prompt", "Missing required parameter: 'prompt'."),
        ("/detokenize", {"tokens": [100_000]}, 400, "tokens", "vocabulary of 320"),
        ("/v1/models/gpt-9", None, 404, "model", "The model `gpt-9` does not exist here"),
        ("/v1/nothing", None, 404, None, "Not Found"),
        ("/v1/completions", None, 405, None, "Method Not Allowed"),
    ],
)  # fmt: skip
def test_every_refusal_has_openais_shape_and_names_the_field(
    api: Api, path: str, body: Any, status: int, param: str | None, message: str
):
    code, found, _ = call(api, path, body)
    assert code == status, found
    assert set(found) == {"error"} and set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["param"] == param, found
    assert message in found["error"]["message"], found


@pytest.mark.parametrize(
    ("path", "about"),
    [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": ASK}),
        ("/v1/responses", {"input": "x"}),
    ],
)
def test_a_prompt_that_would_never_be_computed_is_not_read(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str, about: dict[str, Any]
):
    read: list[str] = []

    def note(name: str) -> None:
        through = getattr(api.front_end, name)

        async def noted(*args: Any, **kwargs: Any) -> Any:
            read.append(name)
            return await through(*args, **kwargs)

        monkeypatch.setattr(api.front_end, name, noted)

    note("encode")
    note("encode_chat")
    api.engine.client.connection.refusals.note("flood", Overloaded("its turn would come late", full_for_s=60.0))
    code, found, _ = call(api, path, about | {"user": "flood"})
    assert code == 429 and "its turn would come late" in found["error"]["message"]
    assert not read
    assert call(api, path, about | {"user": "other"})[0] == 200
    assert len(read) == 1


def test_a_body_that_is_too_large_is_refused_before_it_is_read(api: Api):
    printed = curl(
        api, "/v1/completions", "-H", "Content-Type: application/json", "-H", "Content-Length: 999999999", "-d", "{}"
    )
    assert "the limit is 33554432" in json.loads(printed)["error"]["message"]


def test_the_openapi_document_knows_no_other_errors_than_ours(api: Api):
    document = call(api, "/openapi.json")[1]
    assert {"/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/models", "/tokenize"} <= set(
        document["paths"]
    )
    assert "HTTPValidationError" not in json.dumps(document)
    for operations in document["paths"].values():
        for operation in operations.values():
            assert "422" not in operation["responses"]
