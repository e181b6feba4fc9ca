"""Leases as clients of each interface meet them: OpenAI's, Anthropic's, gRPC and Python's, with keys of two tenants."""

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rich.console import Console

from intarsia import SamplingParams
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.client import Client
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
from intarsia.deploy.front_end.request_log import RequestLog
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.tools.top import screen
from intarsia.errors import InvalidRequest, OverQuota, UnknownLease
from intarsia.kvcache.check import recount
from intarsia.proto.request import RequestOptions
from intarsia.tests.local import make_engine

ASK: dict[str, Any] = {"max_tokens": 24, "temperature": 0, "ignore_eos": True}
CHAT = {**ASK, "messages": [{"role": "user", "content": "Which wood is it that lasts?"}]}
TRIMMING = """\
{%- for turn in messages %}<{{ turn.role }}>{{ turn.content | trim }}</{{ turn.role }}>{% endfor %}
{%- if add_generation_prompt %}<assistant> {% endif %}"""
"""A template that writes answers otherwise than they were drawn, and the prompt's end, too."""

LONG = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)


class Place:
    """Servers of one engine, whose keys are alice's (oak), bob's (ash) and the admin's (yew)."""

    def __init__(self, engine: Engine, grpc: str, url: str, log: Path):
        self.engine, self.grpc, self.url, self.log = engine, grpc, url, log

    def post(self, path: str, body: dict[str, Any], key: str = "oak") -> httpx.Response:
        return httpx.post(self.url + path, json=body, headers=_bearing(key), timeout=60)

    def leases(self, key: str = "oak") -> list[dict[str, Any]]:
        return httpx.get(f"{self.url}/v1/leases", headers=_bearing(key)).json()["data"]

    def release(self, lease: str, key: str = "oak") -> httpx.Response:
        return httpx.delete(f"{self.url}/v1/leases/{lease}", headers=_bearing(key))


