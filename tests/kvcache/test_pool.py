from collections import Counter
from collections.abc import Sequence

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.eviction import Tier
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.pool import BlockPool
from intarsia.kvcache.reach import Full, Sliding
from intarsia.tests.kvcache.plans import plan_of

A, B, C = RequestId(1), RequestId(2), RequestId(3)


def one_level(blocks: int) -> BlockPool:
    return BlockPool(plan_of(Full(), blocks=blocks))


def two_level(large: int, *per_large: int) -> BlockPool:
    """Groups 0 and 1 share `large` usable large pages."""
    return BlockPool(plan_of(Full(), Sliding(4), blocks=large + 1, per_large=per_large))


def test_what_the_null_blocks_leave_of_large_page_0_belongs_to_the_group_of_the_smallest_blocks():
    pool = two_level(2, 6, 2)  # the null block of group 1 covers three blocks of group 0
    assert take(pool, 3) == [3, 4, 5]
    assert not faults(pool, [3, 4, 5])
    pool.groups[0].give_back([3, 4, 5])
    assert pool.num_free_pages == 2  # large page 0 is never free


def take(pool: BlockPool, count: int, request: RequestId = A) -> list[int]:
    return list(pool.take([count] + [0] * (len(pool.groups) - 1), request)[0])


def name(n: int) -> bytes:
    return bytes([n])


def find(pool: BlockPool, n: int, group: int = 0) -> int | None:
    return pool.groups[group].index.get(name(n))


def faults(pool: BlockPool, *held: Sequence[int]) -> list[str]:
    counts = [Counter(blocks) for blocks in held]
    return pool.faults(counts + [Counter()] * (len(pool.groups) - len(counts)))


def test_the_null_block_is_never_dealt_out():
    assert 0 not in take(one_level(8), 7)


def test_exhausted_pool_gives_nothing_and_says_what_there_is():
    pool = one_level(5)
    take(pool, 3)
    with pytest.raises(PoolExhausted, match="2 blocks are wanted; the pool has 1 free") as refusal:
        take(pool, 2)
    assert refusal.value.details == {"asked": 2, "free": 1, "total": 4}
    assert pool.num_available_pages == 1


def test_a_block_given_back_twice_is_caught():
    pool = one_level(3)
    blocks = take(pool, 1)
    pool.groups[0].give_back(blocks)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.groups[0].give_back(blocks)


def test_named_block_is_found_after_it_was_given_back_until_it_is_evicted():
    pool = one_level(3)
    first, second = take(pool, 2)
    pool.groups[0].name([first], [name(1)])
    pool.groups[0].give_back([first, second])
    assert find(pool, 1) == first
    assert take(pool, 1) == [second]  # blank blocks go first
    assert take(pool, 1) == [first]
    assert find(pool, 1) is None
    assert pool.groups[0].was_known(name(1))
    assert pool.num_evicted == 1


def test_least_recently_given_back_is_evicted_first():
    pool = one_level(4)
    a, b, c = take(pool, 3)
    pool.groups[0].name([a, b, c], [name(1), name(2), name(3)])
    pool.groups[0].give_back([b, a, c])
    pool.groups[0].share([b])  # used again
    pool.groups[0].give_back([b])
    assert [take(pool, 1) for _ in range(3)] == [[a], [c], [b]]


def test_shared_block_is_free_only_after_every_holder_left():
    pool = one_level(3)
    blocks = take(pool, 1)
    pool.groups[0].share(blocks)
    pool.groups[0].give_back(blocks)
    assert pool.num_available_pages == 1
    pool.groups[0].give_back(blocks)
    assert pool.num_available_pages == 2


@pytest.mark.parametrize("others", [[], [name(7), name(8)]], ids=["alone", "among others"])
def test_first_block_of_a_name_stays_the_known_one(others: list[bytes]):
    pool = one_level(8)
    first, *twins = take(pool, 2 + len(others))
    pool.groups[0].name([first], [name(1)])
    pool.groups[0].name(twins, [name(1), *others])
    pool.groups[0].give_back([first, *twins])
    assert find(pool, 1) == first
    assert not faults(pool)


def test_forget_all_drops_every_name_and_keeps_held_blocks():
    pool = one_level(4)
    held, kept = take(pool, 2)
    pool.groups[0].name([held, kept], [name(1), name(2)])
    pool.groups[0].give_back([kept])
    pool.forget_all()
    assert find(pool, 1) is None
    assert find(pool, 2) is None
    assert not faults(pool, [held])


