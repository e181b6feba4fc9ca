"""What clients send out of habit, and what they read in answers: OpenAI's own, and those of other servers."""

import http.client
import itertools
import json
import urllib.parse
from dataclasses import replace
from typing import Any

import openai
import pytest

from intarsia.deploy.openai.protocol import ResponsesRequest
from intarsia.deploy.openai.responses import _as_chat
from intarsia.tests.deploy.openai.conftest import Api
from intarsia.tests.deploy.openai.test_app import ASK, call

CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

SAW: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "saw",
        "parameters": {
            "type": "object",
            "properties": {"board": {"type": "string", "minLength": 30, "maxLength": 60}},
            "required": ["board"],
        },
    },
}
NAMED = {"type": "function", "function": {"name": "saw"}}


@pytest.fixture(scope="module")
def client(api: Api) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{api.url}/v1", api_key="none", max_retries=0)


def events(api: Api, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, text, _ = call(api, path, body | {"stream": True})
    assert status == 200, text
    lines = [line.partition("data: ")[2] for line in text.split("\n\n") if line]
    return [json.loads(line) for line in lines if line != "[DONE]"]


def ask(path: str, **fields: Any) -> dict[str, Any]:
    """A short request of that kind."""
    if path == COMPLETIONS:
        return {"prompt": "oak", "max_tokens": 2} | fields
    if path == RESPONSES:
        return {"input": "oak", "max_output_tokens": 2} | fields
    return {"messages": ASK, "max_tokens": 2} | fields


# -- what is taken ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (
            CHAT,
            dict.fromkeys(("functions", "function_call", "prediction", "audio", "web_search_options", "moderation")),
        ),
        (CHAT, {"functions": [], "function_call": "none"}),
        (
            CHAT,
            {"skip_special_tokens": True, "guided_json": None, "best_of": 1, "use_beam_search": False}
            | dict.fromkeys(("chat_template", "guided_regex", "kv_transfer_params", "vllm_xargs", "documents")),
        ),
        (COMPLETIONS, {"skip_special_tokens": True, "use_beam_search": False, "length_penalty": 1.0}),
        (RESPONSES, {"conversation": None, "max_tool_calls": None, "prompt_cache_options": {"mode": "implicit"}}),
        (RESPONSES, {"prompt_cache_retention": "24h", "prompt_cache_key": "k"}),
        (CHAT, {"prompt_cache_retention": "24h", "prompt_cache_options": {"ttl": "30m"}}),
        (RESPONSES, {"top_k": 3, "repetition_penalty": 1.1, "stop": ["x"], "top_logprobs": None}),
        (RESPONSES, {"chat_template_kwargs": {"voice": "joiner"}}),
        (RESPONSES, {"tool_choice": "auto"}),
        (RESPONSES, {"tools": [{"type": "web_search", "external_web_access": False}], "client_metadata": {"a": "b"}}),
        (RESPONSES, {"include": ["reasoning.encrypted_content"], "text": {"verbosity": "low"}}),
        (CHAT, {"max_completion_tokens": 2, "verbosity": "low"}),
        (CHAT, {"tool_choice": "none"}),
        (CHAT, {"reasoning_effort": "minimal"}),
        (CHAT, {"response_format": {"type": "json_object", "schema": {"type": "object", "properties": {}}}}),
    ],
)
def test_fields_that_ask_for_nothing_special_are_taken(api: Api, path: str, fields: dict[str, Any]):
    status, answer, _ = call(api, path, ask(path, **fields))
    assert status == 200, answer


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (CHAT, {"prediction": {"type": "content", "content": "x"}}, "prediction"),
        (CHAT, {"functions": [{"name": "f"}]}, "functions"),
        (CHAT, {"skip_special_tokens": False}, "skip_special_tokens"),
        (CHAT, {"best_of": 2}, "best_of"),
        (CHAT, {"best_of": True}, "best_of"),
        (CHAT, {"nonsense": None}, "nonsense"),
        (CHAT, {"stream_options": {"include_usage": True}}, "stream_options"),
        (COMPLETIONS, {"stream_options": {"include_usage": True}}, "stream_options"),
        (CHAT, {"tool_choice": "auto"}, "tool_choice"),
        (RESPONSES, {"tool_choice": "required"}, "tool_choice"),
        (RESPONSES, {"stream_options": {"include_obfuscation": True}}, "stream_options"),
        (CHAT, {"tool_choice": "auto", "tools": []}, "tool_choice"),
        (CHAT, {"tools": [SAW], "tool_choice": NAMED, "structured_outputs": {"regex": "a"}}, "structured_outputs"),
        (CHAT, {"reasoning_effort": "ultra"}, "reasoning_effort"),
        (RESPONSES, {"reasoning": {"effort": "ultra"}}, "reasoning.effort"),
        (CHAT, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
        (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}},
         "response_format"),
        (RESPONSES, {"background": True}, "background"),
        (RESPONSES, {"include": ["nonsense"]}, "include.0"),
        (RESPONSES, {"text": {"verbosity": "endless"}}, "text.verbosity"),
        (CHAT, {"verbosity": "endless"}, "verbosity"),
        (CHAT, {"max_completion_tokens": 3}, "max_tokens"),
        (CHAT, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs"),
        (CHAT, {"structured_outputs": {}}, "structured_outputs"),
        (CHAT, {"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        (CHAT, {"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "text", "text": "x", "lang": "de"}]}]},
         "messages.0.content.0.lang"),
    ],
)  # fmt: skip
def test_what_would_be_dropped_in_silence_is_refused_by_its_name(
    api: Api, path: str, fields: dict[str, Any], param: str
):
    status, answer, _ = call(api, path, ask(path, **fields))
    assert (status, answer["error"]["param"]) == (400, param), answer


