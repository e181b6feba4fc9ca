"""A call while it is read."""

from .cursor import Cursor
from .events import ArgumentsPiece, CallBegun, CallEnded, Event

HELD_CHARS = 128
"""So many characters of the arguments are read before anything of a call is told: what is no call shows it by then, as
a rule, and is given back as text. What was told cannot be taken back."""


class Draft:
    """One call. Its events come when it has ended, or at once after the first `HELD_CHARS` of its arguments."""

    def __init__(self, cursor: Cursor, out: list[Event]):
        self._cursor = cursor
        self._out = out
        self._held: list[str] = []
        self._held_chars = 0
        self.name: str | None = None
        self.id: str | None = None
        self.is_told = False

    def begin(self, name: str, id: str | None = None) -> None:
        self.name, self.id = name, id

    def write(self, text: str) -> None:
        """More of the arguments' JSON."""
        if not text:
            return
        if self.is_told:
            self._out.append(ArgumentsPiece(text))
            self._cursor.keep_from_here()
            return
        self._held.append(text)
        self._held_chars += len(text)
        if self._held_chars > HELD_CHARS:
            self._tell()

    def end(self, *, is_whole: bool) -> None:
        self._tell()
        self._out.append(CallEnded(is_whole))

    def _tell(self) -> None:
        if self.is_told:
            return
        assert self.name is not None, "a call is told when its name is known"
        self.is_told = True
        self._out.append(CallBegun(self.name, self.id))
        if self._held:
            self._out.append(ArgumentsPiece("".join(self._held)))
            self._held = []
