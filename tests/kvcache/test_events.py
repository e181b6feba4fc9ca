"""Events keep a mirror of the prefix cache up to date."""

import random

from intarsia.kvcache.events import Cleared, Event, Removed, Stored
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full, Sliding
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.world import random_operation, random_world


def serve(m: CacheManager, tokens: list[int], request: int = 1) -> None:
    m.open(RequestId(request), m.lookup(tokens))
    m.extend(RequestId(request), len(tokens))
    m.commit(RequestId(request))
    m.release(RequestId(request))


def apply(mirror: dict[int, set[bytes]], events: list[Event]) -> None:
    for event in events:
        match event:
            case Stored(group, _, _, hashes):
                mirror.setdefault(group, set()).update(hashes)
            case Removed(group, _, hashes):
                mirror[group].difference_update(hashes)
            case Cleared():
                mirror.clear()


def test_a_stored_prefix_is_one_event_per_group_with_its_kind_and_block_size():
    m = CacheManager(plan_of(Full(), Sliding(5)))
    log = m.pool.listen()
    serve(m, list(range(16)))
    events = log.take()
    names = tuple(m.chain(range(16)).grow())
    assert events == [Stored(0, "full", 4, names), Stored(1, "sliding-5", 4, names)]
    assert log.take() == []


def test_evicted_blocks_of_a_group_are_joined_in_one_event():
    m = CacheManager(plan_of(Full(), blocks=9))
    serve(m, list(range(32)))
    log = m.pool.listen()
    serve(m, list(range(100, 116)), 2)
    removed, stored = log.take()
    assert isinstance(removed, Removed)
    assert len(removed.hashes) == 4
    assert isinstance(stored, Stored)


def test_a_reset_is_one_event():
    m = CacheManager(plan_of(Full()))
    serve(m, list(range(16)))
    log = m.pool.listen()
    m.reset_prefix_cache()
    assert log.take() == [Cleared()]


def test_nothing_is_collected_while_no_client_listens():
    m = CacheManager(plan_of(Full()))
    serve(m, list(range(16)))
    assert m.pool.known.log is None


def test_a_mirror_fed_with_events_knows_exactly_what_the_pool_knows():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    for n in range(40):
        world = random_world(random.Random(seed + n))
        log, mirror = world.manager.pool.listen(), {}
        for _ in range(150):
            random_operation(world)
            apply(mirror, log.take())
            for g in range(len(world.plan.groups)):
                assert mirror.get(g, set()) == set(world.manager.pool.groups[g].index)
