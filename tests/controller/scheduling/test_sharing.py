import pytest

from intarsia.kvcache.check import recount
from intarsia.kvcache.reach import Chunked, Full, Sliding, State
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench
from intarsia.tests.simulated import continuation


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("prompt", [[3], PROMPT, list(range(21))])
@pytest.mark.parametrize("reaches", [(Full(), Sliding(5)), (Full(), State()), (Chunked(4),)])
def test_forks_share_the_prompt_and_generate_what_the_model_says(reaches, prompt: list[int], caching: bool):
    bench = Bench(*reaches, caching=caching, max_num_batched_tokens=8, depth=2)
    family = bench.add_family(prompt, max_tokens=9, answers=3)
    bench.run()
    assert [bench.generated[each.id] for each in family] == [continuation(prompt, 9)] * 3
    assert bench.worker.computed_tokens < len(prompt) + 3 * 9 + (3 if caching or len(prompt) > 1 else 3 * len(prompt))
    assert recount(bench.manager).all_free


def test_more_answers_than_slots_wait_like_all_requests():
    bench = Bench(Full(), max_num_seqs=2)
    family = bench.add_family(PROMPT, max_tokens=5, answers=7)
    bench.run()
    assert [bench.generated[each.id] for each in family] == [continuation(PROMPT, 5)] * 7


@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("steps_before", [0, 1, 2, 3])
def test_an_answer_that_is_given_up_leaves_the_others_alone(victim: int, steps_before: int):
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=4, depth=2)
    family = bench.add_family(list(range(10)), max_tokens=9, answers=3)
    for _ in range(steps_before):
        bench.step()
    bench.scheduler.abort(family[victim].id)
    bench.run()
    for index, each in enumerate(family):
        if index != victim:
            assert bench.generated[each.id] == continuation(list(range(10)), 9)
    assert recount(bench.manager).all_free


def test_requests_that_come_together_compute_their_common_prompt_once():
    bench = Bench(Full(), Sliding(5), blocks=256, max_num_batched_tokens=8)
    prompt = [n % 50 for n in range(40)]
    family = [bench.add([*prompt, n], max_tokens=3) for n in range(4)]
    bench.run()
    assert [bench.generated[each.id] for each in family] == [continuation([*prompt, n], 3) for n in range(4)]
    assert bench.worker.computed_tokens < 41 + 3 * (1 + 4) + 4 * 3  # not 4 * 41


def test_waiting_for_a_prompt_of_another_ends_when_that_one_is_given_up():
    bench = Bench(Full(), blocks=256, max_num_batched_tokens=8)
    prompt = [n % 50 for n in range(40)]
    first, second = bench.add(prompt, max_tokens=3), bench.add([*prompt, 1], max_tokens=3)
    bench.step()
    assert second.slot is None
    bench.scheduler.abort(first.id)
    bench.run()
    assert bench.generated[second.id] == continuation([*prompt, 1], 3)


def test_unlike_requests_behind_one_that_waits_for_a_prompt_are_not_held_up():
    bench = Bench(Full(), blocks=256, max_num_batched_tokens=16)
    prompt = [n % 50 for n in range(40)]
    bench.add(prompt, max_tokens=3)
    alike, other = bench.add([*prompt, 1], max_tokens=3), bench.add([9, 8], max_tokens=3)
    for _ in range(3):
        bench.step()
    assert alike.slot is None
    assert other.slot is not None or bench.generated[other.id]


def test_a_prefix_that_a_request_waits_for_outlives_others():
    """Two prompts are known and the pool is full; the one that a waiting request begins with stays."""
    wanted, unwanted = [1] * 12, [2] * 12
    for prompts in ((wanted, unwanted), (unwanted, wanted)):
        bench = Bench(Full(), blocks=13, max_num_seqs=1, max_num_batched_tokens=8)  # 12 usable blocks of 4 tokens
        for prompt in prompts:
            bench.add(prompt, max_tokens=1)
            bench.run()
        bench.add([3] * 24, max_tokens=8)
        waits = bench.add([*wanted, 5], max_tokens=1)
        bench.run()
        assert waits.cached_tokens == 12