def test_a_request_fills_its_own_large_page_before_it_takes_another():
    pool = two_level(3, 4, 1)
    first = take(pool, 1, A)
    other = take(pool, 1, B)
    assert {block // 4 for block in first + take(pool, 3, A)} == {first[0] // 4}
    assert other[0] // 4 != first[0] // 4


def test_blocks_left_over_by_a_request_that_ended_are_used_before_a_new_large_page():
    pool = two_level(3, 4, 1)
    held = take(pool, 1, A)
    pool.groups[0].share(held)  # another request goes on with it
    pool.groups[0].give_back(held)
    pool.end(A)
    assert take(pool, 3, B)[0] // 4 == held[0] // 4
    assert pool.num_free_pages == 2


def test_a_large_page_goes_back_when_all_its_blocks_are_blank():
    pool = two_level(2, 4, 1)
    blocks = take(pool, 2, A)
    assert pool.num_free_pages == 1
    pool.groups[0].give_back(blocks)
    pool.end(A)
    assert pool.num_free_pages == 2
    assert [len(blocks) for blocks in pool.take([0, 2], B)] == [0, 2]  # the other group has it all now


def test_bytes_move_between_groups_when_an_idle_large_page_is_evicted():
    pool = two_level(2, 4, 1)
    blocks = take(pool, 8, A)
    pool.groups[0].name(blocks, [name(n) for n in range(8)])
    pool.groups[0].give_back(blocks)
    assert pool.num_cached_pages == 2
    taken = pool.take([0, 1], B)
    assert pool.num_cached_pages == 1
    assert pool.num_evicted == 4
    assert not faults(pool, *taken)


def test_a_block_set_aside_for_another_request_is_the_last_resort():
    pool = two_level(2, 4, 1)
    mine = take(pool, 1, A)
    pool.take([0, 1], C)
    assert pool.num_available_pages == 0
    stolen = take(pool, 3, B)
    assert {block // 4 for block in stolen} == {mine[0] // 4}
    with pytest.raises(PoolExhausted):
        take(pool, 1, B)


def test_what_is_hardly_missed_is_evicted_before_anything_else():
    pool = one_level(4)
    a, b, c = take(pool, 3)
    pool.groups[0].name([a, b, c], [name(1), name(2), name(3)])
    pool.groups[0].give_back([a], Tier.USUAL)
    pool.groups[0].give_back([b], Tier.USUAL)
    pool.groups[0].give_back([c], Tier.LOW)
    assert [take(pool, 1) for _ in range(3)] == [[c], [a], [b]]


@pytest.mark.parametrize("per_page", [1, 2])
def test_before_something_of_worth_is_evicted_the_pool_asks_what_to_give_up(per_page: int):
    pool = two_level(3, per_page, 1)
    blocks = take(pool, 2 * per_page)
    pool.groups[0].name(blocks, [name(n) for n in range(len(blocks))])
    pool.groups[0].give_back(blocks)
    asked: list[int] = []

    def give_up() -> bool:
        """One block at a time, the latest first."""
        asked.append(blocks[-1 - len(asked)])
        pool.groups[0].make_low(asked[-1:])
        return True

    pool.ask_before_evictions(give_up, lambda request, length: False)
    pool.take([0, 2], B)
    assert set(asked) == set(blocks[per_page:]), "a large page is evicted when all that is cached in it is low"
    assert [pool.groups[0].name_of(block) is None for block in blocks] == [False] * per_page + [True] * per_page


def test_all_groups_get_their_blocks_or_none_does():
    pool = two_level(2, 4, 1)
    pool.take([0, 1], A)
    with pytest.raises(PoolExhausted):
        pool.take([1, 1], B)
    assert pool.num_free_pages == 1


def test_room_for_answers_as_take_would():
    pool = two_level(3, 2, 1)
    pool.take([1, 1], A)
    for wants in ([0, 1], [1, 1], [3, 0], [4, 0], [1, 2], [3, 1]):
        before = pool.room_for(wants, B)
        try:
            taken = pool.take(wants, B)
        except PoolExhausted:
            assert not before
            continue
        assert before
        for g, blocks in enumerate(taken):
            pool.groups[g].give_back(blocks)
        pool.end(B)


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda pool, block: pool._arenas[0].free.append(1), "is free or is lost"),
        (lambda pool, block: pool._arenas[0].free.pop(), "is free or is lost"),
        (lambda pool, block: pool.groups[0].holders.__setitem__(block, 2), "counts 2 holders, the tables name it 1x"),
        (lambda pool, block: pool.groups[0].index.clear(), "leads to block None"),
        (lambda pool, block: pool._arenas[0]._owner.__setitem__(1, 1), "in a large page of group 1"),
        (lambda pool, block: pool._arenas[0]._owner.__setitem__(1, -1), "and belongs to group -1"),
        (lambda pool, block: pool._arenas[0].cache(1, Tier.LOW), "waits for its eviction or does not"),
        (lambda pool, block: setattr(pool.groups[0], "num_held", 0), "counts 0 held blocks, there are 1"),
    ],
)
@pytest.mark.parametrize("per_large", [1, 3])
def test_recount_finds_damage(damage, finding: str, per_large: int):
    pool = BlockPool(plan_of(Full(), Sliding(4), blocks=5, per_large=[per_large, 1]))
    (block,) = pool.take([1, 0], A)[0]
    pool.groups[0].name([block], [name(1)])
    assert not faults(pool, [block])
    damage(pool, block)
    assert any(finding in fault for fault in faults(pool, [block]))


@pytest.mark.parametrize(
    ("damage", "finding"),
    [
        (lambda blocks: blocks._free[1].append(4), "block 4 is in 2 states"),
        (lambda blocks: blocks._free[1].pop(), "block 6 is in 0 states"),
        (lambda blocks: blocks._reserved[A].append(6), "counts 1 reserved blocks, there are 2"),
        (lambda blocks: blocks._cached.queue.discard(5), "counts 0 cached blocks, there are 1"),
        (lambda blocks: setattr(blocks, "_num_free", 7), "counts 7 free blocks, there are 1"),
        (lambda blocks: setattr(blocks, "_num_cached", 0), "counts 0 cached blocks in pages in use, there are 1"),
        (lambda blocks: blocks._used.__setitem__(1, 9), "counts 9 blocks in use in large page 1, there are 2"),
    ],
)
def test_recount_finds_damage_in_a_packed_group(damage, finding: str):
    pool = two_level(3, 4, 1)
    held, cached, left = take(pool, 3)
    pool.groups[0].name([cached], [name(1)])
    pool.groups[0].give_back([cached, left])
    assert (held, cached, left) == (4, 5, 6)  # and block 7 is reserved
    assert not faults(pool, [held])
    damage(pool.groups[0])
    assert any(finding in fault for fault in faults(pool, [held]))
