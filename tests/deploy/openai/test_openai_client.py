"""The `openai` package as it comes, against a real server."""

import json
import time
from typing import Any

import openai
import pytest

from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api
from intarsia.tests.models import greedy

GREEDY: Any = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
ASK: Any = [{"role": "system", "content": "You inlay."}, {"role": "user", "content": "Which wood?"}]


@pytest.fixture(scope="module")
def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


def expected_text(api: Api, prompt: list[int], count: int = 24) -> str:
    return api.tokenizer.decode(greedy(api.oracle, prompt, count))


def test_models_are_listed(client: openai.OpenAI):
    assert [model.id for model in client.models.list()] == ["talker"]
    assert client.models.retrieve("talker").id == "talker"


def test_a_completion_is_the_oracles(api: Api, client: openai.OpenAI):
    answer = client.completions.create(model="talker", prompt="The inlay", **GREEDY)
    prompt = api.tokenizer.encode("The inlay")
    assert answer.choices[0].text == expected_text(api, prompt)
    assert answer.choices[0].finish_reason == "length"
    assert answer.object == "text_completion" and answer.id.startswith("cmpl-")
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), 24)
    assert answer.usage.total_tokens == len(prompt) + 24


@pytest.mark.parametrize("as_tokens", [True, False])
def test_several_prompts_are_answered_in_their_order(api: Api, client: openai.OpenAI, as_tokens: bool):
    texts = ["oak", "The inlay", "x"]
    prompts = [api.tokenizer.encode(text) for text in texts]
    answer = client.completions.create(model="talker", prompt=prompts if as_tokens else texts, n=2, **GREEDY)
    assert [choice.index for choice in answer.choices] == list(range(6))
    assert [choice.text for choice in answer.choices] == [
        expected_text(api, prompt) for prompt in prompts for _ in range(2)
    ]
    assert answer.usage is not None and answer.usage.completion_tokens == 6 * 24


