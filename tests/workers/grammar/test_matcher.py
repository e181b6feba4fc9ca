"""Answers of a given form, from a model that would say anything."""

import asyncio
import json
import random
import re
from pathlib import Path

import pytest

from intarsia.errors import InvalidRequest
from intarsia.proto.request import SamplingParams
from intarsia.tests.local import Completion, complete, make_engine
from intarsia.workers.grammar import matcher as grammars
from intarsia.workers.grammar.matcher import Grammars
from intarsia.workers.grammar.sandbox import GrammarSandbox

EOS, VOCAB = 256, 320  # of the talker


def answers(talker: Path, *asked: SamplingParams, **settings) -> list[Completion]:
    async def scenario() -> list[Completion]:
        engine = await make_engine(talker, **settings)
        return await complete(engine, [[1, 2, 3 + n] for n in range(len(asked))], asked)

    return asyncio.run(scenario())


def text_of(talker: Path, completion: Completion) -> str:
    from transformers import AutoTokenizer

    assert completion.error is None, completion.error
    return AutoTokenizer.from_pretrained(talker).decode(completion.token_ids, skip_special_tokens=True)


SCHEMA = {
    "type": "object",
    "properties": {"name": {"enum": ["oak", "ash"]}, "age": {"type": "integer", "minimum": 1, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_have_their_form_and_end_by_themselves(talker: Path, temperature: float):
    common = {"temperature": temperature, "max_tokens": 60, "seed": 3}
    schema, regex, choice, free = answers(
        talker,
        SamplingParams(**common, json_schema=SCHEMA),
        SamplingParams(**common, regex="[a-c]{3}-[0-9]{2}"),
        SamplingParams(**common, choice=("walnut", 'ma"ple', "äsche")),
        SamplingParams(**common),
    )
    found = json.loads(text_of(talker, schema))
    assert found["name"] in ("oak", "ash") and 1 <= found["age"] <= 99
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", text_of(talker, regex))
    assert text_of(talker, choice) in ("walnut", 'ma"ple', "äsche")
    assert [each.finish_reason for each in (schema, regex, choice)] == ["stop"] * 3
    assert not re.fullmatch("[a-c]{3}-[0-9]{2}", text_of(talker, free))


def test_a_preempted_answer_keeps_its_form(talker: Path):
    """A pool for less than both: one of them is computed anew in the middle of its answer."""
    asked = [SamplingParams(temperature=1.0, seed=n, max_tokens=70, regex="(ab|c){60}") for n in range(3)]
    found = answers(talker, *asked, kv_cache_memory="24KiB", block_size=4, max_model_len=160)
    for completion in found:
        assert re.fullmatch("(ab|c)+", text_of(talker, completion))


def test_the_end_may_not_come_early_and_must_come_at_last(talker: Path):
    """min_tokens beyond what the form can say: the form decides."""
    [completion] = answers(talker, SamplingParams(temperature=0, max_tokens=20, min_tokens=15, regex="abc"))
    assert text_of(talker, completion) == "abc"
    assert completion.finish_reason == "stop"


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"regex": "(ab"}, "regex cannot be used"),
        ({"json_schema": "{"}, "json_schema cannot be read"),
        ({"json_schema": {"type": "elephant"}}, "json_schema cannot be used"),
    ],
)
def test_a_form_that_is_none_is_refused_with_its_reason(talker: Path, form: dict, message: str):
    [completion] = answers(talker, SamplingParams(max_tokens=5, **form))
    assert isinstance(completion.error, InvalidRequest)
    assert message in completion.error.message
    assert completion.error.field == next(iter(form))


def test_a_checkpoint_without_a_tokenizer_says_so(tmp_path: Path):
    with pytest.raises(InvalidRequest, match="needs the model's tokenizer"):
        Grammars(str(tmp_path), False, VOCAB, [EOS]).prepare("regex", "a+")


# Twenty patterns whose intersection llguidance would compute for hours.
ENDLESS = json.dumps({"allOf": [{"type": "string", "pattern": f".*a.{{{n}}}"} for n in range(20)]})


def test_a_form_that_takes_too_long_is_refused_and_the_next_is_compiled(talker: Path):
    grammars = Grammars(str(talker), False, VOCAB, [EOS])
    with pytest.raises(
        InvalidRequest, match=r"json_schema cannot be compiled within 1 s and 2048 MiB; make it simpler"
    ):
        grammars.prepare("json_schema", ENDLESS)
    grammars.prepare("json_schema", "{}")


def test_a_sandbox_whose_process_was_killed_goes_on_with_another():
    sandbox = GrammarSandbox()
    sandbox.run("regex", "a+")
    child = sandbox._child
    assert child is not None
    child.kill()
    child.wait()
    sandbox.run("regex", "b+")
    with pytest.raises(InvalidRequest, match="regex cannot be used"):
        sandbox.run("regex", "(")


