import pytest

from intarsia.controller.scheduling.preemption import Preemption
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.controller.scheduling.step_draft import StepDraft
from intarsia.controller.scheduling.step_times import StepTimes
from intarsia.kvcache.check import recount
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full, Sliding, State
from intarsia.proto.request import RequestOptions
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench, request_of
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.simulated import continuation


def test_short_pool_preempts_the_youngest_and_loses_no_token():
    bench = Bench(Full(), blocks=13, caching=False)  # 12 usable blocks: 48 tokens for two requests of 32
    old, young = bench.add([1] * 8, max_tokens=24), bench.add([2] * 8, max_tokens=24)
    bench.run()
    assert (old.preemptions, young.preemptions > 0) == (0, True)
    assert bench.generated[old.id] == continuation([1] * 8, 24)
    assert bench.generated[young.id] == continuation([2] * 8, 24)


def test_short_pool_preempts_the_least_urgent_even_if_it_came_first():
    bench = Bench(Full(), blocks=13, caching=False)
    patient = bench.add([1] * 8, max_tokens=24, options=RequestOptions(priority=3))
    urgent = bench.add([2] * 8, max_tokens=24)
    bench.run()
    assert (urgent.preemptions, patient.preemptions > 0) == (0, True)


@pytest.mark.parametrize("longest_prefix_first", [False, True])
def test_urgent_request_takes_the_slot_of_a_less_urgent_one_which_loses_no_token(longest_prefix_first: bool):
    # What the less urgent one has computed is cached, and would make it the next one again.
    bench = Bench(Full(), max_num_seqs=1, longest_prefix_first=longest_prefix_first)
    patient = bench.add(PROMPT, max_tokens=20, options=RequestOptions(priority=5))
    for _ in range(3):
        bench.step()
    urgent = bench.add([9, 8, 7], max_tokens=4)
    bench.run()
    assert bench.order_of_ends == [urgent.id, patient.id]
    assert patient.preemptions == 1
    assert bench.generated[patient.id] == continuation(PROMPT, 20)
    assert bench.generated[urgent.id] == continuation([9, 8, 7], 4)


def test_urgent_request_does_not_displace_one_that_has_run_for_long_enough():
    bench = Bench(Full(), max_num_seqs=1, ageing_s=10.0)
    patient = bench.add(PROMPT, max_tokens=20, options=RequestOptions(priority=1))
    bench.step()
    bench.now_s += 11
    urgent = bench.add([9, 8, 7], max_tokens=4)
    bench.run()
    assert bench.order_of_ends == [patient.id, urgent.id]


def test_equal_priorities_do_not_displace_each_other():
    bench = Bench(Full(), max_num_seqs=1)
    first, second = bench.add(PROMPT, max_tokens=9), bench.add(PROMPT, max_tokens=2)
    bench.run()
    assert bench.order_of_ends == [first.id, second.id]
    assert bench.scheduler.preemption.preemptions == 0


@pytest.mark.parametrize(
    ("running", "waiting", "gives_way"),  # priority, seconds since its admission; a level is worth 10 s
    [
        ((1, 0.0), (0, 0.0), True),
        ((1, 9.0), (0, 0.0), True),
        ((1, 11.0), (0, 0.0), False),
        ((0, 0.0), (0, 0.0), False),
        ((0, 0.0), (1, 0.0), False),
    ],
)
def test_a_running_request_gives_way_to_a_more_urgent_one_that_would_be_senior(running, waiting, gives_way: bool):
    preemption = Preemption(SchedulerSettings(ageing_s=10.0), CacheManager(plan_of(Full())), StepTimes())
    first, second = (
        request_of(number=n, options=RequestOptions(priority=each[0])) for n, each in enumerate((running, waiting))
    )
    first.seniority = preemption.seniority(first, 100.0 - running[1])
    assert preemption.gives_way(first, second, 100.0) == gives_way


def test_seniority_is_kept_for_good():
    preemption = Preemption(SchedulerSettings(), CacheManager(plan_of(Full())), StepTimes())
    request = request_of()
    request.seniority = preemption.seniority(request, 100.0)
    assert preemption.seniority(request, 900.0) == request.seniority == (100.0, request.id)


# Host memory


@pytest.mark.parametrize(("reaches", "blocks"), [((Full(),), 17), ((Full(), Sliding(5)), 25), ((Full(), State()), 25)])
def test_blocks_that_are_dear_to_compute_again_come_back_from_host_memory(reaches, blocks: int):
    bench = Bench(*reaches, blocks=blocks, caching=False, swap_bytes=1 << 30, step_us=1000, token_us=1_000_000)
    prompts = [[n] * 8 for n in (1, 2, 3)]
    requests = [bench.add(prompt, max_tokens=24) for prompt in prompts]
    bench.run()
    assert bench.scheduler.preemption.swaps == bench.scheduler.preemption.preemptions > 0
    assert [bench.generated[each.id] for each in requests] == [continuation(prompt, 24) for prompt in prompts]
    assert bench.worker.computed_tokens == 3 * (8 + 23)  # nothing twice
    assert recount(bench.manager).all_free and not bench.worker.swapped


@pytest.mark.parametrize(("swap_bytes", "token_us"), [(0, 1_000_000), (1, 1_000_000), (1 << 30, 0)])
def test_blocks_are_given_back_where_host_memory_is_short_or_slower(swap_bytes: int, token_us: int):
    bench = Bench(Full(), blocks=13, caching=False, swap_bytes=swap_bytes, token_us=token_us)
    for n in (1, 2):
        bench.add([n] * 8, max_tokens=24)
    bench.run()
    assert bench.scheduler.preemption.swaps == 0 < bench.scheduler.preemption.preemptions


def test_tickets_of_a_request_that_is_given_up_are_forgotten_with_the_next_step():
    bench = Bench(Full(), blocks=13, caching=False, swap_bytes=1 << 30, token_us=1_000_000)
    bench.add([1] * 8, max_tokens=24)
    young = bench.add([2] * 8, max_tokens=24)
    while young.swapped is None:
        bench.step()
    tickets = young.swapped.tickets
    bench.scheduler.abort(young.id)
    step = bench.scheduler.plan_step()
    assert step and step.forget == tickets


def test_a_request_without_blocks_in_host_memory_has_nothing_to_forget():
    preemption = Preemption(SchedulerSettings(), CacheManager(plan_of(Full())), StepTimes())
    draft = StepDraft()
    preemption.forget(request_of(), draft)
    assert draft.forget == []
