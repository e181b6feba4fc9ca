import pytest

from intarsia.controller.request import Request
from intarsia.controller.scheduling import prefill_budget as module
from intarsia.controller.scheduling.prefill_budget import PrefillBudget, StepBudget
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.controller.scheduling.step_times import StepTimes
from intarsia.kvcache.reach import Full
from intarsia.proto.request import RequestOptions
from intarsia.tests.controller.scheduling.by_hand import Bench, request_of
from intarsia.tests.simulated import continuation


def budget_of(times: StepTimes, share: float = 0.5, most_tokens: int = 1 << 20, block_tokens: int = 4) -> PrefillBudget:
    settings = SchedulerSettings(max_num_batched_tokens=most_tokens, prefill_share=share)
    return PrefillBudget(settings, block_tokens, times)


def known_times() -> StepTimes:
    """Ten requests decode in 10 ms; a token of a prompt takes 0.1 ms more."""
    times = StepTimes()
    for _ in range(50):
        times.ran.append((10, 0, 10_000))
        times.ran.append((10, 100, 20_000))
    return times


def test_nothing_is_limited_before_both_costs_are_known():
    times = StepTimes()
    budget = budget_of(times)
    assert budget.fair_tokens(10, 1) == float("inf")
    times.ran.append((10, 0, 10_000))
    assert budget.fair_tokens(10, 1) == float("inf")
    times.ran.append((10, 100, 20_000))
    assert budget.fair_tokens(10, 1) < 200


def test_one_prompt_beside_many_requests_that_decode_gets_half_of_the_step():
    assert round(budget_of(known_times()).fair_tokens(10, 1)) == 100


def test_many_prompts_get_as_much_as_they_are_many():
    assert round(budget_of(known_times()).fair_tokens(10, 90)) == 900


def test_without_requests_that_decode_nothing_but_the_step_limits_prompts():
    assert budget_of(known_times(), most_tokens=2048).open(0, 0, 5).left == 2048


def test_a_share_of_one_limits_nothing():
    assert budget_of(known_times(), share=1.0).fair_tokens(10, 1) == float("inf")


@pytest.mark.parametrize(("interval_ms", "tokens"), [(12.0, 20), (40.0, 300), (10.0, 4), (3.0, 4)])
def test_a_wanted_interval_leaves_prompts_what_answers_do_not_take(interval_ms: float, tokens: int):
    settings = SchedulerSettings(max_num_batched_tokens=1 << 20, prefill_share=0.9, token_interval_ms=interval_ms)
    budget = PrefillBudget(settings, 4, known_times()).open(0, 10, 1)
    assert budget.left == pytest.approx(tokens, abs=1)


def test_a_block_is_always_worth_computing():
    assert budget_of(known_times(), block_tokens=256).open(0, 10, 1).left == 256


def test_one_hiccup_does_not_starve_prompts():
    times = known_times()
    times.ran.append((10, 100, 10_000_000))
    assert budget_of(times).fair_tokens(10, 1) > 50


def test_prompts_take_no_less_time_than_they_cost_for_being_there():
    """Ten requests decode in 10 ms; prompts add 6 ms and 0.1 ms for each token. Half of a step is then 40 tokens, but
    to begin is worth no less than 60."""
    times = StepTimes()
    for tokens in (2000, 60, 60, 60, 200, 60, 60):
        times.ran.append((10, 0, 10_000))
        times.ran.append((10, tokens, 16_000 + 100 * tokens))
    budget = budget_of(times)
    assert round(budget.fair_tokens(10, 1)) == 60
    assert round(budget.fair_tokens(10, 90)) == 840


def test_small_chunks_do_not_make_the_next_ones_smaller_still():
    """Chunks as the budget itself wants them, for a long time."""
    times = StepTimes()
    budget = budget_of(times)
    times.ran.append((0, 2000, 206_000))
    for _ in range(200):
        times.ran.append((10, 0, 10_000))
        tokens = max(1, round(min(budget.fair_tokens(10, 1), 2000)))
        times.ran.append((10, tokens, 16_000 + 100 * tokens))
    assert budget.fair_tokens(10, 1) > 30


# Steps that did not fit in memory


