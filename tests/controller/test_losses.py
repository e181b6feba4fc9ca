"""When processes that are lost again and again are given up."""

import asyncio

import pytest

from intarsia.controller import losses as losses_module
from intarsia.controller.losses import LEAST_TRIES, PAUSES_S, Losses
from intarsia.errors import EngineUnavailable

GONE = EngineUnavailable("worker 0 of 2 is gone")


class Clock:
    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.now_s = 1000.0
        monkeypatch.setattr(losses_module.time, "monotonic", lambda: self.now_s)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch)


def test_any_number_of_losses_within_the_time_is_borne(clock: Clock):
    losses = Losses(give_up_after_s=120)
    for _ in range(100):
        clock.now_s += 1.1
        losses.count(GONE)
    clock.now_s += 30
    with pytest.raises(EngineUnavailable, match=r"worker 0 of 2 is gone; lost 101 times in 139 s without a step"):
        losses.count(GONE)


def test_a_few_tries_are_made_however_long_they_take(clock: Clock):
    losses = Losses(give_up_after_s=120)
    for _ in range(LEAST_TRIES):
        losses.count(GONE)
        clock.now_s += 1000
    with pytest.raises(EngineUnavailable, match="lost 6 times in 5000 s"):
        losses.count(GONE)


def test_a_step_in_between_ends_the_row(clock: Clock):
    losses = Losses(give_up_after_s=120)
    for _ in range(50):
        losses.count(GONE)
        clock.now_s += 100
        losses.progress()


def test_who_lives_and_is_asked_nothing_begins_anew(clock: Clock):
    losses = Losses(give_up_after_s=120)
    for _ in range(50):
        losses.count(GONE)
        losses.back()
        clock.now_s += 121


def test_pauses_grow_and_stay_small():
    assert list(PAUSES_S) == sorted(PAUSES_S) and PAUSES_S[0] == 0 and PAUSES_S[-1] <= 2
    asyncio.run(Losses(give_up_after_s=1).bear(GONE))