LOOKS_AHEAD = {"type": "object", "properties": {"a": {"type": "string", "pattern": "^(?=x)y"}}, "required": ["a"]}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "plane"}}])
def test_a_tool_whose_schema_cannot_be_used_is_named_with_the_place_and_the_whole_reason(api: Api, choice: Any):
    tools = [SAW, {"type": "function", "function": {"name": "plane", "parameters": LOOKS_AHEAD}}]
    status, answer, _ = call(api, CHAT, ask(CHAT, tools=tools, tool_choice=choice))
    assert (status, answer["error"]["param"]) == (400, "tools.1.function.parameters"), answer
    assert answer["error"]["message"] == (
        "the parameters of the tool 'plane' cannot be used: look-around, including look-ahead and look-behind, "
        "is not supported, at #/properties/a"
    )


def test_a_schema_that_cannot_be_used_is_refused_with_the_place_and_the_whole_reason(api: Api):
    wanted = {"type": "json_schema", "json_schema": {"name": "a", "schema": LOOKS_AHEAD}}
    status, answer, _ = call(api, CHAT, ask(CHAT, response_format=wanted))
    assert (status, answer["error"]["param"]) == (400, "response_format"), answer
    assert answer["error"]["message"].endswith("look-behind, is not supported, at #/properties/a")


def test_marks_for_caches_and_thoughts_in_messages_are_taken(api: Api):
    mark = {"cache_control": {"type": "ephemeral"}}
    messages = [
        {"role": "system", "content": [{"type": "text", "text": "You inlay.", **mark}], **mark},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "ho", "reasoning": "It is a greeting."},
        {"role": "user", "content": "Which wood?"},
    ]
    status, answer, _ = call(api, CHAT, {"messages": messages, "max_tokens": 2, "tools": [SAW | mark]})
    assert status == 200, answer


def test_a_body_without_its_kind_is_told_which_header_to_send(api: Api):
    status, answer, _ = call(
        api, COMPLETIONS, b'{"prompt":"x"}', **{"Content-Type": "application/x-www-form-urlencoded"}
    )
    assert status == 400 and "Content-Type: application/json" in answer["error"]["message"]


# -- what is answered ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": [1] * 600}),
        (COMPLETIONS, {"prompt": "x " * 600}),
        (COMPLETIONS, {"prompt": "x" * 100_000}),
        (CHAT, {"messages": [{"role": "user", "content": "x " * 600}]}),
        (RESPONSES, {"input": "x " * 600}),
        # Longer than any text of so many tokens, and longer than any that is rendered at all:
        (CHAT, {"messages": [{"role": "user", "content": "x" * 100_000}]}),
        (CHAT, {"messages": [{"role": "user", "content": "x" * 3_000_000}]}),
        (RESPONSES, {"input": "x" * 100_000}),
    ],
)
def test_a_prompt_that_is_too_long_is_refused_in_the_words_that_clients_look_for(
    api: Api, path: str, fields: dict[str, Any]
):
    status, answer, _ = call(api, path, ask(path, **fields))
    error = answer["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded"), answer
    assert "maximum context length is 512 tokens" in error["message"]


