import random
from collections import deque
from collections.abc import Sequence
from typing import Any

import pytest

from intarsia.controller.request import Request
from intarsia.controller.scheduling.outcome import Outcome
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.errors import InvalidSetting
from intarsia.kvcache.check import recount
from intarsia.kvcache.manager import CacheManager, CacheSettings, RequestId
from intarsia.kvcache.plan import Group
from intarsia.kvcache.reach import Chunked, Full, Reach, Sliding, State
from intarsia.proto.request import USUAL_TERMS, FinishReason, SamplingParams, Terms
from intarsia.proto.step import StepResult
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.simulated import VOCAB, SimulatedWorker, continuation


class Bench:
    """A scheduler, a manager and a simulated worker, stepped by hand."""

    def __init__(
        self,
        *reaches: Reach,
        blocks: int = 64,
        block_tokens: int = 4,
        per_large: Sequence[int] = (),
        caching: bool = True,
        depth: int = 1,
        step_us: int = 0,
        token_us: int = 0,
        **limits: Any,
    ):
        """depth: steps under way at once. step_us, token_us: what a step takes, and a token in it, as it is told."""
        plan = plan_of(*reaches, blocks=blocks, block_tokens=block_tokens, per_large=per_large)
        self.manager = CacheManager(plan, CacheSettings(prefix_caching=caching))
        self.scheduler = Scheduler(
            SchedulerSettings(**{"max_num_seqs": 4, "max_num_batched_tokens": 32, **limits}),
            self.manager,
            clock=lambda: self.now_s,
        )
        self.now_s = 1000.0
        self.order_of_ends: list[int] = []
        self._cost_us = step_us, token_us
        self.worker = SimulatedWorker(plan)
        self.generated: dict[int, list[int]] = {}
        self.reasons: dict[int, FinishReason | None] = {}
        self._count = 0
        self._depth = depth
        self._under_way: deque[StepResult] = deque()

    def add(
        self, prompt: list[int], max_tokens: int, stop: tuple[int, ...] = (), terms: Terms = USUAL_TERMS
    ) -> Request:
        return self.add_family(prompt, max_tokens, 1, stop, terms)[0]

    def add_family(
        self,
        prompt: list[int],
        max_tokens: int,
        answers: int,
        stop: tuple[int, ...] = (),
        terms: Terms = USUAL_TERMS,
    ) -> list[Request]:
        """A request with forks: several answers to one prompt."""
        family = [self._request(prompt, max_tokens, stop, terms) for _ in range(answers)]
        self.scheduler.add(family[0], family[1:])
        return family

    def _request(self, prompt: list[int], max_tokens: int, stop: tuple[int, ...], terms: Terms) -> Request:
        self._count += 1
        request = Request(
            id=RequestId(self._count),
            tokens=list(prompt),
            prompt_tokens=len(prompt),
            sampling=SamplingParams(max_tokens=max_tokens),
            seed=0,
            stop_token_ids=frozenset(stop),
            max_total_tokens=len(prompt) + max_tokens,
            terms=terms,
        )
        assert self.manager.plan.fits(request.max_total_tokens)
        self.generated[request.id] = []
        return request

    def step(self) -> Outcome:
        """Plan until `depth` steps are under way, then let the oldest one run and enter what it brought."""
        while len(self._under_way) < self._depth:
            step = self.scheduler.plan_step()
            recount(self.manager)
            if step is None:
                break
            tokens = len(step.decode) + sum(advance.tokens for advance in step.advance)
            per_step, per_token = self._cost_us
            self._under_way.append(self.worker.run(step)._replace(run_us=per_step + tokens * per_token))
        if not self._under_way:
            return Outcome([], [], [])
        outcome = self.scheduler.commit(self._under_way.popleft())
        for request, token, reason, _ in outcome.each():
            self.generated[request.id].append(token)
            self.reasons[request.id] = reason
            if reason is not None:
                self.order_of_ends.append(request.id)
        recount(self.manager)
        return outcome

    def prompt_tokens_of_next_step(self) -> int | None:
        """Run a step; None if there was none."""
        before = self.worker.computed_tokens
        drawn = len(list(self.step().each()))
        return self.worker.computed_tokens - before - drawn if drawn else None

    def run(self, limit: int = 10_000) -> int:
        steps = 0
        while self.scheduler.has_work or self._under_way:
            self.step()
            steps += 1
            assert steps < limit, "the scheduler does not come to an end"
        return steps


PROMPT = [1, 2, 3, 4, 5, 6, 7]


