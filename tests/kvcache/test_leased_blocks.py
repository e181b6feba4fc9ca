"""Blocks that are held while no request uses them. Random use of them is in `test_random_use.py`."""

import pytest

from intarsia.errors import PoolExhausted
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.leased_blocks import Holding, PageCount
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.reach import Chunked, Full, Reach, Sliding, State
from intarsia.kvcache.spec import LayerSpec
from intarsia.kvcache.strategies import plan_memory
from intarsia.tests.kvcache.plans import plan_of

SAID = list(range(14))


def manager(*reaches: Reach, blocks: int = 16, per_large: tuple[int, ...] = ()) -> CacheManager:
    return CacheManager(plan_of(*reaches, blocks=blocks, per_large=per_large))


def leased(m: CacheManager, tokens: list[int], *lengths: int) -> Holding:
    """Compute them, and hold what it takes to go on at these lengths."""
    chain = m.chain(tokens)
    m.open(RequestId(1), m.lookup(chain))
    m.extend(RequestId(1), len(tokens), 0)
    m.commit(RequestId(1))
    m.release(RequestId(1))
    holding = m.leased.hold(chain, m.leased.find(chain, lengths or (len(tokens),)))
    recount(m)
    return holding


def fill(m: CacheManager) -> None:
    """Requests that take all memory that there is."""
    opened: list[RequestId] = []
    with pytest.raises(PoolExhausted):
        for number in range(2, 100):
            opened.append(RequestId(number))
            m.open(opened[-1], m.lookup([90 + number] * 9))
            m.extend(opened[-1], 9, 0)
    for number in opened:
        m.release(number, 0 if number == opened[-1] else 9)
    assert len(opened) > 1
    recount(m)


@pytest.mark.parametrize("kinds", [(Full(),), (Sliding(6),), (Full(), State()), (Sliding(6), State())])
def test_what_is_held_outlives_a_request_that_takes_all_other_memory(kinds: tuple[Reach, ...]):
    m = manager(*kinds)
    holding = leased(m, SAID)
    assert holding.prefix.lengths == (14,)
    fill(m)
    assert m.lookup([*SAID, 7]).tokens == 14
    m.leased.let_go(holding)
    assert recount(m).all_free
    fill(m)


def test_a_state_alone_is_found_at_an_end_behind_a_block_that_no_prompt_had():
    m = manager(State())
    leased(m, SAID)
    assert m.lookup([*SAID, 7]).tokens == 14


def test_an_end_is_found_though_another_one_is_longer():
    m = manager(Full(), blocks=32)
    leased(m, SAID[:13])
    leased(m, [*SAID[:12], 90, 91, 92])
    assert m.lookup([*SAID, 7]).tokens == 13
    other = manager(Sliding(6), Sliding(11), blocks=32)
    leased(other, SAID[:9])
    leased(other, SAID[:12])
    other.forget(0, other.pool.groups[0].index[other.chain(SAID[:12]).grow()[2]])  # type: ignore[arg-type]
    assert other.lookup(SAID[:12]).tokens == 9


def test_a_block_in_which_a_chunk_begins_gets_no_name_where_what_lies_before_was_not_there():
    m = CacheManager(plan_of(Chunked(7), blocks=16, block_tokens=4))
    leased(m, SAID[:7])
    m.open(RequestId(2), hit := m.lookup(SAID))
    m.extend(RequestId(2), 14, hit.tokens)
    m.release(RequestId(2))
    assert hit.tokens == 7  # nothing before is read from there on, so nothing was copied
    names = m.chain(SAID).grow()
    assert names[1] not in m.pool.groups[0].index and names[2] in m.pool.groups[0].index


def test_an_end_that_a_group_has_lost_is_not_held_by_a_full_block_that_begins_so():
    """A lease is found by any prompt that begins so; the block, by one that goes on as its text does."""
    m = manager(Sliding(11), Full(), blocks=32)
    m.leased.let_go(leased(m, SAID[:6]))
    m.open(RequestId(2), m.lookup(chain := m.chain(SAID[:9])))
    m.extend(RequestId(2), 9, 6)
    m.commit(RequestId(2))
    m.release(RequestId(2))
    assert m.leased.find(chain, (6,)).lengths == (6,)
    end = chain.end(6)
    assert end is not None
    m.forget(0, m.pool.groups[0].index[end])  # type: ignore[arg-type]
    found = m.leased.find(chain, (6,))
    assert found.lengths == (4,)
    holding = m.leased.hold(chain, found)
    m.leased.evict_others()
    assert m.lookup([*SAID[:5], 90, 91]).tokens == 4
    m.leased.let_go(holding)
    assert recount(m).all_free


def test_nothing_can_be_held_of_what_is_not_there():
    m = manager(Full())
    found = m.leased.find(m.chain(SAID), (14,))
    assert found.lengths == () and not found.pages
    uncached = CacheManager(plan_of(Sliding(1)), None)
    assert uncached.leased.find(uncached.chain(SAID), (14,)).lengths == ()


def test_several_lengths_are_held_as_far_as_one_can_go_on_there():
    m = manager(Full(), State(), blocks=32)
    chain = m.chain(SAID)
    m.open(RequestId(1), m.lookup(chain))
    m.extend(RequestId(1), 14, 0)
    m.release(RequestId(1))
    assert m.leased.find(chain, (14, 12, 8)).lengths == (
        12,
        14,
    )  # a state was saved in the prompt


def test_all_that_is_not_leased_can_be_evicted():
    m = manager(Full(), State(), blocks=32)
    leased(m, SAID)
    leased_before = len(m.leased.held)
    m.open(RequestId(3), m.lookup([5] * 9))
    m.extend(RequestId(3), 9, 0)
    m.release(RequestId(3))
    assert m.leased.evict_others() > 0
    assert m.lookup([5] * 10).tokens == 0 and m.lookup([*SAID, 7]).tokens == 14
    assert len(m.leased.held) == leased_before and m.leased.evict_others() == 0


def test_a_reset_loses_what_is_held_and_letting_go_of_it_then_does_nothing():
    m = manager(Full())
    holding = leased(m, SAID)
    m.reset_prefix_cache()
    assert m.leased.resets == 1 and m.leased.held == []
    m.leased.let_go(holding)
    assert recount(m).all_free


def test_a_page_counts_once_and_leaves_with_its_last_holder():
    count = PageCount(2)
    count.add([(0, 1), (0, 2), (1, 1)])
    count.add([(0, 2)])
    assert count.used == [2, 1] and count.lacking([(0, 2), (0, 3), (1, 9)]) == [1, 1]
    count.remove([(0, 1), (0, 2), (1, 1)])
    assert count.used == [1, 0] and not count.is_empty
    count.remove([(0, 2)])
    assert count.is_empty


def test_no_request_counts_on_what_leases_may_hold():
    layers = [LayerSpec(0, Full(), 1, 8, 8, 2)]
    usual = plan_memory(layers, PlanSettings(2**16))
    plan = plan_memory(layers, PlanSettings(2**16, lease_share=0.25))
    assert plan.leasable_blocks == int(usual.usable_blocks * 0.25) and plan.usable_blocks == usual.usable_blocks
    tokens = usual.usable_blocks * 16
    assert usual.fits(tokens) and not plan.fits(tokens) and plan.fits(tokens - plan.leasable_blocks * 16)
