"""Several models behind one door: which one answers, over both servers, with simulated engines."""

import asyncio
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from intarsia import SamplingParams
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.client import Client
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.served_models import ServedModels
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.errors import EngineUnavailable, InvalidRequest, UnknownModel
from intarsia.tests.controller.test_engine import make_engine

NAMES = ("oak", "ash")
SHORT = SamplingParams(max_tokens=4)


class Place(NamedTuple):
    url: str
    grpc: str
    engines: list[Engine]
    clients: list[EngineClient]


@pytest.fixture
def place(loop: Any, byte_tokenizer: Tokenizer) -> Iterator[Place]:
    """Two models, and one that did not start."""
    ending: list[Any] = []

    async def start() -> Place:
        engines, clients, front_ends = [], [], []
        for number, name in enumerate(NAMES):
            engine = make_engine()
            engine.info = engine.info._replace(model=name, max_model_len=100 - 40 * number, vocab_size=50)
            running = asyncio.ensure_future(engine.run())
            door = EngineServer(engine)
            client = await EngineClient.connect(await door.start("127.0.0.1"))
            front_ends.append(FrontEnd(client, None if number else byte_tokenizer))
            engines.append(engine)
            clients.append(client)

            async def cancel(running: Any = running) -> None:
                running.cancel()
                await asyncio.gather(running, return_exceptions=True)

            ending.extend((client.close, door.close, cancel))
        models = ServedModels(front_ends, ["elm"])
        http, rpc = HttpServer(make_app(models, interfaces=(add_messages,))), GrpcServer(models)
        url, address = await http.start(port=0), await rpc.start(port=0)
        ending[:0] = [http.stop, rpc.stop]
        return Place(url, address, engines, clients)

    yield loop.run(start())
    for end in ending:
        loop.run(end())


def finished(place: Place) -> list[int]:
    return [engine.stats.finished_requests for engine in place.engines]


@pytest.mark.parametrize("name", NAMES)
def test_the_model_that_a_request_names_answers_it(place: Place, name: str):
    body = {"model": name, "prompt": [1, 2, 3], "max_tokens": 4}
    answer = httpx.post(f"{place.url}/v1/completions", json=body).json()
    assert answer["model"] == name
    with Client(place.grpc, model=name) as client:
        assert client.model_info().model == name
        assert len(client.complete([1, 2, 3], SHORT).token_ids) == 4
        assert [probed.engine for probed in client.probe([1, 2, 3])] == [name]
        assert client.load().finished_requests == 2
    assert finished(place) == [2 if each == name else 0 for each in NAMES]


def test_long_bodies_name_their_model_too(place: Place):
    body = {"model": "ash", "prompt": [1] * 20, "max_tokens": 2, "user": "me", "stop_token_ids": [7] * 1000}
    text = httpx.Request("POST", place.url, json=body).read().ljust(20_000)
    answer = httpx.post(f"{place.url}/v1/completions", content=text, headers={"Content-Type": "application/json"})
    assert answer.status_code == 200, answer.text
    assert answer.json()["model"] == "ash" and finished(place) == [0, 1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/probe"])
def test_a_name_that_is_none_is_told_what_there_is(place: Place, path: str):
    unknown = httpx.post(f"{place.url}{path}", json={"model": "fir", "prompt": [1]})
    assert unknown.status_code == 404 and unknown.json()["error"]["code"] == "model_not_found"
    assert "`fir` does not exist here; there is `oak` and `ash`" in unknown.json()["error"]["message"]
    nameless = httpx.post(f"{place.url}{path}", json={"prompt": [1]})
    assert nameless.status_code == 400 and nameless.json()["error"]["param"] == "model"
    assert "several models are served here: `oak` and `ash`" in nameless.json()["error"]["message"]
    absent = httpx.post(f"{place.url}{path}", json={"model": "elm", "prompt": [1]})
    assert absent.status_code == 503 and "`elm` did not start" in absent.json()["error"]["message"]


def test_a_call_of_grpc_is_told_the_same(place: Place):
    for name, error in (("fir", UnknownModel), (None, InvalidRequest), ("elm", EngineUnavailable)):
        with Client(place.grpc, model=name) as client, pytest.raises(error, match=name or "several models"):
            client.complete([1], SHORT)


def test_the_list_has_all_that_started_with_what_they_can_do(place: Place):
    cards = httpx.get(f"{place.url}/v1/models").json()["data"]
    assert [(card["id"], card["max_model_len"], card["parent"]) for card in cards] == [
        ("oak", 100, None),
        ("ash", 60, None),
    ]
    assert cards[0]["capabilities"]["completions"] and not cards[0]["capabilities"]["vision"]
    assert cards[0]["parsers"] == {"tool_call": None, "reasoning": None}
    assert httpx.get(f"{place.url}/v1/models/ash").json() == cards[1]
    assert httpx.get(f"{place.url}/v1/models/fir").status_code == 404


def test_anthropics_clients_get_their_list_in_pages(place: Place):
    headers = {"anthropic-version": "2023-06-01"}

    def page(**query: Any) -> dict[str, Any]:
        return httpx.get(f"{place.url}/v1/models", params=query, headers=headers).json()

    whole = page()
    assert [card["id"] for card in whole["data"]] == list(NAMES) and not whole["has_more"]
    assert (whole["first_id"], whole["last_id"]) == NAMES
    card = whole["data"][0]
    assert card["type"] == "model" and card["display_name"] == "oak" and card["created_at"].endswith("Z")
    first = page(limit=1)
    assert [card["id"] for card in first["data"]] == ["oak"] and first["has_more"] and first["last_id"] == "oak"
    rest = page(limit=1, after_id="oak")
    assert [card["id"] for card in rest["data"]] == ["ash"] and not rest["has_more"]
    assert [card["id"] for card in page(before_id="ash")["data"]] == ["oak"]
    refused = page(after_id="fir")
    assert refused["type"] == "error" and refused["error"]["type"] == "invalid_request_error"
    one = httpx.get(f"{place.url}/v1/models/oak", headers=headers).json()
    assert one == card


def test_figures_are_told_of_each_model_and_each_family_once(place: Place):
    with Client(place.grpc, model="ash") as client:
        client.complete([1, 2, 3], SHORT)
    text = httpx.get(f"{place.url}/metrics").text
    families = list(text_string_to_metric_families(text))
    assert len({family.name for family in families}) == len(families)
    generated = next(family for family in families if family.name == "vllm:generation_tokens")
    assert {s.labels["model_name"]: s.value for s in generated.samples if s.name.endswith("_total")} == {
        "oak": 0,
        "ash": 4,
    }


def test_a_server_is_degraded_while_one_model_is_away_and_unwell_when_all_are(place: Place, loop: Any):
    assert httpx.get(f"{place.url}/health").json() == {"status": "degraded"}  # one did not start
    loop.run(place.clients[0].close())
    assert httpx.get(f"{place.url}/health").status_code == 200
    assert httpx.post(f"{place.url}/v1/completions", json={"model": "oak", "prompt": [1]}).status_code == 503
    assert httpx.post(f"{place.url}/v1/completions", json={"model": "ash", "prompt": [1]}).status_code == 200
    loop.run(place.clients[1].close())
    assert httpx.get(f"{place.url}/health").status_code == 503