def test_a_response_that_fails_in_its_stream_ends_with_the_event_that_clients_look_for(api: Api):
    begun, going, failed = events(api, RESPONSES, ask(RESPONSES, input=[{"role": "user", "content": "x" * 600}]))
    assert (begun["type"], going["type"], failed["type"]) == (
        "response.created", "response.in_progress", "response.failed"
    )  # fmt: skip
    assert failed["response"]["status"] == "failed"
    assert failed["response"]["error"]["code"] == "context_length_exceeded"
    assert "maximum context length is 512 tokens" in failed["response"]["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field"),
    [
        (COMPLETIONS, "max_tokens"),
        (CHAT, "max_tokens"),
        (CHAT, "max_completion_tokens"),
        (RESPONSES, "max_output_tokens"),
    ],
)
def test_more_tokens_than_the_model_has_left_mean_all_that_are_left(api: Api, path: str, field: str):
    body = {name: value for name, value in ask(path).items() if name != "max_tokens"} | {field: 500_000}
    body |= {"temperature": 0, "seed": 1} | ({} if path == RESPONSES else {"ignore_eos": True})
    status, answer, _ = call(api, path, body)
    assert status == 200, answer
    if path != RESPONSES:
        assert answer["usage"]["total_tokens"] == api.front_end.info.longest_request
        assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("count", [0, 1])
def test_the_token_itself_is_always_among_the_most_probable_ones(api: Api, count: int):
    body = {"prompt": "oak", "max_tokens": 30, "logprobs": count, "temperature": 2, "seed": 4, "ignore_eos": True}
    about = call(api, COMPLETIONS, body)[1]["choices"][0]["logprobs"]
    for token, logprob, top in zip(about["tokens"], about["token_logprobs"], about["top_logprobs"], strict=True):
        assert top[token] == logprob and next(iter(top)) == token
        assert count <= len(top) <= count + 1
    assert any(len(top) == count + 1 for top in about["top_logprobs"])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_in_every_event_needs_usage_at_all(api: Api, path: str):
    for include, number in ((False, 0), (True, 2)):
        options = {"include_usage": include, "continuous_usage_stats": True}
        found = events(api, path, ask(path, stream_options=options, ignore_eos=True))
        assert sum(event.get("usage") is not None for event in found) >= number
        assert include or not any("usage" in event for event in found)


def test_usage_in_every_event_grows_with_each(api: Api):
    options = {"include_usage": True, "continuous_usage_stats": True}
    body = ask(CHAT, max_tokens=8, temperature=0, ignore_eos=True, stream_options=options)
    counts = [event["usage"]["completion_tokens"] for event in events(api, CHAT, body)]
    assert counts[0] < counts[1] and counts[-2:] == [8, 8]  # the role comes first, and the usage alone last
    assert sorted(set(counts)) == counts[:-1]


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_calls_arguments_stream_as_they_are_made(api: Api, choice: Any):
    body = {"messages": ASK, "tools": [SAW], "tool_choice": choice, "seed": 2, "max_tokens": 300}
    body |= {"parallel_tool_calls": False}
    whole = call(api, CHAT, body)[1]["choices"][0]["message"]["tool_calls"][0]["function"]
    deltas = [event["choices"][0]["delta"] for event in events(api, CHAT, body)]
    assert deltas[0] == {"role": "assistant", "content": None}
    calls = [delta["tool_calls"][0] for delta in deltas if "tool_calls" in delta]
    assert calls[0]["function"]["name"] == "saw" and calls[0]["id"].startswith("call_")
    assert all(each["index"] == 0 for each in calls) and not any("id" in each for each in calls[1:])
    assert "".join(each["function"]["arguments"] for each in calls) == whole["arguments"]
    assert len(calls) > 10


