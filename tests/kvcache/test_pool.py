from collections import Counter

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.pool import BlockKey, BlockPool


def key(n: int) -> BlockKey:
    return BlockKey(0, bytes([n]))


def test_the_null_block_is_never_dealt_out():
    assert 0 not in BlockPool(8).take(7)


def test_exhausted_pool_gives_nothing_and_says_what_there_is():
    pool = BlockPool(5)
    pool.take(3)
    with pytest.raises(PoolExhausted, match="2 blocks are wanted; the pool has 1 blank") as refusal:
        pool.take(2)
    assert refusal.value.details == {"asked": 2, "free": 1, "total": 4}
    assert pool.num_free == 1


def test_a_block_given_back_twice_is_caught():
    pool = BlockPool(3)
    blocks = pool.take(1)
    pool.give_back(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.give_back(blocks)


def test_named_block_is_found_after_it_was_given_back_until_it_is_evicted():
    pool = BlockPool(3)
    first, second = pool.take(2)
    pool.name(first, key(1))
    pool.give_back([first, second])
    assert pool.find(key(1)) == first
    assert pool.take(1) == [second]  # blank blocks go first
    assert pool.take(1) == [first]
    assert pool.find(key(1)) is None
    assert pool.evictions == 1


def test_least_recently_given_back_is_evicted_first():
    pool = BlockPool(4)
    a, b, c = pool.take(3)
    for n, block in enumerate((a, b, c)):
        pool.name(block, key(n))
    pool.give_back([b, a, c])
    pool.share([b])  # used again
    pool.give_back([b])
    assert pool.take(3) == [a, c, b]


def test_shared_block_is_free_only_after_every_holder_left():
    pool = BlockPool(3)
    (block,) = pool.take(1)
    pool.share([block])
    pool.give_back([block])
    assert pool.num_free == 1
    pool.give_back([block])
    assert pool.num_free == 2


def test_first_block_of_a_key_stays_the_known_one():
    pool = BlockPool(4)
    first, twin = pool.take(2)
    pool.name(first, key(1))
    pool.name(twin, key(1))
    pool.give_back([first, twin])
    assert pool.find(key(1)) == first
    assert not pool.faults(Counter())


def test_forget_all_drops_every_key_and_keeps_held_blocks():
    pool = BlockPool(4)
    held, kept = pool.take(2)
    pool.name(held, key(1))
    pool.name(kept, key(2))
    pool.give_back([kept])
    pool.forget_all()
    assert pool.find(key(1)) is None
    assert pool.find(key(2)) is None
    assert not pool.faults(Counter([held]))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda pool, block: pool._blank.append(block), "is 1x in the free lists"),
        (lambda pool, block: pool._blank.pop(), "is 0x in the free lists"),
        (lambda pool, block: pool._holders.__setitem__(block, 2), "counts 2 holders, the tables name it 1x"),
        (lambda pool, block: pool._block_of.clear(), "do not name each other"),
    ],
)
def test_recount_finds_damage(damage, finding: str):
    pool = BlockPool(5)
    (block,) = pool.take(1)
    pool.name(block, key(1))
    assert not pool.faults(Counter([block]))
    damage(pool, block)
    assert any(finding in fault for fault in pool.faults(Counter([block])))
