"""What `/v1/messages` says over HTTP. Anthropic's own clients ask it in `tests/clients`."""

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import (
    DeadlineExceeded,
    EngineUnavailable,
    IntarsiaError,
    Overloaded,
    OverQuota,
    PoolExhausted,
    RequestAborted,
)
from intarsia.proto.reply import Delta
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api
from intarsia.tests.deploy.scripted import ScriptedEngine
from intarsia.tests.models import greedy

ASK: dict[str, Any] = {
    "model": "talker",
    "system": "You inlay.",
    "messages": [{"role": "user", "content": "Which wood?"}],
    "max_tokens": 24,
    "temperature": 0,
    "ignore_eos": True,
}
PROMPT = "system: You inlay.\nuser: Which wood?\nassistant: "
ORDER = {
    "name": "order",
    "input_schema": {
        "type": "object",
        "properties": {"wood": {"enum": ["oak", "ash"]}},
        "required": ["wood"],
        "additionalProperties": False,
    },
}


def post(api: Api, body: dict[str, Any], path: str = "/v1/messages", **headers: str) -> httpx.Response:
    return httpx.post(f"{api.url}{path}", json=body, headers=headers, timeout=60)


def events_of(answer: httpx.Response) -> list[dict[str, Any]]:
    found = []
    for event in answer.text.split("\n\n"):
        if event:
            name, _, data = event.partition("\n")
            found.append(json.loads(data.removeprefix("data: ")))
            assert name == f"event: {found[-1]['type']}"
    return found


