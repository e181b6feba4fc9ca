import random

from intarsia.controller.request import Request
from intarsia.controller.scheduling.fair_queue import FairQueue
from intarsia.kvcache.reach import Full
from intarsia.proto.request import RequestOptions
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench, request_of


def request(number: int, arrival_s: float = 0.0, *, priority: int = 0, tenant: str = "") -> Request:
    return request_of(number=number, options=RequestOptions(priority=priority, tenant=tenant), arrival_s=arrival_s)


def queue_of(*requests: Request, ageing_s: float = 10.0) -> FairQueue:
    queue = FairQueue(ageing_s)
    for each in requests:
        queue.enter(each)
        queue.add(each)
    return queue


def drain(queue: FairQueue, tokens: int = 0) -> list[int]:
    """All requests in their turn; each is served so many tokens."""
    order = []
    while (head := queue.head()) is not None:
        queue.remove(head)
        queue.served(head.options.tenant, tokens)
        order.append(head.id)
    return order


def test_equals_are_served_first_come_first_served():
    assert drain(queue_of(request(3, 2.0), request(1, 0.0), request(2, 1.0))) == [1, 2, 3]


def test_a_lower_priority_number_comes_first_until_waiting_makes_up_for_it():
    assert drain(queue_of(request(1, 0.0, priority=1), request(2, 5.0), request(3, 11.0))) == [2, 1, 3]


def test_tenants_take_turns_by_the_tokens_they_were_served():
    flood = [request(n, 0.0, tenant="flood") for n in range(5)]
    late = [request(10 + n, 1.0, tenant="late") for n in range(2)]
    assert drain(queue_of(*flood, *late), tokens=100) == [0, 10, 1, 11, 2, 3, 4]


def test_a_tenant_that_comes_late_starts_level_and_not_with_the_time_it_slept():
    old = request(1, tenant="old")
    queue = queue_of(old)
    queue.served("old", 1000)
    young = [request(10 + n, tenant="young") for n in range(3)]
    for each in [request(2, tenant="old"), *young]:
        queue.enter(each)
        queue.add(each)
    assert drain(queue, tokens=1) == [1, 10, 2, 11, 12]


def test_a_tenant_that_was_away_for_a_moment_keeps_what_it_was_served():
    busy, other = request(1, tenant="busy"), request(2, tenant="other")
    queue = queue_of(busy, other)
    queue.served("busy", 1000)
    queue.remove(busy)
    queue.leave(busy)
    again = request(3, tenant="busy")
    queue.enter(again)
    queue.add(again)
    assert drain(queue, tokens=1) == [2, 3]


def test_longest_prefix_goes_first_but_no_request_is_passed_over_for_ever():
    queue = queue_of(*(request(n, float(n)) for n in range(4)))
    cached = {0: 5, 1: 7, 2: 9, 3: 9}
    best = queue.best_head(lambda each: cached[each.id], now_s=9.9)
    assert best is not None and best.id == 2
    best = queue.best_head(lambda each: cached[each.id], now_s=10.0)
    assert best is not None and best.id == 0


def test_random_use_serves_all_requests_once_in_the_order_that_was_promised():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(50):
        queue = FairQueue(10.0)
        waiting: dict[int, Request] = {}
        for number in range(60):
            each = request(number, float(number), priority=rng.randint(-3, 3), tenant=rng.choice("ab"))
            queue.enter(each)
            queue.add(each)
            waiting[number] = each
            while rng.random() < 0.5 and waiting:
                if rng.random() < 0.3:
                    gone = waiting.pop(rng.choice(list(waiting)))
                    queue.remove(gone)
                    queue.leave(gone)
                    continue
                head = queue.head()
                assert head is not None
                mine = [w for w in waiting.values() if w.options.tenant == head.options.tenant]
                assert head is min(mine, key=lambda w: (w.arrival_s + w.options.priority * 10.0, w.id))
                queue.remove(head)
                queue.served(head.options.tenant, rng.randint(1, 9))
                if rng.random() < 0.3:
                    queue.add(head)  # preempted
                else:
                    queue.leave(head)
                    del waiting[head.id]
        assert len(queue) == len(waiting)
        assert {each.id for each in queue} == set(waiting)


# In a scheduler


def test_a_flood_of_one_tenant_does_not_hold_up_another():
    bench = Bench(Full(), max_num_seqs=1, blocks=64)
    flood = [bench.add([n] * 6, max_tokens=4, options=RequestOptions(tenant="flood")) for n in range(6)]
    bench.step()
    single = bench.add(PROMPT, max_tokens=4, options=RequestOptions(tenant="single"))
    bench.run()
    assert bench.order_of_ends[:2] == [flood[0].id, single.id]


def test_longest_prefix_first_takes_what_is_cached_before_what_came_first():
    bench = Bench(Full(), max_num_seqs=1, longest_prefix_first=True)
    bench.add(list(range(12)), max_tokens=1)
    bench.run()
    blocker = bench.add(PROMPT, max_tokens=2)
    bench.step()
    unknown, known = bench.add([40] * 12, max_tokens=1), bench.add(list(range(12)), max_tokens=1)
    bench.run()
    assert bench.order_of_ends[1:] == [blocker.id, known.id, unknown.id]