def test_a_request_generates_what_the_model_says_and_frees_everything():
    bench = Bench(Full(), Sliding(5))
    request = bench.add(PROMPT, max_tokens=20)
    bench.run()
    assert bench.generated[request.id] == continuation(PROMPT, 20)
    assert bench.reasons[request.id] is FinishReason.LENGTH
    assert recount(bench.manager).all_free


def test_stop_token_ends_a_request_and_is_its_last_token():
    expected = continuation(PROMPT, 20)
    stop = expected[5]
    bench = Bench(Full())
    request = bench.add(PROMPT, max_tokens=20, stop=(stop,))
    bench.run()
    assert bench.generated[request.id] == expected[: expected.index(stop) + 1]
    assert bench.reasons[request.id] is FinishReason.STOP


def test_prompt_longer_than_a_step_is_computed_in_chunks():
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=7)
    request = bench.add(list(range(40)), max_tokens=2)
    assert bench.run() == 6 + 1  # 7+7+7+7+7+5 tokens, whose last gives the first new one, then the second
    assert bench.generated[request.id] == continuation(list(range(40)), 2)


def test_chunk_limit_leaves_room_for_other_prompts_in_the_same_step():
    bench = Bench(Full(), max_num_batched_tokens=32, max_prefill_chunk_tokens=7)
    bench.add(list(range(14)), max_tokens=1)
    bench.add(list(range(20, 34)), max_tokens=1)
    assert bench.run() == 2


def test_decoding_requests_never_wait_for_a_long_prompt():
    bench = Bench(Full(), blocks=128, max_num_batched_tokens=8)
    first = bench.add(PROMPT, max_tokens=10)
    bench.step()
    bench.add(list(range(40)), max_tokens=1)
    for _ in range(6):
        assert first in [entry.request for entry in bench.step().each()]


def test_no_step_exceeds_its_token_limit():
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=9)
    for n in range(8):
        bench.add([n] * (3 + 4 * n), max_tokens=5)
    bench.run()
    assert bench.worker.largest_step_tokens <= 9


def test_short_pool_preempts_the_youngest_and_loses_no_token():
    bench = Bench(Full(), blocks=13, caching=False)  # 12 usable blocks: 48 tokens for two requests of 32
    old, young = bench.add([1] * 8, max_tokens=24), bench.add([2] * 8, max_tokens=24)
    bench.run()
    assert (old.preemptions, young.preemptions > 0) == (0, True)
    assert bench.generated[old.id] == continuation([1] * 8, 24)
    assert bench.generated[young.id] == continuation([2] * 8, 24)


def test_prompt_that_only_fits_in_small_chunks_is_taken_alone():
    bench = Bench(Sliding(4), blocks=4, max_num_batched_tokens=32)  # 12 tokens of memory for a prompt of 40
    request = bench.add(list(range(40)), max_tokens=3)
    bench.run()
    assert bench.generated[request.id] == continuation(list(range(40)), 3)


def test_repeated_prompt_skips_what_is_cached():
    bench = Bench(Full(), Sliding(5))
    prompt = list(range(16))
    bench.add(prompt, max_tokens=4)
    bench.run()
    again = bench.add(prompt, max_tokens=4)
    bench.run()
    assert again.cached_tokens == 15  # all but the last token, whose logits are wanted
    assert bench.generated[again.id] == continuation(prompt, 4)


@pytest.mark.parametrize("steps_before", [0, 1, 3])
def test_aborted_request_frees_its_blocks_and_disturbs_nobody(steps_before: int):
    bench = Bench(Full(), Sliding(5), max_num_batched_tokens=8)
    other, victim = bench.add(PROMPT, max_tokens=9), bench.add(list(range(20)), max_tokens=9)
    for _ in range(steps_before):
        bench.step()
    assert bench.scheduler.abort(victim.id)
    assert not bench.scheduler.abort(victim.id)
    bench.run()
    assert bench.generated[other.id] == continuation(PROMPT, 9)
    assert len(bench.generated[victim.id]) < 9
    assert recount(bench.manager).all_free


def test_request_aborted_while_its_step_runs_gets_no_more_tokens():
    bench = Bench(Full())
    request = bench.add(PROMPT, max_tokens=9)
    step = bench.scheduler.plan_step()
    assert step
    bench.scheduler.abort(request.id)
    assert list(bench.scheduler.commit(bench.worker.run(step)).each()) == []
    bench.run()
    assert recount(bench.manager).all_free


