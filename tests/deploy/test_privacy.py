"""What must stay private: prompts, answers and keys, looked for in all that is written or sent anywhere."""

import json
import logging
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from intarsia import SamplingParams
from intarsia.deploy.client import Client
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.errors import IntarsiaError
from intarsia.proto.tracing import tracer_of
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.test_tracing import TRACE, Collector
from intarsia.tests.workers.grammar.test_matcher import ENDLESS

SECRET = "xylophone"
"""In every prompt, form, and field of a request that is refused."""

KEY, WRONG_KEY = "quartz-key-of-ours", "quartz-key-of-nobody"


class Served(NamedTuple):
    http: str
    grpc: str
    engine: RunningEngine
    collector: Collector
    written: list[str]  # what this process logged


@pytest.fixture
def served(ray_cluster: None, talker: Path, loop: Loop, tmp_path: Path) -> Iterator[Served]:
    keys = tmp_path / "keys"
    keys.write_text(f"{KEY}\n")
    keys.chmod(0o600)
    access = Access(AccessSettings(api_key_file=str(keys)))
    collector = Collector()
    engine = loop.run(
        start_engine(
            engine_settings(
                str(talker), tensor_parallel_size=2, kv_cache_memory="1MiB", otlp_traces_endpoint=collector.url
            )
        )
    )
    front_end = FrontEnd(engine.client, Tokenizer.load(talker), tracer=tracer_of("front-end", collector.url))

    async def listen() -> tuple[HttpServer, GrpcServer, str, str]:
        http, grpc = HttpServer(make_app(lambda: front_end, access), access), GrpcServer(front_end, access)
        return http, grpc, await http.start(port=0), await grpc.start(port=0)

    http, grpc, url, target = loop.run(listen())
    written: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: written.append(logging.Formatter().format(record))
    loggers = [logging.getLogger(name) for name in (None, "uvicorn")]
    for logger in loggers:
        logger.addHandler(handler)
    yield Served(url, target, engine, collector, written)
    for logger in loggers:
        logger.removeHandler(handler)
    loop.run(http.stop())
    loop.run(grpc.stop())
    loop.run(engine.shutdown())


def test_no_prompt_answer_or_key_is_logged_counted_or_traced(
    served: Served, loop: Loop, capfd: pytest.CaptureFixture[str]
):
    import ray

    private: Any = ray._private
    node = private.worker._global_node
    logs = Path(node.get_session_dir_path()) / "logs"
    before = {path: path.stat().st_size for path in logs.rglob("*") if path.is_file()}
    trace = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
    with httpx.Client(base_url=served.http, headers={"authorization": f"Bearer {KEY}"} | trace, timeout=60) as http:
        answers = ask_rightly(http) + ask_wrongly(http)
        with Client(served.grpc, api_key=KEY) as client:
            answers.append(client.complete(f"{SECRET} wood", SamplingParams(max_tokens=5)).text)
            for wrong in (SamplingParams(regex=f"({SECRET}"), SamplingParams(json_schema={"type": SECRET})):
                with pytest.raises(IntarsiaError):
                    client.complete(SECRET, wrong)
        survive(served, loop)
        metrics = http.get("/metrics").text
    served.collector.wait_for(20)
    said = capfd.readouterr()
    places = {
        "log of the front end": "\n".join(served.written),
        "metrics": metrics,
        "traces": b"".join(served.collector.bodies).decode("latin-1"),
        "stdout": said.out,
        "stderr": said.err,
    } | {
        f"Ray's {path.name}": path.read_text(errors="replace")[before.get(path, 0) :]
        for path in logs.rglob("*")
        if path.is_file()
    }
    assert "are lost" in "".join(places.values()), "the controller's log is not among what was read"
    assert len(served.collector.bodies) > 0
    for secret in (SECRET, KEY, WRONG_KEY, "quartz"):
        assert [_excerpt(name, text, secret) for name, text in places.items() if secret in text] == []
    for answer in [answer for answer in answers if len(answer.strip()) > 5]:
        found = [_excerpt(name, text, answer) for name, text in places.items() if answer in text]
        assert not found, (answer, found)


def _excerpt(name: str, text: str, secret: str) -> tuple[str, str]:
    at = text.index(secret)
    return name, text[max(0, at - 200) : at + 200]


def ask_rightly(http: httpx.Client) -> list[str]:
    """Their answers."""
    body = {"model": "talker", "max_tokens": 12, "temperature": 1.0, "seed": 3}
    body["model"] = http.get("/v1/models").json()["data"][0]["id"]
    completion = http.post("/v1/completions", json=body | {"prompt": SECRET}).json()
    chat = http.post("/v1/chat/completions", json=body | {"messages": [{"role": "user", "content": SECRET}]}).json()
    regex = http.post("/v1/completions", json=body | {"prompt": "a", "structured_outputs": {"regex": SECRET}}).json()
    assert regex["choices"][0]["text"] == SECRET
    return [completion["choices"][0]["text"], chat["choices"][0]["message"]["content"]]


def ask_wrongly(http: httpx.Client) -> list[str]:
    """Nothing: each is refused."""
    endless = json.dumps(json.loads(ENDLESS) | {"title": SECRET})
    bodies: list[dict[str, Any]] = [
        {"prompt": SECRET, "temperature": SECRET},
        {"prompt": SECRET * 1000},
        {"prompt": SECRET, SECRET: 1},
        {"prompt": SECRET, "structured_outputs": {"json": {"type": SECRET}}},
        {"prompt": SECRET, "structured_outputs": {"json": endless}},
        {"prompt": {SECRET: 1}},
    ]
    statuses = [http.post("/v1/completions", json=body).status_code for body in bodies]
    statuses.append(http.post("/v1/completions", content=f'{{"prompt": "{SECRET}'.encode()).status_code)
    statuses.append(http.post(f"/{SECRET}", json={}).status_code)
    statuses.append(http.post("/v1/completions", headers={"authorization": f"Bearer {WRONG_KEY}"}).status_code)
    assert statuses == [400] * 7 + [404, 401]
    return []


def survive(served: Served, loop: Loop) -> None:
    """A worker dies, then the controller of a bug, while requests run."""

    async def answer(then: Any) -> None:
        deltas = 0
        async for _ in served.engine.client.generate(list(SECRET.encode()), SamplingParams(max_tokens=100, seed=1)):
            deltas += 1
            if deltas == 5:
                await then()

    async def kill() -> None:
        os.kill((await served.engine.worker_process_ids())[-1], signal.SIGKILL)

    async def break_it() -> None:
        def lose_a_part(actor: Any) -> None:
            actor._engine._scheduler.commit = None

        await served.engine._controller.__ray_call__.remote(lose_a_part)

    loop.run(answer(kill))
    loop.run(answer(break_it))