def test_a_stream_says_what_the_whole_answer_says(api: Api, client: openai.OpenAI):
    whole = client.completions.create(model="talker", prompt=["oak", "ash"], **GREEDY)
    texts, reasons, usage = {0: "", 1: ""}, {}, None
    stream = client.completions.create(
        model="talker", prompt=["oak", "ash"], stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.text
            reasons[choice.index] = choice.finish_reason or reasons.get(choice.index)
        usage = event.usage
    assert [texts[0], texts[1]] == [choice.text for choice in whole.choices]
    assert reasons == {0: "length", 1: "length"}
    assert usage is not None and whole.usage is not None
    assert usage.completion_tokens == whole.usage.completion_tokens == 48


def test_log_probabilities_and_the_prompts_echo(api: Api, client: openai.OpenAI):
    answer = client.completions.create(model="talker", prompt="oak", logprobs=2, echo=True, **GREEDY)
    [choice] = answer.choices
    about = choice.logprobs
    assert about is not None and about.tokens is not None and about.token_logprobs is not None
    assert choice.text.startswith("oak")
    assert "".join(about.tokens[:3]) == "oak" and len(about.tokens) == 3 + 24
    assert about.token_logprobs[0] is None and all(at is not None and at <= 0 for at in about.token_logprobs[1:])
    assert about.top_logprobs is not None and len(about.top_logprobs[5]) == 2
    nothing = client.completions.create(
        model="talker", prompt="oak", logprobs=1, echo=True, **{**GREEDY, "max_tokens": 0}
    )
    assert nothing.choices[0].text == "oak"
    assert nothing.choices[0].logprobs is not None and nothing.choices[0].logprobs.tokens == ["o", "a", "k"]
    assert nothing.usage is not None and nothing.usage.completion_tokens == 0


def test_a_chat_follows_the_template(api: Api, client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="talker",
        messages=ASK,
        logprobs=True,
        top_logprobs=3,
        **GREEDY,
    )
    prompt = api.tokenizer.encode("system: You inlay.\nuser: Which wood?\nassistant: ")
    [choice] = answer.choices
    assert choice.message.content == expected_text(api, prompt)
    assert choice.message.role == "assistant" and choice.finish_reason == "length"
    assert choice.logprobs is not None and choice.logprobs.content is not None
    assert len(choice.logprobs.content) == 24 and len(choice.logprobs.content[0].top_logprobs) == 3
    other = client.chat.completions.create(
        model="talker",
        messages=ASK,
        temperature=0,
        max_completion_tokens=4,
        extra_body={"chat_template_kwargs": {"voice": "joiner"}, "return_token_ids": True, "ignore_eos": True},
    )
    assert api.tokenizer.decode(other.prompt_token_ids).endswith("joiner: ")  # type: ignore[attr-defined]


def test_a_chat_streams(client: openai.OpenAI):
    whole = client.chat.completions.create(model="talker", messages=ASK, n=2, seed=7, max_tokens=20, temperature=2)
    texts, roles = {0: "", 1: ""}, {}
    stream = client.chat.completions.create(
        model="talker",
        messages=ASK,
        n=2,
        seed=7,
        max_tokens=20,
        temperature=2,  # this model is sure of itself
        stream=True,
    )
    for event in stream:
        for choice in event.choices:
            texts[choice.index] += choice.delta.content or ""
            roles[choice.index] = choice.delta.role or roles.get(choice.index)
    assert [texts[0], texts[1]] == [choice.message.content for choice in whole.choices]
    assert texts[0] != texts[1], "the seed of an answer is its own"
    assert roles == {0: "assistant", 1: "assistant"}


def test_an_answer_of_a_schema_parses(client: openai.OpenAI):
    schema = {
        "type": "object",
        "properties": {"wood": {"enum": ["oak", "ash"]}, "rings": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["wood", "rings"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="talker",
        messages=ASK,
        response_format={"type": "json_schema", "json_schema": {"name": "timber", "schema": schema, "strict": True}},
        seed=3,
    )
    found = json.loads(answer.choices[0].message.content or "")
    assert found["wood"] in ("oak", "ash") and 1 <= found["rings"] <= 99
    assert answer.choices[0].finish_reason == "stop"


TOOL = {
    "type": "function",
    "function": {
        "name": "saw",
        "parameters": {
            "type": "object",
            "properties": {"cm": {"type": "integer", "minimum": 1, "maximum": 9}},
            "required": ["cm"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "saw"}}])
def test_a_tool_that_must_be_called_is_called(client: openai.OpenAI, choice: object):
    asked: dict = {"model": "talker", "messages": ASK, "tools": [TOOL], "tool_choice": choice, "seed": 1}
    asked |= {"parallel_tool_calls": False, "max_tokens": 200}
    answer = client.chat.completions.create(**asked)
    [call] = answer.choices[0].message.tool_calls or []
    assert answer.choices[0].finish_reason == "tool_calls" and answer.choices[0].message.content is None
    assert call.type == "function" and call.function.name == "saw"
    assert 1 <= json.loads(call.function.arguments)["cm"] <= 9
    streamed = [
        call
        for event in client.chat.completions.create(**asked, stream=True)
        for call in event.choices[0].delta.tool_calls or []
    ]
    told = [one.function for one in streamed if one.function is not None]
    assert [one.index for one in streamed] == [0] * len(streamed) and told[0].name == "saw"
    assert "".join(one.arguments or "" for one in told) == call.function.arguments
    turn = [*ASK, answer.choices[0].message, {"role": "tool", "tool_call_id": call.id, "content": "sawn"}]
    again = client.chat.completions.create(model="talker", messages=turn, max_tokens=2)
    assert again.usage is not None and again.usage.completion_tokens <= 2


def test_a_response_is_the_chats_answer_in_other_words(client: openai.OpenAI):
    chat = client.chat.completions.create(model="talker", messages=ASK, temperature=0, max_tokens=20)
    answer = client.responses.create(
        model="talker", instructions="You inlay.", input="Which wood?", temperature=0, max_output_tokens=20
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.usage is not None and chat.usage is not None
    assert answer.usage.output_tokens == chat.usage.completion_tokens
    assert answer.status == ("incomplete" if chat.choices[0].finish_reason == "length" else "completed")
    assert chat.choices[0].finish_reason != "length" or answer.incomplete_details is not None


def test_a_response_streams_its_events_in_their_order(client: openai.OpenAI):
    asked: Any = {"model": "talker", "input": ASK, "temperature": 0, "max_output_tokens": 20}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    assert kinds[:4] == ["created", "in_progress", "output_item.added", "content_part.added"]
    assert kinds[-4:-1] == ["output_text.done", "content_part.done", "output_item.done"]
    assert kinds[-1] == whole.status
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].response.output_text == whole.output_text  # type: ignore[union-attr]


def test_a_response_calls_tools_and_hears_their_answers(client: openai.OpenAI):
    tool: Any = {"type": "function", **TOOL["function"]}
    asked: Any = {"model": "talker", "input": ASK, "tools": [tool], "tool_choice": {"type": "function", "name": "saw"}}
    with client.responses.stream(**asked) as stream:
        kinds = [event.type for event in stream]
        [call] = stream.get_final_response().output
    assert "response.function_call_arguments.done" in kinds
    assert call.type == "function_call" and 1 <= json.loads(call.arguments)["cm"] <= 9
    said = {"type": "function_call_output", "call_id": call.call_id, "output": "sawn"}
    turns: Any = [*ASK, call.model_dump(exclude={"parsed_arguments"}), said]
    again = client.responses.create(model="talker", input=turns, max_output_tokens=3)
    assert again.usage is not None and again.usage.output_tokens <= 3


def test_a_response_of_a_schema_parses(client: openai.OpenAI):
    schema = {"type": "object", "properties": {"wood": {"enum": ["oak", "ash"]}}, "required": ["wood"]}
    schema |= {"additionalProperties": False}
    wanted: Any = {"format": {"type": "json_schema", "name": "timber", "schema": schema, "strict": True}}
    answer = client.responses.create(model="talker", input="wood?", text=wanted)
    assert json.loads(answer.output_text)["wood"] in ("oak", "ash")


def test_stops_end_answers_before_them(api: Api, client: openai.OpenAI):
    text = client.completions.create(model="talker", prompt="oak", **GREEDY).choices[0].text
    stop = text[5:7]
    answer = client.completions.create(model="talker", prompt="oak", stop=[stop], **GREEDY)
    assert answer.choices[0].text == text[: text.find(stop)]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None and answer.usage.completion_tokens < GREEDY["max_tokens"]
    chat: Any = {"model": "talker", "messages": [{"role": "user", "content": "wood?"}], **GREEDY}
    text = client.chat.completions.create(**chat).choices[0].message.content or ""
    [choice] = client.chat.completions.create(stop=[text[5:7]], logprobs=True, **chat).choices
    assert (choice.message.content, choice.finish_reason) == (text[: text.find(text[5:7])], "stop")
    assert choice.logprobs is not None and len(choice.logprobs.content or ()) > 1


@pytest.mark.parametrize(
    ("fields", "kind", "param", "message"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError, "model", "The model `gpt-9` does not exist here; `talker` does"),
        ({"temperature": -1}, openai.BadRequestError, "temperature", "decimal below minimum value"),
        ({"temperature": "hot"}, openai.BadRequestError, "temperature", "valid number, got 'hot'"),
        (
            {"max_tokens": 100_000, "prompt": "x " * 600},
            openai.BadRequestError,
            "prompt",
            "maximum context length is 512 tokens (max_model_len)",
        ),
        ({"prompt": ""}, openai.BadRequestError, "prompt", "the prompt is empty"),
        ({"prompt": [1, 999]}, openai.BadRequestError, "prompt", "not in the vocabulary of 320"),
        ({"extra_body": {"max_token": 3}}, openai.BadRequestError, "max_token", "Did you mean max_tokens?"),
        (
            {"extra_body": {"structured_outputs": {"regex": "(ab"}}},
            openai.BadRequestError,
            "structured_outputs",
            "cannot be used",
        ),
        ({"suffix": "end"}, openai.BadRequestError, "suffix", "not supported"),
        ({"best_of": 3}, openai.BadRequestError, "best_of", "not ranked"),
        ({"logit_bias": {"400": 1}}, openai.BadRequestError, "logit_bias", "token 400"),
        ({"stop": [""]}, openai.BadRequestError, "stop.0", "at least 1 character"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_what_cannot_be_served_is_refused_by_name(
    client: openai.OpenAI, fields: dict, kind: type, param: str, message: str, stream: bool
):
    with pytest.raises(kind) as refused:
        client.completions.create(**({"model": "talker", "prompt": "oak", "max_tokens": 4} | fields), stream=stream)
    assert message in str(refused.value)
    assert refused.value.param == param  # type: ignore[attr-defined]
    assert refused.value.type == "invalid_request_error"  # type: ignore[attr-defined]


def test_a_stream_that_is_left_frees_its_blocks(api: Api, client: openai.OpenAI, loop: Loop):
    stream = client.completions.create(
        model="talker", prompt="oak", max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    stream.close()
    impatient = client.with_options(timeout=0.05)
    with pytest.raises(openai.APITimeoutError):
        impatient.completions.create(model="talker", prompt="ash", max_tokens=500, extra_body={"ignore_eos": True})
    deadline = time.monotonic() + 10
    while not loop.run(api.engine.recount()).all_free:
        assert time.monotonic() < deadline
        time.sleep(0.02)
