"""What becomes of a request: one of chat, which says the same."""

from typing import Any

import pytest

from intarsia.deploy.anthropic.protocol import MessagesRequest
from intarsia.deploy.anthropic.translate import as_chat, has_later_system
from intarsia.deploy.openai.requests import turns_of
from intarsia.errors import InvalidRequest

ASK = {"role": "user", "content": "Which wood?"}
ORDER = {"name": "order", "input_schema": {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}}}
CALL = {"type": "tool_use", "id": "toolu_1", "name": "order", "input": {"wood": "oak"}}
MARK = {"cache_control": {"type": "ephemeral", "ttl": "1h"}}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBO"}


def chat(*messages: Any, **fields: Any) -> Any:
    body: dict[str, Any] = {"max_tokens": 5, "messages": list(messages) or [ASK]}
    return as_chat(MessagesRequest.model_validate(body | fields))


def turns(*messages: Any, **fields: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """As a template has them, and the images."""
    return turns_of(chat(*messages, **fields).messages)


def test_a_conversation_has_the_turns_that_chat_has():
    told, _ = turns(
        ASK,
        {"role": "assistant", "content": [{"type": "thinking", "thinking": "Oak.", "signature": "x"},
                                          {"type": "text", "text": "I order."}, CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "2 boards"},
                                     {"type": "text", "text": "And", **MARK}, {"type": "text", "text": "now?"}]},
        system=[{"type": "text", "text": "You inlay.", **MARK}, {"type": "text", "text": "Be brief."}],
    )  # fmt: skip
    call = {"id": "toolu_1", "type": "function", "function": {"name": "order", "arguments": {"wood": "oak"}}}
    assert told == [
        {"role": "system", "content": "You inlay.\nBe brief."},
        ASK,
        {"role": "assistant", "content": "I order.", "reasoning_content": "Oak.", "tool_calls": [call]},
        {"role": "tool", "content": "2 boards", "tool_call_id": "toolu_1"},
        {"role": "user", "content": "And\nnow?"},
    ]


def test_images_are_where_they_were_in_messages_and_results():
    image = {"type": "image", "source": PNG}
    told, urls = turns(
        {"role": "user", "content": [image, {"type": "text", "text": "this?"}]},
        {"role": "assistant", "content": [CALL]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [
            {"type": "image", "source": {"type": "url", "url": "https://images.example/a.png"}}]}]},
    )  # fmt: skip
    assert urls == ["data:image/png;base64,iVBO", "https://images.example/a.png"]
    assert told[0]["content"] == [{"type": "image"}, {"type": "text", "text": "this?"}]
    assert told[2] == {"role": "tool", "tool_call_id": "toolu_1", "content": [{"type": "image"}]}


@pytest.mark.parametrize("content", ["no such wood", [{"type": "text", "text": "no such wood"}]])
def test_the_model_reads_that_a_call_failed(content: Any):
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": content, "is_error": True}
    told, _ = turns(ASK, {"role": "assistant", "content": [CALL]}, {"role": "user", "content": [result]})
    assert told[-1]["content"] == "Error: no such wood"


def test_what_claude_code_tells_its_biller_is_not_for_the_model():
    bills = "x-anthropic-billing-header: cc_version=2.1; cch=00f3a;"
    blocks = [{"type": "text", "text": bills}, {"type": "text", "text": "You inlay."}]
    assert turns(system=blocks)[0][0] == {"role": "system", "content": "You inlay."}
    assert turns(system=[blocks[0]])[0] == [ASK]


def test_what_the_system_says_first_is_one_turn_and_what_it_says_later_is_its_own_or_the_users():
    later = [ASK, {"role": "system", "content": "Oak is out."}, {"role": "user", "content": "And now?"}]
    messages = [{"role": "system", "content": [{"type": "text", "text": "Be brief."}]}, *later]
    told, _ = turns(*messages, system="You inlay.")
    first = {"role": "system", "content": "You inlay.\nBe brief."}
    assert told == [first, *later]
    body = MessagesRequest.model_validate({"max_tokens": 5, "system": "You inlay.", "messages": messages})
    assert has_later_system(body)
    told, _ = turns_of(as_chat(body, later_system="user").messages)
    assert told == [first, {"role": "user", "content": "Which wood?\nOak is out.\nAnd now?"}]
    assert not has_later_system(MessagesRequest.model_validate({"max_tokens": 5, "messages": messages[:2]}))


