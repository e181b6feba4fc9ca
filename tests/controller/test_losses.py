"""When processes that are lost again and again are given up."""

import asyncio

import pytest

from intarsia.controller import losses as losses_module
from intarsia.controller.losses import (
    LEAST_TRIES,
    MOST_LOSSES,
    PAUSES_S,
    SUSPECT_FOR_S,
    Losses,
    NoRoom,
    is_the_cause,
)
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


@pytest.mark.parametrize(
    ("losses", "since_s", "expected"),
    [(MOST_LOSSES, 1000.0, False), (MOST_LOSSES + 1, SUSPECT_FOR_S - 1, False), (MOST_LOSSES + 1, SUSPECT_FOR_S, True)],
)
def test_a_request_is_the_cause_after_too_many_losses_that_took_long(
    clock: Clock, losses: int, since_s: float, expected: bool
):
    assert is_the_cause(losses, clock.now_s - since_s) is expected


class Again:
    """Fails as told, then succeeds."""

    def __init__(self, *failures: EngineUnavailable):
        self._failures = list(failures)
        self.calls = 0

    async def __call__(self) -> None:
        self.calls += 1
        if self._failures:
            raise self._failures.pop(0)


@pytest.fixture
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(losses_module, "PAUSES_S", (0.0,))


def test_what_is_lost_is_built_again_until_it_is_there(no_pauses: None):
    losses, again = Losses(give_up_after_s=120), Again(GONE, GONE)
    asyncio.run(losses.rebuild(again, GONE))
    assert (again.calls, losses.in_a_row) == (3, 3)
    losses.progress()
    assert losses.in_a_row == 0


def test_what_there_is_no_room_for_is_not_tried_again(no_pauses: None):
    again = Again(NoRoom("there are no others"))
    with pytest.raises(EngineUnavailable, match="worker 0 of 2 is gone, and there are no others"):
        asyncio.run(Losses(give_up_after_s=120).rebuild(again, GONE))
    assert again.calls == 1


def test_rebuilding_is_given_up_after_the_stated_time(no_pauses: None):
    again = Again(*[GONE] * 100)
    with pytest.raises(EngineUnavailable, match="give_up_after_s is 1e-09"):
        asyncio.run(Losses(give_up_after_s=1e-9).rebuild(again, GONE))
    assert again.calls == LEAST_TRIES