def _bearing(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def servers(
    loop: Any, talker: Path, folder: Path, *, template: str | None = None, prepares: bool = False, **settings: Any
) -> Iterator[Place]:
    (folder / "keys").write_text("oak alice\nash bob\n")
    (folder / "admin").write_text("yew\n")
    access = Access(AccessSettings(api_key_file=str(folder / "keys"), admin_key_file=str(folder / "admin")))
    written = (folder / "log").open("w+")
    log, tokenizer = RequestLog("json", written), Tokenizer.load(talker, chat_template=template)
    ending: list[Any] = []

    async def start() -> Place:
        engine = await make_engine(talker, kv_cache_memory="256KiB", **settings)
        running = asyncio.ensure_future(engine.run())
        door = EngineServer(engine)
        client = await EngineClient.connect(await door.start("127.0.0.1"))
        front_end = FrontEnd(client, tokenizer, FrontEndSettings(prepare_next_turns=prepares))
        app = make_app(lambda: front_end, access, request_log=log, interfaces=(add_messages,))
        http, rpc = HttpServer(app, access), GrpcServer(front_end, access, log)
        url, address = await http.start(port=0), await rpc.start(port=0)

        async def cancel() -> None:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

        ending.extend((http.stop, rpc.stop, client.close, door.close, cancel))
        return Place(engine, address, url, folder / "log")

    place = loop.run(start())
    yield place
    for end in ending:
        loop.run(end())
    log.close()


@pytest.fixture(scope="module")
def place(loop: Any, talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    yield from servers(loop, talker, tmp_path_factory.mktemp("leases"), lease_share=0.5, lease_share_per_tenant=0.3)


@pytest.fixture(autouse=True)
def nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "place" in request.fixturenames:
        place = request.getfixturevalue("place")
        for key in ("oak", "ash"):
            for lease in place.leases(key):
                assert place.release(lease["id"], key).status_code == 200
        assert recount(place.engine._manager).all_free


def _granted(usage: dict[str, Any]) -> dict[str, Any]:
    lease = usage["lease"]
    assert lease["granted"] and lease["id"].startswith("lease-") and lease["tokens"] > 0
    assert time.time() < lease["until"] <= time.time() + 60
    assert lease["share"]["used"] > 0 and lease["share"]["limit"] == pytest.approx(0.3, abs=0.05)
    assert {each["kind"] for each in lease["layers"]} == {"sliding-8"}
    return lease


def test_chat_tells_what_is_held_and_the_next_turn_takes_it_over(place: Place):
    first = place.post("/v1/chat/completions", {**CHAT, "keep_s": 60, "priority": -3}).json()
    lease = _granted(first["usage"])
    assert lease["tokens"] == first["usage"]["total_tokens"] - 1
    [held] = place.leases()
    assert (held["id"], held["tenant"], held["is_awaited"]) == (lease["id"], "alice", False)
    said = first["choices"][0]["message"]["content"]
    turns = [*CHAT["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
    second = place.post("/v1/chat/completions", {**CHAT, "messages": turns, "lease": lease["id"]}).json()
    assert second["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
    assert "lease" not in second["usage"] and place.leases() == []


def test_a_stream_tells_of_the_lease_with_its_last_event(place: Place):
    answer = place.post("/v1/chat/completions", {**CHAT, "keep_s": 60, "stream": True})
    events = [json.loads(line[6:]) for line in answer.text.split("\n\n") if line.startswith("data: {")]
    _granted(events[-1]["usage"])
    assert events[-1]["choices"] == [] and all(event.get("usage") is None for event in events[:-1])


def test_an_answer_that_ends_with_a_text_is_leased_too(place: Place):
    whole = place.post("/v1/completions", {**ASK, "prompt": "oak and ash and elm"}).json()["choices"][0]["text"]
    stop = whole[10:12]
    answer = place.post("/v1/completions", {**ASK, "prompt": "oak and ash and elm", "stop": stop, "keep_s": 60}).json()
    assert answer["choices"][0]["finish_reason"] == "stop" and answer["choices"][0]["text"] == whole[: whole.find(stop)]
    _granted(answer["usage"])


def test_responses_tell_of_it(place: Place):
    answer = place.post("/v1/responses", {"input": "Which wood?", "max_output_tokens": 24, "keep_s": 60}).json()
    _granted(answer["usage"])


def test_marks_of_anthropic_s_interface_ask_for_a_lease(place: Place):
    marked = [{"type": "text", "text": "You inlay.", "cache_control": {"type": "ephemeral", "ttl": "5m"}}]
    body = {**CHAT, "system": marked}
    usage = place.post("/v1/messages", body).json()["usage"]
    assert usage["lease"]["granted"] and usage["lease"]["until"] > time.time() + 200
    assert place.post("/v1/messages", {**CHAT, "priority": 5}).json()["usage"].get("lease") is None
    streamed = place.post("/v1/messages", {**CHAT, "stream": True, "keep_s": 60}).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    [last] = [event for event in events if event["type"] == "message_delta"]
    _granted(last["usage"])


def test_grpc_tells_of_it_and_a_tenant_sees_its_own_only(place: Place):
    with Client(place.grpc, api_key="oak") as oak, Client(place.grpc, api_key="ash") as ash:
        chunk = oak.complete([7] * 40, LONG, options=RequestOptions(keep_s=60.0, priority=2))
        assert chunk.usage is not None and chunk.usage.lease is not None
        lease = chunk.usage.lease
        assert lease.id and lease.tokens == 63 and lease.limit_pages < lease.pool_pages
        assert [each.receipt.id for each in oak.leases()] == [lease.id] and ash.leases() == []
        assert place.leases("ash") == [] and [each["id"] for each in place.leases("yew")] == [lease.id]
        with pytest.raises(UnknownLease, match="no lease with id"):
            ash.release_lease(lease.id)
        assert place.release(lease.id, "ash").status_code == 404
        oak.release_lease(lease.id)
        assert oak.leases() == []


def test_a_refusal_has_numbers_and_the_answer_comes_all_the_same(place: Place):
    body: dict[str, Any] = {}
    told: dict[str, Any] = {"granted": True}
    prompt = 60
    while told["granted"]:
        prompt += 1
        body = {**ASK, "prompt": [prompt] * 200, "keep_s": 60}
        answer = place.post("/v1/completions", body)
        assert answer.status_code == 200
        told = answer.json()["usage"]["lease"]
    assert told["reason"] == "over_share" and told["pages"] > told["share"]["left_pages"]
    assert f"lie in {told['pages']} large pages" in told["message"]
    refused = place.post("/v1/completions", {**body, "keep_required": True})
    assert refused.status_code == 429 and 1 <= int(refused.headers["Retry-After"]) <= 60
    assert "the tenant's share has" in refused.json()["error"]["message"]
    assert place.post("/v1/completions", body, "ash").json()["usage"]["lease"]["granted"]  # another has its own share


def test_wishes_that_cannot_be(place: Place):
    for body, field in (
        ({"keep_s": 0}, "keep_s"),
        ({"keep_s": 1e9}, "keep_s"),
        ({"keep_required": True}, "keep_required"),
        ({"keep_s": 5, "n": 2}, "keep_s"),
        ({"keep_s": 5, "prompt": ["a", "b"]}, "keep_s"),
    ):
        answer = place.post("/v1/completions", {**ASK, "prompt": "oak", **body})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert place.post("/v1/completions", {**ASK, "prompt": "oak" * 9, "keep_s": 5000}).json()["usage"]["lease"][
        "reason"
    ] == ("too_long")


def test_metrics_and_the_log_tell_of_leases(place: Place):
    place.post("/v1/completions", {**ASK, "prompt": "oak" * 9, "keep_s": 60})
    text = httpx.get(f"{place.url}/metrics", headers=_bearing("yew")).text
    lines = [line for line in text.splitlines() if "lease" in line and "{" in line]
    figures = {line.split("{")[0]: float(line.split()[-1]) for line in lines}
    assert figures["intarsia:leases_held"] == 1 and figures["intarsia:lease_pages"] > 0
    assert 'intarsia:leases_total{engine="0",model_name=' in text and 'result="granted"' in text
    view = httpx.get(f"{place.url}/console/view?pool=0", headers=_bearing("yew")).json()
    assert view["leases"]["held"] == 1
    terminal = Console(width=120, record=True)
    terminal.print(screen(view, view))
    assert "leases: 1 held" in terminal.export_text()
    time.sleep(0.3)
    logged = [json.loads(line).get("leased", "") for line in place.log.read_text().splitlines()]
    assert any(each.startswith("50:") for each in logged)


def test_without_leases_a_wish_is_told_so_and_a_hint_is_not(loop: Any, talker: Path, tmp_path: Path):
    for place in servers(loop, talker, tmp_path):
        told = place.post("/v1/chat/completions", {**CHAT, "keep_s": 60}).json()["usage"]["lease"]
        assert (told["granted"], told["reason"]) == (False, "off") and "--lease-share" in told["message"]
        marked = [{"type": "text", "text": "You inlay.", "cache_control": {"type": "ephemeral"}}]
        assert "lease" not in place.post("/v1/messages", {**CHAT, "system": marked}).json()["usage"]
        assert place.post("/v1/chat/completions", {**CHAT, "keep_s": 60, "keep_required": True}).status_code == 400
        assert place.leases() == [] and place.release("lease-1").status_code == 404
        assert "lease" not in httpx.get(f"{place.url}/metrics", headers=_bearing("yew")).text
        with Client(place.grpc, api_key="oak") as client, pytest.raises(InvalidRequest, match="leases are off here"):
            client.complete("oak", LONG, options=RequestOptions(keep_s=1.0, keep_required=True))


def test_a_next_turn_that_is_prepared_is_held_too_and_takes_the_lease_over(loop: Any, talker: Path, tmp_path: Path):
    (tmp_path / "template.jinja").write_text(TRIMMING)
    for place in servers(
        loop, talker, tmp_path, template=str(tmp_path / "template.jinja"), prepares=True, lease_share=0.5
    ):
        choice = {"structured_outputs": {"choice": ["        oak lasts, and ash bends"]}}
        body = {**CHAT, **choice, "max_tokens": 99, "ignore_eos": False, "keep_s": 60}
        first = place.post("/v1/chat/completions", body).json()
        lease = first["usage"]["lease"]
        until_s = time.monotonic() + 20
        while (held := place.leases()[0])["tokens"] == lease["tokens"]:
            assert time.monotonic() < until_s, held
            time.sleep(0.05)
        said = first["choices"][0]["message"]["content"]
        turns = [*CHAT["messages"], {"role": "assistant", "content": said}, {"role": "user", "content": "And then?"}]
        second = place.post("/v1/chat/completions", {**CHAT, "messages": turns}).json()
        assert second["usage"]["prompt_tokens_details"]["cached_tokens"] == held["tokens"] and not place.leases()


def test_the_errors_of_leases_come_back_over_grpc(place: Place):
    with Client(place.grpc, api_key="oak") as client:
        wish = RequestOptions(keep_s=60.0, keep_required=True)
        with pytest.raises(OverQuota, match="keep_required: a lease of"):
            for n in range(100):
                client.complete([n] * 60, LONG, options=wish)
