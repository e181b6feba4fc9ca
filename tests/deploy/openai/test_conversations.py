"""`/v1/conversations`: OpenAI's own client, and what it does not show."""

import sqlite3
import time
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from intarsia.deploy.openai.stored import Database
from intarsia.deploy.settings.limits import Limits
from intarsia.errors import InvalidRequest
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api
from intarsia.tests.deploy.openai.test_kept import GREEDY, LONG, Place, ended
from intarsia.tests.deploy.openai.test_stored import response
from intarsia.tests.models import greedy

SAID: Any = {"type": "message", "role": "user", "content": "I like oak."}


@pytest.fixture(scope="module")
def place(api: Api, loop: Loop, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place(api, loop, tmp_path_factory.mktemp("conversations"))
    yield place
    place.stop()


@pytest.fixture
def client(place: Place) -> Any:
    return place.client()


def texts(client: Any, name: str) -> list[str]:
    items = client.conversations.items.list(name, order="asc", limit=100)
    return ["".join(part.text for part in item.content) for item in items]  # type: ignore[union-attr]


# -- conversations by themselves -------------------------------------------------------------------------------------


def test_a_conversation_is_kept_changed_and_deleted(place: Place):
    client = place.client()
    made = client.conversations.create(metadata={"for": "oak"}, items=[SAID])
    assert made.id.startswith("conv_") and made.metadata == {"for": "oak"}
    place.stop()
    place.start()
    client = place.client()
    assert client.conversations.retrieve(made.id) == made
    assert client.conversations.update(made.id, metadata={"for": "ash"}).metadata == {"for": "ash"}
    assert client.conversations.retrieve(made.id).metadata == {"for": "ash"}
    assert client.conversations.delete(made.id).deleted
    for asked in (client.conversations.retrieve, client.conversations.delete, client.conversations.items.list):
        with pytest.raises(openai.NotFoundError, match=f"Conversation with id '{made.id}' not found"):
            asked(made.id)


def test_items_are_added_told_by_pages_and_deleted(client: Any):
    made = client.conversations.create(items=[SAID])
    call: Any = {"type": "function_call", "call_id": "call_1", "name": "order", "arguments": "{}"}
    added = client.conversations.items.create(made.id, items=[call, SAID | {"content": "And ash."}])
    assert [item.type for item in added.data] == ["function_call", "message"]
    assert [item.type for item in client.conversations.items.list(made.id)] == ["message", "function_call", "message"]
    [latest, *_] = client.conversations.items.list(made.id, limit=1).data
    assert latest.id == added.data[1].id
    assert client.conversations.items.retrieve(latest.id or "", conversation_id=made.id) == latest
    assert client.conversations.items.delete(latest.id or "", conversation_id=made.id).id == made.id
    with pytest.raises(openai.NotFoundError, match=r"Item with id '.*' not found"):
        client.conversations.items.delete(latest.id or "", conversation_id=made.id)
    assert [item.type for item in client.conversations.items.list(made.id)] == ["function_call", "message"]


def test_a_conversation_of_another_tenant_is_not_there(place: Place, client: Any):
    made, other = client.conversations.create(items=[SAID]), place.client("ash")
    for asked in (other.conversations.retrieve, other.conversations.delete, other.conversations.items.list):
        with pytest.raises(openai.NotFoundError):
            asked(made.id)
    with pytest.raises(openai.NotFoundError):
        other.conversations.items.create(made.id, items=[SAID])
    with pytest.raises(openai.NotFoundError, match="Conversation with id"):
        other.responses.create(model="talker", conversation=made.id, input="x", **GREEDY)
    assert len(list(client.conversations.items.list(made.id))) == 1


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"metadata": {str(n): "x" for n in range(17)}}, "metadata"),
        ({"metadata": {"x": "y" * 513}}, "metadata"),
        ({"items": [SAID] * 21}, "items"),
        ({"items": [{"type": "item_reference", "id": "msg_1"}]}, "send the item itself"),
        ({"items": [{"type": "file"}]}, "items"),
    ],
)
def test_what_a_conversation_cannot_have_is_refused(client: Any, fields: Any, words: str):
    with pytest.raises(openai.BadRequestError, match=words):
        client.conversations.create(**fields)


