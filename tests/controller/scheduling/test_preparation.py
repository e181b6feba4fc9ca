"""What no client has asked for yet: computed where there is room, and given up for any request that comes."""

from collections.abc import Sequence

import pytest

from intarsia.controller.scheduling import preparation as preparation_module
from intarsia.controller.scheduling.preparation import Wanted
from intarsia.kvcache.reach import Full, Reach, Sliding, State
from intarsia.proto.request import RequestOptions
from intarsia.proto.status import PreparedPrompt
from intarsia.tests.controller.scheduling.by_hand import Bench, request_of
from intarsia.tests.kvcache.points_check import check_points
from intarsia.tests.simulated import continuation

KINDS = {
    "full": (Full(),),
    "windows": (Full(), Sliding(5)),
    "states": (Full(), State()),
    "all": (Full(), Sliding(5), State()),
}

HISTORY = [n % 50 for n in range(3, 61)]
"""58 tokens: four more than 13 blocks of four, and a half."""


class Prepared:
    """A bench, and what becomes of prompts that are to be prepared."""

    def __init__(self, *reaches: Reach, **limits):
        self.bench = Bench(*reaches, **limits)
        self.told: list[PreparedPrompt] = []
        self._number = 10_000

    def want(self, tokens: Sequence[int], kept: int = 0, passed: Sequence[int] = (), tenant: str = "") -> Wanted:
        self._number += 1
        request = request_of(tokens, 1, self._number, options=RequestOptions(tenant=tenant))
        request.is_prepared = True
        wanted = Wanted(request, kept, passed, self.told.append)
        self.bench.scheduler.preparation.add(wanted)
        return wanted

    def run(self) -> None:
        self.bench.run()
        check_points(self.bench.manager)

    def found(self, prompt: list[int]) -> int:
        """Tokens of it that a request finds, which is answered."""
        request = self.bench.add(prompt, 2)
        self.run()
        assert self.bench.generated[request.id] == continuation(prompt, 2)
        return request.cached_tokens


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_prepared_is_found_to_its_last_token_but_one(kind: str, depth: int):
    here = Prepared(*KINDS[kind], depth=depth)
    here.want(HISTORY)
    here.run()
    assert here.told == [PreparedPrompt("computed", 0, len(HISTORY) - 1)]
    assert here.bench.manager.num_open == 0 and len(here.bench.scheduler._seats.free_slots) == 4
    assert here.found([*HISTORY[:-1], 49, 48, 47]) == len(HISTORY) - 1


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_there_is_not_computed_again(kind: str):
    here = Prepared(*KINDS[kind])
    here.found(HISTORY)
    before = here.bench.worker.computed_tokens
    here.want([*HISTORY, *continuation(HISTORY, 2)])
    here.run()
    assert here.told == [PreparedPrompt("found", len(HISTORY) + 1, 0)]
    assert here.bench.worker.computed_tokens == before


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_request_waits_for_one_step_at_most(kind: str, depth: int):
    here = Prepared(*KINDS[kind], depth=depth, max_num_batched_tokens=8)
    here.want(HISTORY)
    bench = here.bench
    for _ in range(3):
        bench.step()
    request = bench.add([7, 8, 9], 1)
    bench.step()
    if not bench.generated[request.id]:  # a step was under way when it came
        bench.step()
    assert len(bench.generated[request.id]) == 1
    # What was computed is not lost.
    assert bench.scheduler.preparation.stops == 1
    here.run()
    assert [each.end for each in here.told] == ["computed"]
    assert here.told[0].computed_tokens == len(HISTORY) - 1


def test_while_requests_wait_nothing_is_prepared():
    here = Prepared(Full(), Sliding(5), max_num_seqs=2, depth=2)
    bench = here.bench
    for n in range(12):
        bench.add([n, n + 1, n + 2, *range(20)], 6)
    wanted = here.want(HISTORY)
    while len(bench.scheduler._queue):
        bench.step()
        assert not wanted.computed_tokens
    here.run()
    assert here.told == [PreparedPrompt("computed", 0, len(HISTORY) - 1)]


def test_beside_requests_that_decode_it_adds_a_tenth_to_a_step_at_most():
    here = Prepared(Full(), step_us=100_000, token_us=100, max_num_batched_tokens=64)
    bench = here.bench
    here.found([1, 2, 3])  # now it is known what steps take
    request = bench.add([4, 5, 6], 40)
    bench.step()
    wanted = here.want(HISTORY)
    largest = computed = 0
    while len(bench.generated[request.id]) < 40:
        bench.step()
        largest, computed = max(largest, wanted.computed_tokens - computed), wanted.computed_tokens
    assert largest * 100 <= 0.1 * 101_000
    here.run()


