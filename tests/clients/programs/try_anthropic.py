"""Anthropic's own package for Python."""

import asyncio
from typing import Literal

import anthropic
from probing import KEY, MODEL, ROOT_URL, expect, probe, raises, run
from pydantic import BaseModel

client = anthropic.Anthropic(base_url=ROOT_URL, api_key=KEY, max_retries=0)
later = anthropic.AsyncAnthropic(base_url=ROOT_URL, api_key=KEY, max_retries=0)
ASK = {"system": "You inlay.", "messages": [{"role": "user", "content": "Which wood?"}]}
SCHEMA = {
    "type": "object",
    "properties": {"wood": {"enum": ["oak", "ash"]}, "boards": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["wood", "boards"],
}
TOOLS = [{"name": "order", "description": "Order boards.", "input_schema": SCHEMA}]


class Order(BaseModel):
    wood: Literal["oak", "ash"]
    boards: Literal[1, 2]


GREEDY = {"extra_body": {"temperature": 0}}


def ask(**fields):
    return client.messages.create(**{"model": MODEL, "max_tokens": 24} | ASK | fields)


def fits(found) -> bool:
    return set(found) == {"wood", "boards"} and found["wood"] in ("oak", "ash") and 1 <= found["boards"] <= 9


@probe("models")
def _():
    return ", ".join(model.id for model in client.models.list())


@probe("message")
def _():
    answer = ask(**GREEDY)
    expect(answer.content[0].text and answer.stop_reason in ("max_tokens", "end_turn"), answer)
    expect(answer._request_id and answer.id == f"msg_{answer._request_id}", answer)
    usage = answer.usage
    return f"{usage.input_tokens + usage.cache_read_input_tokens} tokens in, {usage.output_tokens} out"


@probe("the same prompt again")
def _():
    asked = {"system": [{"type": "text", "text": "You inlay. " * 20, "cache_control": {"type": "ephemeral"}}]}
    first, second = ask(**asked).usage, ask(**asked).usage
    expect(second.cache_read_input_tokens > 200 and second.input_tokens < 20, first, second)
    return "found in the cache"


@probe("stream")
def _():
    whole = ask(**GREEDY).content[0].text
    with client.messages.stream(model=MODEL, max_tokens=24, **GREEDY, **ASK) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    expect(text == whole == final.content[0].text, text, whole)
    expect(final.usage.output_tokens, final)
    return "the same text, then the whole message"


@probe("stream of raw events")
def _():
    kinds = [event.type for event in ask(stream=True)]
    expect(kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"], kinds)
    return f"{len(set(kinds))} kinds of event"


@probe("tool required")
def _():
    choice = {"type": "any", "disable_parallel_tool_use": True}
    answer = ask(tools=TOOLS, tool_choice=choice, max_tokens=300)
    [call] = [block for block in answer.content if block.type == "tool_use"]
    expect(call.name == "order" and fits(call.input) and answer.stop_reason == "tool_use", answer)
    return "uses order, input fits the schema"


@probe("tool by name, streamed")
def _():
    choice = {"type": "tool", "name": "order"}
    with client.messages.stream(model=MODEL, max_tokens=300, tools=TOOLS, tool_choice=choice, **ASK) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_message().content
    expect(kinds.count("input_json") > 3 and fits(call.input), kinds, call)
    return "input comes in pieces and fits the schema"


@probe("tool runner")
def _():
    ordered = []

    @anthropic.beta_tool
    def order(wood: Literal["oak", "ash"]) -> str:
        """Order boards."""
        ordered.append(wood)
        return "done"

    runner = client.beta.messages.tool_runner(
        model=MODEL,
        max_tokens=300,
        tools=[order],
        tool_choice={"type": "tool", "name": "order"},
        max_iterations=2,
        **ASK,
    )
    messages = list(runner)
    expect(len(messages) == 2 and ordered, ordered, messages)
    return "the function runs, and its result is sent"


@probe("tool auto, then its result")
def _():
    call = {"type": "tool_use", "id": "toolu_1", "name": "order", "input": {"wood": "oak", "boards": 2}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "2 boards"}]}
    told = [
        *ASK["messages"],
        {"role": "assistant", "content": [{"type": "text", "text": "I order."}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]
    answer = ask(messages=told, tools=TOOLS, tool_choice={"type": "auto"})
    expect(answer.content, answer)
    return "goes on in words"


@probe("an answer sent back")
def _():
    first = ask()
    answer = ask(messages=[*ASK["messages"], {"role": "assistant", "content": first.content}, ASK["messages"][0]])
    expect(answer.content, answer)
    return "goes on"


@probe("thinking")
def _():
    thought = {"type": "thinking", "thinking": "Oak is hard.", "signature": "c2ln"}
    told = [
        *ASK["messages"],
        {"role": "assistant", "content": [thought, {"type": "text", "text": "Oak."}]},
        {"role": "user", "content": "Why?"},
    ]
    answer = ask(messages=told, thinking={"type": "enabled", "budget_tokens": 1024}, max_tokens=2048)
    expect(answer.content, answer)
    return "is asked for, and thoughts are taken back"


@probe("stop sequence")
def _():
    text = ask(**GREEDY).content[0].text
    answer = ask(**GREEDY, stop_sequences=[text[8:10]])
    expect(answer.stop_reason == "stop_sequence" and answer.stop_sequence == text[8:10], answer)
    return "is told"


@probe("structured output, parsed")
def _():
    answer = client.messages.parse(model=MODEL, max_tokens=300, output_format=Order, **ASK)
    return f"an object of {type(answer.parsed_output).__name__}"


@probe("count_tokens")
def _():
    counted = client.messages.count_tokens(model=MODEL, tools=TOOLS, **ASK).input_tokens
    answer = ask(tools=TOOLS)
    expect(counted == answer.usage.input_tokens + answer.usage.cache_read_input_tokens, counted, answer.usage)
    return f"{counted} tokens, as the message has"


@probe("32 at once")
async def _():
    asked = (later.messages.create(model=MODEL, max_tokens=8, **ASK) for _ in range(32))
    return f"{len(await asyncio.gather(*asked))} answers"


@probe("prompt too long")
def _():
    long = [{"role": "user", "content": "x" * 40_000}]
    return raises(anthropic.BadRequestError, lambda: ask(messages=long), "prompt is too long")


@probe("a tool of Anthropic's")
def _():
    tool = {"type": "web_search_20250305", "name": "web_search"}
    return raises(anthropic.BadRequestError, lambda: ask(tools=[tool]), "web_search_20250305")


@probe("wrong model")
def _():
    return raises(anthropic.NotFoundError, lambda: ask(model="no"), "no")


@probe("wrong key")
def _():
    stranger = anthropic.Anthropic(base_url=ROOT_URL, api_key="wrong", max_retries=0)
    return raises(anthropic.AuthenticationError, lambda: stranger.models.list())


@probe("key as a token")
def _():
    bearer = anthropic.Anthropic(base_url=ROOT_URL, auth_token=KEY, api_key=None, max_retries=0)
    return bearer.messages.create(model=MODEL, max_tokens=8, **ASK).role


run()
