"""One line for each request, over HTTP and gRPC, whatever becomes of it."""

import asyncio
import io
import json
import logging
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from intarsia.deploy.client import Client
from intarsia.deploy.front_end import request_log
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.request_log import Record, RequestLog
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.start.log_level import LogLevel, log_from
from intarsia.deploy.start.serve import server_settings
from intarsia.environment import LOG_LEVEL
from intarsia.errors import InvalidSetting, Overloaded, Unauthenticated
from intarsia.kvcache.misses import Miss
from intarsia.proto.reply import Delta
from intarsia.proto.request import SamplingParams
from intarsia.tests.deploy.scripted import HANG, ScriptedEngine

SCRIPT = (
    Delta((5,), num_cached_tokens=2, queue_s=0.25),
    Delta((6,), num_cached_tokens=2),
    Delta((7,), finish_reason="length", num_cached_tokens=2),
)
KEY = "a-key-that-nobody-may-read"


class Logged(NamedTuple):
    url: str
    grpc: str
    engine: ScriptedEngine
    lines: Callable[[int], list[str]]

    def post(self, body: dict[str, Any], path: str = "/v1/completions", key: str = KEY, **headers: str) -> int:
        headers = {"Authorization": f"Bearer {key}"} | headers
        return httpx.post(self.url + path, json=body, headers=headers, timeout=60).status_code

    def entries(self, count: int) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.lines(count)]


@pytest.fixture
def logged(loop: Any, tmp_path: Any) -> Iterator[Callable[..., Logged]]:
    """Starts both servers with a log, in front of a scripted engine."""
    ending: list[Any] = []
    (tmp_path / "keys").write_text(f"{KEY} alice\n")

    def start(form: str | None = "json", script: Any = SCRIPT) -> Logged:
        output = io.StringIO()
        log = RequestLog(form, output) if form else None

        async def listen() -> Logged:
            engine: Any = ScriptedEngine(script)
            front_end, access = FrontEnd(engine, None), Access(AccessSettings(api_key_file=str(tmp_path / "keys")))
            http = HttpServer(make_app(lambda: front_end, access, request_log=log), access)
            rpc = GrpcServer(front_end, access, log)
            ending.extend((http, rpc))
            return Logged(await http.start(port=0), await rpc.start(port=0), engine, lines)

        def lines(count: int) -> list[str]:
            """So many of them, once they are there; no more come."""
            until_s = time.monotonic() + 30
            while output.getvalue().count("\n") < count and time.monotonic() < until_s:
                time.sleep(0.01)
            if log is not None:
                log.close()
            found = output.getvalue().splitlines()
            assert len(found) == count, found
            return found

        return loop.run(listen())

    yield start
    for server in ending:
        loop.run(server.stop())


def test_a_request_leaves_one_entry_with_its_tokens_times_and_end(logged: Callable[..., Logged]):
    there = logged()
    assert there.post({"prompt": [1, 2, 3, 4]}, **{"X-Request-Id": "mine"}) == 200
    [entry] = there.entries(1)
    times = {name: entry.pop(name) for name in ("time", "first_token_s", "total_s")}
    assert entry == {
        "id": "mine",
        "tenant": "alice",
        "endpoint": "/v1/completions",
        "model": "tiny-hybrid",
        "status": 200,
        "tokens_in": 4,
        "tokens_found": 2,
        "tokens_out": 3,
        "queue_s": 0.25,
        "end": "length",
    }
    assert 0 <= times["first_token_s"] <= times["total_s"] and times["time"].endswith("Z")


def test_an_entry_says_why_tokens_were_not_found():
    record = Record("/v1/completions")

    async def pieces() -> AsyncGenerator[tuple[Delta, str], None]:
        misses = Miss("new", 3), Miss("evicted", 16, "sliding-8"), Miss("salt", 2)
        for answer in range(2):  # of one prompt
            yield Delta((1,), finish_reason="length", num_cached_tokens=4, misses=misses, answer=answer), "a"

    async def read() -> None:
        async for _ in record.watch(pieces()):
            pass

    asyncio.run(read())
    assert record.fields()["not_found"] == "3:new,16:evicted:sliding-8,2:salt"


def test_a_line_says_the_same_in_words(logged: Callable[..., Logged]):
    there = logged("line")
    there.post({"prompt": [1, 2, 3, 4], "stream": True, "request_id": "in-its-body"})
    [line] = there.lines(1)
    assert " request id=in-its-body tenant=alice endpoint=/v1/completions model=tiny-hybrid status=200 " in line
    assert " tokens_in=4 tokens_found=2 tokens_out=3 queue_s=0.25 first_token_s=" in line and line.endswith(
        " end=length"
    )


def test_several_prompts_are_one_entry_with_all_their_tokens(logged: Callable[..., Logged]):
    there = logged()
    there.post({"prompt": [[1, 2, 3], [1, 2, 3, 4]]})
    [entry] = there.entries(1)
    assert (entry["tokens_in"], entry["tokens_found"], entry["tokens_out"]) == (7, 4, 6)


