import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.manager import CacheManager, RequestId
from intarsia.kvcache.reach import Full
from intarsia.kvcache.retention import (
    Born,
    GreedyDualPolicy,
    LruPolicy,
    Queue,
    Retain,
    Tier,
    TieredLruPolicy,
    policy_named,
)
from intarsia.tests.kvcache.plans import plan_of


def drain(queue: Queue) -> list[int]:
    order = []
    while (first := queue.first()) is not None:
        order.append(first[1])
        queue.evicted(first[1])
    return order


def push(queue: Queue, item: int, tier: Tier = Tier.USUAL, born: Born = Born.NEW, worth: float = 1.0) -> None:
    queue.push(item, tier, born, worth)


def test_tiers_go_one_after_the_other_and_the_oldest_of_each_first():
    queue = TieredLruPolicy(1.0).queue(10)
    for item, tier in [(1, Tier.PROVEN), (2, Tier.LOW), (3, Tier.USUAL), (4, Tier.LOW), (5, Tier.USUAL)]:
        push(queue, item, tier)
    assert drain(queue) == [2, 4, 3, 5, 1]


def test_what_was_found_is_proven_and_more_than_the_share_pushes_the_oldest_down():
    queue = TieredLruPolicy(0.2).queue(10)  # two may be proven
    for item in (1, 2, 3):
        push(queue, item, born=Born.FOUND)
    push(queue, 4)
    assert drain(queue) == [1, 4, 2, 3]


def test_what_was_computed_again_is_proven_only_while_there_is_room():
    queue = TieredLruPolicy(0.2).queue(10)
    for item in (1, 2, 3):
        push(queue, item, born=Born.AGAIN)
    assert drain(queue) == [3, 1, 2]


def test_proven_items_that_nobody_finds_any_more_grow_stale():
    queue = TieredLruPolicy(0.5).queue(2)
    push(queue, 0, born=Born.FOUND)
    evicted = []
    for item in range(1, 40):
        push(queue, item)
        evicted.append(queue.first()[1])  # type: ignore[index]
        queue.evicted(evicted[-1])
    assert 8 < evicted.index(0) < 24


def test_plain_lru_knows_no_tiers():
    queue = LruPolicy().queue(10)
    for item, tier in [(1, Tier.PROVEN), (2, Tier.LOW), (3, Tier.USUAL)]:
        push(queue, item, tier)
    queue.discard(1)
    push(queue, 1)
    assert drain(queue) == [2, 3, 1]


def test_score_evicts_the_least_work_per_byte_first_and_ages():
    queue = GreedyDualPolicy().queue(10)
    push(queue, 1, worth=5.0)
    push(queue, 2, worth=1.0)
    push(queue, 3, worth=3.0, tier=Tier.LOW)
    assert [queue.first()[1], drain(queue)[:2]] == [3, [3, 2]]  # type: ignore[index]
    queue = GreedyDualPolicy().queue(10)
    push(queue, 1, worth=5.0)
    for item in range(2, 8):  # each eviction makes newcomers worth more
        push(queue, item, worth=2.0)
        queue.evicted(queue.first()[1])  # type: ignore[index]
    assert 1 not in drain(queue)


@pytest.mark.parametrize(("policy", "cliff"), [("lru", True), ("lru-tiers", False)])
def test_a_cycle_longer_than_the_cache_ends_in_no_hits_only_under_plain_lru(policy: str, cliff: bool):
    manager = CacheManager(plan_of(Full(), blocks=41, block_tokens=1), policy=policy_named(policy))
    prompts = [[1000 * n + k for k in range(10)] for n in range(5)]  # 50 blocks, and there are 40
    hits = 0
    for round_ in range(4):
        hits = 0
        for n, prompt in enumerate(prompts):
            hit = manager.lookup(prompt)
            hits += hit.tokens
            request = RequestId(10 * round_ + n)
            manager.open(request, hit)
            manager.extend(request, len(prompt))
            manager.commit(request)
            manager.release(request)
    assert (hits == 0) == cliff


def test_unknown_policy_is_refused_with_what_there_is():
    with pytest.raises(InvalidSetting, match=r"one of lru-tiers, lru, score; got 'fifo'"):
        policy_named("fifo")


@pytest.mark.parametrize("ttl_s", [0, -1.0, float("nan")])
def test_a_time_that_is_none_is_refused(ttl_s: float):
    with pytest.raises(InvalidSetting, match="positive number of seconds"):
        Retain(ttl_s=ttl_s)
