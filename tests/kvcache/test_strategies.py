"""Memory plans: where every layer lies, what a request holds, and what is refused."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import STRATEGIES, Group, MemoryPlan, PlanSettings, exact_bytes
from intarsia.kvcache.reach import Chunked, Full, Reach, Sliding, State
from intarsia.kvcache.spec import PAGE_ALIGNMENT_BYTES, LayerSpec, StateTensor
from intarsia.kvcache.strategies import balanced_length, plan_memory

GIB = 1 << 30


def layers(*kinds: Reach, kv_heads: int = 2, dim: int = 16, item_bytes: int = 4) -> list[LayerSpec]:
    return [LayerSpec(n, reach, kv_heads, dim, dim, item_bytes) for n, reach in enumerate(kinds)]


def gemma_3_27b() -> list[LayerSpec]:
    return layers(*[Full() if n % 6 == 5 else Sliding(1024) for n in range(62)], kv_heads=16, dim=128, item_bytes=2)


def bamba_9b() -> list[LayerSpec]:
    state = (StateTensor((8448, 3), 2), StateTensor((128, 64, 128), 4))
    return [
        LayerSpec(n, Full(), 8, 128, 128, 2) if n in (9, 18, 27) else LayerSpec(n, State(), state=state)
        for n in range(32)
    ]


def plan(specs: Sequence[LayerSpec], memory: int = 1 << 22, max_tokens: int | None = None, **settings) -> MemoryPlan:
    return plan_memory(specs, PlanSettings(memory, **settings), max_tokens)


def test_documented_example_takes_11_blocks_in_10_buffers():
    kinds = [Full() if n % 3 == 2 else Sliding(32) for n in range(30)]  # 10 full + 20 sliding
    made = plan(layers(*kinds), strategy="layered", expected_average_seq_len=112)
    assert [(g.reach, len(g.layers)) for g in made.groups] == [(Sliding(32), 10), (Sliding(32), 10), (Full(), 10)]
    assert made.num_buffers == 10
    assert made.padding_fraction == 0

    manager = CacheManager(made)
    manager.open(RequestId(1), manager.lookup(range(112)))
    manager.extend(RequestId(1), 112)
    manager.commit(RequestId(1))
    held = [sum(block != 0 for block in row) for row in manager.table(RequestId(1))]
    assert sorted(held, reverse=True) == [7, 2, 2]
    assert recount(manager).held == 11


def test_ministral_in_layers_becomes_4_groups_of_9():
    made = plan(layers(*[Full() if n % 4 == 0 else Sliding(32768) for n in range(36)]), GIB, strategy="layered")
    assert [len(g.layers) for g in made.groups] == [9, 9, 9, 9]


def test_gemma_3_27b_is_packed_in_two_groups_and_holds_what_the_exact_bound_allows():
    made = plan(gemma_3_27b(), 40 * GIB)
    assert made.strategy == "packed"
    assert [(g.reach.name, g.pages_per_large) for g in made.groups] == [("sliding-1024", 5), ("full", 26)]
    assert made.padding_fraction == 0
    contexts = (2048, 8192, 32_768, 131_072)
    assert [int(made.concurrency(context)) for context in contexts] == [70, 38, 13, 3]
    for context in contexts:
        assert made.concurrency(context) >= 0.98 * 40 * GIB / exact_bytes(gemma_3_27b(), context, 16)


def test_blocks_without_a_small_common_multiple_are_padded_a_little_and_the_plan_says_so():
    made = plan(bamba_9b(), 40 * GIB)
    assert made.strategy == "packed"
    assert made.padding_fraction < 0.001
    assert "out of proportion" in made.notes[0]


def test_layers_of_very_unlike_pages_are_not_laid_out_in_equal_buffers():
    with pytest.raises(InvalidSetting, match=r"65 times. Use packed.") as refusal:
        plan(bamba_9b(), 40 * GIB, strategy="layered")
    assert refusal.value.field == "strategy"


def test_auto_takes_the_fewest_expected_bytes_and_says_what_the_others_cost():
    made = plan(gemma_3_27b(), 40 * GIB)
    cost = {entry.strategy: entry.bytes_per_request or 0 for entry in made.why}
    assert set(cost) == set(STRATEGIES) - {"auto"}
    assert cost[made.strategy] == min(cost.values())
    assert cost["uniform"] > 2 * cost["packed"]


def test_hybrid_plan_of_llama_4_holds_4_times_the_context_in_the_same_bytes():
    scout = layers(*[Full() if n % 4 == 3 else Chunked(8192) for n in range(48)], kv_heads=1, dim=128, item_bytes=2)
    memory = int(89.71 * GIB)
    uniform = plan(scout, memory, strategy="uniform")
    assert round(uniform.concurrency(8_388_608) * 8_388_608 / 1e6, 2) == 3.92
    made = plan(scout, memory)
    assert made.concurrency(5_242_880) >= 2.97
    assert made.concurrency(8_388_608) >= 1.86
    length = 1 << 34
    assert made.concurrency(length) / uniform.concurrency(length) == pytest.approx(4, abs=0.005)


def test_partitioned_splits_the_memory_for_requests_of_the_expected_length():
    kinds = [Full(), Sliding(16)]
    made = plan(layers(*kinds), strategy="partitioned", expected_average_seq_len=64, block_tokens=16)
    assert [group.blocks_spanning(64, 1) for group in made.groups] == [4, 2]
    assert made.arenas[0].num_pages == pytest.approx(2 * made.arenas[1].num_pages, abs=2)


def test_without_an_expected_length_partitioned_takes_the_models_own_ratio():
    assert balanced_length(gemma_3_27b(), 8192) == 52 * 1024 // 10


def test_uniform_keeps_every_token_of_every_layer_in_one_group():
    made = plan(layers(Full(), Sliding(4), Chunked(8)), strategy="uniform")
    assert [(g.reach, g.layers) for g in made.groups] == [(Full(), (0, 1, 2))]


def test_layers_that_share_own_nothing():
    specs = [*layers(Full(), Sliding(8)), LayerSpec(2, Full(), 2, 16, 16, 4, shares=0)]
    made = plan(specs)
    assert sorted(index for group in made.groups for index in group.layers) == [0, 1]


def test_a_drafters_layers_are_a_group_of_their_own():
    specs = [*layers(Full(), Full()), LayerSpec(2, Full(), 2, 16, 16, 4, is_draft=True)]
    assert [(g.layers, g.is_draft) for g in plan(specs, strategy="packed").groups] == [((0, 1), False), ((2,), True)]


@pytest.mark.parametrize(
    ("memory", "settings", "field", "says"),
    [
        (0, {}, "kv_cache_memory", "must be positive, got 0"),
        (-5, {}, "kv_cache_memory", "must be positive, got -5"),
        (2 * 4096, {}, "kv_cache_memory", r"at least \d are needed"),
        (1 << 20, {"block_tokens": 0}, "block_size", "at least 1 token"),
        (1 << 20, {"strategy": "best"}, "strategy", "must be one of auto, layered"),
        (1 << 20, {"expected_average_seq_len": 0}, "expected_average_seq_len", "positive number of tokens, got 0"),
        (1 << 42, {"block_tokens": 1}, "block_size", "more than the 2147483647"),
    ],
)
def test_impossible_settings_name_their_field(memory: int, settings: dict, field: str, says: str):
    with pytest.raises(InvalidSetting, match=says) as refusal:
        plan(layers(Full(), Sliding(8)), memory, **settings)
    assert refusal.value.field == field


def test_random_plans_give_every_layer_bytes_of_its_own():
    """No byte belongs to two layers of one block, nor to two blocks of one group; and all lie inside the buffers."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        specs: list[LayerSpec] = []
        for n in range(rng.randint(1, 9)):
            if rng.random() < 0.25:
                specs.append(LayerSpec(n, State(), state=(StateTensor((rng.randint(1, 40), 3), 4),)))
            else:
                reach = rng.choice([Full(), Sliding(rng.randint(1, 40)), Chunked(rng.randint(1, 40))])
                specs.append(LayerSpec(n, reach, rng.randint(1, 3), 8, rng.choice([8, 16]), 2))
        for strategy in STRATEGIES:
            try:
                made = plan(specs, rng.randint(50_000, 400_000), strategy=strategy, block_tokens=rng.choice([1, 4, 16]))
            except InvalidSetting:
                continue
            _check_places(made, specs)


