"""JSON in pieces is the JSON of the whole, and no piece is long."""

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from intarsia.deploy.front_end.json_pieces import PIECE, Series, json_pieces, size_of, texts_in


def drawn(rng: random.Random, left: int) -> Any:
    """Any value, of about so many values."""
    kind = rng.randrange(7 if left > 1 else 5)
    if kind >= 5:
        count = rng.choice([0, 1, 2, 10, left])
        within = [drawn(rng, left // max(1, count)) for _ in range(count)]
        return within if kind == 5 else {f"k{n}": inner for n, inner in enumerate(within)}
    return [None, rng.random(), rng.randrange(10**6), 'ä\u2028"\\' * rng.randrange(80), True][kind]


def test_pieces_joined_are_the_json_of_the_whole():
    rng = random.Random(seed := 5)
    print("seed", seed)
    for _ in range(200):
        value = drawn(rng, rng.choice([1, 10, PIECE, 5 * PIECE]))
        found = list(json_pieces(value))
        assert "".join(found) == json.dumps(value, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize(
    "value",
    [
        list(range(10**5)),
        ["text"] * 10**5,
        [{"logprob": -1.5, "top": [[n, -2.5] for n in range(20)]} for _ in range(2000)],
        {"a": {str(n): {"b": [n] * 3} for n in range(10**4)}, "c": [None] * 10**4},
    ],
)  # fmt: skip
def test_no_piece_of_a_long_value_is_long(value: Any):
    found = list(json_pieces(value))
    assert "".join(found) == json.dumps(value, separators=(",", ":"))
    assert max(map(len, found)) < 20 * PIECE


@pytest.mark.parametrize("count", [0, 1, 3, 2000])
def test_a_series_is_the_array_of_its_items_and_few_of_them_are_there_at_once(count: int):
    made: list[int] = []

    def rows() -> Iterator[dict[str, float] | None]:
        yield None
        for n in range(count):
            made.append(n)
            yield {str(place): -0.5 * n for place in range(20)}

    value = {"about": Series(rows, num_values=20 * count), "end": [1]}
    whole = json.dumps({"about": list(rows()), "end": [1]}, separators=(",", ":"))
    made.clear()
    pieces = json_pieces(value)
    found = [next(pieces)]
    assert len(made) <= 2 * PIECE / 20
    assert "".join([*found, *pieces]) == whole
    assert size_of(value, PIECE) == min(PIECE, 20 * count + size_of({"about": None, "end": [1]}, PIECE))


def test_sizes_count_values_and_long_texts_and_stop_early():
    assert size_of([1, {"a": "b"}, []], 100) == 5
    assert size_of("x" * 5000, 10**6) == 51
    assert size_of([list(range(10**6))] * 1000, 7) == 7


def test_texts_are_found_at_any_depth():
    assert sorted(texts_in({"a": ["b", {"c": "d"}], "e": 1})) == ["b", "d"]