def test_a_call_that_is_cut_is_part_of_a_call_and_never_text(api: Api):
    body = {"messages": ASK, "tools": [SAW], "tool_choice": "required", "seed": 2, "max_tokens": 50}
    [choice] = call(api, CHAT, body)[1]["choices"]
    assert choice["finish_reason"] == "length" and not choice["message"]["content"]
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"board"')
    found = events(api, CHAT, body)
    assert not any(event["choices"][0]["delta"].get("content") for event in found)
    assert found[-1]["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_a_call_that_is_cut_before_its_arguments_is_neither_a_call_nor_text(api: Api, choice: Any):
    body = {"messages": ASK, "tools": [SAW], "tool_choice": choice, "max_tokens": 1}
    [whole] = call(api, CHAT, body)[1]["choices"]
    assert whole["finish_reason"] == "length"
    assert "tool_calls" not in whole["message"] and whole["message"]["content"] is None
    found = [event["choices"][0] for event in events(api, CHAT, body)]
    assert not any(each["delta"].get("tool_calls") or each["delta"].get("content") for each in found)
    assert found[-1]["finish_reason"] == "length"


def test_a_tool_that_no_call_can_be_held_to_is_named(api: Api):
    odd = {"type": "function", "function": {"name": "odd", "parameters": {"properties": {"a": {"type": "plank"}}}}}
    for tools, choice, param, named in (
        ([SAW, odd], {"type": "function", "function": {"name": "odd"}}, "tools.1.function.parameters", "'odd'"),
        ([odd], "required", "tools.0.function.parameters", "'odd'"),
        ([SAW, odd], "required", "tools.1.function.parameters", "'odd'"),
    ):
        status, answer, _ = call(api, CHAT, {"messages": ASK, "tools": tools, "tool_choice": choice})
        error = answer["error"]
        assert (status, error["param"]) == (400, param), answer
        assert named in error["message"] and "Invalid type: plank" in error["message"]


@pytest.mark.parametrize(("is_parallel", "number"), [(None, 2), (False, 1)])
def test_calls_side_by_side_are_told_where_they_are_wanted(api: Api, is_parallel: bool | None, number: int):
    one = '<tool_call>{"name": "saw", "arguments": {"board": "BOARD"}}</tool_call>'
    text = one.replace("BOARD", "oak") + one.replace("BOARD", "ash")
    body = {"messages": ASK, "tools": [SAW], "parallel_tool_calls": is_parallel, "max_tokens": 300}
    body |= {"structured_outputs": {"choice": [text]}}
    message = one_of(call(api, CHAT, body))["message"]
    assert [each["function"]["arguments"] for each in message["tool_calls"]] == [
        '{"board": "oak"}',
        '{"board": "ash"}',
    ][:number]
    told = [event["choices"][0]["delta"].get("tool_calls", ()) for event in events(api, CHAT, body)]
    assert {each["index"] for calls in told for each in calls} == set(range(number))


def test_a_stream_begins_with_the_role_alone(api: Api):
    found = [event["choices"][0] for event in events(api, CHAT, ask(CHAT, ignore_eos=True))]
    assert found[0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in choice["delta"] for choice in found[1:])
    assert [choice["finish_reason"] for choice in found] == [None] * (len(found) - 1) + ["length"]


@pytest.mark.parametrize("tools", [[], [SAW]])
def test_a_stream_with_log_probabilities_begins_with_the_role_and_has_a_text_for_each(api: Api, tools: list[Any]):
    """Many of these tokens are parts of characters, which have no text of their own."""
    body = ask(CHAT, max_tokens=40, seed=3, temperature=2, ignore_eos=True, logprobs=True) | (
        {"tools": tools} if tools else {}
    )
    found = [event["choices"][0] for event in events(api, CHAT, body)]
    assert found[0]["delta"]["role"] == "assistant" and found[0]["logprobs"] is None
    told = found[1:]
    assert all(isinstance(choice["delta"]["content"], str) for choice in told)
    assert any(choice["delta"]["content"] == "" for choice in told)
    rows = [row["token"] for choice in told for row in (choice["logprobs"] or {"content": []})["content"]]
    whole = one_of(call(api, CHAT, body))
    assert rows == [row["token"] for row in whole["logprobs"]["content"]]
    assert "".join(choice["delta"]["content"] for choice in told) == whole["message"]["content"]


@pytest.mark.parametrize("strict", [None, False])
def test_objects_have_the_properties_of_their_schema_and_no_others(api: Api, strict: bool | None):
    assert keys_of_answers(api, strict) <= {"a"}


def test_objects_are_open_where_the_server_is_told_so(api: Api, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(api.front_end, "settings", replace(api.front_end.settings, open_objects=True))
    assert not keys_of_answers(api, None) <= {"a"}


def keys_of_answers(api: Api, strict: bool | None) -> set[str]:
    """Of several objects whose schema names "a" alone; "cut" among them where one did not come to its end."""
    number = {"type": "integer", "minimum": 1, "maximum": 3}
    schema = {"type": "object", "properties": {"a": number}, "required": ["a"]}
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": strict}}
    keys = set()
    for seed in range(8):
        body = {"messages": ASK, "response_format": wanted, "seed": seed, "max_tokens": 60, "temperature": 1.5}
        [choice] = call(api, CHAT, body)[1]["choices"]
        if choice["finish_reason"] == "stop":
            keys |= set(json.loads(choice["message"]["content"]))
        else:
            keys.add("cut")
    return keys


# -- responses -------------------------------------------------------------------------------------------------------


def test_a_response_tells_log_probabilities_when_they_are_included(client: openai.OpenAI):
    asked: Any = {"model": "talker", "input": "oak", "max_output_tokens": 6, "top_logprobs": 2, "temperature": 0}
    asked |= {"include": ["message.output_text.logprobs"]}
    answer = client.responses.create(**asked)
    rows = answer.output[0].content[0].logprobs  # type: ignore[union-attr]
    assert rows and all(len(row.top_logprobs) == 2 for row in rows)
    coming: Any = client.responses.create(**asked, stream=True)
    told = [event for event in coming if event.type.endswith("text.delta")]
    streamed = [row.token for event in told for row in event.logprobs]
    assert streamed == [row.token for row in rows][: len(streamed)] and streamed


@pytest.mark.parametrize(
    ("form", "said"),
    [
        ({"type": "json_object"}, None),
        ({"type": "json_object", "schema": {"type": "object", "properties": {"a": {"const": 1}}, "required": ["a"]}},
         '{"a":1}'),
        ({"type": "json_schema", "schema": {"const": "oak"}}, '"oak"'),
        ({"type": "text"}, None),
    ],
)  # fmt: skip
def test_a_response_takes_the_forms_that_chat_takes(api: Api, form: dict[str, Any], said: str | None):
    body = {"input": "oak", "max_output_tokens": 20, "text": {"format": form}}
    status, answer, _ = call(api, RESPONSES, body)
    assert status == 200, answer
    assert answer["text"]["format"] == form
    assert said is None or answer["output"][0]["content"][0]["text"] == said


def test_a_response_may_be_given_the_end_of_what_is_too_long(api: Api):
    long = {"input": "oak " * 600, "max_output_tokens": 5}
    assert call(api, RESPONSES, long | {"truncation": "disabled"})[0] == 400
    status, answer, _ = call(api, RESPONSES, long | {"truncation": "auto"})
    assert status == 200, answer
    assert answer["truncation"] == "auto"
    assert answer["usage"]["input_tokens"] == api.front_end.info.longest_request - 5


def test_thoughts_that_come_back_are_the_next_turns(api: Api):
    turns = [
        {"role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "Greet."}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "ho"}]},
        {"role": "user", "content": "wood?"},
    ]
    status, answer, _ = call(api, RESPONSES, {"input": turns, "max_output_tokens": 2})
    assert status == 200, answer


def test_thoughts_that_no_words_follow_are_a_turn_of_their_own():
    def thought(text: str) -> dict[str, Any]:
        return {"type": "reasoning", "summary": [{"type": "summary_text", "text": text}]}

    turns = [{"role": "user", "content": "hi"}, thought("One."), {"role": "user", "content": "wood?"}, thought("Two.")]
    body = ResponsesRequest.model_validate({"input": turns})
    told = [(each.role, each.content, each.reasoning_content) for each in _as_chat(body).messages]
    assert told == [
        ("user", "hi", None),
        ("assistant", None, "One."),
        ("user", "wood?", None),
        ("assistant", None, "Two."),
    ]


def test_thoughts_without_a_message_are_refused(api: Api):
    thought = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Greet."}]}
    status, answer, _ = call(api, RESPONSES, {"input": [thought], "max_output_tokens": 2})
    assert (status, answer["error"]["param"]) == (400, "input"), answer


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, {"prompt": []}),
        (COMPLETIONS, {"prompt": [[]]}),
        (CHAT, {"messages": []}),
        (RESPONSES, {"input": []}),
    ],
)
def test_an_empty_array_is_called_one(api: Api, path: str, fields: dict[str, Any]):
    status, answer, _ = call(api, path, ask(path) | fields)
    assert (status, answer["error"]["code"]) == (400, "empty_array"), answer
    assert "empty array. Expected an array with minimum length 1" in answer["error"]["message"]


