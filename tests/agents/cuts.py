"""Ways to cut an output: the answer must be the same for each."""

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .cases import Case

PIECE = re.compile(r"\s?\w{1,5}|\s+|[^\w\s]", re.DOTALL)
"""Much as tokenizers cut ordinary text."""


class Token(NamedTuple):
    """A piece of an output as a model makes it."""

    text: str
    is_special: bool


def whole(case: Case) -> Iterator[list[str]]:
    yield [case.given["output"]]


def every_cut(case: Case) -> Iterator[list[str]]:
    """In two, at each place."""
    output = case.given["output"]
    for place in range(1, len(output)):
        yield [output[:place], output[place:]]


def single_characters(case: Case) -> Iterator[list[str]]:
    yield list(case.given["output"])


def given_chunks(case: Case) -> Iterator[list[str]]:
    if case.given.get("chunks"):
        yield case.given["chunks"]


TEXT_MODES = {
    "whole text": whole,
    "every single cut": every_cut,
    "one character at a time": single_characters,
    "the case's own chunks": given_chunks,
}


def tokens_of(case: Case) -> list[Token]:
    """The output in pieces: the family's special tokens as one each, but where the case says that they are spelt."""
    output, spelt = case.given["output"], _spelt(case)
    specials = sorted(case.special_tokens, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, specials))) if specials else None
    found: list[Token] = []
    at = 0
    while at < len(output):
        match = pattern.search(output, at) if pattern else None
        while match is not None and any(start <= match.start() < end for start, end in spelt):
            assert pattern is not None
            match = pattern.search(output, match.start() + 1)
        end = match.start() if match is not None else len(output)
        found += [Token(piece, False) for piece in PIECE.findall(output[at:end])]
        if match is not None:
            found.append(Token(match[0], True))
        at = match.end() if match is not None else end
    assert "".join(token.text for token in found) == output, case.id
    return found


def _spelt(case: Case) -> Sequence[tuple[int, int]]:
    """Where special tokens are spelt by ordinary ones."""
    places, at = [], 0
    for text in case.given.get("plain_text_markers") or ():
        start = case.given["output"].index(text, at)
        places.append((start, start + len(text)))
        at = start + len(text)
    return places
