"""Calls with a tag around each argument."""

import json
import re

from . import json_values
from .cursor import Steps
from .described import Tagged
from .events import CutOff, NotACall
from .reading import LONGEST_NAME_CHARS, Reading
from .typed import Schema, typed

LONGEST_TAG_CHARS = 512

ATTRIBUTE = re.compile(r'([\w-]+)\s*=\s*"([^"]*)"')

WRAPPING_KEYS = ("arguments", "parameters")
"""A tag of such a name, which the tool does not know, may hold all arguments."""


class TaggedReader:
    """Reads one call. Its arguments become a JSON object, in which texts are handed on as they come."""

    def __init__(self, reading: Reading, body: Tagged):
        self._cursor = reading.cursor
        self._reading = reading
        self._body = body
        self._schema = Schema(None)
        self._count = 0  # of arguments that are written
        self._held: tuple[str, str] | None = None  # an argument that may hold all others: its key, and its JSON
        calls = reading.calls
        self._ends = tuple(mark for mark in (body.end, calls.close, calls.section_close, calls.open) if mark)

    def call(self) -> Steps[None]:
        body, cursor, draft = self._body, self._cursor, self._reading.draft
        if body.before:
            yield from cursor.up_to((body.before,), LONGEST_NAME_CHARS)
        draft.begin(self._reading.named(self._plain((yield from self._name()))))
        self._schema = self._reading.schemas.get(draft.name or "", self._schema)
        tags = tuple(tag for tag in (body.key_open, body.whole_open) if tag)
        while True:
            char = yield from cursor.skip_space()
            cursor.keep()
            found = yield from cursor.match((*tags, *self._ends))
            if found not in (*tags, body.end):
                cursor.go_back()
            cursor.forget()
            if found == body.key_open:
                yield from self._argument()
            elif found is not None and found == body.whole_open:
                yield from self._whole()
            elif found is not None or (char == "" and self._count):
                break
            else:
                raise CutOff if char == "" else NotACall
        self._finish()

    def _finish(self) -> None:
        draft = self._reading.draft
        if self._held is not None:
            key, value = self._held
            if value.startswith("{"):
                draft.write(value)
                return
            self._held = None
            self._write_key(key)
            draft.write(value)
        draft.write("}" if self._count else "{}")

    def _name(self) -> Steps[str]:
        """The name, and what else is said of the call."""
        body, cursor = self._body, self._cursor
        if body.name_end:
            name, _ = yield from cursor.up_to((body.name_end,), LONGEST_NAME_CHARS)
            if body.attributes_end:
                yield from cursor.up_to((body.attributes_end,), LONGEST_TAG_CHARS)
            return name
        yield from cursor.skip_space()
        name, mark = yield from cursor.up_to(("\n", body.key_open, *self._ends), LONGEST_NAME_CHARS)
        cursor.at -= len(mark)
        return name

    def _plain(self, text: str) -> str:
        return text.replace("&quot;", '"').replace("&amp;", "&") if self._body.has_entities else text

    def _argument(self) -> Steps[None]:
        body, cursor = self._body, self._cursor
        key, _ = yield from cursor.up_to((body.key_end,), LONGEST_TAG_CHARS)
        key = self._plain(key.strip())
        if not key or any(char in key for char in "<>\n"):
            raise NotACall
        attributes: dict[str, str] = {}
        if body.value_open:
            text, _ = yield from cursor.up_to((body.value_open,), LONGEST_TAG_CHARS)
            attributes = dict(ATTRIBUTE.findall(text))
        if self._held is not None:
            (first, value), self._held = self._held, None
            self._write_key(first)
            self._reading.draft.write(value)
        # A text is handed on as it comes; another value is known when it is whole.
        said = attributes.get(body.type_mark) if body.type_mark else None
        kinds = self._schema.kinds(key)
        if kinds == {"string"} or (kinds is None and said in ("true", "string")):
            self._write_key(key)
            self._reading.draft.write('"')
            yield from self._value(lambda text: self._reading.draft.write(json.dumps(text, ensure_ascii=False)[1:-1]))
            self._reading.draft.write('"')
            return
        pieces: list[str] = []
        yield from self._value(pieces.append)
        value = typed("".join(pieces), kinds, is_json=said is not None)
        # All arguments within one that the tool does not have.
        if key in WRAPPING_KEYS and not self._count and self._schema.has_parameters and not self._schema.knows(key):
            self._held = (key, typed("".join(pieces), None, is_json=True))
            return
        self._write_key(key)
        self._reading.draft.write(value)

    def _write_key(self, key: str) -> None:
        self._reading.draft.write(f"{', ' if self._count else '{'}{json.dumps(key, ensure_ascii=False)}: ")
        self._count += 1

    def _value(self, write: json_values.Write) -> Steps[None]:
        """What is between the tags of a value. A tag that ends values is text where nothing follows that may follow
        a value; a value whose tag was forgotten ends where the next begins."""
        cursor, body = self._cursor, self._body
        if body.is_lined and (yield from cursor.peek()) == "\n":
            cursor.at += 1
        ends = self._value_ends()
        while True:
            place, mark = cursor.find(ends)
            if mark is None:
                if cursor.has_ended:
                    place = self._before_half_tag(ends)
                write(cursor.text[cursor.at : place])
                cursor.at = place
                yield from cursor.more()
                continue
            is_own = mark in (body.value_close, f"\n{body.value_close}")
            if (yield from self._ends_value(place - cursor.at, mark, is_own)):
                place, _ = cursor.find(ends)
                write(cursor.text[cursor.at : place])
                cursor.at = place + (len(mark) if is_own else 0)
                return
            place, _ = cursor.find(ends)
            write(cursor.text[cursor.at : place + len(mark)])
            cursor.at = place + len(mark)

    def _before_half_tag(self, ends: tuple[str, ...]) -> int:
        """Where a value that was cut ends: half of a tag behind it is no part of it, while one character is no tag."""
        cursor = self._cursor
        place = cursor.sure(ends)
        return place if len(cursor.text) - place > 1 else len(cursor.text)

    def _value_ends(self) -> tuple[str, ...]:
        """Marks at which a value may end: its own, and those that end the call or begin the next argument."""
        body, close = self._body, self._body.end or self._reading.calls.close
        if not body.is_lined:
            return (body.value_close, close)
        return (body.value_close, close, *(f"\n{mark}" for mark in (body.value_close, close, body.key_open)))

    def _ends_value(self, before: int, mark: str, is_own: bool) -> Steps[bool]:
        """Does the value end at a mark that stands so many characters before it? What follows it decides."""
        cursor, calls = self._cursor, self._reading.calls
        cursor.keep()
        cursor.at += before + len(mark)
        if is_own:
            char = yield from cursor.skip_space()
            others = (self._body.key_open, self._body.whole_open)
            followers = (*(each for each in others if each), *self._ends)
            found = yield from cursor.match(followers)
            ends = found is not None or char == ""
        elif mark == f"\n{self._body.key_open}":
            ends = True
        else:
            char = yield from cursor.skip_space()
            others = (calls.close, calls.section_close, calls.open, calls.section_open)
            others = tuple(each for each in others if each and not mark.endswith(each))
            ends = char == "" or (yield from cursor.match(others)) is not None
        cursor.go_back()
        cursor.forget()
        return ends

    def _whole(self) -> Steps[None]:
        """All arguments as JSON, between tags of their own."""
        body, cursor = self._body, self._cursor
        if self._count:
            raise NotACall
        if body.value_open:
            yield from cursor.up_to((body.value_open,), LONGEST_TAG_CHARS)
        pieces: list[str] = []
        if (yield from cursor.skip_space()) != "{":
            raise NotACall
        yield from json_values.value(cursor, pieces.append)
        if not (yield from self._reading.pass_over(body.whole_close)):
            raise CutOff if cursor.is_at_end and cursor.has_ended else NotACall
        self._held = ("", "".join(pieces))
