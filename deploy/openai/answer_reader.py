"""One answer of a conversation as it grows: its thoughts, its words and its calls."""

import secrets
import string
import uuid
from collections.abc import Sequence
from typing import NamedTuple

from ..formats.described import NAMED_ID
from ..formats.events import ArgumentsPiece, CallBegun, CallEnded, Event, Thought, Words
from ..front_end.answer_format import AnswerFormat
from ..front_end.marked_stream import parted
from .protocol import Message
from .tools import CallPiece, CallReader, ToolUse

ID_CHARS = string.ascii_letters + string.digits


class Said(NamedTuple):
    """What is certain by now, since the last time."""

    thoughts: str
    text: str
    calls: list[CallPiece]


class AnswerReader:
    """Reads one answer. `push` its text as it comes, then `finish`.

    Where the format is not known, calls are guessed; or a required call has a form of its own, and no thoughts.
    """

    def __init__(self, served: AnswerFormat, use: ToolUse | None, prompt_end: str, *, is_formed: bool, ids: "CallIds"):
        """use: of tools. prompt_end: which may have begun a thought. is_formed: the answer has the form that the
        request gives it, and no other."""
        self._ids = ids
        form = served.form
        is_known = form is not None and not is_formed
        has_calls = form is not None and bool(form.calls or form.kind == "channels")
        tools = {tool.function.name: tool.function.parameters for tool in use.tools} if use is not None else {}
        self._parser = served.parser(tools, prompt_end, finds_calls=use is not None and has_calls) if is_known else None
        guesses = use is not None and not (is_known and has_calls)
        self._guesses = CallReader(use, ids.new) if use is not None and guesses else None
        self._thoughts: list[str] = []
        self._count = 0  # of calls that the parser found
        self._id = ""

    @property
    def has_called(self) -> bool:
        return self._count > 0 or (self._guesses is not None and self._guesses.has_called)

    @property
    def thoughts(self) -> str:
        """All of them so far."""
        return "".join(self._thoughts)

    def push(self, text: str) -> Said:
        """More text, with marks before special tokens."""
        if self._parser is None:
            return self._guessed("", parted(text)[0])
        return self._read(self._parser.push(*parted(text)))

    def finish(self) -> Said:
        """The rest. An answer that was cut may end in a call whose arguments are cut."""
        said = self._read(self._parser.finish()) if self._parser is not None else Said("", "", [])
        if self._guesses is None:
            return said
        text, calls = self._guesses.finish()
        return Said(said.thoughts, said.text + text, said.calls + calls)

    def _read(self, events: Sequence[Event]) -> Said:
        thoughts, words, calls = "", "", list[CallPiece]()
        for event in events:
            match event:
                case Thought(text):
                    thoughts += text
                case Words(text):
                    words += text
                case CallBegun(name, own_id):
                    self._id = own_id or self._ids.new(name)
                    calls.append(CallPiece(self._count, self._id, name, ""))
                    self._count += 1
                case ArgumentsPiece(text):
                    calls = _with_arguments(calls, CallPiece(self._count - 1, self._id, None, text))
                case CallEnded():
                    pass
        if thoughts:
            self._thoughts.append(thoughts)
        said = self._guessed(thoughts, words)
        return said._replace(calls=calls + said.calls)

    def _guessed(self, thoughts: str, words: str) -> Said:
        if self._guesses is None:
            return Said(thoughts, words, [])
        return Said(thoughts, *self._guesses.push(words))


def _with_arguments(calls: list[CallPiece], piece: CallPiece) -> list[CallPiece]:
    """More of the arguments of the call that has come last, with that call's piece if it is among these."""
    if calls and calls[-1].place == piece.place:
        return [*calls[:-1], calls[-1]._replace(arguments=calls[-1].arguments + piece.arguments)]
    return [*calls, piece]


class CallIds:
    """Makes ids for calls, such as the template takes back."""

    def __init__(self, served: AnswerFormat, messages: Sequence[Message]):
        """messages: the conversation so far, whose calls some formats count."""
        self._chars = served.form.id_chars if served.form is not None else 0
        self._names_calls = served.form is not None and served.form.has_named_ids
        self._count = sum(len(message.tool_calls or ()) for message in messages)

    def new(self, name: str) -> str:
        """name: of the tool."""
        if self._names_calls:
            self._count += 1
            return NAMED_ID.format(name=name, count=self._count - 1)
        if self._chars:
            return "".join(secrets.choice(ID_CHARS) for _ in range(self._chars))
        return f"call_{uuid.uuid4().hex[:24]}"
