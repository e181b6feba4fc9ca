import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.manager import CacheManager, RequestId
from intarsia.kvcache.plan import PAGE_ALIGNMENT_BYTES, Group, LayerSpec, PlanSettings, plan_layered
from intarsia.kvcache.reach import Full, Reach, Sliding


def layers(*kinds: Reach, kv_heads: int = 2, dim: int = 16) -> list[LayerSpec]:
    return [LayerSpec(n, reach, kv_heads, dim, dim, item_bytes=4) for n, reach in enumerate(kinds)]


SETTINGS = PlanSettings(memory_bytes=1 << 22, block_tokens=16)


def test_documented_example_takes_11_blocks_in_10_buffers():
    kinds = [Full() if n % 3 == 2 else Sliding(32) for n in range(30)]  # 10 full + 20 sliding
    plan = plan_layered(layers(*kinds), SETTINGS, expected_tokens=112)
    assert [(g.reach, len(g.layers)) for g in plan.groups] == [(Sliding(32), 10), (Sliding(32), 10), (Full(), 10)]
    assert plan.num_buffers == 10
    assert plan.padding_fraction == 0

    manager = CacheManager(plan)
    manager.open(RequestId(1), manager.lookup(range(112)))
    manager.extend(RequestId(1), 112)
    manager.commit(RequestId(1), range(112), 112)
    held = [sum(block != 0 for block in row) for row in manager.table(RequestId(1))]
    assert sorted(held, reverse=True) == [7, 2, 2]
    assert len(manager.held()) == 11


def test_ministral_becomes_4_groups_of_9():
    kinds = [Full() if n % 4 == 0 else Sliding(32768) for n in range(36)]
    settings = PlanSettings(memory_bytes=1 << 30, block_tokens=16)
    plan = plan_layered(layers(*kinds), settings, expected_tokens=8192)
    assert [len(g.layers) for g in plan.groups] == [9, 9, 9, 9]
    assert [g.reach.name for g in plan.groups] == ["full", "sliding-32768", "sliding-32768", "sliding-32768"]


def test_gemma3_27b_is_grouped_by_10_with_little_padding():
    kinds = [Full() if n % 6 == 5 else Sliding(1024) for n in range(62)]  # 10 full + 52 sliding
    settings = PlanSettings(memory_bytes=1 << 30, block_tokens=16)
    plan = plan_layered(layers(*kinds), settings, expected_tokens=8192)
    assert [len(g.layers) for g in plan.groups] == [10, 10, 10, 10, 10, 2, 10]
    assert plan.padding_fraction < 0.07


def test_a_uniform_model_is_one_group():
    plan = plan_layered(layers(*[Full()] * 5), SETTINGS, expected_tokens=8192)
    assert [g.layers for g in plan.groups] == [(0, 1, 2, 3, 4)]
    assert plan.padding_fraction == 0


def test_every_layer_has_one_place_and_buffers_fit_the_memory():
    kinds = [Full(), Sliding(8), Sliding(8), Sliding(64), Full(), Sliding(8), Sliding(64)]
    plan = plan_layered(layers(*kinds), SETTINGS, expected_tokens=256)
    assert sorted(index for group in plan.groups for index in group.layers) == list(range(7))
    assert all(len(group.layers) <= plan.num_buffers for group in plan.groups)
    assert plan.num_buffers * plan.buffer_bytes <= SETTINGS.memory_bytes
    assert plan.page_bytes % PAGE_ALIGNMENT_BYTES == 0


def test_memory_too_small_for_one_block_per_group_is_refused_with_the_numbers():
    with pytest.raises(InvalidSetting, match=r"holds 2 blocks .* at least 3") as refusal:
        plan_layered(layers(Full(), Sliding(8)), PlanSettings(memory_bytes=2 * 4096), expected_tokens=64)
    assert refusal.value.field == "kv_cache_memory"


@pytest.mark.parametrize(("field", "values"), [("block_size", (64, 0)), ("kv_cache_memory", (0, 16))])
def test_impossible_settings_name_their_field(field: str, values: tuple[int, int]):
    with pytest.raises(InvalidSetting) as refusal:
        PlanSettings(*values)
    assert refusal.value.field == field


@pytest.mark.parametrize("reach", [Full(), Sliding(1), Sliding(5), Sliding(16), Sliding(17)], ids=lambda r: r.name)
@pytest.mark.parametrize("block_tokens", [1, 4, 16])
def test_blocks_spanning_bounds_what_a_growing_request_ever_holds(reach: Reach, block_tokens: int):
    group = Group(reach, (0,), block_tokens)
    for chunk in (1, 3, 7, 40):
        for total in (1, 2, 15, 16, 17, 50):
            length, most = 0, 0
            while length < total:
                first = reach.oldest_needed(length) // block_tokens
                length = min(total, length + chunk)
                most = max(most, -(-length // block_tokens) - first)
            assert most <= group.blocks_spanning(total, chunk) <= -(-total // block_tokens)
