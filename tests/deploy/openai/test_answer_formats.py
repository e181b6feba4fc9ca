"""Answers of models whose format is known: over chat, streamed and whole."""

import asyncio
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from intarsia.deploy.front_end.answer_format import format_notes
from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.openai.chat import ChatCall
from intarsia.deploy.openai.protocol import ChatRequest
from intarsia.errors import InvalidSetting
from intarsia.proto.reply import Delta
from intarsia.tests.deploy.scripted import ScriptedEngine

HERMES = '{{ messages[0].content }}<think>\n{# </think> <tool_call> "arguments" #}'
HARMONY = "{{ messages[0].content }}<|start|>assistant{# <|channel|> <|message|> #}"
KIMI = "{{ messages[0].content }}<think>{# <|tool_call_begin|> <|tool_call_argument_begin|> #}"
MISTRAL = "{{ messages[0].content }}{# [TOOL_CALLS] #}"
PLAIN = "{{ messages[0].content }}"

SPECIAL = (
    "<think>", "</think>", "<tool_call>", "</tool_call>", "<|start|>", "<|channel|>", "<|message|>", "<|end|>",
    "<|call|>", "<|return|>", "<|constrain|>", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>",
    "<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>", "[TOOL_CALLS]", "[ARGS]",
)  # fmt: skip

SAW = {"name": "saw", "parameters": {"type": "object", "properties": {"cm": {"type": "integer"}}}}
CALL = '<tool_call>\n{"name": "saw", "arguments": {"cm": 3}}\n</tool_call>'

Make = Callable[..., tuple[FrontEnd, ScriptedEngine]]


@pytest.fixture
def make(byte_backend: Backend, tmp_path: Path) -> Make:
    """A front end whose engine answers with a text, a token at a time."""

    def made(template: str, answer: str, end: str = "stop", **settings: Any) -> tuple[FrontEnd, ScriptedEngine]:
        backend = Backend.from_str(byte_backend.to_str())
        backend.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
        backend.save(str(tmp_path / "tokenizer.json"))
        about = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": template}
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(about))
        tokenizer = Tokenizer.load(tmp_path)
        assert tokenizer is not None
        ids = tokenizer.encode(answer, add_special_tokens=False)
        script = [Delta((token,)) for token in ids[:-1]] + [Delta((ids[-1],), finish_reason=end)]
        engine: Any = ScriptedEngine(script)
        return FrontEnd(engine, tokenizer, FrontEndSettings(**settings)), engine

    return made


def ask(front_end: FrontEnd, **fields: Any) -> dict[str, Any]:
    """The whole answer, which is the same when it is streamed."""
    given = {"messages": [{"role": "user", "content": "hi"}], "tools": [{"type": "function", "function": SAW}]}
    body = {name: value for name, value in (given | fields).items() if value is not None}

    async def asked() -> tuple[dict[str, Any], list[Any]]:
        whole = ChatCall(front_end, ChatRequest.model_validate(body), "1")
        await whole.prepare()
        answer = (await whole.answer()).model_dump()
        options = {"stream": True, "stream_options": {"include_usage": True}}
        stream = ChatCall(front_end, ChatRequest.model_validate(body | options), "2")
        await stream.prepare()
        return answer, [event async for event in stream.events()]

    answer, events = asyncio.run(asked())
    choice, joined = answer["choices"][0], _joined(events[:-1])
    message = choice["message"]
    assert joined["reasoning_content"] == joined["reasoning"] == (message["reasoning_content"] or "")
    assert message["reasoning"] == message["reasoning_content"]
    assert joined["content"] == (message["content"] or "")
    assert joined["calls"] == [tuple(call["function"].values()) for call in message["tool_calls"] or ()]
    assert joined["finish_reason"] == choice["finish_reason"]
    assert joined["usage"]["completion_tokens_details"] == answer["usage"]["completion_tokens_details"]
    return message | {"finish_reason": choice["finish_reason"], "usage": answer["usage"]}


def _joined(events: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"reasoning_content": "", "reasoning": "", "content": "", "finish_reason": None}
    calls: dict[int, list[str]] = {}
    for event in events:
        for choice in event["choices"]:
            for name in ("reasoning_content", "reasoning", "content"):
                found[name] += choice["delta"].get(name) or ""
            for piece in choice["delta"].get("tool_calls") or ():
                function = piece["function"]
                calls.setdefault(piece["index"], [function.get("name", ""), ""])[1] += function["arguments"]
            found["finish_reason"] = choice["finish_reason"] or found["finish_reason"]
        found["usage"] = event.get("usage") or found.get("usage")
    return found | {"calls": [tuple(call) for call in calls.values()]}


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    called = [call["function"] for call in message["tool_calls"] or ()]
    return [(call["name"], json.loads(call["arguments"])) for call in called]


def test_thoughts_words_and_calls_are_told_apart(make: Make):
    front_end, _ = make(HERMES, f"Three.\n</think>\n\nI saw.\n{CALL}")
    message = ask(front_end)
    assert (message["reasoning_content"], message["content"]) == ("Three.", "I saw.")
    assert calls_of(message) == [("saw", {"cm": 3})]
    assert message["finish_reason"] == "tool_calls"
    assert message["usage"]["completion_tokens_details"]["reasoning_tokens"] == len("Three.")


