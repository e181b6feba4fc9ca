import random
from typing import Any

import pytest

from intarsia.kvcache.plan import Group
from intarsia.kvcache.prefix import chain_hashes, longest_hit
from intarsia.kvcache.reach import Full, Reach, Sliding

KEY = b"k" * 32
BLOCK_TOKENS = 4


def group(reach: Reach) -> Group:
    return Group(reach, (0,), BLOCK_TOKENS)


@pytest.mark.parametrize(
    ("reach", "cached", "hit_blocks"),
    [  # blocks of 4; # is cached, . is gone
        (Full(), "#####", 5),
        (Full(), "###.#", 3),
        (Full(), ".####", 0),
        (Sliding(8), "..##.", 4),  # for a window the tail is enough: 7 tokens back lie in two blocks
        (Sliding(8), "...#.", 0),
        (Sliding(8), "#....", 1),
        (Sliding(5), "...#.", 4),  # 4 tokens back: one block
        (Sliding(6), "...#.", 0),  # 5 tokens back: two
        (Sliding(1), ".....", 5),  # sees itself only
    ],
)
def test_longest_hit_per_kind(reach: Reach, cached: str, hit_blocks: int):
    assert longest_hit([group(reach)], [[c == "#" for c in cached]], BLOCK_TOKENS) == hit_blocks


@pytest.mark.parametrize(
    ("full", "sliding", "hit_blocks"),
    [
        ("#####", "..##.", 4),
        ("###..", "..###", 0),  # at 3 blocks the window wants blocks 1 and 2
        ("###..", ".##..", 3),
        ("####.", "##..#", 2),
    ],
)
def test_longest_hit_needs_every_group_at_the_same_length(full: str, sliding: str, hit_blocks: int):
    rows = [[c == "#" for c in row] for row in (full, sliding)]
    assert longest_hit([group(Full()), group(Sliding(8))], rows, BLOCK_TOKENS) == hit_blocks


def test_longest_hit_is_the_longest_that_the_attention_mask_allows():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(2000):
        size = rng.randint(1, 5)
        reaches = rng.sample([Full(), Sliding(1), Sliding(3), Sliding(8), Sliding(13)], rng.randint(1, 3))
        rows = [[rng.random() < 0.7 for _ in range(8)] for _ in reaches]

        def can_continue_at(tokens: int, reaches=reaches, rows=rows, size=size) -> bool:
            """Is every key that the mask shows to the query at position `tokens` in a cached block?"""
            return all(
                row[key // size]
                for reach, row in zip(reaches, rows, strict=True)
                for key in range(tokens)
                if reach.window_tokens is None or key > tokens - reach.window_tokens
            )

        expected = max(n for n in range(9) if can_continue_at(n * size))
        assert longest_hit([Group(r, (0,), size) for r in reaches], rows, size) == expected


def test_hash_depends_on_every_earlier_token():
    a = chain_hashes([1, 2, 3, 4, 5, 6, 7, 8], 4, key=KEY)
    b = chain_hashes([9, 2, 3, 4, 5, 6, 7, 8], 4, key=KEY)
    assert len(a) == 2
    assert a[0] != b[0]
    assert a[1] != b[1]


@pytest.mark.parametrize("change", [{"key": b"x" * 32}, {"salt": b"another tenant"}])
def test_hash_depends_on_key_and_salt(change: dict[str, Any]):
    assert chain_hashes([1, 2, 3, 4], 4, **{"key": KEY, **change}) != chain_hashes([1, 2, 3, 4], 4, key=KEY)


def test_known_hashes_are_continued():
    whole = chain_hashes(range(12), 4, key=KEY)
    assert chain_hashes(range(12), 4, key=KEY, known=whole[:1]) == whole
