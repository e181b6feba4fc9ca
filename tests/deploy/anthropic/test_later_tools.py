"""Tools that the model hears of within a conversation."""

import json
from typing import Any

import pytest

from intarsia.deploy.anthropic.protocol import MessagesRequest
from intarsia.deploy.anthropic.translate import as_chat
from intarsia.deploy.openai.requests import as_template_has, turns_of
from intarsia.errors import InvalidRequest

SCHEMA = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}}
SEARCH = {"name": "search", "input_schema": {"type": "object", "properties": {}}}
ORDER = {"name": "order", "description": "Orders wood.", "input_schema": SCHEMA, "defer_loading": True}
DEFINITION = {"type": "function", "function": {"name": "order", "description": "Orders wood.", "parameters": SCHEMA}}
ASK = {"role": "user", "content": "Which wood?"}
ANSWER = {"role": "assistant", "content": "Oak."}
BY_NAME = {"type": "tool_reference", "name": "order"}
HEARD = "This tool can be called from here on:\n" + json.dumps(DEFINITION)


def found(*names: str) -> list[dict[str, Any]]:
    """A search that found these tools."""
    return [
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "search", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
            {"type": "tool_reference", "tool_name": name} for name in names]}]},
    ]  # fmt: skip


def added(**tool: Any) -> dict[str, Any]:
    return {"role": "system", "content": [{"type": "tool_addition", "tool": tool}]}


REMOVAL = {"role": "system", "content": [{"type": "tool_removal", "tool": BY_NAME}]}


def read(*messages: Any, tools: Any = (SEARCH, ORDER), **fields: Any) -> tuple[list[str], list[str], list[str]]:
    """Names of the tools that the template is told of, of those that may be called, and the turns' texts."""
    body = MessagesRequest.model_validate({"max_tokens": 5, "messages": [*messages], "tools": [*tools]} | fields)
    chat = as_chat(body)
    turns, _ = turns_of(chat.messages)
    told = [tool["function"]["name"] for tool in as_template_has(chat.tools or ())]
    return told, [tool.function.name for tool in chat.tools or ()], [str(turn["content"]) for turn in turns]


def test_a_deferred_tool_that_no_message_refers_to_is_not_there():
    told, callable_names, texts = read(ASK)
    assert (told, callable_names, texts) == (["search"], ["search"], ["Which wood?"])


def test_a_tool_that_a_search_found_is_read_in_its_result_and_may_be_called():
    told, callable_names, texts = read(ASK, *found("order"), tool_choice={"type": "tool", "name": "order"})
    assert (told, callable_names) == (["search"], ["search", "order"])
    assert texts == ["Which wood?", "", HEARD]


def test_a_tool_that_is_found_again_is_read_once():
    _, _, texts = read(ASK, *found("order", "order"), *found("order"))
    again = "This tool can be called from here on: order"
    assert texts == ["Which wood?", "", f"{HEARD}\n{again}", "", again]


def test_a_tool_that_is_told_from_the_beginning_is_not_read_again():
    told, callable_names, texts = read(ASK, *found("search"))
    assert (told, callable_names) == (["search"], ["search"])
    assert texts[-1] == "This tool can be called from here on: search"


def test_the_system_adds_a_tool_by_name_and_takes_it_away():
    assert read(ASK, ANSWER, added(**BY_NAME))[1:] == (["search", "order"], ["Which wood?", "Oak.", HEARD])
    _, callable_names, texts = read(ASK, ANSWER, added(**BY_NAME), REMOVAL)
    assert callable_names == ["search"]
    assert texts[-1] == "This tool can no longer be called: order"


def test_the_system_adds_a_tool_by_its_definition_without_any_before():
    definition = {name: ORDER[name] for name in ("name", "description", "input_schema")}
    addition = added(type="tool_definition", definition=definition)
    for choice in ({"type": "auto"}, {"type": "any"}):
        told, callable_names, texts = read(ASK, ANSWER, addition, tools=(), tool_choice=choice)
        assert (told, callable_names, texts[-1]) == ([], ["order"], HEARD)


def test_a_definition_takes_the_place_of_one_by_that_name():
    told, callable_names, texts = read(ASK, added(type="tool_definition", definition=SEARCH | {"description": "New."}))
    assert (told, callable_names) == ([], ["search"])
    assert '"description": "New."' in texts[-1]


@pytest.mark.parametrize("messages", [found("plane"), [added(type="tool_reference", name="plane")]])
def test_a_tool_that_no_one_defined_is_refused(messages: list[Any]):
    with pytest.raises(InvalidRequest, match=r"messages refer to the tool 'plane'; the tools are search, order"):
        read(ASK, *messages)


def test_auto_without_any_tool_to_call_asks_for_nothing():
    assert read(ASK, tools=(ORDER,), tool_choice={"type": "auto"})[:2] == ([], [])
