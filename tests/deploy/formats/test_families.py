"""What models of each family write, as their templates have it, and what is to be read in it, cut in every way."""

import json
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from intarsia.deploy.formats.chosen import by_name, by_template, markers_of, parser_of
from intarsia.deploy.formats.described import Format
from intarsia.deploy.formats.events import Event
from intarsia.deploy.formats.known import FORMATS
from intarsia.tests.agents.compare import Outcome

TOOLS = {
    "saw": {"type": "object", "properties": {"wood": {"type": "string"}, "cm": {"type": "integer"}}},
    "glue": {"type": "object", "properties": {"parts": {"type": "array"}, "dry": {"type": "boolean"}}},
    "look": {"type": "object", "properties": {}},
}


def read(form: Format, pieces: Sequence[str], prompt_end: str = "") -> Outcome:
    parser = parser_of(form, TOOLS, prompt_end=prompt_end)
    events: list[Event] = []
    for piece in pieces:
        events += parser.push(piece)
    return Outcome.of(events + parser.finish())


def read_by_tokens(form: Format, pieces: Sequence[tuple[str, bool]]) -> Outcome:
    """pieces: text, and whether it is a special token."""
    parser = parser_of(form, TOOLS, single_tokens=markers_of(form))
    events: list[Event] = []
    for text, is_special in pieces:
        events += parser.push(text, (0,) if is_special else ())
    return Outcome.of(events + parser.finish())


SAW = ("saw", {"wood": "oak", "cm": 3})
LOOK = ("look", {})
GLUE = ("glue", {"parts": ["a", {"b": None}], "dry": True})
SAW_JSON = '{"name": "saw", "arguments": {"wood": "oak", "cm": 3}}'
LOOK_JSON = '{"name": "look", "arguments": {}}'
GLUE_JSON = '{"name": "glue", "arguments": {"parts": ["a", {"b": null}], "dry": true}}'

