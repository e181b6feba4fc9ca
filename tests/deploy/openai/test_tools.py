"""Calls of tools in what a model says."""

import json

import pytest
from llguidance import LLMatcher, LLTokenizer

from intarsia.deploy.openai.protocol import ChatRequest
from intarsia.deploy.openai.tools import CallReader, calls_of, tool_use
from intarsia.errors import InvalidRequest
from intarsia.workers.grammar.sandbox import source_of

TOOLS = [
    {"type": "function", "function": {"name": "saw", "parameters": {"type": "object", "properties": {"cm": {}}}}},
    {"type": "function", "function": {"name": "glue"}},
]


def request(**fields) -> ChatRequest:
    return ChatRequest.model_validate({"messages": [{"role": "user", "content": "hi"}], "tools": TOOLS} | fields)


def read(text: str, size: int, **fields) -> tuple[str, list[tuple[str, object]]]:
    """What is said and what is called, when the text comes in pieces of `size` characters."""
    use = tool_use(request(**fields))
    assert use is not None
    reader = CallReader(use)
    came = [*(reader.push(text[n : n + size]) for n in range(0, len(text), size)), reader.finish()]
    calls = calls_of(piece for _, pieces in came for piece in pieces)
    assert reader.has_called is bool(calls)
    said = "".join(said for said, _ in came)
    return said, [(call.function.name, json.loads(call.function.arguments)) for call in calls]


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "said", "called"),
    [
        ("just words", "just words", []),
        ("a < b and [1, 2]", "a < b and [1, 2]", []),
        ("[1] is a footnote", "[1] is a footnote", []),
        ('<tool_call>\n{"name": "saw", "arguments": {"cm": 3}}\n</tool_call>', "", [("saw", {"cm": 3})]),
        (
            'I will. <tool_call>{"name": "saw", "arguments": {}}</tool_call><tool_call>{"name": "glue"}</tool_call>',
            "I will. ",
            [("saw", {}), ("glue", {})],
        ),
        ('[TOOL_CALLS][{"name": "saw", "arguments": {"cm": 1}}]', "", [("saw", {"cm": 1})]),
        ('[{"name": "saw", "arguments": {"cm": 1}}]', "", [("saw", {"cm": 1})]),
        ('{"name": "saw", "parameters": {"cm": 9}}', "", [("saw", {"cm": 9})]),
        ('<|python_tag|>{"name": "glue", "parameters": {}}', "", [("glue", {})]),
        ('{"name": "drill", "parameters": {}}', '{"name": "drill", "parameters": {}}', []),
        ('{"answer": 42}', '{"answer": 42}', []),
        ("<tool_call>broken", "<tool_call>broken", []),
        ("", "", []),
        ("ends with <tool", "ends with <tool", []),
        ('<tool_call>{ so: {"name": "glue", "arguments": {"cm": "}"}}', "", [("glue", {"cm": "}"})]),
        ('{"arguments": {"cm": "{\\""}, "name": "saw"}', "", [("saw", {"cm": '{"'})]),
    ],
)
def test_words_and_calls_are_told_apart_however_they_come(text: str, said: str, called: list, size: int):
    assert read(text, size) == (said, called)


@pytest.mark.parametrize("text", ["{" * 100_000, '{"a": {}, ' * 50_000, '{"a": ' * 3_000 + "1" + "}" * 3_000])
def test_objects_that_are_no_calls_are_words_however_many_and_deep(text: str):
    assert read(text, 7) == (text, [])


def test_a_required_call_is_an_array_of_calls_by_schema():
    use = tool_use(request(tool_choice="required", parallel_tool_calls=False))
    assert use is not None and use.form is not None
    schema = json.loads(use.form["json_schema"])
    assert schema["maxItems"] == 1
    assert [call["properties"]["name"]["const"] for call in schema["items"]["anyOf"]] == ["saw", "glue"]
    assert read('[{"name": "saw", "arguments": {"cm": 2}}]', 4, tool_choice="required") == ("", [("saw", {"cm": 2})])


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("", []),
        ("[", []),
        ('[{"name":"sa', []),
        ('[{"name":"saw"', [("saw", "")]),
        ('[{"name":"saw","arguments":', [("saw", "")]),
        ('[{"name":"saw","arguments":{"cm":"1\\"', [("saw", '{"cm":"1\\"')]),
        ('[{"name":"saw","arguments":{"cm":{"name":"glue","arguments":{}},', [
            ("saw", '{"cm":{"name":"glue","arguments":{}},')
        ]),
        ('[{"name":"glue","arguments":{}},{"name":"saw","arguments":{"c', [("glue", "{}"), ("saw", '{"c')]),
        ('[{"name":"glue","arguments":{}},', [("glue", "{}")]),
    ],
)  # fmt: skip
def test_a_required_call_that_is_cut_is_a_call_with_cut_arguments(text: str, calls: list):
    use = tool_use(request(tool_choice="required"))
    assert use is not None
    reader = CallReader(use)
    came = [*map(reader.push, text), reader.finish()]
    assert not any(said for said, _ in came)
    called = calls_of(piece for _, pieces in came for piece in pieces)
    assert [(call.function.name, call.function.arguments) for call in called] == calls


