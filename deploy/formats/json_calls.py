"""Calls whose arguments are JSON."""

import json
import re

from . import json_values
from .cursor import Steps
from .described import ARGUMENT_KEYS, NAME_KEYS, JsonCall, NamedJson
from .events import CutOff, NotACall
from .reading import LONGEST_NAME_CHARS, Reading

OTHER_KEYS = frozenset({"type", "id", "tool_call_id", "function", "index", "call_id", *NAME_KEYS, *ARGUMENT_KEYS})
"""Of a call as JSON. Where no marker says that an object is a call, no others may be in it."""


def json_call(reading: Reading, body: JsonCall) -> Steps[None]:
    """`{"name": .., "arguments": ..}`, in any order, with more that says nothing."""
    held: list[str] = []
    has_arguments = yield from _json_fields(reading, body, held, levels=1)
    draft = reading.draft
    if draft.name is None or (body.needs_arguments and not has_arguments):
        raise NotACall
    draft.write("".join(held) if held or has_arguments else "{}")


def _json_fields(reading: Reading, body: JsonCall, held: list[str], levels: int) -> Steps[bool]:
    """held: arguments that come before the name. Returns whether there were arguments."""
    cursor, draft, has_arguments = reading.cursor, reading.draft, False
    yield from json_values.expect(cursor, "{")
    while (char := (yield from cursor.skip_space())) != "}":
        if char == ",":
            cursor.at += 1
        key = yield from json_values.text_of_string(cursor)
        if not reading.calls.is_marked and key not in OTHER_KEYS:
            raise NotACall
        yield from json_values.expect(cursor, ":")
        char = yield from cursor.skip_space()
        if key in (body.name_key, *NAME_KEYS) or (key == "function" and char == '"'):
            draft.begin(reading.named((yield from json_values.text_of_string(cursor))), draft.id)
        elif key in (body.arguments_key, *ARGUMENT_KEYS):
            has_arguments = True
            yield from _arguments(reading, draft.write if draft.name is not None else held.append)
        elif key == "function" and char == "{" and levels:
            has_arguments = (yield from _json_fields(reading, body, held, levels - 1)) or has_arguments
        elif key == "id" and char == '"' and reading.calls.has_own_ids:
            draft.id = yield from json_values.text_of_string(cursor)
        else:
            yield from json_values.value(cursor, lambda _: None)
        if (char := (yield from cursor.skip_space())) not in ",}":
            raise NotACall
        if char == "":
            raise CutOff
    cursor.at += 1
    if held and draft.name is not None:
        draft.write("".join(held))
        held.clear()
    return has_arguments


def keyed_call(reading: Reading) -> Steps[None]:
    """`{NAME: {..}}`."""
    yield from json_values.expect(reading.cursor, "{")
    reading.draft.begin(reading.named((yield from json_values.text_of_string(reading.cursor))))
    yield from json_values.expect(reading.cursor, ":")
    yield from _arguments(reading, reading.draft.write)
    yield from json_values.expect(reading.cursor, "}")


def named_json(reading: Reading, body: NamedJson) -> Steps[None]:
    cursor, draft = reading.cursor, reading.draft
    if body.before:
        yield from cursor.up_to((body.before,), LONGEST_NAME_CHARS)
    header, mark = yield from _header(reading, body)
    name, own_id = header.strip(), None
    if body.id_mark and mark == body.id_mark:
        text, _ = yield from cursor.up_to(body.ends, LONGEST_NAME_CHARS)
        own_id = text.strip()
    if body.id_pattern and (found := re.fullmatch(body.id_pattern, name)):
        name, own_id = found[1], name
    draft.begin(reading.named(name), own_id if reading.calls.has_own_ids else None)
    if body.fence_open:
        yield from reading.pass_over(body.fence_open)
    # Without arguments it is a call where the next marker says so.
    char = yield from cursor.skip_space()
    if char != "{" and (not mark or (yield from _is_close_next(reading))):
        draft.write("{}")
        return
    yield from _arguments(reading, draft.write)
    if body.fence:
        yield from reading.pass_over(body.fence)


def _header(reading: Reading, body: NamedJson) -> Steps[tuple[str, str]]:
    """The name and the marker behind it. Without a marker, a brace or the end of the answer is behind it."""
    ends = tuple(mark for mark in (*body.ends, body.id_mark) if mark)
    others = () if body.ends and body.id_mark == "" else ("{", *reading.calls.opens, reading.calls.close)
    try:
        header, mark = yield from reading.cursor.up_to((*ends, *(each for each in others if each)), LONGEST_NAME_CHARS)
    except CutOff:
        name = reading.cursor.text[reading.cursor.at :].strip()
        if not others or name not in reading.schemas:
            raise
        reading.cursor.at = len(reading.cursor.text)
        return name, ""
    if mark not in ends:
        reading.cursor.at -= len(mark)
        return header, "{" if mark == "{" else ""
    return header, mark


def _is_close_next(reading: Reading) -> Steps[bool]:
    calls, cursor = reading.calls, reading.cursor
    ends = tuple(mark for mark in (calls.close, calls.section_close) if mark)
    cursor.keep()
    found = yield from cursor.match(ends)
    cursor.go_back()
    cursor.forget()
    return found is not None


def _arguments(reading: Reading, write: json_values.Write) -> Steps[None]:
    """An object; or one that is spelt as a string, which is not told before it is whole; or nothing."""
    cursor = reading.cursor
    match (yield from cursor.skip_space()):
        case "{":
            yield from json_values.value(cursor, write)
        case '"':
            write(object_in((yield from json_values.text_of_string(cursor))))
        case "":
            raise CutOff
        case _:
            pieces: list[str] = []
            yield from json_values.value(cursor, pieces.append)
            if "".join(pieces) != "null":
                raise NotACall
            write("{}")


def object_in(text: str) -> str:
    """Arguments that are spelt as a string. Raises `NotACall` unless they are an object."""
    if not text.strip():
        return "{}"
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise NotACall from None
    if not isinstance(value, dict):
        raise NotACall
    return text.strip()