WRITTEN = [  # format, end of the prompt, output, reasoning, content, calls
    (
        "minimax_m2", "<think>\n",
        'Oak.\n</think>\n\nI saw.\n<minimax:tool_call>\n<invoke name="saw">\n<parameter name="wood">oak</parameter>\n'
        '<parameter name="cm">3</parameter>\n</invoke>\n<invoke name="look">\n</invoke>\n</minimax:tool_call>[e~[',
        "Oak.", "I saw.", [SAW, LOOK],
    ),
    (
        "step3", "<think>\n",
        'Oak.\n</think>\n<｜tool_calls_begin｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="saw">'
        '<steptml:parameter name="wood">oak</steptml:parameter><steptml:parameter name="cm">3</steptml:parameter>'
        '</steptml:invoke><｜tool_call_end｜>\n<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="look">'
        "</steptml:invoke><｜tool_call_end｜>\n<｜tool_calls_end｜><｜EOT｜>",
        "Oak.", "", [SAW, LOOK],
    ),
    (
        "qwen3_coder", "<think>\n",  # Step 3.5 and MiMo V2 write so, too
        "Oak.\n</think>\n\n<tool_call>\n<function=saw>\n<parameter=wood>\noak\n</parameter>\n<parameter=cm>\n3\n"
        "</parameter>\n</function>\n</tool_call>",
        "Oak.", "", [SAW],
    ),
    (
        "seed_oss", "",
        "<seed:think>Oak.</seed:think>\n<seed:tool_call>\n<function=saw>\n<parameter=wood>oak</parameter>\n"
        "<parameter=cm>3</parameter>\n</function>\n</seed:tool_call><seed:eos>",
        "Oak.", "", [SAW],
    ),
    (
        "olmo3", "<think>",
        'Oak.</think><function_calls>saw(wood="oak", cm=3)\nglue(parts=["a", {"b": None}], dry=True)\nlook()'
        "</function_calls><|im_end|>",
        "Oak.", "", [SAW, GLUE, LOOK],
    ),
    ("exaone4", "<think>\n", f"Oak.\n</think>\n\n<tool_call>{SAW_JSON}</tool_call>", "Oak.", "", [SAW]),
    (
        "lfm2", "",
        "<think>Oak.</think>I saw.<|tool_call_start|>[saw(wood='oak', cm=3), look()]<|tool_call_end|><|im_end|>",
        "Oak.", "I saw.", [SAW, LOOK],
    ),
    ("lfm2", "", "<|tool_call_start|>[saw(wood='it's oak', cm=3)]<|tool_call_end|>", "", "",
     [("saw", {"wood": "it's oak", "cm": 3})]),
    (
        "ernie45", "<think>\n",
        f"Oak.\n</think>\n\n<response>\nI saw.\n</response>\n<tool_call>\n{SAW_JSON}\n</tool_call>\n",
        "Oak.", "I saw.", [SAW],
    ),
    (
        "hunyuan_a13b", "",
        f"<think>\nOak.\n</think>\n<answer>\nI saw.\n</answer>\n<tool_calls>[{SAW_JSON}, {GLUE_JSON}]</tool_calls>",
        "Oak.", "I saw.", [SAW, GLUE],
    ),
    (
        "hy_v3", "",
        "<think>Oak.</think><tool_calls>\n<tool_call>saw<tool_sep>\n<arg_key>wood</arg_key>\n<arg_value>oak</arg_value>\n"
        "<arg_key>cm</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n</tool_calls>",
        "Oak.", "", [SAW],
    ),
    (
        "cohere", "",
        '<|START_THINKING|>Oak.<|END_THINKING|><|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "saw", '
        '"parameters": {"wood": "oak", "cm": 3}},\n    {"tool_call_id": "1", "tool_name": "look", "parameters": {}}\n]'
        "<|END_ACTION|><|END_OF_TURN_TOKEN|>",
        "Oak.", "", [SAW, LOOK],
    ),
    ("cohere", "", "<|START_THINKING|>Oak.<|END_THINKING|><|START_RESPONSE|>Done.<|END_RESPONSE|>",
     "Oak.", "Done.", []),
    (
        "command_r", "",
        'Action: ```json\n[\n    {\n        "tool_name": "saw",\n        "parameters": {"wood": "oak", "cm": 3}\n    }'
        "\n]```<|END_OF_TURN_TOKEN|>",
        "", "", [SAW],
    ),
    ("phi4_mini_json", "", f"<|tool_call|>[{SAW_JSON}]<|/tool_call|><|end|>", "", "", [SAW]),
    ("phi4_mini_json", "", f"functools[{SAW_JSON}, {LOOK_JSON}]", "", "", [SAW, LOOK]),
    ("smollm3", "<think>\n", f"Oak.\n</think>\n<tool_call>{SAW_JSON}</tool_call>", "Oak.", "", [SAW]),
    (
        "jamba", "",
        f"I saw.\n<tool_calls>[\n  {SAW_JSON},\n  {LOOK_JSON}\n]</tool_calls><|eom|>",
        "", "I saw.", [SAW, LOOK],
    ),
    (
        "minimax", "<think>",
        f"Oak.</think><tool_calls>\n{SAW_JSON}\n{LOOK_JSON}\n</tool_calls>",
        "Oak.", "", [SAW, LOOK],
    ),
    (
        "kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>think<|sep|>',
        'Oak.<|close|>think<|sep|><|open|>response<|sep|>I saw.<|close|>response<|sep|><|open|>tools<|sep|><|open|>'
        'call tool="saw" index="1"<|sep|><|open|>argument key="wood" type="string"<|sep|>oak<|close|>argument<|sep|>'
        '<|open|>argument key="cm" type="number"<|sep|>3<|close|>argument<|sep|><|close|>call<|sep|>'
        '<|open|>call tool="look" '
        'index="2"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>',
        "Oak.", "I saw.", [SAW, LOOK],
    ),
    (
        "kimi_k3", '<|open|>message role="assistant"<|sep|><|open|>response<|sep|>',
        '<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="saw" index="1"<|sep|><|open|>json type="object"'
        '<|sep|>{"wood": "oak", "cm": 3}<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>',
        "", "", [SAW],
    ),
    (
        "functiongemma", "",
        "<start_function_call>call:saw{wood:<escape>oak<escape>,cm:3}<end_function_call><start_function_call>call:look{}"
        "<end_function_call><start_function_response>",
        "", "", [SAW, LOOK],
    ),
    (
        "apertus", "",
        '<|inner_prefix|>Oak.<|inner_suffix|>I saw.<|tools_prefix|>[{"saw": {"wood": "oak", "cm": 3}}, {"look": {}}]'
        "<|tools_suffix|><|assistant_end|>",
        "Oak.", "I saw.", [SAW, LOOK],
    ),
    ("longcat", "", f"<longcat_tool_call>\n{SAW_JSON}\n</longcat_tool_call>", "", "", [SAW]),
    (
        "longcat", "<longcat_think>\n",
        "Oak.\n</longcat_think>\n<longcat_tool_call>saw\n<longcat_arg_key>wood</longcat_arg_key>\n<longcat_arg_value>oak"
        "</longcat_arg_value>\n<longcat_arg_key>cm</longcat_arg_key>\n<longcat_arg_value>3</longcat_arg_value>\n"
        "</longcat_tool_call>",
        "Oak.", "", [SAW],
    ),
    ("xlam", "", f"[{SAW_JSON}, {LOOK_JSON}]", "", "", [SAW, LOOK]),
    ("xlam", "", f"I saw.\n```json\n[{SAW_JSON}]\n```", "", "I saw.", [SAW]),
    ("xlam", "", f"<think>Oak.</think>[{SAW_JSON}]", "Oak.", "", [SAW]),
    (
        "internlm", "",
        'I saw.<|action_start|><|plugin|>\n{"name": "saw", "parameters": {"wood": "oak", "cm": 3}}<|action_end|>\n',
        "", "I saw.", [SAW],
    ),
    ("apriel", "Here are my reasoning steps:\n",
     f"Oak.\n[BEGIN FINAL RESPONSE]\nI saw.\n<tool_calls>[{SAW_JSON}]</tool_calls>\n<|end|>", "Oak.", "I saw.", [SAW]),
    ("gigachat3", "", f"function call<|role_sep|>\n{SAW_JSON}", "", "", [SAW]),
    (
        "solar_open", "<|begin|>assistant",
        '<|think|>Oak.<|end|><|begin|>assistant<|tool_calls|><|tool_call:begin|>ab12<|tool_call:name|>saw'
        '<|tool_call:args|>{"wood": "oak", "cm": 3}<|tool_call:end|><|calls|>',
        "Oak.", "", [SAW],
    ),
    ("functionary", "", '<function=saw>{"wood": "oak", "cm": 3}</function>', "", "", [SAW]),
    ("granite", "", f"<function_call> {SAW_JSON} <function_call> {LOOK_JSON}", "", "", [SAW, LOOK]),
    ("llama3_json", "", '<function=saw>{"wood": "oak", "cm": 3}</function><|eom_id|>', "", "", [SAW]),
    ("kimi_k2", "", "◁think▷Oak.◁/think▷Done.", "Oak.", "Done.", []),
    ("deepseek_v31", "", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>saw\n```json\n"
     '{"wood": "oak", "cm": 3}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>', "", "", [SAW]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "prompt_end", "output", "reasoning", "content", "calls"), WRITTEN)
def test_each_family_is_read_the_same_however_it_is_cut(name, prompt_end, output, reasoning, content, calls):
    form = by_name(name)
    assert form is not None, name
    whole = read(form, [output], prompt_end)
    found = [(call.name, json.loads(call.arguments)) for call in whole.calls]
    assert (whole.reasoning.strip(), whole.content.strip(), found) == (reasoning, content, calls)
    assert all(call.is_whole for call in whole.calls)
    for place in range(1, len(output)):
        assert read(form, [output[:place], output[place:]], prompt_end) == whole, place
    assert read(form, list(output), prompt_end) == whole


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_text_around_markers_is_not_lost(form):
    """Broken answers: pieces of markers, of calls and of text in any order. All characters that are no marker come out
    again, and cuts change nothing."""
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    chance = random.Random(seed)
    bits = [*markers_of(form), *(marker[: len(marker) // 2] for marker in markers_of(form)), "\n", " ", SAW_JSON, "saw",
            '{"name": "saw", "arguments": {"wood": "o', "[saw(wood='oak')]", "{", "}", "[", "]", '"', "word", "<b>",
            "é", "saw(", "call:saw{", "to=saw", "assistant"]  # fmt: skip
    for _ in range(60):
        output = "".join(chance.choice(bits) for _ in range(chance.randrange(1, 12)))
        whole = read(form, [output])
        for place in range(1, len(output)):
            assert read(form, [output[:place], output[place:]]) == whole, output
        assert read(form, list(output)) == whole, output
        if not whole.calls and form.kind == "marked":
            bare = output
            for marker in markers_of(form):
                bare = bare.replace(marker, "")
            lost = Counter("".join(bare.split())) - Counter(whole.reasoning + whole.content)
            assert not lost, (output, whole)


def test_long_arguments_stream_while_they_are_written():
    form = by_name("qwen3_coder")
    assert form is not None
    parser = parser_of(form, TOOLS)
    parser.push("<tool_call>\n<function=saw>\n<parameter=wood>\n")
    told = [event for _ in range(100) for event in parser.push("oak, ash ")]
    assert len(told) > 80
    parser.push("\n</parameter>\n</function>\n</tool_call>")


def test_markers_that_ordinary_tokens_spell_are_text():
    form = by_name("hermes")
    assert form is not None
    spelt = [("<tool", False), ("_call>", False), (SAW_JSON, False), ("</tool_call>", False)]
    assert read_by_tokens(form, spelt).content == f"<tool_call>{SAW_JSON}</tool_call>"
    real = [("<tool_call>", True), (SAW_JSON, False), ("</tool_call>", True)]
    assert [call.name for call in read_by_tokens(form, real).calls] == ["saw"]


def test_every_format_is_found_by_its_own_signs():
    for form in FORMATS:
        found = by_template(" ".join(form.signs))
        assert found is not None
        if found is not form:  # another one has all of its signs, and is looked for before it
            assert set(found.signs) <= set(" ".join(form.signs).split()) | set(form.signs)


def test_all_names_are_distinct_and_lead_to_their_format():
    for form in FORMATS:
        for name in (form.name, *form.aliases):
            assert by_name(name) is form, name
