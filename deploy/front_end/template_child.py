"""The process in which chat templates are rendered: see `templates.py`, which starts it.

A template is a program, and what it is given is anybody's: two loops within each other take hours, a string times a
number takes all memory. So it runs where a timer and a limit of memory end it, and nothing else with it. The rendered
text is what transformers makes of the same template and messages (`transformers.utils.chat_template_utils`). Some
templates of released models need what transformers refuses; they render here, and it is nothing that the limits of this
process do not hold for:

    list.append and its like    on lists and dicts that the template made itself; not on what it was given
    from_json, fromjson         filters that read JSON, the inverse of `tojson`; what is no text they leave as it is
    {% do ... %}                an expression whose value is not printed

This file is run by itself and imports jinja2 alone, so that a child is there within 0.1 s and takes 20 MB.

    in    {"bytes": N, "timeout_s": S, "memory_bytes": M, "max_bytes": B}\\n and N bytes of JSON, a question
    out   {"bytes": N}\\n and N bytes of text; or {"refused": why}, {"too_long": B}, {"too_large": true} and no more
"""

import json
import resource
import signal
import sys
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.debug  # what it needs to say where a template failed, while there is memory
import jinja2.ext
import jinja2.nodes
from jinja2.sandbox import SandboxedEnvironment, modifies_known_mutable

LONGEST_COMPLAINT_CHARS = 300

REASONING = ("reasoning_content", "thinking", "reasoning")
"""What clients call the reasoning of a message. Templates read the first of them, gpt-oss's the second."""

OPEN_END = "CONTINUE_FINAL_MESSAGE_TAG "
"""Stands after a message that is to be gone on with, so that its end is found in what is rendered."""


class Refused(Exception):
    """The template, or we, cannot do with these messages."""


class TooLong(Exception):
    """More text came than was asked for."""


class Generation(jinja2.ext.Extension):
    """{% generation %} marks what the model wrote, which matters to those who train. Here it says what it contains."""

    tags = frozenset({"generation"})  # type: ignore[assignment]

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_contained"), [], [], body).set_lineno(line)

    def _contained(self, caller: Any) -> str:
        return caller()


class Environment(SandboxedEnvironment):
    """One in which a template changes what it made itself. What it was given stays as it is, as in transformers."""

    given: frozenset[int] = frozenset()  # of the render under way: the ids of lists and dicts in it

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        changes_given = id(obj) in self.given and modifies_known_mutable(obj, attr)
        return not changes_given and super().is_safe_attribute(obj, attr, value)


def _containers(value: Any) -> Iterator[int]:
    """The ids of all lists and dicts in a value as JSON has it."""
    left = [value]
    while left:
        at = left.pop()
        if isinstance(at, dict | list):
            yield id(at)
            left.extend(at.values() if isinstance(at, dict) else at)