def test_functions_of_a_namespace_are_called_by_it(client: openai.OpenAI):
    function: Any = SAW["function"]
    space: Any = {"type": "namespace", "name": "shop", "description": "d", "tools": [{"type": "function", **function}]}
    asked: Any = {"model": "talker", "input": "saw!", "tools": [space], "max_output_tokens": 300, "seed": 2}
    asked |= {"tool_choice": {"type": "function", "name": "saw"}}
    extra = {"seed": asked.pop("seed")}
    answer = client.responses.create(**asked, extra_body=extra)
    [made] = answer.output
    assert (made.name, made.namespace) == ("saw", "shop")  # type: ignore[union-attr]
    assert answer.tools[0].tools[0].name == "saw"  # type: ignore[union-attr]
    deltas = [
        event.delta
        for event in client.responses.create(**asked, stream=True, extra_body=extra)
        if event.type == "response.function_call_arguments.delta"
    ]
    assert "".join(deltas) == made.arguments and len(deltas) > 10  # type: ignore[union-attr]
    back = {"type": "function_call_output", "call_id": made.call_id, "output": "done"}  # type: ignore[union-attr]
    turns: Any = [{"role": "user", "content": "saw!"}, made.model_dump(exclude_none=True), back]
    again = client.responses.create(model="talker", input=turns, tools=[space], max_output_tokens=3)
    assert again.output