# -- responses -------------------------------------------------------------------------------------------------------


def test_responses_go_on_with_a_conversation_and_are_added_to_it(api: Api, client: Any):
    made = client.conversations.create(items=[SAID])
    first: Any = client.responses.create(model="talker", conversation=made.id, input="Which wood?", **GREEDY)
    assert first.conversation.id == made.id
    second = client.responses.create(model="talker", conversation={"id": made.id}, input="And now?", **GREEDY)
    prompt = (
        f"user: I like oak.\nuser: Which wood?\nassistant: {first.output_text}\nuser: And now?\nassistant: "
    )  # fmt: skip
    tokens = api.tokenizer.encode(prompt)
    assert second.usage is not None and second.usage.input_tokens == len(tokens)
    assert second.output_text == api.tokenizer.decode(greedy(api.oracle, tokens, 12))
    assert texts(client, made.id) == ["I like oak.", "Which wood?", first.output_text, "And now?", second.output_text]


def test_a_response_that_is_not_kept_is_added_all_the_same(place: Place, client: Any):
    made = client.conversations.create()
    before = place.count()
    told = client.responses.create(model="talker", conversation=made.id, input="x", store=False, **GREEDY)
    assert told.store is False and place.count() == before  # type: ignore[attr-defined]
    assert texts(client, made.id) == ["x", told.output_text]


def test_streams_and_responses_in_the_background_are_added_when_they_are_whole(client: Any):
    made = client.conversations.create()
    *_, last = client.responses.create(model="talker", conversation=made.id, input="a", stream=True, **GREEDY)
    begun = client.responses.create(model="talker", conversation=made.id, input="b", background=True, **GREEDY)
    assert ended(client, begun.id).status == "incomplete"
    assert texts(client, made.id)[:3] == ["a", last.response.output_text, "b"]
    assert len(texts(client, made.id)) == 4


def test_nothing_is_added_of_a_response_that_is_cancelled_or_whose_conversation_is_deleted(client: Any):
    made, other = client.conversations.create(items=[SAID]), client.conversations.create()
    begun = client.responses.create(model="talker", conversation=made.id, input="b", background=True, **LONG)
    client.responses.cancel(begun.id)
    assert texts(client, made.id) == ["I like oak."]
    begun = client.responses.create(model="talker", conversation=other.id, input="b", background=True, **LONG)
    client.conversations.delete(other.id)
    assert ended(client, begun.id).status == "incomplete"
    with pytest.raises(openai.NotFoundError):
        client.conversations.retrieve(other.id)


def test_an_item_of_a_conversation_can_be_named(client: Any):
    made = client.conversations.create(items=[SAID])
    [item] = client.conversations.items.list(made.id)
    named: Any = [{"type": "item_reference", "id": item.id}]
    told = client.responses.create(model="talker", input=named, **GREEDY)
    plain = client.responses.create(model="talker", input=[SAID], **GREEDY)
    assert told.output_text == plain.output_text


def test_two_ways_to_say_what_came_before_are_refused(client: Any):
    first = client.responses.create(model="talker", input="x", **GREEDY)
    made = client.conversations.create()
    with pytest.raises(openai.BadRequestError, match="give one of them"):
        client.responses.create(
            model="talker", input="x", conversation=made.id, previous_response_id=first.id, **GREEDY
        )


def test_a_response_of_a_conversation_is_gone_on_from_by_naming_the_conversation(client: Any):
    made = client.conversations.create(items=[SAID])
    first = client.responses.create(model="talker", conversation=made.id, input="x", **GREEDY)
    with pytest.raises(openai.BadRequestError, match=f"went on with the conversation '{made.id}'"):
        client.responses.create(model="talker", input="x", previous_response_id=first.id, **GREEDY)