def test_quiet_decode_step_names_slots_only():
    bench = Bench(Full(), Sliding(5), block_tokens=16)
    bench.add(PROMPT, max_tokens=9)
    bench.step()
    step = bench.scheduler.plan_step()
    assert step
    assert (step.retire, step.admit, step.advance, step.decode) == ((), (), (), (0,))
    assert len(step.pack()) < 16


def test_steps_too_small_for_every_request_to_decode_are_refused():
    with pytest.raises(InvalidSetting, match=r"max_num_batched_tokens \(3\) must be at least max_num_seqs \(4\)"):
        SchedulerSettings(max_num_seqs=4, max_num_batched_tokens=3)


def test_random_loads_end_with_every_token_right_and_every_block_free():
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    preemptions = 0
    for _ in range(60):
        kinds = [Full(), Sliding(1), Sliding(3), Sliding(6), Sliding(11), Chunked(4), Chunked(7), State()]
        reaches = rng.sample(kinds, rng.randint(1, 3))
        size = rng.choice([2, 3, 4])
        alone = sum(Group(reach, (0,), size).blocks_spanning(27, chunk_tokens=1) for reach in reaches)
        bench = Bench(
            *reaches,
            blocks=1 + alone + rng.randint(0, 20),
            block_tokens=size,
            per_large=[rng.choice([1, 1, 2, 3]) for _ in reaches],
            caching=rng.random() < 0.7,
            max_num_seqs=rng.randint(1, 6),
            max_num_batched_tokens=rng.randint(6, 40),
            max_prefill_chunk_tokens=rng.choice([None, 1, 7]),
            depth=rng.choice([1, 2]),
        )
        wanted: dict[int, tuple[list[int], int]] = {}
        aborted: set[int] = set()
        stops: dict[int, frozenset[int]] = {}
        for _ in range(12):
            prompt = [rng.randint(0, 1) for _ in range(rng.randint(1, 18))]
            count = rng.randint(1, 9)
            request = bench.add(prompt, count, stop=rng.choice([(), (), tuple(range(0, VOCAB, 9))]))
            wanted[request.id] = prompt, count
            stops[request.id] = request.stop_token_ids
            for _ in range(rng.randint(0, 4)):
                bench.step()
            if rng.random() < 0.2:
                victim = RequestId(rng.choice(list(wanted)))
                if bench.scheduler.abort(victim):
                    aborted.add(victim)
        bench.run()
        for request_id, (prompt, count) in wanted.items():
            expected = continuation(prompt, count)
            end = next((n + 1 for n, token in enumerate(expected) if token in stops[request_id]), count)
            expected = expected[:end]
            if request_id in aborted:
                expected = expected[: len(bench.generated[request_id])]
            assert bench.generated[request_id] == expected
        assert recount(bench.manager).all_free
        preemptions += bench.scheduler.preemptions
    assert preemptions > 0, "the load was too light to preempt anybody"


# Several answers to one prompt


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


def test_all_slots_are_seats_while_prompts_wait_for_their_tokens_of_a_step():
    bench = Bench(Full(), max_num_seqs=4, max_num_batched_tokens=8)
    for start in range(3):
        bench.add(list(range(start, start + 8)), max_tokens=9)
    bench.step()
    assert bench.scheduler.is_full and bench.scheduler.num_seated == 1
    assert bench.scheduler.num_seats == 4
    bench.run()
    assert not bench.scheduler.is_full


def test_there_are_no_more_seats_than_the_pool_has_blocks_for():
    bench = Bench(Full(), blocks=10, max_num_seqs=4, max_num_batched_tokens=64)
    for start in range(4):
        bench.add(list(range(10 * start, 10 * start + 14)), max_tokens=9)
    bench.step()
    assert bench.scheduler.is_full and bench.scheduler.num_seated == bench.scheduler.num_seats == 2
    bench.run()
    assert bench.scheduler.num_seats == 4


def test_more_answers_than_slots_wait_like_everybody_else():
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


# Who goes first, who gives way


def test_urgent_request_takes_the_slot_of_a_less_urgent_one_which_loses_no_token():
    bench = Bench(Full(), max_num_seqs=1)
    patient = bench.add(PROMPT, max_tokens=20, terms=Terms(priority=5))
    for _ in range(3):
        bench.step()
    urgent = bench.add([9, 8, 7], max_tokens=4)
    bench.run()
    assert bench.order_of_ends == [urgent.id, patient.id]
    assert patient.preemptions == 1
    assert bench.generated[patient.id] == continuation(PROMPT, 20)
    assert bench.generated[urgent.id] == continuation([9, 8, 7], 4)


