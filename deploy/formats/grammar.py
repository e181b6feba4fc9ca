"""Makes an answer follow a format: a grammar, in llguidance's Lark, of the calls that a request asks for.

    start: thoughts calls
    calls: <[258]> ( call_0 | call_1 ) <[259]>
    call_0: "\\n{\\"name\\": \\"saw\\", \\"arguments\\": " args_0 "}\\n"
    args_0: %json {..}

Markers that are single tokens stand as tokens, since the model writes them so; the others as text.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .described import Braced, Calls, Format, JsonCall, KeyedCall, NamedJson, Pythonic, Tagged, Thoughts
from .harmony import CHANNEL, CONSTRAIN, MESSAGE, NEXT
from .typed import Schema

ANY_TEXT = "/(?s:.*)/"

SPACING = "x-guidance"
"""Where a schema tells llguidance of white space."""

AS_TEMPLATES_WRITE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""The white space in JSON: where any may follow, small models go on with it for ever."""

PLAIN_KEY = re.compile(r"[\w.-]+")
"""Names of parameters that need no escapes in any format."""

UNSAID = ("pattern", "format", "minLength")
"""Of a string, what a text between tags is not held to: such tools are called in JSON."""


class Wanted(NamedTuple):
    """A tool that may be called."""

    name: str
    parameters: Mapping[str, Any]  # their schema


class Unwritten(Exception):
    """A format, or a tool in it, has no grammar here."""


def grammar_of(
    form: Format,
    tools: Sequence[Wanted],
    tokens: Mapping[str, int],
    *,
    thoughts: Thoughts | None,
    has_begun_thinking: bool,
    is_parallel: bool,
    must_call: bool = True,
) -> str | None:
    """The grammar of an answer that calls one of the tools, or several. None: there is none for these.

    tokens: markers that are single tokens. thoughts: those that may come before. has_begun_thinking: the prompt has.
    must_call: else there may be words, and calls behind them."""
    try:
        writer = _Writer(form, tokens)
        return (
            writer.messages(tools, must_call)
            if form.kind == "channels"
            else writer.answer(tools, thoughts, has_begun_thinking, is_parallel, must_call)
        )
    except Unwritten:
        return None


