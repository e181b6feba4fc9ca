"""Forecasts made from a sample of the conversations."""

import random

import pytest

from intarsia.kvcache import sampled_worth
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.memory_worth import SCALES
from intarsia.kvcache.reach import Full, Reach, Sliding, State
from intarsia.kvcache.sampled_worth import FREE_S, MOST_BLOCKS, Forecast, SampledWorth, follow
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.kvcache.test_memory_worth import chats

FAMILIES = [
    pytest.param((Full(),), id="full", marks=pytest.mark.slow),
    pytest.param((Full(), Sliding(9)), id="windows"),
    pytest.param((Full(), State()), id="states", marks=pytest.mark.slow),
]


class Clock:
    """Each look at it takes so many seconds."""

    def __init__(self, look_s: float = 0.0):
        self.look_s, self.now_s = look_s, 0.0

    def __call__(self) -> float:
        self.now_s += self.look_s
        return self.now_s


def serve(reaches: tuple[Reach, ...], blocks: int, prompts: list[list[int]], one_in: int = 1) -> SampledWorth:
    manager = CacheManager(plan_of(*reaches, blocks=blocks), hash_key=b"k" * 32)
    assert manager.retention is not None
    worth = SampledWorth(manager.plan, manager.retention, Clock())
    manager.retention.after = worth.served
    worth._one_in = one_in
    worth._begin()
    for n, prompt in enumerate(prompts):
        hit = manager.lookup(prompt)
        manager.open(RequestId(n), hit)
        manager.extend(RequestId(n), len(prompt), hit.tokens)
        manager.commit(RequestId(n))
        manager.release(RequestId(n))
    return worth


def forecast_of(worth: SampledWorth) -> Forecast:
    forecast = worth.forecast()
    assert forecast is not None
    return forecast


@pytest.mark.parametrize("reaches", FAMILIES)
def test_a_quarter_of_the_conversations_forecasts_as_all_of_them_do(
    reaches: tuple[Reach, ...], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sampled_worth, "COUNTED_REQUESTS", 1 << 30)  # of the same time
    prompts = chats(5, 4000)
    whole, sampled = (forecast_of(serve(reaches, 801, prompts, one_in)) for one_in in (1, 4))
    assert sampled.one_in == 4 and 0.7 < sampled.requests / 1000 < 1.4
    for (scale, share), (_, by_all) in zip(sampled.found, whole.found, strict=True):
        assert abs(share - by_all) < 0.06, (scale, share, by_all)


def test_no_request_no_forecast():
    worth = serve((Full(),), 101, [])
    assert worth.forecast() is None
    assert serve((Full(),), 101, [[1]]).forecast() is None  # a prompt without a full block


def test_what_takes_too_long_follows_half_as_many_and_counts_anew():
    manager = CacheManager(plan_of(Full(), blocks=101))
    assert manager.retention is not None
    clock = Clock()
    worth = SampledWorth(manager.plan, manager.retention, clock)
    manager.retention.after = worth.served
    rng = random.Random(1)

    def ask(n: int) -> None:
        prompt = [rng.randrange(50) for _ in range(12)]
        manager.open(RequestId(n), manager.lookup(prompt))
        manager.extend(RequestId(n), len(prompt), 0)
        manager.release(RequestId(n))

    for n in range(50):
        ask(n)
    assert forecast_of(worth).one_in == 1 and forecast_of(worth).requests == 50
    clock.look_s = FREE_S  # a request takes as long as is free, and time passes no faster
    for n in range(50, 60):
        ask(n)
    assert worth._one_in > 1
    assert (forecast := worth.forecast()) is None or forecast.requests < 10


def test_a_large_pool_begins_with_a_sample_that_bounds_what_is_kept_of_it():
    manager = CacheManager(plan_of(Full(), blocks=MOST_BLOCKS))
    assert manager.retention is not None
    worth = follow(manager.retention, manager.plan)
    assert worth._one_in == max(SCALES)


def test_of_conversations_that_share_a_beginning_some_are_followed():
    rng = random.Random(2)
    prompts = [[7] * 40 + [rng.randrange(1000) for _ in range(24)] for _ in range(600)]
    worth = serve((Full(),), 401, prompts, one_in=8)
    assert 30 < forecast_of(worth).requests < 160
    shared = worth._latest.shared_blocks
    assert sum(shared.values()) == 10
    # The thought pool of the same size has an eighth of the memory, and the shared blocks beside it.
    worth._fit_pools()
    block = worth._path_block_bytes
    assert worth._pools._pools[1.0].memory_bytes == 10 * block + (worth._plan.memory_bytes - 10 * block) // 8