def test_steps_shrink_after_one_that_did_not_fit_and_grow_again(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GROW_AFTER_STEPS", 10)
    budget = budget_of(StepTimes(), most_tokens=1024)
    budget.shrink(5)
    lefts = [budget.open(step, 0, 1).left for step in (5, 14, 15, 24, 25, 35)]
    assert lefts == [256, 256, 512, 512, 1024, 1024]


def test_steps_grow_as_often_as_is_due_when_prompts_come_late(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "GROW_AFTER_STEPS", 10)
    budget = budget_of(StepTimes(), most_tokens=1024)
    budget.shrink(0)
    assert budget.open(20, 0, 1).left == 1024


@pytest.mark.parametrize(("most_tokens", "least"), [(1024, 16), (128, 16), (64, 16), (3, 3)])
def test_steps_shrink_to_a_block_at_most_and_never_grow_by_it(most_tokens: int, least: int):
    settings = SchedulerSettings(max_num_seqs=1, max_num_batched_tokens=most_tokens)
    budget = PrefillBudget(settings, 16, StepTimes())
    for _ in range(6):
        budget.shrink(0)
    assert budget.open(0, 0, 1).left == least


# Prompts that end in this step

SHARE = 99
"""Tokens beside ten requests that decode, of `known_times`: 99.99, as learnt."""


@pytest.mark.parametrize(
    ("remaining", "tokens"), [(60, 60), (SHARE, SHARE), (SHARE + 1, SHARE + 1), (2 * SHARE, 2 * SHARE)]
)
def test_a_prompt_that_ends_with_twice_its_share_gets_it(remaining: int, tokens: int):
    assert budget_of(known_times()).open(0, 10, 1).left_for("a").of(remaining) == tokens


@pytest.mark.parametrize("remaining", [2 * SHARE + 1, 5000])
def test_a_longer_prompt_gets_its_share(remaining: int):
    assert budget_of(known_times()).open(0, 10, 1).left_for("a").of(remaining) == SHARE


def test_what_was_borrowed_is_lacking_in_the_next_step_and_is_given_back_by_each_step_since():
    budget = budget_of(known_times())
    first = budget.open(0, 10, 1)
    first.spend("a", SHARE + 60)
    assert (first.left, first.borrowed) == (0, 60)
    assert budget.open(1, 10, 1).left_for("a") == (SHARE - 60, 0)
    assert budget.open(2, 10, 1).left_for("a") == (SHARE, SHARE)
    budget.open(3, 10, 1).spend("a", 2 * SHARE)
    assert budget.open(5, 10, 1).left_for("a") == (SHARE, SHARE)


def test_one_prompt_borrows_and_the_next_ones_get_what_is_left():
    budget = budget_of(known_times()).open(0, 10, 1)
    budget.spend("a", 29)
    assert [budget.left_for("a").of(remaining) for remaining in (70 + SHARE, 71 + SHARE)] == [70 + SHARE, 70]
    budget.spend("a", 90)
    assert budget.left_for("a").of(10) == 0
    assert budget.borrowed == 20


def test_a_tenant_that_leaves_half_of_a_step_to_others_borrows_nothing():
    budget = budget_of(known_times()).open(0, 10, 1)
    budget.share([prompt("a", 500)], [prompt("b", 500)])
    assert budget.left_for("a").of(90) == 50
    assert budget.left_for("b").of(190) == 190


def test_with_a_wanted_interval_nothing_is_borrowed():
    settings = SchedulerSettings(max_num_batched_tokens=1 << 20, token_interval_ms=20.0)
    assert PrefillBudget(settings, 4, known_times()).open(0, 10, 1).left_for("a") == (SHARE, 0)


def test_a_step_lends_no_more_than_it_holds():
    assert budget_of(known_times(), most_tokens=150).open(0, 10, 1).left_for("a") == (SHARE, 140 - SHARE)


# Two tenants


def prompt(tenant: str, tokens: int) -> Request:
    return request_of([1] * tokens, options=RequestOptions(tenant=tenant))


@pytest.mark.parametrize(
    ("running", "waiting", "left"),  # the step holds 100; running: most senior first
    [
        ([("a", 500)], [], 100),
        ([("a", 500)], [("a", 500)], 100),
        ([("a", 500)], [("b", 500)], 50),
        ([("a", 500)], [("b", 30)], 70),
        ([("a", 500), ("b", 10)], [("c", 20)], 70),
    ],
)
def test_the_most_senior_tenant_leaves_up_to_half_to_others_that_need_it(running: list, waiting: list, left: int):
    budget = StepBudget(100)
    budget.share([prompt(*each) for each in running], [prompt(*each) for each in waiting])
    assert (budget.left_for("a").tokens, budget.left_for("b").tokens) == (left, 100)


def test_what_one_tenant_spends_is_lacking_to_all():
    budget = StepBudget(100)
    budget.share([prompt("a", 500)], [prompt("b", 500)])
    budget.spend("b", 60)
    assert (budget.left_for("a").tokens, budget.left_for("b").tokens) == (40, 40)
    budget.spend("a", 40)
    assert budget.left == 0


# In a scheduler


def test_a_long_prompt_leaves_half_of_the_time_to_those_who_decode():
    bench = Bench(Full(), blocks=256, max_num_batched_tokens=256, token_us=100, step_us=1000)
    decoding = [bench.add([n] * 3, max_tokens=60) for n in range(3)]
    for _ in range(10):
        bench.step()
    bench.add(list(range(10)) * 20, max_tokens=1)
    shares = []
    while (flight := bench.prompt_tokens_of_next_step()) is not None:
        shares.append(flight)
    during = [tokens for tokens in shares if tokens]
    assert len(during) > 10
    assert max(during[5:]) <= 2 * (1000 + 3 * 100) / 100
    assert all(bench.generated[each.id] == continuation([n] * 3, 60) for n, each in enumerate(decoding))


@pytest.mark.parametrize("count", [1, 3, 9])
def test_short_prompts_of_a_tenant_do_not_wait_for_a_long_one_of_another_that_is_under_way(count: int):
    bench = Bench(Full(), max_num_seqs=16, blocks=256, caching=False)
    long = bench.add([1] * 320, max_tokens=1, options=RequestOptions(tenant="long"))
    bench.step()
    short = [bench.add([n] * 7, max_tokens=1, options=RequestOptions(tenant="short")) for n in range(count)]
    steps = 0
    while not all(bench.generated[each.id] for each in short):
        computed = bench.worker.computed_tokens
        bench.step()
        assert bench.worker.computed_tokens - computed == 32  # the step stays full
        steps += 1
    assert steps == -(-7 * count // 16)  # half of each step is theirs
    bench.run()
    assert bench.generated[long.id] == continuation([1] * 320, 1)


def test_long_prompts_of_two_tenants_share_each_step():
    bench = Bench(Full(), max_num_seqs=4, blocks=256, caching=False)
    first = bench.add([1] * 96, max_tokens=1, options=RequestOptions(tenant="first"))
    bench.step()
    second = bench.add([2] * 160, max_tokens=1, options=RequestOptions(tenant="second"))
    for _ in range(2):
        bench.step()
    assert (first.computed_tokens, second.computed_tokens) == (64, 32)
    bench.run()
    assert bench.generated[second.id] == continuation([2] * 160, 1)
