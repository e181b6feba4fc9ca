"""Where every block of a pool is at one moment, as bytes that travel well: a byte per block, a byte per large page.

    state of a block    ELSEWHERE  its large page belongs to another group, or to none, or is the null page
                        FREE       holds nothing, in a large page of its group
                        RESERVED   holds nothing; set aside for the request that took the large page
                        HELD       by one request (or another owner), SHARED by several
                        LOW        cached for a later prompt, and evicted before
                        USUAL      all other cached ones

The map of 100,000 blocks takes a few milliseconds, since all loops over blocks that are not cached run in C.
"""

from collections.abc import Iterable
from enum import IntEnum
from itertools import repeat
from typing import NamedTuple

from .eviction import Tier

NO_OWNER = 255
"""Owner of a free large page."""

MOST_HOLDERS = 255


class BlockState(IntEnum):
    """The values of the bytes in `GroupMap.states`."""

    ELSEWHERE = 0
    FREE = 1
    RESERVED = 2
    HELD = 3
    SHARED = 4
    LOW = 5
    USUAL = 6


STATE_OF_TIER = {Tier.LOW: BlockState.LOW, Tier.USUAL: BlockState.USUAL}

_BY_HOLDERS = bytes([BlockState.ELSEWHERE, BlockState.HELD, *[BlockState.SHARED] * (MOST_HOLDERS - 1)])


class ArenaMap(NamedTuple):
    """Large pages of one arena."""

    owners: bytes  # the group of each, `NO_OWNER` where it is free; the null page first


class GroupMap(NamedTuple):
    """Blocks of one group."""

    arena: int
    per_large: int  # blocks in a large page: block b lies in large page b // per_large
    states: bytes  # a `BlockState` for each, the null block first


class PoolMap(NamedTuple):
    """Of one moment."""

    arenas: tuple[ArenaMap, ...]
    groups: tuple[GroupMap, ...]


def states_of_held(holders: list[int]) -> bytearray:
    """`HELD`, `SHARED` or nothing for each block, by how many hold it."""
    try:
        counts = bytes(holders)
    except ValueError:  # one has more holders than a byte can count
        counts = bytes(map(min, holders, repeat(MOST_HOLDERS)))
    return bytearray(counts.translate(_BY_HOLDERS))


def states_of_cached(tiers: Iterable[tuple[Tier, Iterable[int]]], count: int) -> bytes:
    """`LOW`, `USUAL` or nothing for each of `count` items, by the queue they are in."""
    states = bytearray(count)
    for tier, items in tiers:
        state = STATE_OF_TIER[tier]
        for item in items:
            states[item] = state
    return bytes(states)


def where(owners: bytes, owner: int, values: bytes) -> bytes:
    """Of the values, those at places of `owner`; 0 elsewhere."""
    mask = owners.translate(bytes([255 if number == owner else 0 for number in range(256)]))
    return _whole(_number(values) & _number(mask), len(values))


def either(some: bytes | bytearray, others: bytes) -> bytes:
    """Both, where at most one of the two is not 0."""
    return _whole(_number(some) | _number(others), len(some))


def _number(values: bytes | bytearray) -> int:
    """As one large number, whose bits are combined in C."""
    return int.from_bytes(values, "little")


def _whole(number: int, count: int) -> bytes:
    return number.to_bytes(count, "little")
