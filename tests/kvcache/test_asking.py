"""Asking changes nothing: the map of the pool, the recount and all that is known are equal before and after."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.tests.kvcache.world import World, random_operation, random_prompt, random_world

NEW = RequestId(1 << 40)


def random_wants(world: World) -> list[int]:
    return [world.rng.choice([0, 1, 1, 2, 5, 30]) for _ in world.plan.groups]


def random_request(world: World) -> RequestId:
    return world.rng.choice([*world.live, NEW])


QUESTIONS: dict[str, Callable[[World], Any]] = {
    "room for": lambda w: w.manager.pool.room_for(random_wants(w), random_request(w)),
    "room at no loss": lambda w: w.manager.pool.room_at_no_loss(random_wants(w), random_request(w)),
    "room to grow": lambda w: [w.manager.room_to_grow(r, live.computed + 60) for r, live in w.live.items()],
    "chunk end": lambda w: [w.manager.chunk_end(r, live.computed + 2000) for r, live in w.live.items()],
    "lookup": lambda w: w.manager.lookup(random_prompt(w) or [1]),
    "table": lambda w: [(w.manager.table(r), w.manager.held_blocks(r), w.manager.swap_bytes(r)) for r in w.live],
    "map": lambda w: w.manager.pool.map(),
    "stored": lambda w: w.manager.pool.stored(),
}


def state(manager: CacheManager) -> tuple[Any, ...]:
    """All that can be seen of it, and the order of eviction."""
    pool = manager.pool
    queues = [[list(items) for _, items in pages._cached.tiers()] for pages in pool._arenas]
    return pool.map(), recount(manager), pool.known.version, queues, [list(group.index) for group in pool.groups]


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_changes_nothing_in_any_state(question: str):
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + 29}")
    for seed in range(first, first + 30):
        world = random_world(random.Random(seed))
        for _ in range(60):
            random_operation(world)
            before = state(world.manager)
            QUESTIONS[question](world)
            assert state(world.manager) == before, f"seed {seed}"


def test_a_refusal_changes_nothing_in_any_state():
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + 39}")
    refused = 0
    for seed in range(first, first + 40):
        world = random_world(random.Random(seed))
        for _ in range(60):
            random_operation(world)
            wants, request, before = random_wants(world), random_request(world), state(world.manager)
            if not any(wants) or world.manager.pool.room_for(wants, request):
                continue
            with pytest.raises(PoolExhausted):
                world.manager.pool.take(wants, request)
            assert state(world.manager) == before, f"seed {seed}"
            refused += 1
    assert refused > 40, "too few full pools to mean anything"
