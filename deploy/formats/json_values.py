"""A JSON value that is still coming: handed on piece by piece as it is written, once it is surely JSON.

Slips that models make are mended, and nothing else is changed: line breaks within strings, Python's spelling of `True`,
a comma behind the last entry, escapes that JSON does not have.
"""

import json
import re
from collections.abc import Callable

from .cursor import Cursor, Steps
from .events import CutOff, NotACall

MOST_LEVELS = 96
"""Of lists and objects within each other."""

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")

PLAIN = re.compile(r'(?:[^"\\\x00-\x1f]+|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*')
"""What a string may hold as it is."""

WORDS = {"true": "true", "false": "false", "null": "null", "True": "true", "False": "false", "None": "null"}

ESCAPES = frozenset('"\\/bfnrt')

MOST_NUMBER_CHARS = 1024

Write = Callable[[str], None]


def value(cursor: Cursor, write: Write, levels: int = 0) -> Steps[None]:
    """Pass over one value. Raises `NotACall` for what is no JSON, `CutOff` where the answer ends in it."""
    if levels > MOST_LEVELS:
        raise NotACall
    match (yield from cursor.skip_space()):
        case "":
            raise CutOff
        case '"':
            yield from string(cursor, write)
        case "{":
            yield from _entries(cursor, write, "}", levels)
        case "[":
            yield from _entries(cursor, write, "]", levels)
        case _:
            write((yield from _bare(cursor)))


def string(cursor: Cursor, write: Write) -> Steps[None]:
    """A string, from its opening quote on."""
    cursor.at += 1
    write('"')
    while True:
        found = PLAIN.match(cursor.text, cursor.at)
        if found and found.end() > cursor.at:
            write(found[0])
            cursor.at = found.end()
        char = cursor.text[cursor.at : cursor.at + 1]
        if char == "":
            yield from cursor.more()
        elif char == '"':
            cursor.at += 1
            write('"')
            return
        elif char == "\\":
            write((yield from _escape(cursor)))
        else:
            cursor.at += 1
            write(json.dumps(char)[1:-1])


def text_of_string(cursor: Cursor) -> Steps[str]:
    """A string, which is wanted as what it means. The cursor is at its opening quote, else `NotACall` is raised."""
    if (yield from cursor.skip_space()) != '"':
        yield from _end_or_not_a_call(cursor)
    pieces: list[str] = []
    yield from string(cursor, pieces.append)
    return json.loads("".join(pieces))


def expect(cursor: Cursor, char: str) -> Steps[None]:
    """Pass over white space and this character. Raises `NotACall` for another one, `CutOff` at the end."""
    if (yield from cursor.skip_space()) != char:
        yield from _end_or_not_a_call(cursor)
    cursor.at += 1


def _end_or_not_a_call(cursor: Cursor) -> Steps[None]:
    if cursor.is_at_end:
        yield from cursor.more()
    raise NotACall


def _entries(cursor: Cursor, write: Write, close: str, levels: int) -> Steps[None]:
    """What is within a list or an object, from its opening bracket on."""
    write(cursor.text[cursor.at])
    cursor.at += 1
    before = ""
    while True:
        space, char = yield from _space(cursor)
        if char == close:
            cursor.at += 1
            write(space + close)
            return
        write(before + space)
        if close == "}":
            if char != '"':
                yield from _end_or_not_a_call(cursor)
            yield from string(cursor, write)
            yield from expect(cursor, ":")
            write(":")
            space, char = yield from _space(cursor)
            write(space)
        yield from value(cursor, write, levels + 1)
        space, char = yield from _space(cursor)
        if char == ",":
            cursor.at += 1
            before = space + ","
        elif char == close:
            cursor.at += 1
            write(space + close)
            return
        else:
            yield from _end_or_not_a_call(cursor)


def _space(cursor: Cursor) -> Steps[tuple[str, str]]:
    """White space as it stands, and the character behind it."""
    pieces = []
    while True:
        start = cursor.at
        while cursor.text[cursor.at : cursor.at + 1] in (" ", "\n", "\t", "\r"):
            cursor.at += 1
        pieces.append(cursor.text[start : cursor.at])
        if not cursor.is_at_end or cursor.has_ended:
            return "".join(pieces), cursor.text[cursor.at : cursor.at + 1]
        yield


def _bare(cursor: Cursor) -> Steps[str]:
    bare = yield from cursor.bare(MOST_NUMBER_CHARS)
    if bare not in WORDS and not NUMBER.fullmatch(bare):
        raise NotACall
    cursor.at += len(bare)
    return WORDS.get(bare, bare)


def _escape(cursor: Cursor) -> Steps[str]:
    """An escape in a string, from its backslash on; one that JSON does not have becomes the characters it stands for
    in other languages, or those it is written with."""
    while len(cursor.text) < cursor.at + 2:
        yield from cursor.more()
    char = cursor.text[cursor.at + 1]
    if char == "u":
        while len(cursor.text) < cursor.at + 6:
            yield from cursor.more()
        code = cursor.text[cursor.at : cursor.at + 6]
        if re.fullmatch(r"\\u[0-9a-fA-F]{4}", code):
            cursor.at += 6
            return code
    cursor.at += 2
    if char in ESCAPES:
        return "\\" + char
    return "'" if char == "'" else "\\\\" + (char if char >= " " else json.dumps(char)[1:-1])
