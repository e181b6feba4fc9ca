"""How long and how deep a JSON text is, without a parser."""

import json
import random
import string

import pytest

from intarsia.deploy.http import json_scan
from intarsia.deploy.http.json_scan import extent


def by_parser(value: object) -> tuple[int, int]:
    """(items, levels) of a parsed value: a container and each of its values but the first counts."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [by_parser(each) for each in (value.values() if isinstance(value, dict) else value)]
    items = 1 + max(0, len(inner) - 1) + sum(count for count, _ in inner)
    return items, 1 + max((levels for _, levels in inner), default=0)


def drawn(rng: random.Random, depth: int) -> object:
    kind = rng.randrange(4 if depth else 2)
    if kind == 0:
        return rng.choice([None, True, 0, -1.5, 10**30])
    if kind == 1:
        return "".join(rng.choices('\\"[]{},: \n\x01é' + string.ascii_letters, k=rng.randrange(12)))
    values = [drawn(rng, depth - 1) for _ in range(rng.randrange(5))]
    return values if kind == 2 else {str(drawn(rng, 0)) + str(n): value for n, value in enumerate(values)}


def test_random_texts_have_the_extent_that_a_parser_finds_however_they_are_sliced(monkeypatch: pytest.MonkeyPatch):
    seed = random.randrange(2**32)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(3000):
        monkeypatch.setattr(json_scan, "SLICE_BYTES", rng.choice([1, 2, 3, 7, 64, 2**20]))
        value = drawn(rng, 4)
        items, levels = by_parser(value)
        text = json.dumps(value, ensure_ascii=rng.random() < 0.5).encode()
        assert extent(text) == (1 + items, levels), text


@pytest.mark.parametrize("text", [b"", b'"', b"\\", b"[" * 100_000, b']"' * 10_000, b'{"a":' * 100_000])
def test_what_is_no_json_has_an_extent_too(text: bytes):
    assert extent(text).levels <= 100_000
