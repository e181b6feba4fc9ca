"""A place in a text that is still coming.

Readers are generators: where the text ends before they can decide, they yield, and go on when there is more. A reader
decides by what it has read up to a place and never by how far the text happens to go, so its answer does not depend on
how the text was cut.
"""

import re
from collections.abc import Generator, Iterable, Sequence
from functools import lru_cache
from typing import TypeVar

from .events import CutOff, NotACall

Result = TypeVar("Result")

Steps = Generator[None, None, Result]
"""A reader: it yields where it needs more text."""

SPACE = re.compile(r"\s*")

BARE = re.compile(r"[-+.\w]*")
"""What numbers and words are made of."""


class Cursor:
    """The text that may still be needed, and a place in it. Single-threaded.

    Invariant: what was read before the first of `kept` places, and before the cursor, is gone.
    """

    def __init__(self, single_tokens: frozenset[str] = frozenset()):
        """single_tokens: markers that are one token each, so the same characters elsewhere are text. They are looked
        for only where `feed` was told of marks."""
        self.text = ""
        self.at = 0
        self.has_ended = False
        self._kept: list[int] = []
        self._single_tokens = single_tokens
        self._marks: set[int] = set()
        self._begins: dict[str, bool] = {}  # of markers: whether they begin with a single token

    def feed(self, text: str, marks: Iterable[int] = ()) -> None:
        """marks: places in `text` where special tokens begin."""
        gone = min(self._kept[0], self.at) if self._kept else self.at
        if gone:
            self.text = self.text[gone:]
            self.at -= gone
            self._kept = [place - gone for place in self._kept]
            self._marks = {mark - gone for mark in self._marks if mark >= gone}
        self._marks.update(len(self.text) + mark for mark in marks)
        self.text += text

    def keep(self) -> None:
        """Remember this place, to come back to it."""
        self._kept.append(self.at)

    def keep_from_here(self) -> None:
        """Come back to this place instead of the one that was remembered last."""
        self._kept[-1] = self.at

    def go_back(self) -> None:
        self.at = self._kept[-1]

    def forget(self) -> None:
        """Forget the place that was remembered last."""
        self._kept.pop()

    @property
    def is_at_end(self) -> bool:
        """Whether all text that has come was read; more may come."""
        return self.at >= len(self.text)

    def more(self) -> Steps[None]:
        """Wait for more text. Raises `CutOff` where there is none."""
        if self.has_ended:
            raise CutOff
        yield

    def peek(self) -> Steps[str]:
        """The next character; "" at the end of the answer."""
        while self.is_at_end and not self.has_ended:
            yield
        return self.text[self.at : self.at + 1]

    def skip_space(self) -> Steps[str]:
        """Pass over white space. Returns the character behind it, "" at the end of the answer."""
        while True:
            found = SPACE.match(self.text, self.at)
            self.at = found.end() if found else self.at
            if not self.is_at_end or self.has_ended:
                return self.text[self.at : self.at + 1]
            yield

    def bare(self, most_chars: int) -> Steps[str]:
        """A number or a word, up to what is none: before that nothing of it is certain. Stays in front of it. Raises
        `NotACall` where it is longer than `most_chars`, and `CutOff` where nothing comes behind it."""
        while True:
            found = BARE.match(self.text, self.at)
            end = found.end() if found else self.at
            if end - self.at > most_chars:
                raise NotACall
            if end < len(self.text):
                return self.text[self.at : end]
            yield from self.more()

    def has(self, marker: str, at: int) -> bool:
        """Is there this marker at a place? One that is a single token is none where it is spelt by others."""
        return self.text.startswith(marker, at) and self._counts(marker, at)

    def match(self, markers: Sequence[str]) -> Steps[str | None]:
        """Pass over the longest of the markers that the text goes on with. None: it goes on with none."""
        while True:
            found = max((marker for marker in markers if self.has(marker, self.at)), key=len, default=None)
            rest = self.text[self.at : self.at + _longest(markers)]
            could_be = any(
                len(marker) > len(rest) and marker.startswith(rest) and self._may_count(marker, self.at)
                for marker in markers
                if found is None or len(marker) > len(found)
            )
            if not could_be or self.has_ended:
                if found is not None:
                    self.at += len(found)
                return found
            yield

    def find(self, markers: Sequence[str]) -> tuple[int, str | None]:
        """The first place, from the cursor on, where one of the markers stands, and which. Without one, the place up
        to which there is surely none: a marker may be beginning there.

        Where one marker begins like a longer one, the longer one is found."""
        if not markers:
            return len(self.text), None
        pattern = _pattern(tuple(markers))
        start = self.at
        while (found := pattern.search(self.text, start)) is not None:
            marker, place = found[0], found.start()
            if self._counts(marker, place):
                longer = [each for each in markers if len(each) > len(marker) and each.startswith(marker)]
                rest = self.text[place:]
                if not self.has_ended and any(len(each) > len(rest) and each.startswith(rest) for each in longer):
                    return min(place, self.sure(markers)), None
                return place, marker
            start = place + 1
        return (len(self.text) if self.has_ended else self.sure(markers)), None

    def up_to(self, markers: Sequence[str], most_chars: int) -> Steps[tuple[str, str]]:
        """Pass over text and the marker behind it, and return both. Raises `NotACall` where the text is longer than
        `most_chars`, and `CutOff` where no marker comes."""
        while True:
            place, marker = self.find(markers)
            if place - self.at > most_chars:
                raise NotACall
            if marker is not None:
                text, self.at = self.text[self.at : place], place + len(marker)
                return text, marker
            yield from self.more()

    def sure(self, markers: Sequence[str]) -> int:
        """The place behind which the text could be the beginning of a marker."""
        begins, longest = _beginnings(tuple(markers))
        start = max(self.at, len(self.text) - longest + 1)
        while (found := begins.search(self.text, start)) is not None:
            place = found.start()
            rest = self.text[place:]
            if any(each.startswith(rest) and self._may_count(each, place) for each in markers):
                return place
            start = place + 1
        return len(self.text)

    def _counts(self, marker: str, place: int) -> bool:
        return not self.begins_with_token(marker) or place in self._marks

    def _may_count(self, marker: str, place: int) -> bool:
        """A single token comes as a whole: its beginning alone is text."""
        return not self.begins_with_token(marker) or place in self._marks

    def begins_with_token(self, marker: str) -> bool:
        """Whether a marker is a single token, or begins with one."""
        found = self._begins.get(marker)
        if found is None:
            found = self._begins[marker] = any(map(marker.startswith, self._single_tokens))
        return found


@lru_cache(maxsize=1024)
def _pattern(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(markers, key=len, reverse=True))))


@lru_cache(maxsize=1024)
def _beginnings(markers: tuple[str, ...]) -> tuple[re.Pattern[str], int]:
    """A pattern for the first characters of markers, and the length of the longest one."""
    firsts = sorted({marker[0] for marker in markers})
    return re.compile("[" + "".join(map(re.escape, firsts)) + "]"), _longest(markers)


def _longest(markers: Sequence[str]) -> int:
    return max(map(len, markers), default=0)
