from typing import Any

import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.kvcache.spec import LayerSpec, StateTensor, check_layers


def attention(index: int, **sizes: Any) -> LayerSpec:
    usual: dict[str, Any] = {"kv_heads": 2, "key_dim": 16, "value_dim": 16, "item_bytes": 2}
    return LayerSpec(index, Full(), **(usual | sizes))


def test_bytes_of_a_token_count_keys_values_and_what_lies_beside_them():
    assert attention(0).token_bytes == 128
    assert attention(0, extra_token_bytes=8).token_bytes == 136


def test_latent_attention_is_one_head_without_values():
    assert attention(0, kv_heads=1, key_dim=576, value_dim=0).token_bytes == 1152


@pytest.mark.parametrize(("block_tokens", "entries"), [(16, 4), (5, 2), (4, 1), (1, 1), (18, 5)])
def test_a_block_has_room_for_the_entries_of_tokens_that_end_in_it(block_tokens: int, entries: int):
    layer = LayerSpec(0, Full(), 1, 32, 0, 2, extra_token_bytes=16, entry_tokens=4)
    assert (layer.entries_in(block_tokens), layer.block_bytes(block_tokens)) == (entries, entries * (64 + 16))
    ends = [number * 4 + 3 for number in range(1000)]
    assert max(sum(block == end // block_tokens for end in ends) for block in range(200)) <= entries


def test_a_token_has_its_share_of_an_entry():
    assert LayerSpec(0, Full(), 1, 32, 0, 2, entry_tokens=4).token_bytes == 16
    assert LayerSpec(0, Full(), 1, 32, 0, 2, entry_tokens=128).token_bytes == 1


def test_a_block_of_a_state_is_the_whole_state_each_tensor_aligned():
    layer = LayerSpec(0, State(), state=(StateTensor((3, 7), 2), StateTensor((4, 4), 4)))
    assert layer.block_bytes(16) == layer.block_bytes(1) == 128


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: attention(0, kv_heads=-1), "negative or empty size"),
        (lambda: attention(0, kv_heads=0), "keeps nothing"),
        (lambda: LayerSpec(0, State()), "keeps nothing"),
        (lambda: LayerSpec(0, State(), state=(StateTensor((0, 4), 2),)), "negative or empty size"),
        (lambda: check_layers([]), "at least one layer"),
        (lambda: check_layers([attention(0), attention(0)]), "described twice"),
        (lambda: check_layers([attention(0), LayerSpec(1, Full(), shares=7)]), "shares the pages of layer 7"),
    ],
)
def test_layers_that_can_not_be_are_refused_in_one_sentence(make, says: str):
    with pytest.raises(InvalidSetting, match=says) as refusal:
        make()
    assert refusal.value.field == "layers"


def test_a_layer_may_keep_tokens_and_a_state():
    check_layers([attention(0), LayerSpec(0, State(), state=(StateTensor((4, 4), 4),)), attention(1)])
    check_layers([attention(0), LayerSpec(0, Sliding(4), kv_heads=1, key_dim=4, item_bytes=2)])
