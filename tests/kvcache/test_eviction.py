import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.eviction import (
    GreedyDualPolicy,
    History,
    LruPolicy,
    Queue,
    Tier,
    TieredLruPolicy,
    policy_named,
)
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full
from intarsia.tests.kvcache.plans import plan_of


def drain(queue: Queue) -> list[int]:
    order = []
    while (first := queue.first()) is not None:
        order.append(first[1])
        queue.evicted(first[1])
    return order


def push(queue: Queue, item: int, tier: Tier = Tier.USUAL, history: History = History.NEW) -> None:
    queue.push(item, tier, history)


def test_tiers_go_one_after_the_other_and_the_oldest_of_each_first():
    queue = TieredLruPolicy(1.0).queue(10)
    for item, tier in [(1, Tier.PROVEN), (2, Tier.LOW), (3, Tier.USUAL), (4, Tier.LOW), (5, Tier.USUAL)]:
        push(queue, item, tier)
    assert drain(queue) == [2, 4, 3, 5, 1]


def test_what_was_found_is_proven_and_more_than_the_share_pushes_the_oldest_down():
    queue = TieredLruPolicy(0.2).queue(10)  # two may be proven
    for item in (1, 2, 3):
        push(queue, item, history=History.FOUND)
    push(queue, 4)
    assert drain(queue) == [1, 4, 2, 3]


def test_what_was_computed_again_is_proven_only_while_there_is_room():
    queue = TieredLruPolicy(0.2).queue(10)
    for item in (1, 2, 3):
        push(queue, item, history=History.AGAIN)
    assert drain(queue) == [3, 1, 2]


def test_proven_items_that_nobody_finds_any_more_grow_stale():
    queue = TieredLruPolicy(0.5).queue(2)
    push(queue, 0, history=History.FOUND)
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


def release(policy: GreedyDualPolicy, queue: Queue, item: int, length: int, tier: Tier = Tier.USUAL) -> None:
    """The work of a prefix grows faster than its length, and its bytes do not grow at all."""
    policy.begin_release(length, 1)
    push(queue, item, tier)
    policy.end_release()


def test_score_evicts_the_least_work_per_byte_first_and_ages():
    policy = GreedyDualPolicy()
    queue = policy.queue(10)
    for item, length, tier in [(1, 500, Tier.USUAL), (2, 100, Tier.USUAL), (3, 300, Tier.LOW)]:
        release(policy, queue, item, length, tier)
    assert drain(queue) == [3, 2, 1]
    policy = GreedyDualPolicy()
    queue = policy.queue(10)
    release(policy, queue, 1, 500)
    for item in range(2, 8):  # each eviction makes newcomers worth more
        release(policy, queue, item, 200)
        queue.evicted(queue.first()[1])  # type: ignore[index]
    assert 1 not in drain(queue)


def test_under_score_an_item_that_no_request_releases_keeps_its_value():
    policy = GreedyDualPolicy()
    queue = policy.queue(10)
    release(policy, queue, 1, 500)
    release(policy, queue, 2, 100)
    queue.discard(1)
    push(queue, 1)  # touched: no request ends
    assert drain(queue) == [2, 1]


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
