"""Tokens to text where some special tokens matter: they stand in it, each behind a mark that nothing else has."""

from collections.abc import Mapping, Sequence

from .tokenizer import TextStream, Tokenizer

MARK = "\ufdd0"
"""Stands before a special token in a text. Unicode has no such character, so nothing is lost where it is taken from
what the model says."""


class MarkedStream:
    """As `TextStream`, with the markers of a format. What ordinary tokens spell is no marker, and has no mark."""

    def __init__(self, tokenizer: Tokenizer, markers: Mapping[int, str]):
        """markers: their texts, by token."""
        self._tokenizer = tokenizer
        self._markers = markers
        self._stream = TextStream(tokenizer)

    def push(self, token_ids: Sequence[int]) -> str:
        """New text, which may be empty."""
        if self._markers.keys().isdisjoint(token_ids):
            return _unmarked(self._stream.push(token_ids))
        pieces: list[str] = []
        run: list[int] = []
        for token in token_ids:
            marker = self._markers.get(token)
            if marker is None:
                run.append(token)
                continue
            # What is before a marker does not change with what is behind it.
            pieces += (_unmarked(self._stream.push(run) + self._stream.finish()), MARK, marker)
            self._stream, run = TextStream(self._tokenizer), []
        if run:
            pieces.append(_unmarked(self._stream.push(run)))
        return "".join(pieces)

    def finish(self) -> str:
        """The rest, be it half a character."""
        return _unmarked(self._stream.finish())


def parted(text: str) -> tuple[str, list[int]]:
    """The text without the marks, and the places where they were."""
    if MARK not in text:
        return text, []
    pieces = text.split(MARK)
    places, at = [], 0
    for piece in pieces[:-1]:
        at += len(piece)
        places.append(at)
    return "".join(pieces), places


def _unmarked(text: str) -> str:
    return text.replace(MARK, "\N{REPLACEMENT CHARACTER}") if MARK in text else text