def test_where_it_is_dear_nothing_is_prepared_beside_requests_that_decode():
    here = Prepared(Full(), step_us=1000, token_us=1000)
    bench = here.bench
    here.found([1, 2, 3])
    request = bench.add([4, 5, 6], 30)
    bench.step()
    wanted = here.want(HISTORY)
    while len(bench.generated[request.id]) < 29:
        bench.step()
        assert not wanted.computed_tokens
    here.run()
    assert [each.end for each in here.told] == ["computed"]


def test_steps_without_requests_are_short():
    here = Prepared(Full(), step_us=0, token_us=10_000, max_num_batched_tokens=64)
    here.found([1, 2, 3])
    wanted, computed = here.want(HISTORY), 0
    while here.bench.scheduler.preparation.wanted:
        here.bench.step()
        assert wanted.computed_tokens - computed <= 5
        computed = wanted.computed_tokens


@pytest.mark.parametrize("kind", KINDS)
def test_a_request_that_lacks_blocks_has_those_of_what_is_prepared(kind: str):
    here = Prepared(*KINDS[kind], blocks=40, depth=2, max_num_batched_tokens=8)
    bench = here.bench
    request = bench.add([1, 2, 3], 90)
    bench.step()
    here.want(HISTORY)
    here.run()
    assert bench.generated[request.id] == continuation([1, 2, 3], 90)
    assert bench.scheduler.preemption.preemptions == 0


@pytest.mark.parametrize(("kind", "blocks"), [("full", 28), ("windows", 44), ("states", 64), ("all", 56)])
def test_nothing_that_is_worth_more_is_evicted(kind: str, blocks: int):
    here = Prepared(*KINDS[kind], blocks=blocks)
    often = [list(range(40)), list(range(1, 41))]
    kept = 0
    for n in range(60):  # used again and again
        kept = here.found([*often[n % 2], n % 50])
    here.want([49 - n % 50 for n in range(24)])
    here.run()
    for each in often:
        assert here.found([*each, 34]) >= kept - 4  # a request takes a block itself


def test_the_end_of_the_earlier_sequence_makes_room():
    here = Prepared(Full(), State(), blocks=40)
    bench = here.bench
    prompt, thoughts = HISTORY[:24], list(range(10, 40))
    drawn = [*prompt, *continuation(prompt, 30)]
    request = bench.add(prompt, 30)
    here.run()
    assert bench.generated[request.id] == drawn[24:]
    end = bench.manager.chain(drawn[:-1]).grow()[-1]
    assert end in bench.manager.pool.groups[0].index
    history = [*prompt, *thoughts]
    here.want(history, kept=24, passed=drawn[24:])
    here.run()
    groups = bench.manager.pool.groups
    low = {block for group in groups for tier, blocks in group._pages._cached.tiers() if not tier for block in blocks}
    assert groups[0].index[end] in low
    assert here.found([*history, 1]) == len(history) - 1


def test_of_a_tenants_prompts_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparation_module, "MOST_OF_A_TENANT", 2)
    monkeypatch.setattr(preparation_module, "MOST_WANTED", 3)
    here = Prepared(Full())
    wanted = [here.want([n, *HISTORY], tenant=tenant) for n, tenant in enumerate("aaabbc")]
    assert [each.end for each in here.told] == ["forgotten"] * 3
    assert here.bench.scheduler.preparation.wanted == [wanted[2], wanted[4], wanted[5]]


def test_long_prompts_are_bounded_together(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(preparation_module, "MOST_TOKENS", 100)
    here = Prepared(Full())
    here.want(HISTORY)
    last = here.want([1, *HISTORY])
    assert here.bench.scheduler.preparation.wanted == [last]
    assert here.want([2] * 300) in here.bench.scheduler.preparation.wanted


def test_what_workers_lost_is_wanted_no_more():
    here = Prepared(Full(), max_num_batched_tokens=8)
    here.want(HISTORY)
    here.want([1, *HISTORY])
    here.bench.step()
    here.bench.scheduler.start_anew()
    assert [each.end for each in here.told] == ["forgotten", "forgotten"]
    assert here.bench.manager.num_open == 0 and not here.bench.scheduler.has_work


def test_nothing_is_learnt_of_when_prompts_come_again():
    here = Prepared(Full(), State())
    here.found(HISTORY)
    retention = here.bench.manager.retention
    assert retention is not None
    now = retention._now
    here.want([*HISTORY, *range(20)])
    here.run()
    retention._catch_up()
    assert retention._now == now and not retention._visits