@pytest.mark.parametrize(
    ("choice", "meant"),
    [("saw", "saw"), ("shop.saw", "shop.saw"), ("shop__saw", "shop.saw"), ("plane", "shop.plane"), ("x", "x")],
)
def test_a_choice_means_the_function_that_has_just_this_name(choice: str, meant: str):
    body = {"input": "x", "tools": tools_of_shops("shop"), "tool_choice": {"type": "function", "name": choice}}
    chosen = _as_chat(ResponsesRequest.model_validate(body)).tool_choice
    assert chosen.function.name == meant  # type: ignore[union-attr]


def test_a_choice_that_means_several_functions_is_refused(api: Api):
    body = {"input": "x", "tools": tools_of_shops("shop", "yard"), "tool_choice": {"type": "function", "name": "plane"}}
    status, answer, _ = call(api, RESPONSES, body)
    assert (status, answer["error"]["param"]) == (400, "tool_choice"), answer
    assert "give one of shop.plane, yard.plane" in answer["error"]["message"]


def tools_of_shops(*spaces: str) -> list[dict[str, Any]]:
    """Each has a saw and a plane, and there is a saw without any."""
    own = [{"type": "function", "name": name, "parameters": None} for name in ("saw", "plane")]
    return [*({"type": "namespace", "name": space, "tools": own} for space in spaces), own[0]]


# -- the server ------------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id_that_is_drawn_or_given_back(api: Api):
    for path, body in ((COMPLETIONS, ask(COMPLETIONS)), ("/health", None), ("/nowhere", None)):
        first, second = (call(api, path, body)[2]["X-Request-Id"] for _ in range(2))
        assert first and second and first != second
        assert call(api, path, body, **{"X-Request-Id": "mine"})[2]["X-Request-Id"] == "mine"
    status, answer, headers = call(api, CHAT, ask(CHAT, request_id="of-the-body"))
    assert (status, answer["id"], headers["X-Request-Id"]) == (200, "chatcmpl-of-the-body", "of-the-body")


def test_head_is_get_without_a_body(api: Api):
    address = urllib.parse.urlsplit(api.url)
    connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=30)
    for path in ("/health", "/v1/models", "/metrics", "/health"):
        connection.request("HEAD", path)
        answer = connection.getresponse()
        assert (answer.status, answer.read()) == (200, b""), path
    connection.close()


def test_the_front_page_leads_to_the_console(api: Api):
    status, page, _ = call(api, "/")
    assert status == 200 and "<html" in page


def test_the_version_is_told(api: Api):
    from intarsia import __version__

    assert call(api, "/version")[1] == {"version": __version__}


def test_tokenizing_messages_may_go_on_with_the_last_one(api: Api):
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "oak is"}]
    found = call(api, "/tokenize", {"messages": turns, "continue_final_message": True})
    assert found[0] == 200, found[1]
    assert call(api, "/detokenize", {"tokens": found[1]["tokens"]})[1]["prompt"].endswith("oak is")


def test_tokens_of_messages_have_special_ones_as_the_request_says(api: Api):
    turns = [{"role": "user", "content": "hi"}]
    for fields in ({}, {"add_special_tokens": False}, {"add_special_tokens": True}):
        status, found, _ = call(api, "/tokenize", {"messages": turns, **fields})
        assert status == 200, found
        assert found["count"] == len(found["tokens"]) and found["token_strs"] is None


def test_tokens_of_a_step_count_the_prompt_and_all_that_was_drawn(api: Api):
    def total() -> float:
        text = call(api, "/metrics")[1]
        return float(next(line for line in text.splitlines() if "iteration_tokens_total_sum" in line).split()[-1])

    before = total()
    body = {"prompt": [9, 8, 7, 6, 5], "max_tokens": 10, "ignore_eos": True}
    assert call(api, COMPLETIONS, body)[0] == 200
    assert total() - before == 15


# -- what other servers have, too ------------------------------------------------------------------------------------


def one_of(answer: tuple[int, Any, Any]) -> Any:
    status, body, _ = answer
    assert status == 200, body
    return body["choices"][0]


def test_words_that_must_not_come_do_not_come(api: Api):
    body = ask(COMPLETIONS, max_tokens=12, temperature=0, return_token_ids=True)
    ids = one_of(call(api, COMPLETIONS, body))["token_ids"]
    word = next(text for token in ids if (text := api.tokenizer.text_of(token)).strip() and "�" not in text)
    [banned] = api.tokenizer.encode(word, add_special_tokens=False)
    assert banned in ids
    other = one_of(call(api, COMPLETIONS, body | {"bad_words": [word]}))["token_ids"]
    assert banned not in other and len(other) == len(ids)