def test_urgent_request_displaces_nobody_who_has_run_for_long_enough():
    bench = Bench(Full(), max_num_seqs=1, ageing_s=10.0)
    patient = bench.add(PROMPT, max_tokens=20, terms=Terms(priority=1))
    bench.step()
    bench.now_s += 11
    urgent = bench.add([9, 8, 7], max_tokens=4)
    bench.run()
    assert bench.order_of_ends == [patient.id, urgent.id]


def test_equal_priorities_displace_nobody():
    bench = Bench(Full(), max_num_seqs=1)
    first, second = bench.add(PROMPT, max_tokens=9), bench.add(PROMPT, max_tokens=2)
    bench.run()
    assert bench.order_of_ends == [first.id, second.id]
    assert bench.scheduler.preemptions == 0


def test_short_pool_preempts_the_least_urgent_whoever_came_first():
    bench = Bench(Full(), blocks=13, caching=False)
    patient = bench.add([1] * 8, max_tokens=24, terms=Terms(priority=3))
    urgent = bench.add([2] * 8, max_tokens=24)
    bench.run()
    assert (urgent.preemptions, patient.preemptions > 0) == (0, True)


def test_a_flood_of_one_tenant_does_not_hold_up_another():
    bench = Bench(Full(), max_num_seqs=1, blocks=64)
    flood = [bench.add([n] * 6, max_tokens=4, terms=Terms(tenant="flood")) for n in range(6)]
    bench.step()
    single = bench.add(PROMPT, max_tokens=4, terms=Terms(tenant="single"))
    bench.run()
    assert bench.order_of_ends[:2] == [flood[0].id, single.id]


@pytest.mark.parametrize("count", [1, 3, 9])
def test_short_prompts_of_a_tenant_do_not_wait_for_a_long_one_of_another_that_is_under_way(count: int):
    bench = Bench(Full(), max_num_seqs=16, blocks=256, caching=False)
    long = bench.add([1] * 320, max_tokens=1, terms=Terms(tenant="long"))
    bench.step()
    short = [bench.add([n] * 7, max_tokens=1, terms=Terms(tenant="short")) for n in range(count)]
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
    first = bench.add([1] * 96, max_tokens=1, terms=Terms(tenant="first"))
    bench.step()
    second = bench.add([2] * 160, max_tokens=1, terms=Terms(tenant="second"))
    for _ in range(2):
        bench.step()
    assert (first.computed_tokens, second.computed_tokens) == (64, 32)
    bench.run()
    assert bench.generated[second.id] == continuation([2] * 160, 1)


def test_longest_prefix_first_takes_what_is_cached_before_what_came_first():
    bench = Bench(Full(), max_num_seqs=1, longest_prefix_first=True)
    bench.add(list(range(12)), max_tokens=1)
    bench.run()
    blocker = bench.add(PROMPT, max_tokens=2)
    bench.step()
    unknown, known = bench.add([40] * 12, max_tokens=1), bench.add(list(range(12)), max_tokens=1)
    bench.run()
    assert bench.order_of_ends[1:] == [blocker.id, known.id, unknown.id]


# Deadlines


def test_a_request_whose_time_is_over_is_given_up_wherever_it_is():
    bench = Bench(Full(), max_num_seqs=1, depth=2)
    runs = bench.add(PROMPT, max_tokens=50, terms=Terms(timeout_s=5.0))
    waits = bench.add(PROMPT, max_tokens=50, terms=Terms(timeout_s=4.0))
    patient = bench.add([1, 2, 3], max_tokens=3)
    for _ in range(3):
        bench.step()
    assert bench.scheduler.take_expired() == []
    bench.now_s += 4.5
    bench.step()
    assert bench.scheduler.take_expired() == [waits]
    bench.now_s += 1.0
    bench.run()
    assert bench.scheduler.take_expired() == [runs]
    assert bench.generated[patient.id] == continuation([1, 2, 3], 3)
    assert recount(bench.manager).all_free


def test_a_deadline_that_is_met_is_forgotten():
    bench = Bench(Full())
    bench.add(PROMPT, max_tokens=3, terms=Terms(timeout_s=5.0))
    bench.run()
    bench.now_s += 10
    bench.scheduler.plan_step()
    assert bench.scheduler.take_expired() == []


# How much of a step prompts get


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


# Prefixes that others compute, or wait for


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


def test_a_prefix_that_somebody_waits_for_outlives_others():
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