def test_a_system_alone_is_its_own_turn_and_nothing_at_all_is_refused():
    assert turns({"role": "system", "content": "You inlay."})[0] == [{"role": "system", "content": "You inlay."}]
    with pytest.raises(InvalidRequest, match="messages are empty"):
        chat({"role": "system", "content": ""})


def test_messages_of_the_user_on_end_are_one_turn():
    told, urls = turns(
        {"role": "user", "content": [{"type": "image", "source": PNG}]},
        {"role": "user", "content": "Which wood?"},
        {"role": "assistant", "content": "Oak."},
        {"role": "user", "content": "Why?"},
        {"role": "user", "content": "And now?"},
    )
    assert len(urls) == 1 and [turn["role"] for turn in told] == ["user", "assistant", "user"]
    assert told[0]["content"] == [{"type": "image"}, {"type": "text", "text": "Which wood?"}]
    assert told[2]["content"] == "Why?\nAnd now?"


def test_an_answer_goes_on_with_the_assistants_last_message():
    asked = chat(ASK, {"role": "assistant", "content": "The best wood is"})
    assert asked.continue_final_message and asked.messages[-1].content == "The best wood is"
    assert chat(ASK).continue_final_message is None
    with pytest.raises(InvalidRequest, match="send the result"):
        chat(ASK, {"role": "assistant", "content": [CALL]})


@pytest.mark.parametrize(
    ("choice", "told", "parallel"),
    [
        (None, None, None),
        ({"type": "auto"}, "auto", None),
        ({"type": "auto", "disable_parallel_tool_use": True}, "auto", False),
        ({"type": "any"}, "required", None),
        ({"type": "none"}, "none", None),
    ],
)
def test_a_choice_of_tools_is_chats(choice: Any, told: str | None, parallel: bool | None):
    asked = chat(tools=[ORDER], tool_choice=choice)
    assert (asked.tool_choice, asked.parallel_tool_calls) == (told, parallel)


def test_a_tool_is_chosen_by_its_name_however_long_it_is():
    name = "mcp__" + "w" * 100
    asked = chat(tools=[ORDER | {"name": name}], tool_choice={"type": "tool", "name": name})
    assert asked.tools[0].function.name == name == asked.tool_choice.function.name
    assert chat(tool_choice={"type": "auto"}).tool_choice is None  # without tools it says nothing


def test_examples_of_input_are_the_schemas():
    [tool] = chat(tools=[ORDER | {"input_examples": [{"wood": "ash"}], "strict": True}]).tools
    assert tool.function.parameters["examples"] == [{"wood": "ash"}] and tool.function.strict


def test_a_thread_is_refused_as_clients_expect_it():
    with pytest.raises(InvalidRequest, match="send all of its messages") as refused:
        chat(thread={"type": "create"})
    assert refused.value.details["error_code"] == "thread_unsupported_request"


@pytest.mark.parametrize(
    ("thinking", "told"),
    [
        ({"type": "enabled", "budget_tokens": 2048}, {"enable_thinking": True, "thinking": True, "voice": "x"}),
        ({"type": "adaptive"}, {"enable_thinking": True, "thinking": True, "voice": "x"}),
        ({"type": "disabled"}, {"enable_thinking": False, "thinking": False, "voice": "x"}),
        (None, {"voice": "x"}),
    ],
)
def test_thinking_is_the_templates_business(thinking: Any, told: dict[str, Any]):
    assert chat(thinking=thinking, chat_template_kwargs={"voice": "x"}).chat_template_kwargs == told


def test_other_fields_have_the_names_that_chat_has():
    asked = chat(
        stop_sequences=["END"], temperature=0.5, top_k=3, top_p=0.9, metadata={"user_id": "me"}, stream=True, seed=7,
        output_config={"effort": "high", "format": {"type": "json_schema", "schema": {"type": "object"}}},
    )  # fmt: skip
    told = asked.model_dump(exclude_none=True, by_alias=True)
    del told["messages"]
    assert told == {
        "max_completion_tokens": 5, "stop": ["END"], "temperature": 0.5, "top_k": 3, "top_p": 0.9, "user": "me",
        "stream": True, "seed": 7, "reasoning_effort": "high",
        "response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "object"}}},
    }  # fmt: skip