def test_a_word_of_several_tokens_is_left_unfinished(api: Api):
    body = ask(COMPLETIONS, max_tokens=12, temperature=0, return_token_ids=True)
    ids = one_of(call(api, COMPLETIONS, body))["token_ids"]
    pair = next(
        text
        for first, second in itertools.pairwise(ids)
        if api.tokenizer.encode(text := api.tokenizer.decode([first, second]), add_special_tokens=False)
        == [first, second]
    )
    other = one_of(call(api, COMPLETIONS, body | {"bad_words": [pair]}))["token_ids"]
    wanted = api.tokenizer.encode(pair, add_special_tokens=False)
    assert wanted not in [list(each) for each in itertools.pairwise(other)]
    assert other[: ids.index(wanted[1])] == ids[: ids.index(wanted[1])]  # the first of them is free


def test_all_log_probabilities_are_told_where_they_are_few_enough(api: Api):
    body = ask(COMPLETIONS, logprobs=-1, prompt_logprobs=-1, return_tokens_as_token_ids=True)
    choice = one_of(call(api, COMPLETIONS, body))
    for row in choice["logprobs"]["top_logprobs"]:
        assert set(row) == {f"token_id:{token}" for token in range(320)}
    assert len(choice["prompt_logprobs"][1]) == 320
    assert all(each["rank"] for each in choice["prompt_logprobs"][1].values())
    chat = one_of(call(api, CHAT, ask(CHAT, logprobs=True, top_logprobs=-1)))
    assert len(chat["logprobs"]["content"][0]["top_logprobs"]) == 320
    status, refused, _ = call(api, COMPLETIONS, ask(COMPLETIONS, logprobs=-1, n=16, max_tokens=400))
    assert status == 400 and refused["error"]["param"] == "logprobs" and "3125 tokens" in refused["error"]["message"]
    many = ask(CHAT, logprobs=True, top_logprobs=-1, n=16, max_tokens=400)
    assert call(api, CHAT, many)[1]["error"]["param"] == "top_logprobs"


def test_a_tokens_rank_counts_the_more_probable_ones(api: Api):
    body = ask(COMPLETIONS, prompt="oak and ash", prompt_logprobs=-1)
    for row in one_of(call(api, COMPLETIONS, body))["prompt_logprobs"][1:]:
        own = next(iter(row.values()))  # the token itself comes first
        assert own["rank"] == 1 + sum(each["logprob"] > own["logprob"] for each in row.values())


@pytest.mark.parametrize(("asked", "kept"), [({}, slice(-3, None)), ({"truncation_side": "right"}, slice(3))])
def test_a_prompt_may_be_cut_to_its_end_or_its_beginning(api: Api, asked: dict[str, Any], kept: slice):
    prompt = api.tokenizer.encode("oak, ash and walnut")
    body = ask(COMPLETIONS, prompt=prompt, return_token_ids=True, truncate_prompt_tokens=3)
    assert one_of(call(api, COMPLETIONS, body | asked))["prompt_token_ids"] == prompt[kept]


def test_a_prompt_may_be_cut_to_what_leaves_room_for_the_answer(api: Api):
    longest = api.front_end.info.longest_request
    body = ask(COMPLETIONS, prompt=[7] * (longest + 50), max_tokens=5, return_token_ids=True)
    assert call(api, COMPLETIONS, body)[0] == 400
    assert len(one_of(call(api, COMPLETIONS, body | {"truncate_prompt_tokens": -1}))["prompt_token_ids"]) == longest - 5


def test_a_stream_tells_the_ids_of_the_prompt_once_and_those_of_the_answer(api: Api):
    body = ask(CHAT, max_tokens=9, temperature=0, ignore_eos=True, return_token_ids=True, n=2)
    whole = call(api, CHAT, body)[1]
    found = events(api, CHAT, body)
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in found[1:])
    for choice in whole["choices"]:
        own = [each for event in found for each in event["choices"] if each["index"] == choice["index"]]
        assert [token for each in own for token in each.get("token_ids", ())] == choice["token_ids"]


