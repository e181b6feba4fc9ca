"""gpt-oss does not put calls into an answer: it writes messages, each on a channel, and a call is a message to a tool.

    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{..}<|call|>
    <|start|>assistant<|channel|>final<|message|>words<|return|>

Its markers are special tokens. A parser that is told where these are takes nothing else for one.
"""

import re
from collections.abc import Mapping
from typing import NamedTuple

from . import json_values
from .answer_parser import AnswerParser
from .cursor import Steps
from .described import Format
from .draft import Draft
from .events import CutOff, NotACall, Thought, Words
from .typed import Schema

START, CHANNEL, CONSTRAIN, MESSAGE = "<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
NEXT = f"{START}assistant"
"""Where a message was not ended, the next one ends it."""

MARKERS = (START, CHANNEL, CONSTRAIN, MESSAGE, *ENDS)

RECIPIENT = re.compile(r"to=([^\s<]+)")
BEGINNINGS = (*MARKERS, "assistant", "to=")
"""How the head of a message begins. What begins otherwise is a message without one."""

LONGEST_HEAD_CHARS = 2048


class Head(NamedTuple):
    """What is said of a message before it."""

    channel: str
    recipient: str | None


class Harmony(AnswerParser):
    """Of answers that are messages."""

    def __init__(
        self,
        form: Format,
        schemas: Mapping[str, Schema],
        *,
        prompt_end: str = "",
        finds_calls: bool = True,
        single_tokens: frozenset[str] = frozenset(),
    ):
        super().__init__(schemas, prompt_end=prompt_end, finds_calls=finds_calls, single_tokens=single_tokens)
        self._has_told: set[type] = set()  # kinds of text that were told: two messages are two lines

    def _run(self) -> Steps[None]:
        try:
            yield from self._messages()
        except CutOff:
            return

    def _messages(self) -> Steps[None]:
        cursor = self._cursor
        # The prompt may have begun a message, up to its text.
        before, _, head = self._prompt_end.rpartition(START)
        if before or head:
            head = head.removeprefix("assistant")
        if head.rstrip().endswith(MESSAGE):
            yield from self._body(_head(head))
        while True:
            if (yield from cursor.skip_space()) == "":
                return
            cursor.keep()
            found = yield from cursor.match(BEGINNINGS)
            cursor.go_back()
            cursor.forget()
            if found is None:
                yield from self._text(Words)
                continue
            yield from cursor.match((START,))
            head += yield from self._head()
            yield from self._body(_head(head))
            head = ""

    def _head(self) -> Steps[str]:
        """The text up to that of the message. The cursor is behind it."""
        pieces: list[str] = []
        while True:
            text, mark = yield from self._up_to_mark()
            pieces.append(text)
            if mark == MESSAGE:
                return "".join(pieces)
            if mark in (START, *ENDS):
                pieces.clear()
            else:
                pieces.append(mark)

    def _up_to_mark(self) -> Steps[tuple[str, str]]:
        try:
            return (yield from self._cursor.up_to(MARKERS, LONGEST_HEAD_CHARS))
        except NotACall:
            # No head is so long: it is passed over.
            self._cursor.at = len(self._cursor.text)
            return "", ""

    def _body(self, head: Head) -> Steps[None]:
        name = self._tool(head.recipient)
        if name is not None and self._finds_calls and (yield from self._call(name)):
            yield from self._rest()
            return
        yield from self._text(Thought if head.channel == "analysis" else Words)

    def _tool(self, recipient: str | None) -> str | None:
        """The tool that a message is for. None: it is for no tool of the request."""
        if recipient is None:
            return None
        name = recipient.removeprefix("functions.")
        return name if name != recipient or name in self._schemas else None

    def _call(self, name: str) -> Steps[bool]:
        """A message to a tool: its arguments. False: they are no JSON, and the message is text."""
        cursor, draft = self._cursor, Draft(self._cursor, self._told)
        draft.begin(name)
        cursor.keep()
        try:
            if (yield from cursor.skip_space()) == "{":
                yield from json_values.value(cursor, draft.write)
            elif (yield from cursor.match((*ENDS, NEXT))) is None and not (cursor.has_ended and cursor.is_at_end):
                raise NotACall
            else:
                cursor.go_back()
                draft.write("{}")
            draft.end(is_whole=True)
        except CutOff:
            draft.end(is_whole=False)
        except NotACall:
            if draft.is_told:
                draft.end(is_whole=False)
            cursor.go_back()
            return False
        finally:
            cursor.forget()
        return True

    def _rest(self) -> Steps[None]:
        """What is behind a call, up to the message's end, says nothing."""
        while True:
            place, mark = self._cursor.find((*ENDS, NEXT))
            self._cursor.at = place
            if mark is not None:
                self._cursor.at += len(mark) if mark in ENDS else 0
                return
            yield from self._cursor.more()

    def _text(self, kind: type[Thought] | type[Words]) -> Steps[None]:
        """The text of a message."""
        cursor = self._cursor
        separator = "\n" if kind in self._has_told else ""
        while True:
            place, mark = cursor.find((*ENDS, NEXT))
            if text := cursor.text[cursor.at : place]:
                self._told.append(kind(separator + text))
                self._has_told.add(kind)
                separator = ""
            cursor.at = place
            if mark is not None:
                cursor.at += len(mark) if mark in ENDS else 0
                return
            yield from cursor.more()


def _head(text: str) -> Head:
    found = RECIPIENT.search(text)
    _, _, behind = text.rpartition(CHANNEL)
    words = behind.replace("<", " ").split() if CHANNEL in text else []
    channel = words[0] if words and not words[0].startswith("to=") else ""
    return Head(channel, found[1] if found else None)
