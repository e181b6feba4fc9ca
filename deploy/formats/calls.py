"""Reads calls, one after the other, by the description of a format."""

import re
from collections.abc import Callable, Mapping

from . import json_values
from .cursor import Cursor, Steps
from .described import Braced, Calls, JsonCall, KeyedCall, NamedJson, Pythonic, Tagged
from .draft import Draft
from .events import CutOff, Event, NotACall
from .json_calls import json_call, keyed_call, named_json
from .reading import Reading
from .tagged import TaggedReader
from .typed import Schema
from .written_calls import braced_call, pythonic_call

NOISE = re.compile(r"[^<{\[]{0,64}")
"""Between the marker of a section and that of its first call."""

CLOSERS = re.compile(r"[}\]\s]{0,8}")
"""Brackets too many, between a call and the marker behind it."""


class CallsReader:
    """Reads a block of calls. One instance a block.

    The cursor's last kept place is where the call begins that is being read: after `NotACall` it is text from there.
    """

    def __init__(self, cursor: Cursor, calls: Calls, schemas: Mapping[str, Schema], out: list[Event]):
        self._cursor = cursor
        self._calls = calls
        self.reading = Reading.of(cursor, calls, schemas, out)
        self.count = 0  # of calls that have ended
        self.is_in_section = False

    @property
    def has_told(self) -> bool:
        """Whether something was told that cannot be taken back."""
        return self.count > 0 or self.reading.draft.is_told

    def block(self, marker: str) -> Steps[None]:
        """All calls behind a marker, at which the cursor stands. Raises `NotACall` and `CutOff`."""
        calls = self._calls
        if not calls.is_marked:
            yield from self._items()
            return
        self._cursor.at += len(marker)
        if marker == calls.section_open:
            self.is_in_section = True
            yield from self._section()
            return
        yield from self._items()
        if calls.section_close:
            yield from self.reading.pass_over(calls.section_close)

    def _section(self) -> Steps[None]:
        calls = self._calls
        opens = tuple(mark for mark in (calls.open, *calls.also_open) if mark)
        ends = (calls.section_close,) if calls.section_close else ()
        if not opens:
            if ends and (yield from self.reading.pass_over(*ends)):
                return
            yield from self._items()
            yield from self.reading.pass_over(*ends)
            return
        while True:
            if (yield from self._cursor.skip_space()) == "":
                if not self.count:
                    raise CutOff
                return
            self._keep_if_called()
            found = yield from self._cursor.match((*opens, *ends))
            if found is None and not self.count:
                yield from self._noise()
                found = yield from self._cursor.match(opens)
            if found is None:
                if not self.count:
                    raise NotACall
                return
            if found in ends:
                return
            yield from self._items()

    def _noise(self) -> Steps[None]:
        while True:
            found = NOISE.match(self._cursor.text, self._cursor.at)
            end = found.end() if found else self._cursor.at
            if end < len(self._cursor.text) or self._cursor.has_ended:
                self._cursor.at = end
                return
            if end - self._cursor.at >= 64:
                return
            yield

    def _items(self) -> Steps[None]:
        """A call, and others that follow without a marker of their own; then the marker that closes them."""
        yield from self._item()
        while (yield from self._is_item_next()):
            self._cursor.keep_from_here()
            yield from self._item()
        if self._calls.close:
            yield from self._close(self._calls.close)

    def _is_item_next(self) -> Steps[bool]:
        """Does another call follow? Passes over what separates it."""
        body, cursor = self._calls.body, self._cursor
        if not isinstance(body, JsonCall | Pythonic) or (isinstance(body, Pythonic) and body.is_bracketed):
            return False
        cursor.keep()
        char = yield from cursor.skip_space()
        if char and char in self._calls.between:
            cursor.at += 1
            char = yield from cursor.skip_space()
        is_next = char == "{" if isinstance(body, JsonCall) else char.isidentifier()
        if not is_next:
            cursor.go_back()
        cursor.forget()
        return is_next

    def _item(self) -> Steps[None]:
        """One call, or a list of them."""
        reading = self.reading
        match self._calls.body:
            case JsonCall() as body:
                yield from self._list_or_one(lambda: json_call(reading, body))
            case KeyedCall():
                yield from self._list_or_one(lambda: keyed_call(reading))
            case Pythonic(is_bracketed=True):
                yield from self._bracketed(lambda: pythonic_call(reading), "]")
            case Pythonic():
                yield from self._one(pythonic_call(reading))
            case NamedJson() as body:
                yield from self._one(named_json(reading, body))
            case Tagged() as body:
                yield from self._one(TaggedReader(reading, body).call())
            case Braced() as body:
                yield from self._one(braced_call(reading, body))

    def _one(self, read: Steps[None]) -> Steps[None]:
        yield from read
        self.reading.draft.end(is_whole=True)
        self.count += 1
        self.reading.draft = Draft(self._cursor, self.reading.out)
        self._cursor.keep_from_here()

    def _list_or_one(self, read: Callable[[], Steps[None]]) -> Steps[None]:
        if (yield from self._cursor.skip_space()) == "[":
            yield from self._bracketed(read, "]")
        else:
            yield from self._one(read())

    def _bracketed(self, read: Callable[[], Steps[None]], close: str) -> Steps[None]:
        """Calls in brackets, at least one."""
        cursor = self._cursor
        yield from json_values.expect(cursor, "[")
        while True:
            char = yield from cursor.skip_space()
            if char == close and self.count:
                cursor.at += 1
                return
            self._keep_if_called()
            yield from self._one(read())
            char = yield from cursor.skip_space()
            if char == ",":
                cursor.at += 1
            elif char == "":
                raise CutOff
            elif char != close:
                raise NotACall

    def _keep_if_called(self) -> None:
        """What was read before belongs to calls that are told."""
        if self.count:
            self._cursor.keep_from_here()

    def _close(self, close: str) -> Steps[None]:
        if (yield from self.reading.pass_over(close)):
            return
        cursor = self._cursor
        cursor.keep()
        while True:
            found = CLOSERS.match(cursor.text, cursor.at)
            end = found.end() if found else cursor.at
            if end < len(cursor.text) or cursor.has_ended or end - cursor.at >= 8:
                break
            yield
        cursor.at = end
        if (yield from cursor.match((close,))) is None:
            cursor.go_back()
        cursor.forget()
