"""Whether the form of an answer can be compiled in time: tried first in a process that can be ended.

llguidance counts what it does and gives up, but not everywhere: the intersection of twenty patterns, `.*a.{19}` and the
like, is computed for hours, in a thread that nothing can stop, and what overflows the stack takes its process with it.
So whatever is compiled in a worker has been compiled before, within a second and so much memory, by a child of it that
a timer of its own ends. The child reads a line of JSON for each form, and answers with one.
"""

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
from typing import Any

from ...errors import InvalidRequest

TRIAL_S = 1.0
"""What compiling it may take, up to the tokens an answer can begin with."""

TRIAL_BYTES = 2 << 30
"""Of address space."""

MOST_CHARS_TOLD = 300


class FormTrial:
    """A process that compiles forms, one after another, started when it is needed."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._child: subprocess.Popen[str] | None = None

    def run(self, kind: str, text: str) -> None:
        """Raises `InvalidRequest`, naming the field, if the form is none or takes too much."""
        with self._lock:
            answer = self._ask(json.dumps([kind, text]) + "\n")
        if not answer:
            raise InvalidRequest(
                f"{kind} can not be compiled within {TRIAL_S:g} s and {TRIAL_BYTES >> 20} MiB; make it simpler",
                field=kind,
            )
        complaint = json.loads(answer)
        if complaint is not None:
            raise InvalidRequest(complaint, field=kind)

    def _ask(self, question: str) -> str:
        """What the child says; nothing if it ends over it."""
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
    """The form as llguidance wants it. Raises `ValueError`."""
    from llguidance import LLMatcher

    match kind:
        case "json_schema":
            # Where any white space may follow, small models go on with it for ever.
            return LLMatcher.grammar_from_json_schema(text, defaults={"whitespace_flexible": False})
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
    raise ValueError(f"{kind} is no form of answers; there are json_schema, regex and choice")


def complaint_about(matcher: Any, kind: str) -> str | None:
    """What is wrong with a compiled form, if anything."""
    return f"{kind} can not be used: {one_line(matcher.get_error())}" if matcher.is_error() else None


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
    """The child: until nobody asks any more."""
    from llguidance import LLTokenizer

    resource.setrlimit(resource.RLIMIT_AS, (TRIAL_BYTES, TRIAL_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    tokenizer = LLTokenizer("byte")  # it is the form that takes long, not the vocabulary
    for question in sys.stdin:
        signal.setitimer(signal.ITIMER_REAL, TRIAL_S)
        complaint = _complaint(tokenizer, *json.loads(question))
        signal.setitimer(signal.ITIMER_REAL, 0)
        print(json.dumps(complaint), flush=True)


def _complaint(tokenizer, kind: str, text: str) -> str | None:
    from llguidance import LLMatcher

    try:
        matcher = LLMatcher(tokenizer, source_of(kind, text), log_level=0)
    except ValueError as error:
        return f"{kind} can not be read: {one_line(str(error))}"
    if not matcher.is_error():
        matcher.compute_bitmask()
    return complaint_about(matcher, kind)
