"""`/v1/responses` where responses are kept: OpenAI's own client, and what it does not show."""

import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.openai.kept import KeptResponses
from intarsia.deploy.openai.stored import Database, ResponseStore, StoreSettings
from intarsia.deploy.settings.limits import Limits
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api
from intarsia.tests.models import greedy

LIMITS = Limits(max_background=2)
GREEDY: Any = {"temperature": 0, "max_output_tokens": 12, "extra_body": {"ignore_eos": True}}
LONG: Any = {"max_output_tokens": 300, "extra_body": {"ignore_eos": True}}


class Place:
    """A server with three keys; it can be started again."""

    def __init__(self, api: Api, loop: Loop, folder: Path):
        (folder / "keys").write_text("oak alice\nash bob\nelm\n")
        self._access = Access(AccessSettings(api_key_file=str(folder / "keys")))
        self._settings = StoreSettings(folder=str(folder))
        self._api, self._loop = api, loop
        self.start()

    def start(self) -> None:
        self.store = ResponseStore(self._settings, 0, LIMITS)
        self.kept = KeptResponses(self.store, LIMITS)
        app = make_app(lambda: self._api.front_end, self._access, limits=LIMITS, kept=self.kept)
        self._server = HttpServer(app, self._access, LIMITS)

        async def listen() -> str:
            await self.store.open()
            return await self._server.start(port=0)

        self.url = self._loop.run(listen())

    def stop(self) -> None:
        async def end() -> None:
            await self._server.stop()
            await self.kept.stop()
            await self.store.close()

        self._loop.run(end())

    def client(self, key: str = "oak") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0)

    def count(self) -> int:
        return self._loop.run(self.store.ask(lambda database: database.totals(None)))[0]