class Dict:
    """`dict` as templates call it: of its attributes they get this one only."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any, **kwargs: Any) -> dict:
        return dict.fromkeys(*args, **kwargs)


class Namespace(jinja2.utils.Namespace):
    """One that takes no names with an underscore in front, by which Python's insides are reached."""

    def __init__(*args: Any, **kwargs: Any):
        self, args = args[0], args[1:]
        attributes = dict(*args, **kwargs)
        for name in attributes:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, attributes)

    def __setitem__(self, name: Any, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace takes no name that begins with an underscore: {name!r}")


def _raise_exception(message: Any) -> None:
    raise jinja2.exceptions.TemplateError(message)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """jinja's own would escape what HTML minds."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _from_json(value: Any) -> Any:
    """What a text says as JSON; anything else as it is, since callers give the arguments of calls as either."""
    if not isinstance(value, str):
        return value
    try:
        return json.loads(value)
    except ValueError as error:
        raise jinja2.exceptions.TemplateError(f"from_json is given a text that is no JSON: {error}") from None


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


@lru_cache(16)
def compiled(template: str) -> jinja2.Template:
    """Compile the template as transformers does, and what it refuses to."""
    environment = Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols, jinja2.ext.do]
    )
    environment.filters |= {"tojson": _tojson, "from_json": _from_json, "fromjson": _from_json}
    environment.globals |= {
        "raise_exception": _raise_exception,
        "strftime_now": _strftime_now,
        "dict": Dict(),
        "namespace": Namespace,
    }
    return environment.from_string(template)


def render(question: dict[str, Any], max_bytes: int) -> str:
    """question: see `templates.Question`. Raises `Refused`, `TooLong` or whatever a template raises."""
    messages = [_turn(message) for message in question["messages"]]
    open_text = _open_last(messages, question["template"]) if question["continue_final_message"] else None
    given = {
        "messages": messages,
        "tools": question["tools"],
        "documents": question["variables"].pop("documents", None),
        "add_generation_prompt": question["add_generation_prompt"],
    }
    template, given = compiled(question["template"]), {**question["variables"], **given}
    template.environment.given = frozenset(_containers(given))  # type: ignore[attr-defined]
    pieces, left = [], max_bytes
    for piece in template.generate(**given):
        pieces.append(piece)
        left -= len(piece)  # at least as many bytes
        if left < 0:
            raise TooLong
    text = "".join(pieces)
    return text if open_text is None else _cut_at_open_end(text, open_text)


def _turn(message: dict[str, Any]) -> dict[str, Any]:
    """Leave null fields out, and give the reasoning under each name that templates read."""
    message = {name: value for name, value in message.items() if value is not None}
    reasoning = next((message[name] for name in REASONING if name in message), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _open_last(messages: list[dict[str, Any]], template: str) -> str:
    """Mark the end of the last message's text. Returns the text."""
    content = messages[-1].get("content")
    if content is None:
        raise Refused('continue_final_message is set but the final message has no "content" to continue')
    if "content" not in template:
        raise Refused("continue_final_message is set and the template does not read the content of messages")
    if not isinstance(content, list):
        messages[-1]["content"] = content + OPEN_END
        return content
    for part in reversed(content):
        if "text" in part:
            text, part["text"] = part["text"], part["text"] + OPEN_END
            return text
    raise Refused("continue_final_message is set and the final message has no text to continue")


def _cut_at_open_end(text: str, open_text: str) -> str:
    mark = OPEN_END.strip()
    if open_text.strip() not in text or mark not in text:
        raise Refused("continue_final_message is set and the template leaves out the final message, or parts of it")
    end = text.rindex(mark)
    is_kept = text[end : end + len(OPEN_END)] == OPEN_END  # else the template strips messages
    return text[:end] if is_kept else text[:end].rstrip()


def answer(question: bytes, max_bytes: int) -> tuple[dict[str, Any], bytes]:
    """(head, text)"""
    try:
        text = render(json.loads(question), max_bytes).encode("utf-8", "surrogatepass")
    except (TooLong, MemoryError, RecursionError) as error:
        return ({"too_long": max_bytes} if isinstance(error, TooLong) else {"too_large": True}), b""
    except Exception as error:  # noqa: BLE001  templates raise what their authors wrote
        return {"refused": str(error)[:LONGEST_COMPLAINT_CHARS]}, b""
    return ({"bytes": len(text)}, text) if len(text) <= max_bytes else ({"too_long": max_bytes}, b"")


def serve() -> None:
    """Until its parent ends, or something took too much: the parent then starts another."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which may still have to ask
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as own:
        taken_bytes = int(own.read().split()[0]) * resource.getpagesize()
    questions, answers = sys.stdin.buffer, sys.stdout.buffer
    while line := questions.readline():
        about = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, about["timeout_s"])
        resource.setrlimit(resource.RLIMIT_AS, (taken_bytes + about["memory_bytes"], resource.RLIM_INFINITY))
        head, text = answer(questions.read(about["bytes"]), about["max_bytes"])
        answers.write(json.dumps(head).encode() + b"\n")
        answers.write(text)
        answers.flush()
        signal.setitimer(signal.ITIMER_REAL, 0)
        if "too_large" in head:
            return


if __name__ == "__main__":
    serve()