def test_an_answer_is_the_one_that_chat_gives(api: Api):
    answer = post(api, ASK)
    told, prompt = answer.json(), api.tokenizer.encode(PROMPT)
    text = api.tokenizer.decode(greedy(api.oracle, prompt, 24))
    assert told["content"] == [{"type": "text", "text": text, "citations": None}]
    assert (told["type"], told["role"], told["model"]) == ("message", "assistant", "talker")
    assert (told["stop_reason"], told["stop_sequence"]) == ("max_tokens", None)
    assert told["id"] == f"msg_{answer.headers['request-id']}"
    usage = told["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == len(prompt)
    assert (usage["cache_creation_input_tokens"], usage["output_tokens"]) == (0, 24)


def test_what_was_found_in_the_cache_is_told_apart(api: Api):
    body = ASK | {"system": "You inlay wood of every kind, and say so in many words. " * 2}
    first, second = post(api, body).json()["usage"], post(api, body).json()["usage"]
    assert second["cache_read_input_tokens"] >= 64 > first["cache_read_input_tokens"]
    assert sum(lost["tokens"] for lost in first.pop("not_cached")) == first["input_tokens"]
    assert sum(lost["tokens"] for lost in second.pop("not_cached")) == second["input_tokens"]
    assert sum(first.values()) == sum(second.values())


def test_a_stream_tells_what_the_whole_answer_tells(api: Api):
    whole = post(api, ASK).json()
    answer = post(api, ASK | {"stream": True})
    assert answer.headers["request-id"] and answer.headers["content-type"].startswith("text/event-stream")
    events = events_of(answer)
    kinds = [event["type"] for event in events]
    assert kinds[:3] == ["message_start", "ping", "content_block_start"]
    assert kinds[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    start = events[0]["message"]
    assert start["content"] == [] and start["stop_reason"] is None
    assert start["usage"]["output_tokens"] == 1
    text = "".join(event["delta"]["text"] for event in events if event["type"] == "content_block_delta")
    assert [text] == [block["text"] for block in whole["content"]]
    assert events[-2]["delta"] == {"stop_reason": "max_tokens", "stop_sequence": None}
    assert events[-2]["usage"]["output_tokens"] == 24


@pytest.mark.parametrize("is_streaming", [True, False])
def test_the_sequence_that_stopped_an_answer_is_told(api: Api, is_streaming: bool):
    text = post(api, ASK).json()["content"][0]["text"]
    stop = text[9:11]
    answer = post(api, ASK | {"stop_sequences": ["never said", stop], "stream": is_streaming})
    told = events_of(answer)[-2]["delta"] if is_streaming else answer.json()
    assert (told["stop_reason"], told["stop_sequence"]) == ("stop_sequence", stop)


@pytest.mark.parametrize(
    "choice", [{"type": "any", "disable_parallel_tool_use": True}, {"type": "tool", "name": "order"}]
)
def test_a_tool_that_must_be_used_is_used(api: Api, choice: dict[str, Any]):
    body = ASK | {"tools": [ORDER], "tool_choice": choice, "max_tokens": 200, "ignore_eos": False}
    whole = post(api, body).json()
    [call] = whole["content"]
    assert (call["type"], call["name"], whole["stop_reason"]) == ("tool_use", "order", "tool_use")
    assert call["id"].startswith("toolu_") and call["input"]["wood"] in ("oak", "ash")
    events = events_of(post(api, body | {"stream": True}))
    pieces = [event["delta"]["partial_json"] for event in events if event["type"] == "content_block_delta"]
    assert len(pieces) > 3 and json.loads("".join(pieces)) == call["input"]
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


def test_an_answer_of_a_schema_is_one(api: Api):
    form = {"format": {"type": "json_schema", "schema": ORDER["input_schema"]}}
    told = post(api, ASK | {"output_config": form, "max_tokens": 200}).json()
    assert json.loads(told["content"][0]["text"])["wood"] in ("oak", "ash")


def test_an_answer_goes_on_with_what_the_assistant_began(api: Api):
    asked = [*ASK["messages"], {"role": "assistant", "content": "The best is"}]
    told = post(api, ASK | {"messages": asked}).json()
    prompt = api.tokenizer.encode(f"{PROMPT}The best is")
    assert told["content"][0]["text"] == api.tokenizer.decode(greedy(api.oracle, prompt, 24))


def test_tokens_are_counted_as_they_would_be_asked(api: Api):
    body = {name: ASK[name] for name in ("model", "system", "messages")}
    counted = post(api, body, "/v1/messages/count_tokens").json()
    assert counted == {"input_tokens": len(api.tokenizer.encode(PROMPT))}
    long = body | {"system": "x" * 5000}
    assert post(api, long, "/v1/messages/count_tokens").json()["input_tokens"] > 5000  # though the model takes 512


def test_a_hint_to_the_cache_changes_nothing_and_a_wrong_one_is_refused(api: Api):
    mark = {"type": "ephemeral", "ttl": "5m"}
    marked = ASK | {"system": [{"type": "text", "text": "You inlay.", "cache_control": mark}], "cache_control": mark}
    assert post(api, marked).json()["content"] == post(api, ASK).json()["content"]
    refused = post(api, ASK | {"cache_control": {"type": "ephemeral", "ttl": "2d"}})
    assert refused.status_code == 400 and "'5m' or '1h'" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"max_tokens": None}, "max_tokens: "),
        ({"messages": []}, "Invalid 'messages': empty array."),
        ({"messages": [{"role": "king", "content": "x"}]}, "Invalid value: 'king'"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "Invalid value: 'document'"),
        ({"messages": [{"role": "user", "content": [{"type": "tool_use", "id": "1"}]}]}, "Invalid value: 'tool_use'"),
        ({"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]}, "'thinking'"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "'web_search_20250305'"),
        ({"tools": [ORDER], "tool_choice": {"type": "tool", "name": "plane"}}, "the tools are order"),
        ({"tool_choice": {"type": "any"}}, "only allowed when 'tools' are specified"),
        ({"thinking": {"type": "between_tools"}}, "'between_tools'"),
        ({"container": "c_1"}, "container is not supported here; leave it out"),
        ({"mcp_servers": [{"type": "url"}]}, "mcp_servers: "),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}}, "'clear_thinking_20251015'"),
        ({"stop_sequence": ["x"]}, "Did you mean stop_sequences?"),
        ({"temperature": 7}, "above maximum value"),
        ({"metadata": {"user_id": "x" * 300}}, "metadata.user_id: "),
        ({"model": "claude"}, "The model `claude` does not exist here"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, "prompt is too long"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_in_words_and_in_anthropics_shape(api: Api, fields: dict[str, Any], words: str):
    answer = post(api, {name: value for name, value in (ASK | fields).items() if value is not None or name in fields})
    found = answer.json()
    kind = "not_found_error" if "model" in fields else "invalid_request_error"
    assert answer.status_code == (404 if "model" in fields else 400)
    assert found["type"] == "error" and found["error"]["type"] == kind and words in found["error"]["message"], found
    assert found["request_id"] == answer.headers["request-id"] == answer.headers["x-request-id"]


@pytest.mark.parametrize("version", ["2023-06-01", "2026-10-21", None])
def test_the_version_of_the_interface_is_the_one_that_is_spoken(api: Api, version: str | None):
    headers = {"anthropic-version": version} if version else {}
    assert post(api, ASK, **headers).status_code == 200
    assert "2023-06-01" in post(api, ASK, **{"anthropic-version": "2022-01-01"}).json()["error"]["message"]


# -- refusals of the door and of the engine --------------------------------------------------------------------------

Start = Callable[..., str]

STRICT = """\
{%- for message in messages %}
    {%- if message.role == 'system' and not loop.first %}{{ raise_exception('the system begins') }}{% endif %}
    {%- if message.role == 'assistant' and loop.first %}{{ raise_exception('the user begins') }}{% endif %}
    {{- message.role }}: {{ message.content }}{{ '\\n' }}
{%- endfor %}"""


@pytest.fixture
def start(loop: Loop, talker: Path) -> Iterator[Start]:
    """Starts a server in front of an engine that fails so; returns its URL."""
    servers: list[HttpServer] = []

    def started(*script: Any, limits: Limits | None = None, tokenizer_of: Path = talker) -> str:
        tokenizer = Tokenizer.load(tokenizer_of)
        access = Access(AccessSettings(api_key=("oak",)))
        engine: Any = ScriptedEngine(script)

        async def listen() -> str:
            front_end = FrontEnd(engine, tokenizer, limits=limits)
            servers.append(
                HttpServer(
                    make_app(lambda: front_end, access, limits=limits, interfaces=(add_messages,)), access, limits
                )
            )
            return await servers[-1].start(port=0)

        return loop.run(listen())

    yield started
    for server in servers:
        loop.run(server.stop())


@pytest.fixture
def strict(talker: Path, tmp_path: Path) -> Path:
    """A tokenizer whose template refuses what many do."""
    folder = Path(shutil.copytree(talker, tmp_path / "strict"))
    (folder / "chat_template.jinja").write_text(STRICT)
    return folder


def ask(url: str, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 3} | fields
    return httpx.post(f"{url}/v1/messages", json=body, headers={"x-api-key": "oak"} | (headers or {}))


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (Overloaded("its turn would come late", retry_after_s=3.0), 529, "overloaded_error"),
        (OverQuota("you have 8 here already"), 429, "rate_limit_error"),
        (PoolExhausted("no blocks"), 529, "overloaded_error"),
        (EngineUnavailable("it starts"), 503, "api_error"),
        (DeadlineExceeded("too late"), 504, "timeout_error"),
        (RequestAborted("by another"), 499, "invalid_request_error"),
        (IntarsiaError("a bug"), 500, "api_error"),
    ],
)
def test_each_failure_has_anthropics_status_and_type(start: Start, error: IntarsiaError, status: int, kind: str):
    answer = ask(start(error))
    told = answer.json()
    assert (answer.status_code, told["type"]) == (status, "error")
    assert told["error"] == {"type": kind, "message": error.message}
    assert answer.headers.get("retry-after") == (f"{error.retry_after_s:g}" if error.retry_after_s else None)


