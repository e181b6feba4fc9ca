import pytest

from intarsia.errors import InvalidSetting
from intarsia.kvcache.eviction import Clock, Queue, Tier, policy_named
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full
from intarsia.tests.kvcache.plans import plan_of


def drain(queue: Queue) -> list[int]:
    order = []
    while (first := queue.first()) is not None:
        order.append(first[1])
        queue.discard(first[1])
    return order


def test_what_is_low_goes_before_what_is_usual_and_the_oldest_of_each_first():
    queue = Queue(Clock(), has_tiers=True)
    for item, tier in [(2, Tier.LOW), (3, Tier.USUAL), (4, Tier.LOW), (5, Tier.USUAL)]:
        queue.push(item, tier)
    queue.push_many([6, 7], Tier.LOW)
    assert (queue.num_low, len(queue)) == (4, 6)
    assert drain(queue) == [2, 4, 6, 7, 3, 5]


def test_plain_lru_knows_no_tiers():
    queue = Queue(Clock(), has_tiers=False)
    for item, tier in [(1, Tier.USUAL), (2, Tier.LOW), (3, Tier.USUAL)]:
        queue.push(item, tier)
    queue.discard(1)
    queue.push(1, Tier.LOW)
    assert (queue.num_low, drain(queue)) == (0, [2, 3, 1])


@pytest.mark.parametrize(("policy", "least"), [("lru", 0), ("worth", 20)])
def test_a_cycle_longer_than_the_cache_ends_in_no_hits_only_under_plain_lru(policy: str, least: int):
    manager = CacheManager(plan_of(Full(), blocks=41, block_tokens=1), policy=policy_named(policy))
    prompts = [[1000 * n + k for k in range(10)] for n in range(5)]  # 50 blocks, and there are 40
    hits = 0
    for round_ in range(8):
        hits = 0
        for n, prompt in enumerate(prompts):
            hit = manager.lookup(prompt)
            hits += hit.tokens
            request = RequestId(10 * round_ + n)
            manager.open(request, hit)
            manager.extend(request, len(prompt))
            manager.commit(request)
            manager.release(request)
    assert least <= hits <= (40 if least else 0)


def test_unknown_policy_is_refused_with_what_there_is():
    with pytest.raises(InvalidSetting, match=r"one of worth, lru; got 'fifo'"):
        policy_named("fifo")