@pytest.mark.parametrize(
    ("body", "path", "key", "status", "end"),
    [
        ({"prompt": "text"}, "/v1/completions", "another", 401, "Unauthenticated"),
        ({"prompt": []}, "/v1/completions", KEY, 400, "refused"),
        ({"prompt": [1], "model": "gpt-9"}, "/v1/completions", KEY, 404, "UnknownModel"),
        ({"tokens": [1]}, "/nowhere", KEY, 404, "refused"),
    ],
)
def test_what_is_refused_has_its_entry(
    logged: Callable[..., Logged], body: dict[str, Any], path: str, key: str, status: int, end: str
):
    there = logged()
    assert there.post(body, path, key) == status
    [entry] = there.entries(1)
    assert (entry["status"], entry["end"], entry["endpoint"], entry["tokens_out"]) == (status, end, path, 0)


def test_an_answer_that_fails_has_the_name_of_its_error(logged: Callable[..., Logged]):
    there = logged(script=(SCRIPT[0], Overloaded("no room")))
    there.post({"prompt": [1, 2], "stream": True})
    [entry] = there.entries(1)
    assert (entry["status"], entry["end"], entry["tokens_out"]) == (200, "Overloaded", 1)


def test_a_client_that_leaves_is_told_as_one(logged: Callable[..., Logged]):
    there = logged(script=(SCRIPT[0], HANG))
    with httpx.stream(
        "POST", f"{there.url}/v1/completions", json={"prompt": [1, 2], "stream": True},
        headers={"Authorization": f"Bearer {KEY}"}, timeout=30,
    ) as answer:  # fmt: skip
        next(answer.iter_lines())
    [entry] = there.entries(1)
    assert (entry["end"], entry["tokens_out"]) == ("left", 1)


def test_what_only_looks_has_no_entry(logged: Callable[..., Logged]):
    there = logged()
    for path in ("/health", "/metrics", "/v1/models", "/console"):
        httpx.get(there.url + path, headers={"Authorization": f"Bearer {KEY}"})
    there.post({"prompt": [1]})
    assert len(there.entries(1)) == 1


def test_calls_of_grpc_have_entries_refused_or_answered(logged: Callable[..., Logged]):
    there = logged()
    with Client(there.grpc, api_key=KEY) as client:
        list(client.generate([1, 2, 3, 4], SamplingParams(max_tokens=3), request_id="by-grpc"))
    with Client(there.grpc, api_key="another") as client, pytest.raises(Unauthenticated):
        list(client.generate([1], SamplingParams(max_tokens=3)))
    answered, refused = there.entries(2)
    assert (answered["id"], answered["tenant"], answered["end"]) == ("by-grpc", "alice", "length")
    assert (answered["tokens_in"], answered["tokens_out"], answered["status"]) == (4, 3, None)
    assert (refused["end"], refused["endpoint"]) == ("Unauthenticated", "/intarsia.v1.Inference/Generate")


def test_neither_texts_nor_keys_are_written(logged: Callable[..., Logged]):
    there = logged("line")
    there.post({"prompt": "a secret text"})
    there.post({"prompt": [1], "user": "u" * 3000})
    assert not [word for line in there.lines(2) for word in ("secret", KEY, "u" * 300) if word in line]


@pytest.mark.parametrize("form", request_log.FORMS)
def test_what_a_client_chose_stays_on_one_line(logged: Callable[..., Logged], form: str):
    there = logged(form)
    there.post({"prompt": [1]}, "/x%0A2026-01-01T00:00:00Z%20request%20id=forged%20end=stop%0d%1b[2J")
    [line] = there.lines(1)
    assert "forged" in line and line.isprintable() and " id=forged" not in line.partition("endpoint")[0]
    assert json.dumps("/x\n2026")[1:-1] in line  # quoted


def test_without_a_log_nothing_of_it_is_there(logged: Callable[..., Logged]):
    there = logged(None)
    before = {thread.name for thread in threading.enumerate()}
    there.post({"prompt": [1]})
    there.lines(0)
    assert "request log" not in before


def test_who_does_not_read_the_log_does_not_stop_the_server(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(request_log, "MOST_WAITING", 4)
    is_read, written = threading.Event(), io.StringIO()

    class Slow(io.StringIO):
        def write(self, text: str) -> int:
            is_read.wait(30)
            return written.write(text)

    log = RequestLog("json", Slow())

    async def ask() -> None:
        for _ in range(20):
            with log.one("/v1/completions"):
                pass

    asyncio.run(asyncio.wait_for(ask(), 30))
    is_read.set()
    log.close()
    entries = list(map(json.loads, written.getvalue().splitlines()))
    dropped = sum(entry.get("dropped_requests", 0) for entry in entries)
    asked = [entry for entry in entries if "endpoint" in entry]
    assert dropped and len(asked) + dropped == 20


def test_another_form_is_refused_with_those_there_are():
    with pytest.raises(InvalidSetting, match="request_log must be line or json, got 'xml'") as refusal:
        server_settings(request_log="xml")
    assert refusal.value.field == "request_log"


def test_log_level_is_that_of_our_loggers_alone(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv(LOG_LEVEL, "")
    ours = logging.getLogger("intarsia")
    before = ours.level
    try:
        log_from(LogLevel.DEBUG)
        assert logging.getLogger("intarsia.deploy.front_end.router").isEnabledFor(logging.DEBUG)
        assert not logging.getLogger("httpx").isEnabledFor(logging.DEBUG)
    finally:
        ours.setLevel(before)