def test_a_failure_within_a_stream_is_an_event(start: Start):
    url = start(Delta((79,)), Delta((107,)), EngineUnavailable("it is lost"))
    events = events_of(ask(url, stream=True))
    assert [event["type"] for event in events][-2:] == ["content_block_delta", "error"]
    assert events[-1]["error"] == {"type": "api_error", "message": "it is lost"} and events[-1]["request_id"]


def test_a_template_that_wants_the_system_first_gets_what_it_says_later_from_the_user(start: Start, strict: Path):
    said = [{"role": "system", "content": "Oak is out."}, {"role": "user", "content": "And now?"}]
    url = start(Delta((79,), finish_reason="stop"), tokenizer_of=strict)
    answer = ask(url, messages=[{"role": "user", "content": "x"}, *said])
    assert answer.status_code == 200, answer.text
    counted = httpx.post(
        f"{url}/v1/messages/count_tokens",
        json={"messages": [{"role": "user", "content": "x"}, *said]},
        headers={"x-api-key": "oak"},
    ).json()
    assert counted == {"input_tokens": len("user: x\nOak is out.\nAnd now?\n")}
    refused = ask(url, messages=[{"role": "assistant", "content": "x"}, said[1]])
    assert refused.status_code == 400 and "the user begins" in refused.json()["error"]["message"]


@pytest.mark.parametrize(
    ("headers", "status", "kind"),
    [
        ({"x-api-key": "ash"}, 401, "authentication_error"),
        ({"x-api-key": ""}, 401, "authentication_error"),
        ({"x-api-key": "ash", "authorization": "Bearer oak"}, 200, None),
        ({"x-api-key": "oak", "authorization": "Bearer ash"}, 401, "authentication_error"),
        ({"x-api-key": "oak"}, 200, None),
    ],
)
def test_a_key_comes_in_either_header(start: Start, headers: dict[str, str], status: int, kind: str | None):
    answer = ask(start(Delta((79,), finish_reason="stop")), headers)
    assert (answer.status_code, answer.json().get("error", {}).get("type")) == (status, kind), answer.text


def test_the_door_refuses_in_anthropics_shape(start: Start):
    url = start(limits=Limits(max_body_bytes=20))
    for path, method, status, kind in (
        ("/v1/messages", "POST", 413, "request_too_large"),
        ("/v1/messages/batches", "GET", 404, "not_found_error"),
        ("/v1/messages", "GET", 405, "invalid_request_error"),
    ):
        answer = httpx.request(
            method, url + path, headers={"x-api-key": "oak"}, content=b"x" * 30 if method == "POST" else None
        )
        assert answer.status_code == status
        told = answer.json()
        assert told["error"]["type"] == kind and told["request_id"] == answer.headers["request-id"]