class _Writer:
    """Writes the rules of one grammar."""

    def __init__(self, form: Format, tokens: Mapping[str, int]):
        self._form = form
        self._tokens = tokens
        self._rules: list[str] = []
        parts = sorted(tokens, key=len, reverse=True)
        self._parts = re.compile("(" + "|".join(map(re.escape, parts)) + ")") if parts else None

    def answer(
        self, tools: Sequence[Wanted], thoughts: Thoughts | None, has_begun: bool, is_parallel: bool, must_call: bool
    ) -> str:
        if not self._form.calls:
            raise Unwritten
        calls = self._form.calls[0]
        # Words that may spell a marker cannot be held to anything.
        if not must_call and next(iter(calls.opens)) not in self._tokens:
            raise Unwritten
        self._calls(calls, tools, is_parallel)
        before = self._thoughts(thoughts, has_begun) if thoughts is not None else ""
        words = "" if must_call else self._text("words")
        return self._whole(f"{before} {words} calls" if must_call else f"{before} {words} calls?")

    def messages(self, tools: Sequence[Wanted], must_call: bool) -> str:
        """Of gpt-oss: thoughts, then a message to a tool."""
        if not {CHANNEL, MESSAGE, "<|end|>", "<|call|>"} <= self._tokens.keys():
            raise Unwritten
        end = self._literal("<|end|>" + NEXT)
        self._rule("thought", f"{self._literal(f'{CHANNEL}analysis{MESSAGE}')} {self._text('thinking')} {end}")
        for number, tool in enumerate(tools):
            head = self._literal(f"{CHANNEL}commentary to=functions.{tool.name} {CONSTRAIN}json{MESSAGE}")
            self._rule(f"call_{number}", f"{head} {self._json(tool.parameters)} {self._literal('<|call|>')}")
        called = " | ".join(f"call_{number}" for number in range(len(tools)))
        if must_call:
            return self._whole(f"thought? ( {called} )")
        said = self._text("words")
        self._rule("preamble", f"{self._literal(f'{CHANNEL}commentary{MESSAGE}')} {said} {end}")
        self._rule("final", f"{self._literal(f'{CHANNEL}final{MESSAGE}')} {said}")
        return self._whole(f"( thought | preamble )* ( final | {called} )")

    # Rules

    def _rule(self, name: str, body: str) -> None:
        self._rules.append(f"{name}: {body.strip()}")

    def _whole(self, start: str) -> str:
        return "\n".join([f"start: {' '.join(start.split())}", *self._rules]) + "\n"

    def _text(self, name: str) -> str:
        """Any text without special tokens."""
        rule = f"{name.upper()}: {ANY_TEXT}"
        if rule not in self._rules:
            self._rules.append(rule)
        return name.upper()

    def _text_up_to(self, name: str, end: str, most_chars: int | None = None) -> str:
        """Any text, and the marker behind it."""
        if self._parts is not None and self._parts.fullmatch(end) and most_chars is None:
            return f"{self._text('text')} {self._literal(end)}"
        text = ANY_TEXT if most_chars is None else f"/(?s:.{{0,{most_chars}}})/"
        if self._parts is not None and self._parts.search(end):
            bounded = f"{name}_text".upper()
            self._rules.append(f"{bounded}: {text}")
            return f"{bounded} {self._literal(end)}"
        self._rules.append(f"{name}[suffix={json.dumps(end)}]: {text}")
        return name

    def _literal(self, text: str) -> str:
        """This text, with single tokens as such."""
        pieces = self._parts.split(text) if self._parts is not None else [text]
        written = [
            f"<[{self._tokens[piece]}]>" if piece in self._tokens else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
            if piece
        ]
        return " ".join(written)

    def _json(self, schema: Mapping[str, Any]) -> str:
        return f"%json {json.dumps({SPACING: AS_TEMPLATES_WRITE, **schema})}"

    def _thoughts(self, thoughts: Thoughts, has_begun: bool) -> str:
        ended = self._text_up_to("thinking", thoughts.close)
        if has_begun:
            return ended
        self._rule("thoughts", f"{self._literal(thoughts.open + thoughts.label)} {ended}")
        return "thoughts?"

    def _calls(self, calls: Calls, tools: Sequence[Wanted], is_parallel: bool) -> None:
        """The rule `calls`: one of the tools, or several if is_parallel."""
        body = calls.body
        for number, tool in enumerate(tools):
            if not _is_plain(tool.name):
                raise Unwritten
            self._rule(f"call_{number}", self._call(body, tool, f"{number}"))
        one = "( " + " | ".join(f"call_{number}" for number in range(len(tools))) + " )"
        gap = self._literal(body.gap) if isinstance(body, Tagged) else ""
        # Within one pair of markers there is a list, or one call each.
        is_list = isinstance(body, KeyedCall | Pythonic) or (isinstance(body, JsonCall) and body.is_list)
        if is_list:
            between = '"\\n"' if isinstance(body, Pythonic) and not body.is_bracketed else '", "'
            one = f"{one} ( {between} {one} )*" if is_parallel else one
            if not (isinstance(body, Pythonic) and not body.is_bracketed):
                one = f'"[" {one} "]"'
        inner = self._literal(calls.inner)
        marked = f"{self._literal(calls.open)} {inner} {one} {inner} {self._literal(calls.close)} {gap}"
        if is_parallel and not is_list and calls.is_marked:
            marked = f"( {marked} )+"
        opened, closed = self._literal(calls.section_open), self._literal(calls.section_close)
        self._rule("calls", f"{opened} {gap if opened else ''} {marked} {closed}")

    def _call(self, body: Any, tool: Wanted, number: str) -> str:
        """What stands between the markers of a call."""
        name = json.dumps(tool.name, ensure_ascii=False)
        match body:
            case JsonCall():
                head = f'{{"{body.name_key}": {name}, "{body.arguments_key}": '
                return f'{self._literal(head)} {self._json(tool.parameters)} "}}"'
            case KeyedCall():
                return f'{self._literal(f"{{{name}: ")} {self._json(tool.parameters)} "}}"'
            case NamedJson():
                return self._named_json(body, tool)
            case Tagged():
                return self._tagged(body, tool, number)
            case Pythonic():
                pairs = self._pairs(tool, number, "{key}=", ", ", self._python_value)
                return f'{self._literal(f"{tool.name}(")} {pairs} ")"'
            case Braced():
                pairs = self._pairs(tool, number, "{key}:", ",", lambda *of: self._braced_value(body, *of))
                return f'{self._literal(f"{body.before}{tool.name}{{")} {pairs} "}}"'
            case _:
                raise Unwritten

    def _named_json(self, body: NamedJson, tool: Wanted) -> str:
        before = self._literal(body.lead + body.before)
        name = f"functions.{tool.name}:" if body.id_pattern else tool.name
        count = "/[0-9]{1,3}/" if body.id_pattern else ""
        end, close = body.ends[0] if body.ends else "", ""
        if body.fence:
            end, close = f"{end}\n", self._literal(f"\n{body.fence}")
        return f"{before} {self._literal(name)} {count} {self._literal(end)} {self._json(tool.parameters)} {close}"

    def _tagged(self, body: Tagged, tool: Wanted, number: str) -> str:
        schema, line, gap = Schema(tool.parameters), "\n" if body.is_lined else "", body.gap
        head = f"{body.lead}{body.before}{tool.name}{body.name_end}"
        if body.name_end == '"':
            head += body.attributes_end
        pieces = [self._literal(f"{head}{gap}")]
        for place, (key, inner, is_required) in enumerate(_parameters(tool.parameters)):
            kinds = schema.kinds(key)
            is_text = kinds is None or "string" in kinds
            said = "" if not body.type_mark else f' {body.type_mark}="{_type_said(body, is_text)}"'
            opened = self._literal(f"{body.key_open}{key}{body.key_end}{said}{body.value_open}{line}")
            closed = f"{line}{body.value_close}"
            value = (
                self._text_value(inner, f"v_{number}_{place}", closed)
                if is_text
                else (f"{self._json(inner)} {self._literal(closed)}")
            )
            argument = f"{opened} {value} {self._literal(gap)}"
            pieces.append(argument if is_required else f"( {argument} )?")
        return " ".join([*pieces, self._literal(body.end)])

    def _text_value(self, schema: Mapping[str, Any], name: str, end: str) -> str:
        """A string as bare text, with what ends it."""
        values = schema.get("enum", [schema["const"]] if "const" in schema else None)
        if isinstance(values, list):
            if not values or not all(isinstance(each, str) and each for each in values):
                raise Unwritten
            return f"( {' | '.join(map(self._literal, values))} ) {self._literal(end)}"
        if any(word in schema for word in UNSAID):
            raise Unwritten
        most = schema.get("maxLength")
        return self._text_up_to(name, end, most if isinstance(most, int) else None)

    def _pairs(self, tool: Wanted, number: str, key_form: str, comma: str, value: Any) -> str:
        """Keys and values in the schema's order, some of which may be left out, with commas between them."""
        parameters = list(_parameters(tool.parameters))
        schema = Schema(tool.parameters)
        last = len(parameters)
        for place in range(last - 1, -1, -1):
            key, inner, is_required = parameters[place]
            pair = f"{self._literal(key_form.format(key=key))} {value(inner, schema.kinds(key), f'v_{number}_{place}')}"
            more = f"more_{number}_{place + 1}" if place + 1 < last else ""
            first = f"first_{number}_{place + 1}" if place + 1 < last else '""'
            self._rule(f"pair_{number}_{place}", pair)
            own = f"pair_{number}_{place}"
            with_comma = f"{json.dumps(comma)} {own}"
            self._rule(f"more_{number}_{place}", f"{with_comma if is_required else f'( {with_comma} )?'} {more}")
            self._rule(f"first_{number}_{place}", f"{own} {more}" + ("" if is_required else f" | {first}"))
        return f"first_{number}_0" if parameters else ""

    def _python_value(self, schema: Mapping[str, Any], kinds: frozenset[str] | None, name: str) -> str:
        if kinds == {"boolean"} and "enum" not in schema and "const" not in schema:
            return '( "True" | "False" )'
        return '"None"' if kinds == {"null"} else self._json(schema)

    def _braced_value(self, body: Braced, schema: Mapping[str, Any], kinds: frozenset[str] | None, name: str) -> str:
        if kinds is not None and "string" not in kinds:
            return self._json(schema)
        return f"{self._literal(body.quote)} {self._text_value(schema, name, body.quote)}"


def _type_said(body: Tagged, is_text: bool) -> str:
    if body.type_mark == "string":
        return "true" if is_text else "false"
    return "string" if is_text else "number"


def _is_plain(name: str) -> bool:
    return PLAIN_KEY.fullmatch(name) is not None


def _parameters(schema: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any], bool]]:
    """Each parameter with its schema, which can stand alone, and whether it is required. Raises `Unwritten`."""
    if any(word in schema for word in ("anyOf", "oneOf", "allOf", "$ref", "patternProperties")):
        raise Unwritten
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    properties = schema.get("properties", {})
    for key, inner in properties.items():
        if not _is_plain(key) or not isinstance(inner, Mapping):
            raise Unwritten
        yield key, {**shared, **inner}, key in schema.get("required", ())
