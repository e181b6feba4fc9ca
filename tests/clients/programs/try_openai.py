"""OpenAI's own package for Python."""

import asyncio
import json
from typing import Literal

import openai
from probing import KEY, MODEL, URL, expect, probe, raises, run
from pydantic import BaseModel

client = openai.OpenAI(base_url=URL, api_key=KEY, max_retries=0)
later = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0)
ASK = [{"role": "system", "content": "You inlay."}, {"role": "user", "content": "Which wood?"}]
PARAMETERS = {
    "type": "object",
    "properties": {"wood": {"enum": ["oak", "ash"]}, "boards": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["wood", "boards"],
}
TOOLS = [{"type": "function", "function": {"name": "order", "parameters": PARAMETERS}}]


class Order(BaseModel):
    wood: Literal["oak", "ash"]
    boards: Literal[1, 2]


def ask(**fields):
    return client.chat.completions.create(**{"model": MODEL, "messages": ASK, "max_tokens": 24} | fields)


def fits(arguments: str) -> bool:
    found = json.loads(arguments)
    return set(found) == {"wood", "boards"} and found["wood"] in ("oak", "ash") and 1 <= found["boards"] <= 9


@probe("models")
def _():
    return ", ".join(model.id for model in client.models.list())


@probe("chat")
def _():
    answer = ask(temperature=0)
    expect(answer.choices[0].message.content and answer.choices[0].finish_reason in ("length", "stop"), answer)
    return f"{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out"


@probe("several answers")
def _():
    answer = ask(n=3)
    expect([choice.index for choice in answer.choices] == [0, 1, 2], answer)
    return "3 choices"


@probe("stream with usage")
def _():
    whole = ask(temperature=0).choices[0].message.content
    chunks = list(ask(temperature=0, stream=True, stream_options={"include_usage": True}))
    expect("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole, whole)
    expect(not chunks[-1].choices and chunks[-1].usage.completion_tokens, chunks[-1])
    return f"the same text, then usage of {chunks[-1].usage.total_tokens} tokens"


@probe("log-probabilities")
def _():
    content = ask(logprobs=True, top_logprobs=3, max_tokens=4).choices[0].logprobs.content
    expect(len(content) <= 4 and all(len(token.top_logprobs) == 3 for token in content), content)
    return "3 for each token"


@probe("tool required")
def _():
    answer = ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, max_tokens=200)
    [call] = answer.choices[0].message.tool_calls
    expect(call.function.name == "order" and fits(call.function.arguments), call)
    return "calls order, arguments fit the schema"


@probe("tool by name, streamed")
def _():
    named = {"type": "function", "function": {"name": "order"}}
    with client.chat.completions.stream(
        model=MODEL, messages=ASK, tools=TOOLS, tool_choice=named, max_tokens=200
    ) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_completion().choices[0].message.tool_calls
    expect(kinds.count("tool_calls.function.arguments.delta") > 3, kinds)
    expect(fits(call.function.arguments), call)
    return "arguments come in pieces and fit the schema"


@probe("tool auto, then its result")
def _():
    call = {"id": "call_1", "type": "function", "function": {"name": "order", "arguments": '{"wood":"oak","boards":2}'}}
    told = [
        *ASK,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "2"},
    ]
    answer = ask(messages=told, tools=TOOLS, tool_choice="auto")
    expect(answer.choices[0].finish_reason in ("length", "stop"), answer)
    return "goes on in words"


@probe("structured output, parsed")
def _():
    parsed = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Order, max_tokens=200)
    return f"an object of {type(parsed.choices[0].message.parsed).__name__}"


@probe("responses")
def _():
    answer = client.responses.create(model=MODEL, input="Which wood?", max_output_tokens=24)
    expect(answer.output_text, answer)
    return f"{answer.usage.input_tokens} tokens in, {answer.usage.output_tokens} out"


@probe("responses, streamed")
def _():
    with client.responses.stream(
        model=MODEL, input="Which wood?", text_format=Order, max_output_tokens=200
    ) as stream:  # to an end of its own: the package knows no final response of an answer that is cut
        kinds = {event.type for event in stream}
        parsed = stream.get_final_response().output_parsed
    expect(isinstance(parsed, Order) and {"response.created", "response.output_text.delta"} <= kinds, kinds)
    return f"{len(kinds)} kinds of event"