@pytest.mark.parametrize(
    ("text", "fields", "at_least"),
    [
        ('[{"name":"saw","arguments":{"cm":"a long text, \\"}{["}}]', {"tool_choice": "required"}, 20),
        ('<tool_call>{"name": "saw", "arguments": {"cm": [1, 2, {"a": 3}]}}</tool_call>', {}, 15),
        ('{"cm": "a long text"}', {"tool_choice": {"type": "function", "function": {"name": "saw"}}}, 15),
    ],
)
def test_arguments_are_told_as_they_come(text: str, fields: dict, at_least: int):
    use = tool_use(request(**fields))
    assert use is not None
    reader = CallReader(use)
    pieces = [piece for char in text for piece in reader.push(char)[1]]
    assert len(pieces) >= at_least
    assert [piece.name for piece in pieces] == ["saw"] + [None] * (len(pieces) - 1)
    assert len({piece.id for piece in pieces}) == 1
    assert reader.finish() == ("", [])
    assert json.loads(calls_of(pieces)[0].function.arguments)["cm"]


def accepts(form: dict, text: str) -> bool:
    """Whether an answer of this form can be this text, by what holds answers to their form."""
    matcher = LLMatcher(LLTokenizer("byte"), source_of("json_schema", form["json_schema"]), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    return matcher.try_consume_tokens(list(text.encode())) == len(text) and matcher.is_accepting()


PLANK = {
    "type": "object",
    "properties": {"wood": {"$ref": "#/$defs/Wood"}, "then": {"$ref": "#"}},
    "required": ["wood"],
    "$defs": {"Wood": {"enum": ["oak", "#/$defs/Wood"]}},
}
BOARD = {
    "type": "object",
    "properties": {"$ref": {"$ref": "#/definitions/Wood"}},
    "required": ["$ref"],
    "definitions": {"Wood": {"enum": ["ash"]}},
}


@pytest.mark.parametrize(
    ("call", "is_one"),
    [
        ('[{"name":"plank","arguments":{"wood":"oak"}}]', True),
        ('[{"name":"plank","arguments":{"wood":"oak","then":{"wood":"#/$defs/Wood"}}}]', True),
        ('[{"name":"plank","arguments":{"wood":"ash"}}]', False),
        ('[{"name":"plank","arguments":{"wood":"oak","then":[]}}]', False),
        ('[{"name":"board","arguments":{"$ref":"ash"}},{"name":"plank","arguments":{"wood":"oak"}}]', True),
        ('[{"name":"board","arguments":{"$ref":"oak"}}]', False),
    ],
)
def test_in_a_required_call_each_tools_references_mean_its_own_schema(call: str, is_one: bool):
    tools = [
        {"type": "function", "function": {"name": name, "parameters": parameters}}
        for name, parameters in (("plank", PLANK), ("board", BOARD))
    ]
    use = tool_use(request(tools=tools, tool_choice="required"))
    assert use is not None and use.form is not None
    assert accepts(use.form, call) is is_one


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "nail"}}])
def test_a_tool_that_refers_to_what_it_does_not_have_is_named(choice: object):
    lost = {"type": "object", "properties": {"mm": {"$ref": "#/$defs/Size"}}}
    tools = [*TOOLS, {"type": "function", "function": {"name": "nail", "parameters": lost}}]
    with pytest.raises(InvalidRequest, match=r"the tool 'nail' refers to '#/\$defs/Size'") as refused:
        tool_use(request(tools=tools, tool_choice=choice))
    assert refused.value.field == "tools.2.function.parameters"


def test_a_named_call_is_its_arguments():
    named = {"type": "function", "function": {"name": "saw"}}
    use = tool_use(request(tool_choice=named))
    assert use is not None and use.form is not None
    # A function has no parameters beyond its own.
    assert json.loads(use.form["json_schema"]) == TOOLS[0]["function"]["parameters"] | {"additionalProperties": False}
    assert read(' {"cm": 5}', 3, tool_choice=named) == ("", [("saw", {"cm": 5})])


@pytest.mark.parametrize("size", [1, 9])
@pytest.mark.parametrize(
    ("text", "called"),
    [
        ("", []),
        ("{", []),
        (' {\n"', []),
        ('{"c', ['{"c']),
        ('{ "cm": 1 ', ['{ "cm": 1']),
        ("{}", ["{}"]),
        ('{"cm":1}\n', ['{"cm":1}']),
    ],
)
def test_a_named_call_that_is_cut_is_a_call_once_its_arguments_say_something(text: str, called: list[str], size: int):
    use = tool_use(request(tool_choice={"type": "function", "function": {"name": "saw"}}))
    assert use is not None
    reader = CallReader(use)
    pieces = [piece for at in range(0, len(text), size) for piece in reader.push(text[at : at + size])[1]]
    said, rest = reader.finish()
    assert said == "" and [call.function.arguments for call in calls_of([*pieces, *rest])] == called
    assert reader.has_called == bool(called)


def test_no_call_is_wanted_without_tools_or_by_choice():
    assert tool_use(request(tool_choice="none")) is None
    assert tool_use(request(tools=None)) is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": None, "tool_choice": "required"}, "only allowed when 'tools' are specified"),
        ({"tools": [], "tool_choice": "auto"}, "only allowed when 'tools' are specified"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "drill"}}},
            "names 'drill'; the tools are saw, glue",
        ),
    ],
)
def test_a_choice_of_what_is_not_there_is_refused(fields: dict, message: str):
    with pytest.raises(InvalidRequest, match=message) as refused:
        tool_use(request(**fields))
    assert refused.value.field == "tool_choice"
