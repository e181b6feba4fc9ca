"""Answers that follow a format's grammar are read back as the calls that were asked for, whatever a model draws."""

import json
import random
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from llguidance import LLMatcher
from llguidance.hf import from_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from intarsia.deploy.formats.chosen import by_name, markers_of, parser_of
from intarsia.deploy.formats.described import Format
from intarsia.deploy.formats.events import Event
from intarsia.deploy.formats.grammar import Wanted, grammar_of
from intarsia.deploy.formats.known import FORMATS
from intarsia.deploy.front_end.marked_stream import MARK, parted
from intarsia.errors import InvalidRequest
from intarsia.tests.agents.compare import Outcome
from intarsia.workers.grammar.matcher import Grammars

SEEDS = 10

MOST_TOKENS = 3000

SAW = {
    "type": "object",
    "properties": {
        "wood": {"type": "string", "maxLength": 3},
        "cm": {"type": "integer"},
        "kind": {"type": "string", "enum": ["rip", "cross"]},
        "slow": {"type": "boolean"},
        "at": {"$ref": "#/$defs/places"},
    },
    "required": ["wood", "kind"],
    "additionalProperties": False,
    "$defs": {"places": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
}
LOOK = {"type": "object", "properties": {}, "additionalProperties": False}
TOOLS = {"saw": SAW, "shop.look": LOOK}
WANTED = [Wanted(name, parameters) for name, parameters in TOOLS.items()]
WRITTEN = [form for form in FORMATS if form.calls or form.kind == "channels"]


class Vocabulary:
    """Letters and some bytes, and markers: as single tokens, or spelt."""

    def __init__(self, special: tuple[str, ...]):
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Tokenizer(models.BPE(vocab={byte: n for n, byte in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken(text, special=True) for text in ("<eos>", *special)])
        self.fast: Any = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
        self.tokens = {text: int(self.fast.convert_tokens_to_ids(text)) for text in special}
        self.end = int(self.fast.convert_tokens_to_ids("<eos>"))
        self._guided = from_tokenizer(self.fast, n_vocab=len(self.fast), eos_token=[self.end])
        self._bytes = range(len(alphabet))
        self._plain = [token for token in self._bytes if self.fast.decode([token]).isascii()]

    def draw(self, grammar: str, chance: random.Random) -> str:
        """An answer of random tokens that the grammar allows, with marks before special tokens."""
        matcher = LLMatcher(self._guided, grammar, log_level=0)
        assert not matcher.is_error(), (matcher.get_error(), grammar)
        drawn: list[int] = []
        special = {token: text for text, token in self.tokens.items()}
        for _ in range(MOST_TOKENS):
            mask = matcher.compute_bitmask()
            allowed = [token for token in (*self._bytes, *special, self.end) if mask[token // 8] >> token % 8 & 1]
            # What may end is ended in half of the cases, and text is of characters of one byte: it is long enough so.
            if self.end in allowed and (len(allowed) == 1 or chance.random() < 0.5):
                break
            others = [token for token in allowed if token != self.end]
            simple = [token for token in others if token in special or token in self._plain]
            drawn.append(chance.choice(simple or others))
            matcher.consume_token(drawn[-1])
            if matcher.is_stopped():
                break
        else:
            raise AssertionError((self.fast.decode(drawn)[-200:], grammar))
        marked, run = "", list[int]()
        for token in drawn:
            if token in special:
                marked, run = marked + self.fast.decode(run) + MARK + special[token], []
            else:
                run.append(token)
        return marked + self.fast.decode(run)


def read(form: Format, text: str, single_tokens: tuple[str, ...]) -> Outcome:
    parser = parser_of(form, TOOLS, single_tokens=single_tokens)
    events: list[Event] = [*parser.push(*parted(text)), *parser.finish()]
    return Outcome.of(events)


@pytest.mark.parametrize("is_single", [True, False], ids=["tokens", "spelt"])
@pytest.mark.parametrize("form", WRITTEN, ids=lambda form: form.name)
def test_required_calls_are_read_back_as_such(form: Format, is_single: bool):
    special = tuple(text for text in markers_of(form) if text.startswith(("<", "[")) and is_single)
    special = tuple(text for text in special if not any(char in text for char in '="\n')) if is_single else ()
    vocabulary = Vocabulary(special)
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    for is_parallel in (True, False):
        grammar = grammar_of(
            form, WANTED, vocabulary.tokens, thoughts=None, has_begun_thinking=False, is_parallel=is_parallel
        )
        if form.kind == "channels" and not is_single:
            assert grammar is None, "its markers are tokens, or it is not gpt-oss"
            continue
        assert grammar is not None
        for number in range(SEEDS):
            text = vocabulary.draw(grammar, random.Random(seed + number))
            outcome = read(form, text, special)
            assert outcome.calls, (text, grammar)
            assert is_parallel or len(outcome.calls) == 1
            assert not outcome.content.strip(), (text, grammar)
            for call in outcome.calls:
                assert call.is_whole, (text, outcome)
                jsonschema.validate(json.loads(call.arguments), TOOLS[call.name])


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder", "harmony", "mistral"])
def test_thoughts_come_before_a_required_call(name: str):
    form = by_name(name)
    assert form is not None
    special = ("</think>", "<|channel|>", "<|message|>", "<|start|>", "<|end|>", "<|call|>", "[TOOL_CALLS]", "[ARGS]")
    vocabulary = Vocabulary(special)
    thoughts = form.thoughts[-1] if form.thoughts else None
    grammar = grammar_of(
        form, WANTED[1:], vocabulary.tokens, thoughts=thoughts, has_begun_thinking=True, is_parallel=False
    )
    assert grammar is not None
    guided = LLMatcher(vocabulary._guided, grammar, log_level=0)
    begun = "<|channel|>analysis<|message|>I look.<|end|>" if form.kind == "channels" else "I look.</think>"
    for token in vocabulary.fast.encode(begun):
        assert guided.consume_token(token), guided.get_error()
    mask = guided.compute_bitmask()
    assert not mask[vocabulary.end // 8] >> vocabulary.end % 8 & 1, "a call has to follow"


def test_of_a_schema_that_text_between_tags_cannot_be_held_to_there_is_no_grammar():
    form = by_name("qwen3_coder")
    assert form is not None
    strict = {"type": "object", "properties": {"wood": {"type": "string", "pattern": "^oak$"}}}
    told = {"thoughts": None, "has_begun_thinking": False, "is_parallel": False}
    assert grammar_of(form, [Wanted("saw", strict)], {}, **told) is None
    assert grammar_of(form, [Wanted("a b", LOOK)], {}, **told) is None


def test_the_workers_compile_such_a_grammar(tmp_path: Path):
    form = by_name("hermes")
    assert form is not None
    vocabulary = Vocabulary(("<tool_call>", "</tool_call>"))
    vocabulary.fast.save_pretrained(tmp_path)
    told = {"thoughts": None, "has_begun_thinking": False, "is_parallel": False}
    grammar = grammar_of(form, WANTED[1:], vocabulary.tokens, **told)
    assert grammar is not None
    grammars = Grammars(str(tmp_path), False, len(vocabulary.fast), [vocabulary.end])
    grammars.prepare("lark", grammar)
    matcher = grammars.matcher("lark", grammar, [])
    for token in vocabulary.fast.encode('<tool_call>\n{"name": "shop.look", "arguments": {}}\n</tool_call>'):
        assert matcher.allowed()[token // 8] >> token % 8 & 1, vocabulary.fast.decode([token])
        matcher.take(token)
    bad = [Wanted("saw", {"type": "object", "properties": {"wood": {"type": "string", "pattern": "("}}})]
    broken = grammar_of(form, bad, vocabulary.tokens, **told)
    assert broken is not None
    with pytest.raises(InvalidRequest, match="lark") as refused:
        grammars.prepare("lark", broken)
    assert refused.value.field == "lark"
