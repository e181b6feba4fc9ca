"""Each reach against the attention mask itself."""

import pytest

from intarsia.kvcache.reach import NEVER, Full, Reach, Sliding

REACHES = [Full(), Sliding(1), Sliding(2), Sliding(7), Sliding(16)]


def visible(reach: Reach, query: int, key: int) -> bool:
    """The attention mask: does the query at position `query` see the key at position `key`?"""
    window = reach.window_tokens
    return key <= query and (window is None or key > query - window)


@pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.name)
def test_oldest_needed_is_the_first_key_the_mask_shows(reach: Reach):
    for length in range(60):
        seen = [key for key in range(length) if visible(reach, length, key)]
        assert reach.oldest_needed(length) == (seen[0] if seen else length)


@pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.name)
def test_oldest_needed_never_moves_back(reach: Reach):
    oldest = [reach.oldest_needed(length) for length in range(60)]
    assert oldest == sorted(oldest)


@pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.name)
def test_max_lookback_is_the_longest_row_of_the_mask(reach: Reach):
    for length in range(60):
        rows = [length_ - reach.oldest_needed(length_) for length_ in range(length + 1)]
        assert reach.max_lookback(length) == max(rows)


@pytest.mark.parametrize("reach", REACHES, ids=lambda r: r.name)
def test_passed_at_is_the_first_length_whose_query_no_longer_sees_the_token(reach: Reach):
    for token in range(30):
        lengths = [length for length in range(token + 1, 80) if reach.oldest_needed(length) > token]
        assert reach.passed_at(token) == (lengths[0] if lengths else NEVER)


def test_a_window_that_hides_even_the_query_is_refused():
    with pytest.raises(ValueError, match="got 0 tokens"):
        Sliding(0)