def test_messages_on_channels_are_found_by_their_special_tokens(make: Make):
    thought = "<|channel|>analysis<|message|>Look at < |start|>.<|end|>"
    head = "<|start|>assistant<|channel|>commentary to=functions.saw "
    front_end, engine = make(HARMONY, thought + head + '<|constrain|>json<|message|>{"cm": 3}<|call|>')
    message = ask(front_end)
    assert (message["reasoning_content"], message["content"]) == ("Look at < |start|>.", None)
    assert calls_of(message) == [("saw", {"cm": 3})]
    # The token that ends a call ends the answer, whatever the model's own end tokens are.
    wanted = front_end.tokenizer
    assert wanted is not None
    ends = wanted.special_tokens_of(["<|call|>", "<|return|>"])
    assert {*engine.asked[0][1].stop_token_ids} == {*ends}


def test_without_tools_a_call_is_text_and_thoughts_are_thoughts(make: Make):
    front_end, _ = make(HERMES, f"Three.</think>{CALL}")
    for fields in ({"tools": None}, {"tool_choice": "none"}):
        message = ask(front_end, **fields)
        assert (message["reasoning_content"], message["content"]) == ("Three.", CALL)
        assert message["tool_calls"] is None


def test_an_answer_cut_within_a_call_is_that_far_of_a_call(make: Make):
    front_end, _ = make(HERMES, '</think><tool_call>{"name": "saw", "arguments": {"wood": "oa', "length")
    message = ask(front_end)
    assert message["tool_calls"][0]["function"] == {"name": "saw", "arguments": '{"wood": "oa'}
    assert message["finish_reason"] == "length"


def test_a_form_that_the_request_gives_has_no_thoughts(make: Make):
    front_end, _ = make(HERMES, '{"cm": 3}')
    assert ask(front_end, response_format={"type": "json_object"}, tools=None)["content"] == '{"cm": 3}'


def test_a_required_call_is_held_to_the_format_after_its_thoughts(make: Make):
    front_end, engine = make(HERMES, f"Three.</think>{CALL}")
    for choice in ("required", {"type": "function", "function": {"name": "saw"}}):
        message = ask(front_end, tool_choice=choice)
        assert (message["reasoning_content"], calls_of(message)) == ("Three.", [("saw", {"cm": 3})])
        grammar = engine.asked[-1][1].lark or ""
        assert '"type": "integer"' in grammar
        assert grammar.startswith("start: TEXT <[")
    # A tool that is strict is held to its schema where it is called, and need not be.
    ask(front_end, tools=[{"type": "function", "function": SAW | {"strict": True}}])
    assert (engine.asked[-1][1].lark or "").splitlines()[0].endswith("calls?")
    ask(front_end)
    assert engine.asked[-1][1].form is None


def test_a_required_call_is_json_where_the_format_is_unknown_or_cannot_hold_it(make: Make):
    for template, parser in ((PLAIN, None), (PLAIN, "qwen3_coder")):
        front_end, engine = make(template, '[{"name":"saw","arguments":{"wood":"oak"}}]', tool_call_parser=parser)
        saw = {"type": "object", "properties": {"wood": {"type": "string", "pattern": "^oak$"}}}
        tool = {"type": "function", "function": {"name": "saw", "parameters": saw}}
        assert calls_of(ask(front_end, tools=[tool], tool_choice="required")) == [("saw", {"wood": "oak"})]
        assert engine.asked[-1][1].json_schema is not None


def test_ids_of_calls_are_those_that_the_template_takes_back(make: Make):
    call = '<|tool_calls_section_begin|><|tool_call_begin|>functions.saw:4<|tool_call_argument_begin|>{"cm": 3}'
    front_end, _ = make(KIMI, f"</think>{call}<|tool_call_end|><|tool_calls_section_end|>")
    assert ask(front_end)["tool_calls"][0]["id"] == "functions.saw:4"
    front_end, _ = make(MISTRAL, '[TOOL_CALLS]saw[ARGS]{"cm": 3}')
    own_id = ask(front_end)["tool_calls"][0]["id"]
    assert len(own_id) == 9
    assert own_id.isalnum()


def test_an_unknown_format_is_said_to_be_unknown(make: Make):
    front_end, _ = make(PLAIN, '[TOOL_CALLS][{"name": "saw", "arguments": {"cm": 3}}]')
    [note] = format_notes(front_end.answer_format, front_end.tokenizer)
    assert "unknown" in note
    assert "--reasoning-parser" in note
    message = ask(front_end)  # its calls are guessed all the same
    assert calls_of(message) == [("saw", {"cm": 3})]


def test_a_format_by_name_is_in_place_of_the_templates(make: Make):
    front_end, _ = make(PLAIN, f"<think>Three.</think>{CALL}", tool_call_parser="qwen3_xml", reasoning_parser="qwen3")
    [note] = format_notes(front_end.answer_format, front_end.tokenizer)
    assert note == "answers: thoughts <think>, calls qwen3_coder (as asked)"
    message = ask(front_end)
    assert message["reasoning_content"] == "Three."
    assert calls_of(message) == [("saw", {"cm": 3})]
    front_end, _ = make(HERMES, f"Three.</think>{CALL}", reasoning_parser="none")
    assert (ask(front_end)["content"], ask(front_end)["reasoning_content"]) == ("Three.", None)


def test_an_unknown_name_is_refused_with_those_that_are_known():
    with pytest.raises(InvalidSetting, match="hermes") as refused:
        FrontEndSettings(tool_call_parser="herpes")
    assert refused.value.field == "tool_call_parser"
