"""Values as Python writes them, handed on as JSON while they come."""

import json
import re

from .cursor import Cursor, Steps
from .events import CutOff, NotACall
from .json_values import MOST_LEVELS, MOST_NUMBER_CHARS, WORDS, Write

NUMBER = re.compile(r"[-+]?(0|[1-9]\d*|(?:0|[1-9]\d*)?\.\d+|(?:0|[1-9]\d*)\.\d*)([eE][+-]?\d+)?")

ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "0": "\0", "a": "\a", "v": "\v"} | {
    char: char for char in "\\'\""
}

CODES = {"x": 2, "u": 4, "U": 8}
"""Digits of the character codes in strings."""

BEHIND = frozenset(",)]}:")
"""What stands behind a string. A quote with something else behind it is a character of the string: models forget to
escape it."""


def value(cursor: Cursor, write: Write, levels: int = 0) -> Steps[None]:
    """Pass over one value and write its JSON. Raises `NotACall` for what is no value, `CutOff` at the answer's end."""
    if levels > MOST_LEVELS:
        raise NotACall
    char = yield from cursor.skip_space()
    if char == "":
        raise CutOff
    if char in "\"'":
        yield from _string(cursor, write)
    elif char in "[(":
        yield from _list(cursor, write, "]" if char == "[" else ")", levels)
    elif char == "{":
        yield from _dict(cursor, write, levels)
    else:
        write((yield from _bare(cursor)))


def as_json(text: str) -> str | None:
    """The JSON of a whole value. None: it is no value."""
    cursor, pieces = Cursor(), list[str]()
    cursor.feed(text + " ")
    cursor.has_ended = True
    try:
        for _ in value(cursor, pieces.append):
            pass
    except (NotACall, CutOff):
        return None
    return "".join(pieces) if not text[cursor.at :].strip() else None


def _string(cursor: Cursor, write: Write) -> Steps[None]:
    quote = cursor.text[cursor.at]
    plain = re.compile(r"[^\\" + quote + "]*")
    cursor.at += 1
    write('"')
    while True:
        found = plain.match(cursor.text, cursor.at)
        if found and found.end() > cursor.at:
            write(_quoted(found[0]))
            cursor.at = found.end()
        char = cursor.text[cursor.at : cursor.at + 1]
        if char == "":
            yield from cursor.more()
        elif char == "\\":
            write(_quoted((yield from _escape(cursor))))
        elif (yield from _is_last(cursor)):
            cursor.at += 1
            write('"')
            return
        else:
            cursor.at += 1
            write(_quoted(quote))


def _is_last(cursor: Cursor) -> Steps[bool]:
    """Is the quote at the cursor the one that ends its string?"""
    while True:
        place = cursor.at + 1
        while cursor.text[place : place + 1].isspace():
            place += 1
        if place < len(cursor.text) or cursor.has_ended:
            return place >= len(cursor.text) or cursor.text[place] in BEHIND
        yield


def _escape(cursor: Cursor) -> Steps[str]:
    while len(cursor.text) < cursor.at + 2:
        yield from cursor.more()
    char = cursor.text[cursor.at + 1]
    digits = CODES.get(char, 0)
    while len(cursor.text) < cursor.at + 2 + digits:
        yield from cursor.more()
    code = cursor.text[cursor.at + 2 : cursor.at + 2 + digits]
    if digits and re.fullmatch(r"[0-9a-fA-F]+", code) and (number := int(code, 16)) < 0x110000:
        cursor.at += 2 + digits
        return chr(number)
    cursor.at += 2
    return "" if char == "\n" else ESCAPES.get(char, "\\" + char)


def _list(cursor: Cursor, write: Write, close: str, levels: int) -> Steps[None]:
    cursor.at += 1
    write("[")
    is_first = True
    while (char := (yield from cursor.skip_space())) != close:
        if char == "":
            raise CutOff
        write("" if is_first else ", ")
        yield from value(cursor, write, levels + 1)
        yield from _comma(cursor, close)
        is_first = False
    cursor.at += 1
    write("]")


def _dict(cursor: Cursor, write: Write, levels: int) -> Steps[None]:
    cursor.at += 1
    write("{")
    is_first = True
    while (char := (yield from cursor.skip_space())) != "}":
        if char == "":
            raise CutOff
        write("" if is_first else ", ")
        if char not in "\"'":
            raise NotACall
        yield from _string(cursor, write)
        char = yield from cursor.skip_space()
        if char != ":":
            raise CutOff if char == "" else NotACall
        cursor.at += 1
        write(": ")
        yield from value(cursor, write, levels + 1)
        yield from _comma(cursor, "}")
        is_first = False
    cursor.at += 1
    write("}")


def _comma(cursor: Cursor, close: str) -> Steps[None]:
    """Pass over the comma behind an entry, if it is not the last one."""
    char = yield from cursor.skip_space()
    if char == ",":
        cursor.at += 1
    elif char != close:
        raise CutOff if char == "" else NotACall


def _bare(cursor: Cursor) -> Steps[str]:
    bare = yield from cursor.bare(MOST_NUMBER_CHARS)
    if bare not in WORDS and not NUMBER.fullmatch(bare):
        raise NotACall
    cursor.at += len(bare)
    if bare in WORDS:
        return WORDS[bare]
    return _number(bare)


def _number(bare: str) -> str:
    """JSON has no sign before positive numbers, and digits on both sides of a point."""
    bare = bare.removeprefix("+")
    bare = re.sub(r"^(-?)\.", r"\g<1>0.", bare)
    return re.sub(r"\.(?=$|[eE])", ".0", bare)


def _quoted(text: str) -> str:
    """Half characters, which codes may name, stay codes."""
    return json.dumps(text, ensure_ascii=any("\ud800" <= char <= "\udfff" for char in text))[1:-1]
