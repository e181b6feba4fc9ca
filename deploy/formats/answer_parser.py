"""What all parsers of answers share: text goes in as it comes, and events come out."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .cursor import Cursor, Steps
from .events import Event
from .typed import Schema


class AnswerParser(ABC):
    """Reads one answer. `push` its text as it comes, then `finish`."""

    def __init__(
        self,
        schemas: Mapping[str, Schema],
        *,
        prompt_end: str = "",
        finds_calls: bool = True,
        single_tokens: frozenset[str] = frozenset(),
    ):
        """schemas: of the tools that are offered. prompt_end: the end of the prompt, which may have begun a thought or
        a message. single_tokens: markers that are one token of the model each; `push` is then told where these are."""
        self._schemas = schemas
        self._prompt_end = prompt_end
        self._finds_calls = finds_calls
        self._cursor = Cursor(single_tokens)
        self._told: list[Event] = []  # since the last push
        self._steps = self._run()

    @abstractmethod
    def _run(self) -> Steps[None]:
        """Read the whole answer. Begins with the first text."""

    def push(self, text: str, marks: Iterable[int] = ()) -> list[Event]:
        """More text. marks: places in it where special tokens begin. Returns what is certain by now."""
        self._cursor.feed(text, marks)
        return self._go_on()

    def finish(self) -> list[Event]:
        """The answer has ended. Returns the rest."""
        self._cursor.has_ended = True
        return self._go_on()

    def _go_on(self) -> list[Event]:
        next(self._steps, None)
        events = joined(self._told)
        self._told.clear()
        return events


def joined(events: Sequence[Event]) -> list[Event]:
    """The same events, with pieces of one kind behind each other as one."""
    found: list[Any] = []
    for event in events:
        last = found[-1] if found else None
        if last is not None and type(last) is type(event) and hasattr(event, "text"):
            found[-1] = type(event)(last.text + event.text)  # type: ignore[union-attr]
        else:
            found.append(event)
    return found
