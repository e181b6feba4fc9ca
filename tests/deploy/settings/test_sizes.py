"""Amounts as people write them."""

import pytest

from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.settings.sizes import parse_bytes, parse_lengths, parse_tokens
from intarsia.errors import InvalidSetting


@pytest.mark.parametrize(
    ("text", "tokens"),
    [(7, 7), ("7", 7), ("32k", 32_000), ("32K", 32_768), ("1m", 10**6), ("1M", 2**20), ("1.5k", 1500), ("-2", -2)],
)
def test_tokens_are_read_with_a_unit_or_without(text: str | int, tokens: int):
    assert parse_tokens(text, "max_model_len") == tokens


@pytest.mark.parametrize("text", ["", "k", "32x", "32 kb", "1.5", "1e3", "1.0001k", "٣", True, "9" * 5000])
def test_what_is_no_number_of_tokens_names_its_field(text: object):
    with pytest.raises(InvalidSetting, match="max_model_len must be a whole number of tokens"):
        parse_tokens(text, "max_model_len")


@pytest.mark.parametrize("text", ["9" * 5000 + "GiB", "1e3", "-1GiB"])
def test_what_is_no_number_of_bytes_names_its_field(text: str):
    with pytest.raises(InvalidSetting, match="swap_space must be a number of bytes"):
        parse_bytes(text, "swap_space")


def test_every_number_of_tokens_takes_a_unit():
    made = engine_settings(
        "m", max_model_len="2K", max_num_batched_tokens="1k", max_prefill_chunk_tokens="1K", max_waiting_tokens="1m"
    )
    assert (made.max_model_len, made.scheduler.max_num_batched_tokens) == (2048, 1000)
    assert engine_settings("m", expected_average_seq_len="4K").plan.expected_average_seq_len == 4096
    assert parse_lengths("2k,8K") == [2000, 8192]
    assert (made.scheduler.max_prefill_chunk_tokens, made.overload.max_waiting_tokens) == (1024, 10**6)
