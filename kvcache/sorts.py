"""Sorts of points: those of a sort are used again alike, as far as is known.

kind          an end of a path that no prompt has gone beyond, or a place before it; `Kind` tells them apart
gap           requests between the last two uses
times         turns of the conversation so far; of a point at which paths part: its uses
new tokens    of the latest prompt: those that were not known before
"""

from enum import IntEnum
from typing import NamedTuple

GAPS, TIMES, NEWS = 15, 8, 15
"""Buckets of the three marks of a sort."""


class Kind(IntEnum):
    """What is asked of a point, and of which."""

    END = 0  # is the end of a path gone beyond?
    STOP = 1  # of a place that one path leads through: does a prompt go on just there?
    PARTING = 2  # is a place where paths part passed, by any of them?
    STOP_AT_PARTING = 3


class Sort(NamedTuple):
    """Points that are alike."""

    kind: Kind
    gap: int
    times: int
    new: int


def gap_bucket(requests: int) -> int:
    return 0 if requests == 0 else 1 + min(GAPS - 2, requests.bit_length() - 1)


def turns_bucket(turns: int) -> int:
    return turns if turns < 4 else 4 if turns < 8 else 5


def uses_bucket(uses: int) -> int:
    return min(TIMES - 1, uses.bit_length() - 1)


def new_bucket(tokens: int) -> int:
    return min(NEWS - 1, (max(0, tokens) // 16 + 1).bit_length() - 1)
