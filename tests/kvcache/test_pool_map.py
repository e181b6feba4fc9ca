"""The map of a pool against what the pool, and a recount from the tables, say of every block."""

import random

from intarsia.kvcache.check import recount
from intarsia.kvcache.eviction import Tier
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.pool import BlockPool
from intarsia.kvcache.pool_map import NO_OWNER, BlockState, PoolMap
from intarsia.kvcache.reach import Full, Sliding
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.world import random_operation, random_world

HELD = {BlockState.HELD, BlockState.SHARED}
CACHED = {BlockState.LOW, BlockState.USUAL}
ONE, OTHER = RequestId(1), RequestId(2)


def large_pages(seen: PoolMap) -> tuple[int, int, int]:
    """(held, cached, free) large pages, counted from the blocks."""
    counts = [0, 0, 0]
    for number, arena in enumerate(seen.arenas):
        for large in range(1, len(arena.owners)):
            states = set()
            for g, group in enumerate(seen.groups):
                if group.arena == number and g == arena.owners[large]:
                    states |= set(group.states[large * group.per_large : (large + 1) * group.per_large])
            counts[0 if states & {*HELD, BlockState.RESERVED} else 1 if states & CACHED else 2] += 1
    return counts[0], counts[1], counts[2]


def test_map_says_what_the_pool_and_the_tables_say_after_random_use():
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + 79}")
    for seed in range(first, first + 80):
        world = random_world(random.Random(seed))
        for _ in range(60):
            random_operation(world)
            check(world.manager)


def check(manager: CacheManager) -> None:
    seen, count, pool = manager.pool.map(), recount(manager), manager.pool
    assert large_pages(seen) == (count.held, count.kept, count.blank)
    for g, group in enumerate(seen.groups):
        assert sum(state in HELD for state in group.states) == count.held_blocks[g]
        for block, state in enumerate(group.states):
            holders, name = pool.groups[g].holders[block], pool.groups[g].name_of(block)
            assert (state == BlockState.HELD) == (holders == 1)
            assert (state == BlockState.SHARED) == (holders > 1)
            assert (state in CACHED) == (holders == 0 and name is not None)


def test_free_large_pages_belong_to_no_group():
    pool = BlockPool(plan_of(Full(), blocks=4))
    assert pool.map().arenas[0].owners == bytes([NO_OWNER] * 4)


def test_reserved_and_free_blocks_are_told_apart():
    pool = BlockPool(plan_of(Full(), Sliding(8), blocks=4, per_large=(4, 1)))
    [[block], []] = pool.take([1, 0], ONE)
    states = pool.map().groups[0].states
    assert states[block] == BlockState.HELD
    assert states.count(BlockState.RESERVED) + states.count(BlockState.FREE) > 0
    pool.end(ONE)  # what was reserved is free now
    assert pool.map().groups[0].states.count(BlockState.RESERVED) == 0


def test_tiers_are_those_in_which_blocks_are_evicted():
    pool = BlockPool(plan_of(Full(), blocks=6))
    [blocks] = pool.take([2], ONE)
    pool.groups[0].name(blocks, [b"a", b"b"])
    for block, tier in zip(blocks, Tier, strict=True):
        pool.groups[0].give_back([block], tier)
    states = pool.map().groups[0].states
    assert [states[block] for block in blocks] == [BlockState.LOW, BlockState.USUAL]


def test_more_holders_than_a_byte_counts_are_still_several():
    pool = BlockPool(plan_of(Full(), blocks=3))
    [[block]] = pool.take([1], ONE)
    for _ in range(300):
        pool.groups[0].share([block])
    assert pool.map().groups[0].states[block] == BlockState.SHARED
