"""Random scenarios of the real scheduler and cache manager; `bench/simulate.py` plays any number of them."""

import random
from collections.abc import Callable

import pytest

from intarsia.controller.scheduling.deadlines import Deadlines
from intarsia.controller.scheduling.live_requests import LiveRequests
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.step_draft import StepDraft
from intarsia.controller.scheduling.swap import SwapSpace
from intarsia.kvcache.manager import CacheManager
from intarsia.proto.step import Step
from intarsia.tests.simulation import Outcome, Scenario, Violation


def play(seeds: range) -> Outcome:
    total = Outcome()
    for seed in seeds:
        total.add(Scenario(seed).run())
    return total


def test_random_scenarios_violate_nothing():
    first = random.randrange(1 << 30)
    print(f"seeds {first} to {first + 299}")
    total = play(range(first, first + 300))
    assert min(total.preemptions, total.expired, total.aborted, total.forked, total.swapped) > 0
    assert min(total.leased, total.lease_refused, total.turns_kept) > 0


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 20_000, 1_000))
def test_many_random_scenarios_violate_nothing(first: int):
    play(range(first, first + 1_000))


def test_a_scenario_is_the_same_from_the_same_seed():
    assert Scenario(11).run() == Scenario(11).run()


def quiet_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "quiet_until", lambda self, request: 1 << 40)


def seniority_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    original = LiveRequests.preempt

    def preempt(self: LiveRequests, request, draft: StepDraft) -> None:
        original(self, self._seats.running[0], draft)

    monkeypatch.setattr(LiveRequests, "preempt", preempt)


def deadlines_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Deadlines, "pass_by", lambda self, now_s: [])


def swapped_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SwapSpace, "give_back", lambda self, swapped: None)


def forks_from_too_late(monkeypatch: pytest.MonkeyPatch) -> None:
    original = StepDraft.admit

    def admit(self: StepDraft, request, blocks, *, has_encoded: bool) -> None:
        original(self, request, blocks, has_encoded=has_encoded)
        entry = self.admits[-1]
        computed_tokens = entry.computed_tokens + (request.parent is None and has_encoded)
        self.admits[-1] = entry._replace(computed_tokens=computed_tokens)

    monkeypatch.setattr(StepDraft, "admit", admit)


def drafts_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan that computes nothing takes what it was to tell the workers with it."""
    original = Scheduler._seal

    def seal(self: Scheduler) -> Step | None:
        step = original(self)
        self._draft = StepDraft()
        return step

    monkeypatch.setattr(Scheduler, "_seal", seal)


@pytest.mark.parametrize(
    "plant",
    [quiet_for_ever, seniority_forgotten, deadlines_unseen, swapped_forgotten, forks_from_too_late, drafts_thrown_away],
)
def test_planted_bugs_are_found(plant: Callable, monkeypatch: pytest.MonkeyPatch):
    plant(monkeypatch)
    with pytest.raises(Violation, match=r"seed \d+: "):
        play(range(200))
