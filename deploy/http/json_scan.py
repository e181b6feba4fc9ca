"""How deep and how long a JSON text is, known before it becomes objects: a parser makes a hundred bytes out of three.

The scan is numpy's over slices of the text, so it holds nothing up: numpy lets other threads run meanwhile.
"""

from typing import NamedTuple

import numpy as np

SLICE_BYTES = 2**20

QUOTE, BACKSLASH, COMMA = b'"\\,'
OPENING, CLOSING = b"[{", b"]}"


class Extent(NamedTuple):
    """How many values and levels a JSON text has."""

    items: int  # values, counted by commas and brackets
    levels: int  # of lists and objects within each other


UNBOUNDED = Extent(2**63, 2**63)


def extent(text: bytes, most: Extent = UNBOUNDED) -> Extent:
    """Of a text that need not be JSON: of what is none this is an upper bound of what a parser would make of it. Beyond
    `most` it is not looked at further."""
    items, depth, deepest = 1, 0, 0
    is_inside, is_escaped = False, False
    whole = np.frombuffer(text, np.uint8)
    for start in range(0, len(whole), SLICE_BYTES):
        part = whole[start : start + SLICE_BYTES]
        quotes, is_escaped = _quotes(part, is_escaped)
        inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(bool) ^ is_inside
        is_inside = bool(inside[-1])
        outside = ~inside
        opens = outside & ((part == OPENING[0]) | (part == OPENING[1]))
        closes = outside & ((part == CLOSING[0]) | (part == CLOSING[1]))
        items += int(np.count_nonzero(opens)) + int(np.count_nonzero(outside & (part == COMMA)))
        levels = (
            depth + np.cumsum(opens.view(np.int8), dtype=np.int32) - np.cumsum(closes.view(np.int8), dtype=np.int32)
        )
        deepest = max(deepest, int(levels.max()))
        depth = int(levels[-1])
        if items > most.items or deepest > most.levels:
            break
    return Extent(items, deepest)


def _quotes(part: np.ndarray, is_escaped: bool) -> tuple[np.ndarray, bool]:
    """Which characters are quotes that begin or end a text, and whether the character after these is escaped.
    is_escaped: whether the first of these is."""
    quotes = part == QUOTE
    slashes = np.flatnonzero(part == BACKSLASH)
    if is_escaped:
        quotes[0] = False
        slashes = slashes[1:] if len(slashes) and slashes[0] == 0 else slashes
    if not len(slashes):
        return quotes, False
    # In a run of backslashes every other one, from its first on, escapes what follows it.
    first_of_run = np.concatenate(([True], np.diff(slashes) > 1))
    runs = np.maximum.accumulate(np.where(first_of_run, np.arange(len(slashes)), 0))
    escaping = slashes[(np.arange(len(slashes)) - runs) % 2 == 0]
    escaped = escaping + 1
    quotes[escaped[escaped < len(part)]] = False
    return quotes, bool(escaped[-1] == len(part))