def _check_places(made: MemoryPlan, specs: list[LayerSpec]) -> None:
    assert sum(made.buffers) == sum(arena.num_pages * arena.page_bytes for arena in made.arenas)
    sizes = {(spec.index, spec.reach.keeps): spec.page_bytes(made.block_tokens) for spec in specs}
    placed = 0
    for group in made.groups:
        assert group.page_bytes % PAGE_ALIGNMENT_BYTES == 0
        spans: dict[int, list[tuple[int, int]]] = {}
        for layer, place in zip(group.layers, group.places, strict=True):
            size = sizes[layer, group.reach.keeps]
            assert place.offset_bytes % PAGE_ALIGNMENT_BYTES == 0
            assert place.offset_bytes + size <= group.page_bytes
            last = (made.blocks_of(group) - 1) * group.page_bytes + place.offset_bytes + size
            assert last <= made.buffers[place.buffer]
            spans.setdefault(place.buffer, []).append((place.offset_bytes, place.offset_bytes + size))
            placed += 1
        for ranges in spans.values():
            ranges.sort()
            assert all(end <= start for (_, end), (start, _) in pairwise(ranges))
        arena = made.arenas[group.arena]
        assert group.block_bytes * group.pages_per_large == arena.page_bytes
    assert placed == len(specs)


@pytest.mark.parametrize(
    "reach", [Full(), Sliding(1), Sliding(5), Sliding(17), Chunked(1), Chunked(6), Chunked(16)], ids=lambda r: r.name
)
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