@probe("responses, tool")
def _():
    tool = {"type": "function", "name": "order", "parameters": PARAMETERS, "strict": False}
    answer = client.responses.create(
        model=MODEL, input="Which wood?", tools=[tool], tool_choice="required", max_output_tokens=300
    )
    call = next(item for item in answer.output if item.type == "function_call")
    expect(call.name == "order" and fits(call.arguments), call)
    return "calls order"


@probe("responses, parsed")
def _():
    answer = client.responses.parse(model=MODEL, input="Which wood?", text_format=Order, max_output_tokens=200)
    return f"an object of {type(answer.output_parsed).__name__}"


@probe("responses, one after another")
def _():
    asked = {"model": MODEL, "max_output_tokens": 16}
    first = client.responses.create(input="Which wood?", **asked)
    second = client.responses.create(input="And now?", previous_response_id=first.id, **asked)
    expect(second.usage.input_tokens > first.usage.input_tokens + 16, first.usage, second.usage)
    kinds = [item.type for item in client.responses.input_items.list(second.id)]
    expect(kinds == ["message"] * 3, kinds)
    client.responses.delete(first.id)
    raises(openai.NotFoundError, lambda: client.responses.retrieve(first.id), first.id)
    return "goes on, is listed and deleted"


@probe("responses, in the background")
def _():
    begun = client.responses.create(model=MODEL, input="Which wood?", background=True, max_output_tokens=16)
    while (found := client.responses.retrieve(begun.id)).status in ("queued", "in_progress"):
        pass
    expect(found.output_text and found.usage.output_tokens, found)
    long = client.responses.create(model=MODEL, input="Which wood?", background=True, max_output_tokens=20_000)
    stopped = client.responses.cancel(long.id).status
    expect(stopped in ("cancelled", "completed"), stopped)  # this model may have come to an end
    return f"{found.status}, and another one is {stopped}"


@probe("responses, a stream taken up again")
def _():
    asked = {"model": MODEL, "input": "Which wood?", "max_output_tokens": 64}
    with client.responses.create(background=True, stream=True, **asked) as stream:
        begun = [event for event, _ in zip(stream, range(4), strict=False)]
    rest = client.responses.retrieve(begun[0].response.id, stream=True, starting_after=begun[-1].sequence_number)
    events = [*begun, *rest]
    expect([event.sequence_number for event in events] == list(range(len(events))), events)
    whole = client.responses.retrieve(begun[0].response.id)
    said = "".join(event.delta for event in events if event.type == "response.output_text.delta")
    expect(said == whole.output_text, said, whole)
    return "without a gap"


@probe("completion with echo")
def _():
    answer = client.completions.create(model=MODEL, prompt="The inlay", max_tokens=0, echo=True, logprobs=1)
    expect(answer.choices[0].text == "The inlay" and len(answer.choices[0].logprobs.tokens) == 9, answer)
    return "the prompt with its log-probabilities"


@probe("32 at once")
async def _():
    answers = await asyncio.gather(
        *(later.chat.completions.create(model=MODEL, messages=ASK, max_tokens=8) for _ in range(32))
    )
    return f"{len(answers)} answers"


@probe("prompt too long")
def _():
    try:
        ask(messages=[{"role": "user", "content": "x" * 40_000}])
    except openai.BadRequestError as error:
        expect(error.code == "context_length_exceeded", error.code)
        return f"BadRequestError, code {error.code}"
    raise AssertionError("no error")


@probe("wrong model")
def _():
    return raises(openai.NotFoundError, lambda: ask(model="no"), "no")


@probe("wrong key")
def _():
    stranger = openai.OpenAI(base_url=URL, api_key="wrong", max_retries=0)
    return raises(openai.AuthenticationError, lambda: stranger.models.list())


@probe("wrong value")
def _():
    return raises(openai.BadRequestError, lambda: ask(temperature=7), "temperature")


run()
