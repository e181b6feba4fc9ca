"""The items of a response, out of parts of an answer as they come."""

from typing import Any

from intarsia.deploy.openai.protocol import OutputReasoning, ResponsesRequest
from intarsia.deploy.openai.response_items import Items
from intarsia.deploy.openai.responses import items_of
from intarsia.deploy.openai.tools import CallPiece

PIECES: tuple[tuple[str, str, list[CallPiece]], ...] = (
    ("Which ", "", []),
    ("wood?", "", []),
    ("", "I order ", []),
    ("", "oak.", [CallPiece(0, "call_1", "order", '{"wood":')]),
    ("", "", [CallPiece(0, "call_1", None, '"oak"}')]),
)


def told(is_cut: bool = False) -> tuple[Items, list[dict[str, Any]]]:
    items = Items({})
    events = [event for thoughts, text, calls in PIECES for event in items.add(thoughts, text, calls, [])]
    return items, events + list(items.end(is_cut=is_cut))


def test_thoughts_words_and_calls_are_items_in_their_order():
    items, events = told()
    assert [item.type for item in items.done] == ["reasoning", "message", "function_call"]
    assert all(item.status == "completed" for item in items.done)
    thought = items.done[0]
    assert isinstance(thought, OutputReasoning) and thought.content[0].text == "Which wood?"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    of_thoughts = [event["type"].removeprefix("response.") for event in events if event["output_index"] == 0]
    assert of_thoughts == [
        "output_item.added", "content_part.added", "reasoning_text.delta", "reasoning_text.delta",
        "reasoning_text.done", "content_part.done", "output_item.done",
    ]  # fmt: skip
    assert [event["item"] for event in events if event["type"] == "response.output_item.done"] == [
        item.model_dump() for item in items.done
    ]


def test_an_answer_that_is_cut_ends_in_an_item_that_says_so():
    assert [item.status for item in told(is_cut=True)[0].done] == ["completed", "completed", "incomplete"]
    items = Items({})
    for _ in items.add("Which", "", [], []):
        pass
    items.cut()
    assert [(item.type, item.status) for item in items.done] == [("reasoning", "incomplete")]


def test_what_was_answered_can_be_sent_back_and_is_kept_with_its_ids():
    items, _ = told()
    sent: list[dict[str, Any]] = [item.model_dump() for item in items.done]
    body = ResponsesRequest.model_validate({"input": [*sent, {"role": "user", "content": "And?"}]})
    kept = items_of(body)
    assert [item["id"] for item in kept[:3]] == [item.id for item in items.done]
    assert kept[3] == {
        "status": "completed",
        "type": "message",
        "role": "user",
        "content": [{"type": "input_text", "text": "And?"}],
        "id": kept[3]["id"],
    }
    assert items_of(ResponsesRequest.model_validate({"input": kept})) == kept
