"""Forecasts against pools of that size, with the same requests."""

import random
from typing import Any

import pytest

from intarsia.deploy.replay.prefill import extend_by_chunk
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.memory_worth import SCALES, MemoryWorth, ThoughtPool, with_forecasts
from intarsia.kvcache.reach import Chunked, Full, Reach, Sliding, State
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.points_check import check_tree, points_below

FAMILIES = {
    "full": (Full(),),
    "windows": (Full(), Sliding(9)),
    "chunks": (Full(), Chunked(8)),
    "states": (Full(), State()),
}


def families(*quick: str) -> list[Any]:
    """As parameters: tests of the others are slow."""
    return [
        pytest.param(reaches, id=name, marks=[] if name in quick else [pytest.mark.slow])
        for name, reaches in FAMILIES.items()
    ]


def chats(seed: int, count: int = 1500) -> list[list[int]]:
    """Prompts of conversations: a system prompt, and turns that come back after a while, or never."""
    rng = random.Random(seed)
    open_chats: list[list[int]] = []
    prompts, fresh = [], 1000
    for _ in range(count):
        if open_chats and rng.random() < 0.6:
            chat = open_chats.pop(int(rng.random() ** 2 * len(open_chats)))
        else:
            chat = list(range(12))
        turn = rng.randint(8, 40)
        chat = chat + list(range(fresh, fresh + turn))
        fresh += turn
        prompts.append(chat)
        if len(chat) < 150:
            open_chats.append(chat)
    return prompts


def replay(reaches: tuple[Reach, ...], blocks: int, prompts: list[list[int]]) -> tuple[int, MemoryWorth]:
    """Tokens found, and what pools of other sizes would have found."""
    plan = plan_of(*reaches, blocks=blocks)
    manager = CacheManager(plan)
    assert manager.retention is not None
    worth = with_forecasts(manager.retention, plan)
    found = asked = 0
    for n, prompt in enumerate(prompts):
        hit = manager.lookup(prompt)
        manager.open(RequestId(n), hit)
        manager.extend(RequestId(n), len(prompt), hit.tokens)
        manager.commit(RequestId(n))
        manager.release(RequestId(n))
        found, asked = found + hit.tokens, asked + len(prompt)
    assert worth.asked_tokens == asked
    return found, worth


@pytest.mark.parametrize("reaches", families("windows"))
def test_a_forecast_is_what_a_pool_of_that_size_finds(reaches: tuple[Reach, ...]):
    prompts = chats(1)
    found, worth = replay(reaches, 401, prompts)
    for scale, forecast in worth.forecast(found).items():
        really, _ = replay(reaches, int(400 * scale) + 1, prompts)
        assert abs(forecast - really) < 0.03 * worth.asked_tokens, (scale, forecast, really)


@pytest.mark.parametrize("reaches", families(*FAMILIES))
def test_more_memory_is_never_worth_less(reaches: tuple[Reach, ...]):
    _, worth = replay(reaches, 201, chats(2))
    found = [worth.found_tokens[scale] for scale in SCALES]
    assert found == sorted(found) and found[0] < found[-1]


def thought_bytes(pool: ThoughtPool, reaches: tuple[Reach, ...], block_bytes: int) -> int:
    """Counted anew: each block that some point needs, once."""
    size, blocks = pool._size, 0
    for point in points_below(pool._retention.tree.root):
        blocks += point.kept - point.start if point.is_kept else 0
        blocks += sum(1 for length in point.lengths if length % size) * sum(not isinstance(r, State) for r in reaches)
    for reach in reaches[1:]:
        needed: set[tuple[int, int]] = set()
        for point in points_below(pool._retention.tree.root):
            if not point.lengths:
                continue
            if isinstance(reach, State):
                blocks += len(point.lengths)
                continue
            at, first = point, reach.oldest_needed(min(point.lengths)) // size
            while at is not None and at.end > first:
                needed |= {(id(at), n) for n in range(max(first, at.start), at.end)}
                at = at.parent
        blocks += len(needed)
    return blocks * block_bytes


@pytest.mark.parametrize("reaches", families(*FAMILIES))
def test_bytes_of_a_thought_pool_are_those_of_its_points_and_fit(reaches: tuple[Reach, ...]):
    _, worth = replay(reaches, 201, chats(3, 400))
    for pool in worth._pools.values():
        check_tree(pool._retention.tree)
        assert pool._blocks.used_bytes <= pool.memory_bytes
        assert pool._blocks.used_bytes == thought_bytes(pool, reaches, 64)


def replay_by_chunks(reaches: tuple[Reach, ...], blocks: int, prompts: list[list[int]]) -> int:
    """Tokens found. Steps are as long as there is room for."""
    manager, found = CacheManager(plan_of(*reaches, blocks=blocks)), 0
    for n, prompt in enumerate(prompts):
        hit = manager.lookup(prompt)
        manager.open(RequestId(n), hit)
        length = hit.tokens
        while length < len(prompt):
            length = extend_by_chunk(manager, RequestId(n), len(prompt), length)
            manager.commit(RequestId(n))
        manager.release(RequestId(n))
        found += hit.tokens
    return found


@pytest.mark.parametrize("reaches", families("windows"))
@pytest.mark.parametrize(("blocks", "most_off"), [(64, 0.08), (80, 0.01), (128, 0.01)])
def test_of_a_pool_that_one_request_fills_a_forecast_finds_what_its_steps_leave(
    reaches: tuple[Reach, ...], blocks: int, most_off: float
):
    """Before the window of a long prompt's end, its first steps take blocks in all groups."""
    rng = random.Random(6)
    prompts = [list(range(20)) + [rng.randrange(100, 10**9) for _ in range(rng.randint(60, 92))] for _ in range(300)]
    found, worth = replay(reaches, blocks + 1, prompts)
    really = replay_by_chunks(reaches, blocks // 2 + 1, prompts)
    assert abs(worth.forecast(found)[0.5] - really) <= most_off * worth.asked_tokens
