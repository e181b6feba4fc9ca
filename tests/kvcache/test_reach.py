"""Each reach against the attention mask itself."""

import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.reach import NEVER, Chunked, Cross, Full, Reach, Sliding, State

REACHES = [Full(), Sliding(1), Sliding(2), Sliding(7), Sliding(16), Chunked(1), Chunked(5), Chunked(16)]


def visible(reach: Reach, query: int, key: int) -> bool:
    """The attention mask: does the query at position `query` see the key at position `key`?"""
    window, chunk = reach.window_tokens, reach.chunk_tokens
    return (
        key <= query and (window is None or key > query - window) and (chunk is None or key // chunk == query // chunk)
    )


@pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.name)
def test_oldest_needed_is_the_first_key_the_mask_shows(reach: Reach):
    for length in range(60):
        seen = [key for key in range(length) if visible(reach, length, key)]
        assert reach.oldest_needed(length) == (seen[0] if seen else length)


@pytest.mark.parametrize("reach", [*REACHES, State()], ids=lambda r: r.name)
def test_oldest_needed_never_moves_back(reach: Reach):
    oldest = [reach.oldest_needed(length) for length in range(60)]
    assert oldest == sorted(oldest)


@pytest.mark.parametrize("reach", [*REACHES, State()], ids=lambda r: r.name)
def test_max_lookback_bounds_every_row_of_the_mask(reach: Reach):
    for length in range(60):
        rows = [length_ - reach.oldest_needed(length_) for length_ in range(length + 1)]
        assert reach.max_lookback(length) == max(rows)


@pytest.mark.parametrize("reach", [*REACHES, State()], ids=lambda r: r.name)
def test_passed_at_is_the_first_length_whose_query_no_longer_sees_the_token(reach: Reach):
    for token in range(30):
        lengths = [length for length in range(token + 1, 80) if reach.oldest_needed(length) > token]
        assert reach.passed_at(token) == (lengths[0] if lengths else NEVER)


def test_first_query_of_a_chunk_needs_nothing():
    assert Chunked(8).oldest_needed(16) == 16


def test_a_state_is_needed_exactly_where_the_next_token_stands():
    assert State().oldest_needed(9) == 8


@pytest.mark.parametrize(("kind", "field"), [(Sliding, "window"), (Chunked, "chunk")])
def test_a_limit_that_hides_even_the_query_is_refused(kind, field: str):
    with pytest.raises(InvalidSetting, match="got 0") as refusal:
        kind(0)
    assert refusal.value.field == field


@pytest.mark.parametrize(
    ("reach", "slots"), [(Full(), 40), (Sliding(8), 40), (Chunked(8), 40), (State(), 1), (Cross(), 12)]
)
def test_a_table_has_an_entry_for_whatever_the_kind_keeps(reach: Reach, slots: int):
    """Of a sequence of 40 tokens, with 12 of an encoder."""
    assert reach.slots_for(40, encoder_tokens=12) == slots