@pytest.mark.parametrize(
    ("path", "fields", "prompts"),
    [
        (COMPLETIONS, {"prompt": "oak " * 50_000}, 1),
        (COMPLETIONS, {"prompt": ["oak " * 50_000, "ash"]}, 2),
        (CHAT, {"messages": [{"role": "user", "content": "oak " * 50_000}]}, 1),
    ],
)
def test_a_prompt_may_be_cut_however_long_it_is(api: Api, path: str, fields: dict[str, Any], prompts: int):
    status, answer, _ = call(api, path, ask(path) | fields | {"truncate_prompt_tokens": 3})
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == 3 * prompts


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES])
def test_usage_says_of_each_token_that_was_not_found_why(api: Api, path: str):
    details: dict[str, Any] = {}
    said = "why is the oak older than the ash? " * 3
    prompt = {COMPLETIONS: {"prompt": said}, RESPONSES: {"input": said}}
    for _ in range(2):
        body = ask(path) | prompt.get(path, {"messages": [{"role": "user", "content": said}]})
        status, answer, _ = call(api, path, body)
        assert status == 200, answer
        usage = answer["usage"]
        details = usage.get("prompt_tokens_details") or usage["input_tokens_details"]
        counted = details["cached_tokens"] + sum(each["tokens"] for each in details["not_cached"])
        assert counted == usage.get("prompt_tokens", usage.get("input_tokens"))
    assert details["cached_tokens"] > 0 and {each["cause"] for each in details["not_cached"]} <= {"new", "last_token"}


def test_a_second_conversation_finds_the_instructions_that_it_shares(api: Api):
    system = {"role": "system", "content": "you know all about the oak and the ash, and tell it in few words. " * 3}
    found = []
    for words in ("how old is the oldest one?", "where does it stand?"):
        status, answer, _ = call(api, CHAT, ask(CHAT, messages=[system, {"role": "user", "content": words}]))
        assert status == 200, answer
        found.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    before = len(api.tokenizer.chat([system, {"role": "user", "content": ""}], add_generation_prompt=False))
    assert found[0] < 16 and before - found[1] < 2 * 16, (found, before)


def test_an_answer_that_goes_on_with_a_message_may_begin_with_it(api: Api):
    body = {
        "messages": [*ASK, {"role": "assistant", "content": "Oak is"}],
        "max_tokens": 4,
        "temperature": 0,
        "continue_final_message": True,
        "add_generation_prompt": False,
    }
    alone = one_of(call(api, CHAT, body))["message"]["content"]
    assert one_of(call(api, CHAT, body | {"echo": True}))["message"]["content"] == f"Oak is{alone}"
    parts = [each["choices"][0]["delta"].get("content", "") for each in events(api, CHAT, body | {"echo": True})]
    assert "".join(parts) == f"Oak is{alone}"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"tool_choice": "required"},
            "Invalid value for 'tool_choice': 'tool_choice' is only allowed when 'tools' are specified.",
        ),
        (
            {"stream_options": {"include_usage": True}},
            "The 'stream_options' parameter is only allowed when 'stream' is enabled.",
        ),
        (
            {"temperature": 3},
            "Invalid 'temperature': decimal above maximum value. Expected a value <= 2, but got 3 instead.",
        ),
        (
            {"max_tokens": 0},
            "Invalid 'max_tokens': integer below minimum value. Expected a value >= 1, but got 0 instead.",
        ),
        ({"verbosity": "x"}, "Invalid value: 'x'. Supported values are: 'low', 'medium' or 'high'."),
    ],
)
def test_a_refusal_is_in_openais_words_where_it_has_some(api: Api, fields: dict[str, Any], message: str):
    status, answer, _ = call(api, CHAT, ask(CHAT) | fields)
    assert (status, answer["error"]["message"]) == (400, message)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_answers_say_by_which_system_they_were_made(api: Api, path: str):
    _, whole, _ = call(api, path, ask(path))
    assert whole["system_fingerprint"].startswith("fp_")
    assert {each["system_fingerprint"] for each in events(api, path, ask(path))} == {whole["system_fingerprint"]}


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"max_token": 3}, "unknown_parameter"),
        ({"prompt": None}, "invalid_type"),
        ({"temperature": "hot"}, "invalid_type"),
        ({"temperature": 9}, "decimal_above_max_value"),
        ({"min_p": -0.5}, "decimal_below_min_value"),
        ({"max_tokens": -1}, "integer_below_min_value"),
        ({"logprobs": 21}, "integer_above_max_value"),
        ({"truncation_side": "top"}, "invalid_value"),
        ({"truncate_prompt_tokens": 0}, "invalid_value"),
        ({"model": "gpt-9"}, "model_not_found"),
        ({"prompt": [1] * 600}, "context_length_exceeded"),
        ({"prompt": []}, "empty_array"),
    ],
)
def test_a_refusal_has_the_one_word_that_openai_has_for_it(api: Api, fields: dict[str, Any], code: str):
    _, answer, _ = call(api, COMPLETIONS, ask(COMPLETIONS, **fields))
    assert answer["error"]["code"] == code, answer
    _, answer, _ = call(api, CHAT, {"max_tokens": 3})
    assert answer["error"]["code"] == "missing_required_parameter"
