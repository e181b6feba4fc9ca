from typing import Any

import pytest

from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.settings.sizes import parse_bytes
from intarsia.errors import InvalidSetting


@pytest.mark.parametrize(
    ("text", "count"),
    [("64MiB", 64 * 2**20), ("1.5 GiB", 3 * 2**29), ("10GB", 10**10), ("2048", 2048), (2048, 2048), ("3 kb", 3000)],
)
def test_bytes_are_read_with_their_unit(text: str | int, count: int):
    assert parse_bytes(text, "kv_cache_memory") == count


@pytest.mark.parametrize("text", ["", "lots", "64 MiX", "-5", "NaN", "1e9", True, None])
def test_unreadable_bytes_list_the_units(text: object):
    with pytest.raises(InvalidSetting, match=r"optional unit .*MiB") as refusal:
        parse_bytes(text, "kv_cache_memory")
    assert refusal.value.field == "kv_cache_memory"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel_size", 0),
        ("block_size", 0),
        ("kv_cache_memory", 0),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("max_model_len", 1),
        ("max_prefill_chunk_tokens", 0),
        ("dtype", "int4"),
        ("cpu_threads", 0),
        ("generation_config", "vendor"),
    ],
)
def test_impossible_setting_names_its_field(field: str, value: object):
    with pytest.raises(InvalidSetting) as refusal:
        engine_settings("model", **{field: value})  # type: ignore[arg-type]
    assert refusal.value.field == field


def test_a_name_that_is_no_setting_is_an_unexpected_argument():
    misspelt: Any = {"max_num_seq": 3}
    with pytest.raises(TypeError, match=r"max_num_seq is no setting\. Did you mean max_num_seqs\?"):
        engine_settings("model", **misspelt)
