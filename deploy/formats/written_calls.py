"""Calls that are written in a language of their own: as Python calls a function, and as Gemma does."""

import json

from . import json_values, literals
from .cursor import Steps
from .described import Braced
from .events import CutOff, NotACall
from .reading import LONGEST_NAME_CHARS, NAME, Reading
from .typed import Schema, typed


def pythonic_call(reading: Reading) -> Steps[None]:
    """`name(key=value, ..)`."""
    cursor, draft = reading.cursor, reading.draft
    yield from cursor.skip_space()
    name, _ = yield from cursor.up_to(("(",), LONGEST_NAME_CHARS)
    draft.begin(reading.named(name))
    before = "{"
    while (char := (yield from cursor.skip_space())) != ")":
        if char == "":
            raise CutOff
        key, _ = yield from cursor.up_to(("=",), LONGEST_NAME_CHARS)
        if not NAME.fullmatch(key := key.strip().strip("\"'")):
            raise NotACall
        draft.write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        yield from literals.value(cursor, draft.write)
        char = yield from cursor.skip_space()
        if char == ",":
            cursor.at += 1
        elif char != ")":
            raise CutOff if char == "" else NotACall
    cursor.at += 1
    draft.write("{}" if before == "{" else "}")


def braced_call(reading: Reading, body: Braced) -> Steps[None]:
    """`call:NAME{..}`."""
    cursor, draft = reading.cursor, reading.draft
    yield from cursor.skip_space()
    if (yield from cursor.match((body.before,))) is None:
        raise CutOff if cursor.is_at_end and cursor.has_ended else NotACall
    name, _ = yield from cursor.up_to(("{",), LONGEST_NAME_CHARS)
    draft.begin(reading.named(name))
    yield from _braces(reading, body.quote, reading.schemas.get(draft.name or ""), 0)


def _braces(reading: Reading, quote: str, schema: Schema | None, levels: int) -> Steps[None]:
    """The entries of an object, from behind its brace on. schema: of the outermost one's entries."""
    cursor, write = reading.cursor, reading.draft.write
    before = "{"
    while (char := (yield from cursor.skip_space())) != "}":
        if char == "":
            raise CutOff
        key = yield from _braced_key(reading, quote)
        write(f"{before}{json.dumps(key, ensure_ascii=False)}: ")
        before = ", "
        kinds = schema.kinds(key) if schema is not None else None
        yield from _braced_value(reading, quote, kinds, levels + 1)
        yield from comma(reading, "}")
    cursor.at += 1
    write("{}" if before == "{" else "}")


def _braced_key(reading: Reading, quote: str) -> Steps[str]:
    key, _ = yield from reading.cursor.up_to((":",), LONGEST_NAME_CHARS)
    key = key.replace(quote, "").strip().strip('"')
    if not key or any(char in key for char in "{}[],"):
        raise NotACall
    return key


def _braced_value(reading: Reading, quote: str, kinds: frozenset[str] | None, levels: int) -> Steps[None]:
    cursor, write = reading.cursor, reading.draft.write
    if levels > json_values.MOST_LEVELS:
        raise NotACall
    char = yield from cursor.skip_space()
    if (yield from cursor.match((quote,))):
        yield from _quoted(reading, quote)
    elif char == '"':
        yield from json_values.string(cursor, write)
    elif char == "{":
        cursor.at += 1
        yield from _braces(reading, quote, None, levels)
    elif char == "[":
        cursor.at += 1
        write("[")
        is_first = True
        while (char := (yield from cursor.skip_space())) != "]":
            if char == "":
                raise CutOff
            write("" if is_first else ", ")
            yield from _braced_value(reading, quote, None, levels + 1)
            yield from comma(reading, "]")
            is_first = False
        cursor.at += 1
        write("]")
    else:
        write((yield from _bare(reading, kinds)))


def _quoted(reading: Reading, quote: str) -> Steps[None]:
    """Text up to the next quote, which nothing escapes."""
    cursor, write = reading.cursor, reading.draft.write
    write('"')
    while True:
        place, found = cursor.find((quote,))
        write(json.dumps(cursor.text[cursor.at : place], ensure_ascii=False)[1:-1])
        cursor.at = place
        if found is not None:
            cursor.at += len(quote)
            write('"')
            return
        yield from cursor.more()


def _bare(reading: Reading, kinds: frozenset[str] | None) -> Steps[str]:
    """A number or a word, or text without quotes."""
    cursor = reading.cursor
    while True:
        place, found = cursor.find((",", "}", "]"))
        if found is not None:
            break
        yield from cursor.more()
    text, cursor.at = cursor.text[cursor.at : place].strip(), place
    if not text:
        raise NotACall
    return typed(text, kinds, is_json=True)


def comma(reading: Reading, close: str) -> Steps[None]:
    char = yield from reading.cursor.skip_space()
    if char == ",":
        reading.cursor.at += 1
    elif char != close:
        raise CutOff if char == "" else NotACall
