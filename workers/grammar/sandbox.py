"""Whether a grammar for structured output can be compiled in time: tried first in a process that can be ended.

llguidance counts what it does and gives up, but not everywhere: the intersection of twenty patterns, `.*a.{19}` and the
like, is computed for hours, in a thread that nothing can stop, and what overflows the stack takes its process with it.
So a worker compiles only what a child of it has compiled before, within a second and a limit of memory. A timer of the
child's own ends it. The child reads a line of JSON for each grammar, and answers with one. What is wrong with a schema
is then looked for, part by part, under a timer, too.
"""

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

from ...errors import InvalidRequest

TRIAL_S = 1.0
"""What compiling it may take, up to the tokens an answer can begin with."""

PLACE_S = 0.25
"""What looking for the cause of a complaint may take."""

TRIAL_BYTES = 2 << 30
"""Of address space."""

MOST_CHARS_TOLD = 300

MOST_PARTS_TRIED = 1000
"""Of a schema, in which the cause of a complaint is looked for."""

LONGEST_PLACE_CHARS = 120

PLACE_OF = "place of "
"""Before the kind of a grammar: this asks for the place of a complaint in it."""

TOKEN, ANY_LITERAL = re.compile(r"<\[\d+\]>"), '"token"'
"""A token of the model in a grammar, which the child does not know; and what stands for it while it is tried."""

NAMED = ("$defs", "definitions", "properties", "patternProperties", "dependentSchemas")
"""Keywords of JSON Schema whose values are schemas by name."""

DATA = ("const", "enum", "default", "examples")
"""Keywords whose values are no schemas."""


class GrammarSandbox:
    """A process that compiles grammars, one after another, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def run(self, kind: str, text: str) -> None:
        """Raises `InvalidRequest`, naming the field, if the grammar is none or takes too much. Of a schema the error's
        details have the `complaint` alone and its `place`, a pointer, where that is known."""
        with self._lock:
            answer = self._ask(kind, text)
            if not answer:
                raise InvalidRequest(
                    f"{kind} cannot be compiled within {TRIAL_S:g} s and {TRIAL_BYTES >> 20} MiB; make it simpler",
                    field=kind,
                )
            complaint = json.loads(answer)
            if complaint is None:
                return
            place = json.loads(self._ask(PLACE_OF + kind, text) or "null")
        if not place:
            raise InvalidRequest(complaint, field=kind)
        place = place if len(place) <= LONGEST_PLACE_CHARS else f"{place[: LONGEST_PLACE_CHARS - 4]} ..."
        raise InvalidRequest(f"{complaint}, at {place}", field=kind, complaint=complaint, place=place)

    def _ask(self, kind: str, text: str) -> str:
        """The child's answer; empty if the child ended before it answered."""
        question = json.dumps([kind, text]) + "\n"
        if self._child is None or self._child.poll() is not None:
            self._child = _start()
        assert self._child.stdin is not None and self._child.stdout is not None
        answer = ""
        with contextlib.suppress(BrokenPipeError):
            self._child.stdin.write(question)
            self._child.stdin.flush()
            answer = self._child.stdout.readline()
        if not answer:
            self._child.communicate()
            self._child = None
        return answer


def source_of(kind: str, text: str) -> str:
    """The grammar as llguidance wants it. Raises `ValueError`."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            # Where any white space may follow, small models go on with it for ever.
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        case "lark":
            return LLMatcher.grammar_from_lark(text)
    raise ValueError(f"{kind} is no form of answers; there are json_schema, regex, choice and lark")


def complaint_about(matcher: Any, kind: str) -> str | None:
    """What is wrong with a compiled grammar, if anything."""
    return f"{kind} cannot be used: {one_line(matcher.get_error())}" if matcher.is_error() else None


def one_line(text: str) -> str:
    """What a library complains of, as one sentence. A regular expression's parser draws where the fault is, and then
    says what it is: that is what counts."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    told = next((line.removeprefix("error: ") for line in lines if line.startswith("error: ")), " ".join(lines))
    return told if len(told) <= MOST_CHARS_TOLD else f"{told[: MOST_CHARS_TOLD - 4]} ..."


def _start() -> "subprocess.Popen[str]":
    program = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; serve()"
    command = [sys.executable, "-c", program]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def serve() -> None:
    """The child: until its input ends."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")  # it is the grammar that takes long, not the vocabulary
    for question in sys.stdin:
        kind, text = json.loads(question)
        asked, within_s = (_place, PLACE_S) if kind.startswith(PLACE_OF) else (_complaint, TRIAL_S)
        signal.setitimer(signal.ITIMER_REAL, within_s)
        answer = asked(tokenizer, kind.removeprefix(PLACE_OF), text)
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(answer), flush=True)


def _complaint(tokenizer, kind: str, text: str) -> str | None:
    from llguidance import LLMatcher

    if kind == "lark":
        text = TOKEN.sub(ANY_LITERAL, text)
    try:
        matcher = LLMatcher(tokenizer, source_of(kind, text), log_level=0)
    except ValueError as error:
        return f"{kind} cannot be read: {one_line(str(error))}"
    if not matcher.is_error():
        matcher.compute_bitmask()
    return complaint_about(matcher, kind)


def _place(tokenizer, kind: str, text: str) -> str | None:
    """A pointer to the innermost part of a schema that alone causes the same complaint; None where no part does.

    A part that refers to others than the definitions causes another complaint when it stands alone. It is passed over.
    """
    # Only a schema has parts.
    if kind != "json_schema":
        return None
    try:
        part = json.loads(text)
    except ValueError:
        return None
    complaint, shared = _complaint(tokenizer, kind, text), _shared(part)
    place, left = "", MOST_PARTS_TRIED

    def is_at_fault(inner: dict[str, Any]) -> bool:
        return _complaint(tokenizer, kind, json.dumps({**shared, **inner})) == complaint

    # Go into the first part that is at fault by itself, as long as there is one and tries are left.
    while True:
        for step, inner in _parts(part):
            left -= 1
            if left < 0:
                return None
            if is_at_fault(inner):
                place, part = f"{place}/{step}", inner
                break
        else:
            return f"#{place}" if place else None


def _shared(schema: Any) -> dict[str, Any]:
    """The definitions that any part of the schema may refer to."""
    given = schema if isinstance(schema, dict) else {}
    return {name: given[name] for name in ("$defs", "definitions") if name in given}


def _parts(schema: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """The schemas right within a schema, definitions first, and the way to each."""
    given = schema if isinstance(schema, dict) else {}
    for name in sorted(given, key=lambda name: NAMED.index(name) if name in NAMED else len(NAMED)):
        value = given[name]
        if name in DATA:
            continue
        if isinstance(value, list):
            yield from ((f"{name}/{n}", each) for n, each in enumerate(value) if isinstance(each, dict))
        elif name in NAMED and isinstance(value, dict):
            yield from ((f"{name}/{_escaped(key)}", each) for key, each in value.items() if isinstance(each, dict))
        elif isinstance(value, dict):
            yield name, value


def _escaped(name: str) -> str:
    """As pointers have it."""
    return name.replace("~", "~0").replace("/", "~1")
