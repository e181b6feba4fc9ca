"""The tokens that end an answer are no part of it."""

from collections.abc import Iterable, Sequence


class StopGate:
    """Keeps back what may be stop tokens at the end of the text, and drops them there. Elsewhere they are text."""

    def __init__(self, stops: Sequence[str], single_tokens: frozenset[str] = frozenset()):
        self._stops = tuple(stops)
        self._firsts = frozenset(stop[0] for stop in stops)  # most texts have none of these characters
        self._single_tokens = single_tokens
        self._text = ""
        self._marks: list[int] = []

    def push(self, text: str, marks: Iterable[int] = ()) -> tuple[str, list[int]]:
        """The text that is surely before the end, with its marks."""
        self._marks += [len(self._text) + mark for mark in marks]
        self._text += text
        size = len(self._text)
        if not self._firsts.intersection(self._text):
            return self._take(size)
        return self._take(min(self._before_stops(size), self._before_stops(size - self._beginning())))

    def rest(self) -> tuple[str, list[int]]:
        """The text that was kept back and is no stop token. The answer has ended."""
        return self._take(self._before_stops(len(self._text)))

    def _before_stops(self, end: int) -> int:
        """The place behind which there are only stop tokens, and white space between them."""
        while True:
            bare = len(self._text[:end].rstrip())
            place = next((bare - len(stop) for stop in self._stops if self._is_stop(stop, bare)), None)
            if place is None:
                return end
            end = place

    def _is_stop(self, stop: str, end: int) -> bool:
        place = end - len(stop)
        if place < 0 or not self._text.startswith(stop, place):
            return False
        return stop not in self._single_tokens or place in self._marks

    def _beginning(self) -> int:
        """Characters at the end of the text with which a stop token could begin."""
        longest = max(map(len, self._stops))
        for place in range(max(0, len(self._text) - longest + 1), len(self._text)):
            rest = self._text[place:]
            if any(stop.startswith(rest) for stop in self._stops if stop not in self._single_tokens):
                return len(self._text) - place
        return 0

    def _take(self, end: int) -> tuple[str, list[int]]:
        text, self._text = self._text[:end], self._text[end:]
        marks = [mark for mark in self._marks if mark < end]
        self._marks = [mark - end for mark in self._marks if mark >= end]
        return text, marks