@pytest.mark.parametrize(
    ("kind", "text", "reason"),
    [
        ("regex", "(", "regex cannot be used: unclosed group"),
        ("regex", "(?=a)b", "regex cannot be used: look-around, including look-ahead"),
        ("json_schema", '{"type": "string", "pattern": "(?!a)b"}', "json_schema cannot be used: look-around"),
        ("json_schema", '{"$ref": "#/a"}', "json_schema cannot be used: Pointer '/a' does not exist"),
    ],
)
def test_a_form_that_cannot_be_used_is_refused_with_the_whole_reason(kind: str, text: str, reason: str):
    with pytest.raises(InvalidRequest) as refused:
        GrammarSandbox().run(kind, text)
    assert str(refused.value).startswith(reason)


@pytest.mark.parametrize(
    ("schema", "place"),
    [
        ({"type": "string", "pattern": "(?=a)b"}, None),
        ({"properties": {"x": {"type": "string"}, "a/b": {"items": {"pattern": "(?=a)b"}}}}, "#/properties/a~1b/items"),
        ({"anyOf": [{"type": "null"}, {"$ref": "#/$defs/A"}], "$defs": {"A": {"type": "elephant"}}}, "#/$defs/A"),
        ({"properties": {"x": {"enum": [{"type": "elephant"}]}, "y": {"type": "elephant"}}}, "#/properties/y"),
        ({"properties": {"x": {"items": {"$ref": "#/$defs/A"}}}}, "#/properties/x/items"),
        # Whether a part that refers to its own root is at fault cannot be seen from it alone.
        ({"properties": {"x": {"$ref": "#/properties/y"}, "y": {"type": "elephant"}}}, "#/properties/y"),
    ],
)
def test_of_a_schema_that_cannot_be_used_the_part_at_fault_is_told(schema: dict, place: str | None):
    with pytest.raises(InvalidRequest) as refused:
        GrammarSandbox().run("json_schema", json.dumps(schema))
    assert refused.value.details.get("place") == place
    assert str(refused.value).endswith(f", at {place}") is (place is not None)


def test_a_schema_of_which_the_fault_is_not_found_in_time_is_refused_all_the_same():
    sandbox, endless = GrammarSandbox(), json.loads(ENDLESS)
    with pytest.raises(InvalidRequest, match=r"json_schema cannot be used: Invalid type: elephant$") as refused:
        sandbox.run("json_schema", json.dumps({"type": "elephant", "$defs": {"unused": endless}}))
    assert "place" not in refused.value.details
    sandbox.run("json_schema", "{}")


def test_a_form_is_compiled_once(talker: Path, monkeypatch: pytest.MonkeyPatch):
    grammars = Grammars(str(talker), False, VOCAB, [EOS])
    grammars.prepare("regex", "ab+")
    monkeypatch.setattr(grammars, "_compile", lambda *_: pytest.fail("it was compiled again"))
    matcher, other = (grammars.matcher("regex", "ab+", []) for _ in range(2))
    matcher.take(alphabet_token(talker, "a"))
    assert tokens_in(matcher.allowed()) == [alphabet_token(talker, "b")]
    assert tokens_in(other.allowed()) == [alphabet_token(talker, "a")]


def tokens_in(bits: bytes) -> list[int]:
    return [token for token in range(8 * len(bits)) if bits[token // 8] >> token % 8 & 1]


def alphabet_token(talker: Path, byte: str) -> int:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(talker).convert_tokens_to_ids(byte)


def test_a_form_of_ever_more_states_ends_before_it_fills_the_memory(talker: Path):
    """Its 2**20 states are found as answers go on, and kept for the next; a long text with a bound has few."""
    from transformers import AutoTokenizer

    forms = Grammars(str(talker), False, VOCAB, [EOS])
    letters = AutoTokenizer.from_pretrained(talker).encode("ab")
    draw = random.Random(5)
    endless, taken = forms.matcher("regex", "(a|b)*a(a|b){20}", []), 0
    while not endless.is_complete and taken < 40_000:
        endless.take(draw.choice(letters))
        taken += 1
    assert 1_000 < taken < 40_000
    assert (
        endless.failure is not None
        and endless.failure.startswith("lexer error: too many")
        and len(endless.failure) < 80
    )
    anew = forms.matcher("regex", "(a|b)*a(a|b){20}", letters)
    assert not anew.is_complete and anew.failure is None
    long = forms.matcher("regex", ".{0,6000}", letters[:1] * 5999)
    assert not long.is_complete


def test_an_answer_whose_form_turns_out_too_complex_fails_typed_and_others_go_on(
    talker: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(grammars, "MAX_STATES", 50)
    common = {"temperature": 1.0, "max_tokens": 150, "ignore_eos": True}
    complex_one, simple, free = answers(
        talker,
        SamplingParams(**common, seed=1, regex=".{0,5000}"),
        SamplingParams(**common, seed=2, regex="[a-c]+"),
        SamplingParams(**common, seed=3),
        max_model_len=200,
    )
    assert isinstance(complex_one.error, InvalidRequest) and complex_one.error.field == "regex"
    assert "the answer's form became too complex after " in complex_one.error.message
    assert simple.error is None and len(simple.token_ids) == 150
    assert free.error is None and len(free.token_ids) == 150