def test_an_answer_that_cannot_be_added_is_told_all_the_same(
    client: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    made = client.conversations.create()

    def full(*_: Any, **__: Any) -> bool:
        raise sqlite3.OperationalError("database or disk is full")

    monkeypatch.setattr(Database, "add_to_conversation", full)
    told = client.responses.create(model="talker", conversation=made.id, input="x", **GREEDY)
    assert told.output_text and "could not be added" in caplog.text


def test_without_a_place_to_keep_them_conversations_are_refused(api: Api):
    client = openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.BadRequestError, match="keeps no conversations"):
        client.responses.create(model="talker", input="x", conversation="conv_1", **GREEDY)
    with pytest.raises(openai.NotFoundError):
        client.conversations.create()


# -- on disk ---------------------------------------------------------------------------------------------------------


def item(name: str, size: int = 1) -> dict[str, Any]:
    return {"id": name, "type": "message", "role": "user", "content": "x" * size}


def test_bytes_are_those_of_what_is_there(tmp_path: Any):
    database = Database(tmp_path / "it.sqlite3", Limits())
    conversations = database.conversations
    assert database.totals("oak") == (0, 0)
    database.begin_conversation("oak", "a", {}, [])
    empty = database.totals("oak")[1]
    database.add_to_conversation("oak", "a", [item("1", 100), item("2", 1000)])
    with_items = database.totals("oak")[1]
    assert with_items - empty > 1100
    conversations.set_metadata("oak", "a", {"ä": "ö" * 100})
    assert database.totals("oak")[1] > with_items + 200
    conversations.set_metadata("oak", "a", {})
    assert conversations.delete_item("oak", "a", "2") and not conversations.delete_item("oak", "a", "2")
    assert conversations.delete_item("oak", "a", "1")
    assert database.totals("oak") == (1, empty)
    assert conversations.delete("oak", "a") and database.totals(None) == (0, 0)
    database.close()


def test_conversations_and_responses_share_a_tenants_room_and_the_latest_used_stays(tmp_path: Any):
    database = Database(tmp_path / "it.sqlite3", Limits(max_stored_responses=3))
    database.begin_conversation("oak", "a", {}, [item("1")])
    database.begin_conversation("oak", "b", {}, [item("2")])
    database.put("oak", response("r"))
    database.add_to_conversation("oak", "a", [item("3")])
    database.put("oak", response("s"))
    assert database.totals("oak")[0] == 3
    assert database.conversations.get("oak", "b") is None and database.conversations.get("oak", "a") is not None
    assert database.get("oak", "r") is not None and database.get("oak", "s") is not None
    database.close()


def test_a_conversation_that_is_too_old_is_forgotten(tmp_path: Any):
    database = Database(tmp_path / "it.sqlite3", Limits(max_stored_age_s=0.05))
    database.begin_conversation("oak", "a", {}, [item("1")])
    time.sleep(0.1)
    assert database.conversations.get("oak", "a") is None and database.conversations.items("oak", "a") is None
    database.forget_old()
    assert database.totals(None) == (0, 0)
    database.close()


@pytest.mark.parametrize(("limits", "words"), [({"max_messages": 2}, "3 items"), ({"max_body_bytes": 500}, "bytes")])
def test_more_than_a_request_may_bring_is_refused_and_nothing_is_added(tmp_path: Any, limits: Any, words: str):
    database = Database(tmp_path / "it.sqlite3", Limits(**limits))
    with pytest.raises(InvalidRequest, match=words):
        database.begin_conversation("oak", "b", {}, [item(str(n), 200) for n in range(3)])
    database.begin_conversation("oak", "a", {}, [item("1"), item("2")])
    with pytest.raises(InvalidRequest, match=words):
        database.add_to_conversation("oak", "a", [item("3", 500)])
    assert [each["id"] for each in database.conversations.items("oak", "a") or ()] == ["1", "2"]
    assert not database.add_to_conversation("ash", "a", [item("3")])  # which is not there
    assert database.add_to_conversation("oak", "a", [item("3", 500)], is_answer=True)  # which the model has said
    with pytest.raises(InvalidRequest, match="begin a new one"):
        database.conversations.check_room("oak", "a")
    database.close()