@pytest.fixture(scope="module")
def place(api: Api, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(api, loop, tmp_path_factory.mktemp("kept"))
    yield place
    place.stop()


@pytest.fixture
def client(place: Place) -> openai.OpenAI:
    return place.client()


def ended(client: openai.OpenAI, name: str) -> Any:
    until_s = time.monotonic() + 60
    while (found := client.responses.retrieve(name)).status in ("queued", "in_progress"):
        assert time.monotonic() < until_s, found
        time.sleep(0.05)
    return found


def test_a_response_is_kept_as_it_was_told_and_deleted(client: openai.OpenAI):
    told = client.responses.create(model="talker", input="Which wood?", metadata={"a": "b"}, **GREEDY)
    assert told.store is True  # type: ignore[attr-defined]
    assert client.responses.retrieve(told.id).to_dict() == told.to_dict()
    client.responses.delete(told.id)
    with pytest.raises(openai.NotFoundError, match=f"Response with id '{told.id}' not found"):
        client.responses.retrieve(told.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.delete(told.id)


def test_a_stream_is_kept_as_its_last_event_tells(client: openai.OpenAI):
    *_, last = client.responses.create(model="talker", input="Which wood?", stream=True, **GREEDY)
    assert last.type == "response.incomplete"
    assert client.responses.retrieve(last.response.id).to_dict() == last.response.to_dict()


def test_nothing_is_kept_where_that_is_not_wanted(place: Place, client: openai.OpenAI):
    before = place.count()
    told = client.responses.create(model="talker", input="Which wood?", store=False, **GREEDY)
    assert told.store is False and place.count() == before  # type: ignore[attr-defined]
    with pytest.raises(openai.BadRequestError, match="leave store out"):
        client.responses.create(model="talker", input="x", store=False, background=True)


def test_a_response_goes_on_with_another_as_if_all_had_been_sent(api: Api, client: openai.OpenAI):
    first = client.responses.create(model="talker", input="Which wood?", instructions="Be brief.", **GREEDY)
    call = {"type": "function_call", "call_id": "call_1", "name": "order", "arguments": '{"wood": "oak"}'}
    result = {"type": "function_call_output", "call_id": "call_1", "output": "2"}
    items: Any = [call, result]
    second: Any = client.responses.create(
        model="talker",
        previous_response_id=first.id,
        input=items,
        **GREEDY,
    )
    assert second.previous_response_id == first.id
    third = client.responses.create(model="talker", previous_response_id=second.id, input="And now?", **GREEDY)
    prompt = (
        f'user: Which wood?\nassistant: {first.output_text} calls order {{"wood": "oak"}}\ntool: 2\n'
        f"assistant: {second.output_text}\nuser: And now?\nassistant: "
    )
    tokens = api.tokenizer.encode(prompt)
    assert third.usage is not None and third.usage.input_tokens == len(tokens)
    assert third.output_text == api.tokenizer.decode(greedy(api.oracle, tokens, 12))
    # The items are told by pages, the latest first.
    pages = client.responses.input_items.list(third.id, limit=2)
    kinds = [item.type for item in pages]
    assert kinds == ["message", "message", "function_call_output", "function_call", "message", "message"]
    assert [item.type for item in client.responses.input_items.list(third.id, order="asc")] == kinds[::-1]
    [asked] = client.responses.input_items.list(third.id, limit=1).data
    assert asked.type == "message" and asked.content[0].text == "And now?"  # type: ignore[union-attr]


def test_items_of_kept_responses_are_named_by_their_ids(api: Api, place: Place, client: openai.OpenAI):
    first = client.responses.create(model="talker", input="Which wood?", **GREEDY)
    [asked] = client.responses.input_items.list(first.id).data
    named: Any = [{"type": "item_reference", "id": each} for each in (asked.id, first.output[0].id)]
    more: Any = [*named, {"role": "user", "content": "And now?"}]
    told = client.responses.create(model="talker", input=more, **GREEDY)
    same = client.responses.create(model="talker", input="And now?", previous_response_id=first.id, **GREEDY)
    assert told.output_text == same.output_text
    for other, words in (
        (client, "Item with id 'msg_0' not found"),
        (place.client("ash"), f"'{asked.id}' not found"),
        (openai.OpenAI(base_url=f"{api.url}/v1", api_key="none"), "this server keeps no responses"),
    ):
        wrong = {"type": "item_reference", "id": "msg_0"} if other is client else named[0]
        with pytest.raises(openai.BadRequestError, match=words):
            items: Any = [wrong, *more[-1:]]
            other.responses.create(model="talker", input=items)


def test_a_conversation_whose_beginning_was_deleted_does_not_go_on(client: openai.OpenAI):
    first = client.responses.create(model="talker", input="a", **GREEDY)
    second = client.responses.create(model="talker", input="b", previous_response_id=first.id, **GREEDY)
    client.responses.delete(first.id)
    for previous in (first.id, second.id, "resp_nothing"):
        with pytest.raises(
            openai.BadRequestError, match=f"Previous response with id '{previous}' not found"
        ) as refused:
            client.responses.create(model="talker", input="c", previous_response_id=previous)
        assert refused.value.param == "previous_response_id" and refused.value.code == "previous_response_not_found"


def test_a_response_is_made_in_the_background(api: Api, client: openai.OpenAI):
    begun = client.responses.create(model="talker", input="Which wood?", background=True, **GREEDY)
    assert begun.status == "queued" and begun.background and begun.output == [] and begun.usage is None
    whole = ended(client, begun.id)
    told = client.responses.create(model="talker", input="Which wood?", **GREEDY)
    assert whole.status == "incomplete" and whole.output_text == told.output_text
    assert whole.usage.output_tokens == 12
    assert client.responses.cancel(begun.id).status == "incomplete"  # which comes too late
    with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response"):
        client.responses.cancel(told.id)
    with pytest.raises(openai.BadRequestError, match="get it without stream"):
        list(client.responses.retrieve(begun.id, stream=True))


def test_a_stream_is_taken_up_where_it_was_left(client: openai.OpenAI):
    with client.responses.create(model="talker", input="x", background=True, stream=True, **LONG) as stream:
        begun = [next(stream) for _ in range(9)]
    assert [event.type for event in begun[:3]] == ["response.created", "response.queued", "response.in_progress"]
    name, seen = begun[0].response.id, begun[-1].sequence_number  # type: ignore[union-attr]
    rest = list(client.responses.retrieve(name, stream=True, starting_after=seen))
    assert [event.sequence_number for event in (*begun, *rest)] == list(range(9 + len(rest)))
    assert rest[-1].type == "response.incomplete" and len(rest) > 10
    # And when all of it has been kept.
    ended(client, name)
    again = list(client.responses.retrieve(name, stream=True))
    assert [event.to_dict() for event in again] == [event.to_dict() for event in (*begun, *rest)]
    assert list(client.responses.retrieve(name, stream=True, starting_after=again[-1].sequence_number)) == []


def test_what_is_made_in_the_background_can_be_stopped(api: Api, client: openai.OpenAI):
    stopped = client.responses.create(model="talker", input="x", background=True, **LONG)
    told = client.responses.cancel(stopped.id)
    assert told.status == "cancelled" == client.responses.retrieve(stopped.id).status
    assert all(item.status == "incomplete" for item in told.output)  # type: ignore[union-attr]
    deleted = client.responses.create(model="talker", input="x", background=True, stream=False, **LONG)
    client.responses.delete(deleted.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(deleted.id)
    until_s = time.monotonic() + 10
    while api.front_end.num_running:
        assert time.monotonic() < until_s, "the model goes on"
        time.sleep(0.02)


def test_a_tenant_has_so_many_in_the_background(place: Place, client: openai.OpenAI):
    begun = [client.responses.create(model="talker", input="x", background=True, **LONG) for _ in range(2)]
    with pytest.raises(openai.RateLimitError, match="2 of your responses are being made"):
        client.responses.create(model="talker", input="x", background=True, **LONG)
    other = place.client("ash").responses.create(model="talker", input="x", background=True, **GREEDY)
    text = httpx.get(f"{place.url}/metrics", headers={"authorization": "Bearer oak"}).text
    assert 'intarsia:background_responses{engine="0",model_name="talker"} 2.0' in text
    for each in begun:
        client.responses.cancel(each.id)
    assert ended(place.client("ash"), other.id).status == "incomplete"


def sees_nothing(other: openai.OpenAI, name: str) -> None:
    for ask in (
        lambda: other.responses.retrieve(name),
        lambda: list(other.responses.retrieve(name, stream=True)),
        lambda: list(other.responses.input_items.list(name)),
        lambda: other.responses.cancel(name),
        lambda: other.responses.delete(name),
    ):
        with pytest.raises(openai.NotFoundError):
            ask()
    with pytest.raises(openai.BadRequestError, match="not found"):
        other.responses.create(model="talker", input="x", previous_response_id=name)


def test_a_tenant_never_sees_anothers_response(place: Place):
    oak, others = place.client("oak"), [place.client(key) for key in ("ash", "elm")]
    mine = oak.responses.create(model="talker", input="Which wood?", **GREEDY)
    for other in others:
        sees_nothing(other, mine.id)
    running = oak.responses.create(model="talker", input="x", background=True, stream=True, **LONG)
    name = next(iter(running)).response.id  # type: ignore[union-attr]
    for other in others:
        sees_nothing(other, name)
    running.close()
    assert oak.responses.cancel(name).status == "cancelled"
    assert oak.responses.retrieve(mine.id).id == mine.id


def test_a_restart_keeps_responses_and_ends_those_that_were_made(place: Place):
    kept = place.client().responses.create(model="talker", input="Which wood?", **GREEDY)
    running = place.client().responses.create(model="talker", input="x", background=True, **LONG)
    place.stop()
    place.start()
    client = place.client()
    assert client.responses.retrieve(kept.id).output_text == kept.output_text
    failed = client.responses.retrieve(running.id)
    assert failed.status == "failed" and failed.error is not None
    assert failed.error.code == "server_error" and "the server ended" in failed.error.message
    assert client.responses.create(model="talker", input="And?", previous_response_id=kept.id, **GREEDY).output_text


def test_a_disk_that_is_full_loses_no_answer(place: Place, client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch):
    def full(*_: Any) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "put", full)
    told = client.responses.create(model="talker", input="Which wood?", **GREEDY)
    assert told.output_text and told.store is False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/responses/resp_1", 404, "Response with id 'resp_1' not found."),
        ("/v1/responses/resp_1/input_items", 404, "not found"),
        ("/v1/responses/resp_1/input_items?limit=101", 400, "above maximum value"),
        ("/v1/responses/resp_1/input_items?order=up", 400, "Supported values are: 'asc' or 'desc'"),
        ("/v1/responses/resp_1?starting_after=3", 400, "give stream=true"),
        ("/v1/responses/resp_1?stream=true", 404, "not found"),
        (f"/v1/responses/{'x' * 3000}", 404, "not found"),
    ],
)
def test_what_is_not_there_or_not_sensible_is_refused(place: Place, path: str, status: int, words: str):
    answer = httpx.get(place.url + path, headers={"authorization": "Bearer oak"})
    error = answer.json()["error"]
    assert answer.status_code == status and words in error["message"] and len(error["message"]) < 300


def test_a_path_of_several_methods_tells_them_all(place: Place):
    answer = httpx.put(f"{place.url}/v1/responses/resp_1", headers={"authorization": "Bearer oak"})
    assert answer.status_code == 405 and answer.headers["allow"] == "DELETE, GET"
    assert "it takes DELETE, GET" in answer.json()["error"]["message"]


def test_without_a_place_to_keep_them_nothing_of_this_is_there(api: Api):
    plain = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    told = plain.responses.create(model="talker", input="Which wood?", store=True, **GREEDY)
    assert told.store is False  # type: ignore[attr-defined]
    for fields in ({"previous_response_id": told.id}, {"background": True}):
        with pytest.raises(openai.BadRequestError, match="this server keeps no responses") as refused:
            plain.responses.create(model="talker", input="x", **fields)  # type: ignore[call-overload]
        assert refused.value.param == next(iter(fields))
    assert httpx.get(f"{api.url}/v1/responses/{told.id}").json()["error"]["message"].endswith("Not Found")
