"""What is counted of requests and steps, for the engine and for each tenant."""

from dataclasses import asdict
from typing import Any

import pytest

from intarsia.controller.request import Request
from intarsia.controller.scheduling.outcome import Outcome, Progress
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.controller.telemetry import COUNTS, KEPT_ENDED, MOST_TENANTS, LoopTimes, Telemetry
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Full
from intarsia.proto.request import FinishReason, RequestOptions, SamplingParams
from intarsia.proto.status import EngineLoad
from intarsia.proto.step import Advance, Step, StepResult
from intarsia.tests.kvcache.plans import plan_of


def telemetry(live: int = 0) -> Telemetry:
    manager = CacheManager(plan_of(Full(), blocks=32))
    return Telemetry(Scheduler(SchedulerSettings(), manager), range(live))


def request(number: int = 1, salt: str = "", answer: int = 1, **known: Any) -> Request:
    """With a prompt of four tokens and so many of its answer."""
    return Request(
        id=RequestId(number), tokens=[1] * (4 + answer), prompt_tokens=4, sampling=SamplingParams(), seed=0,
        stop_token_ids=frozenset(), max_total_tokens=20, options=RequestOptions(salt=salt), **known,
    )  # fmt: skip


def counted(heard: Telemetry, salt: str | None = None) -> dict[str, int]:
    return {name: count for name, count in heard.counts(salt).items() if count}


def test_every_counter_of_a_load_is_one_of_the_engine():
    assert set(COUNTS) == set(EngineLoad._fields[5:])


@pytest.mark.parametrize(
    ("how", "counter"),
    [
        ("stop", {"finished_requests": 1}),
        ("length", {"finished_requests": 1}),
        ("abort", {"aborted_requests": 1}),
        ("deadline", {"expired_requests": 1}),
        ("error", {}),
    ],
)
def test_an_end_is_counted_for_the_engine_and_for_its_tenant(how: str, counter: dict[str, int]):
    heard = telemetry()
    asked = request(salt="alice", answer=3, cached_tokens=2, preemptions=1)
    heard.began(asked, 1.0)
    heard.left(asked)
    heard.ended(asked, how, 2.0)
    begun = {"prompt_tokens": 4, "cached_tokens": 2}
    assert counted(heard) == begun | counter
    assert counted(heard, "alice") == begun | counter | {"generated_tokens": 3, "preemptions": 1}
    assert counted(heard, "bob") == {}
    assert [each.state for each in heard.journal.all_ended(with_tokens=False)] == [how]


def test_only_whole_answers_are_measured_and_all_ends_are_told_apart():
    heard = telemetry()
    for number, how in enumerate(("stop", "abort", "length")):
        asked = request(number, answer=3)
        heard.began(asked, 1.0)
        heard.ended(asked, how, 2.0)
    metrics = heard.meter.read(CacheManager(plan_of(Full(), blocks=32)))
    assert metrics.finished == {"stop": 1, "abort": 1, "length": 1}
    assert sum(metrics.distributions["generated_tokens"].counts) == 2


def test_refusals_of_front_ends_are_of_no_engine():
    heard = telemetry()
    heard.refused(1, "alice")
    heard.refused(5)
    assert counted(heard) == {"refused_requests": 6}
    assert counted(heard, "alice") == {"refused_requests": 1}


def test_a_tenant_is_told_of_rebuilds():
    heard = telemetry()
    heard.rebuilt()
    assert counted(heard, "alice") == {"rebuilds": 1}


def test_the_oldest_tenant_is_forgotten_for_one_too_many():
    heard = telemetry()
    for number in range(MOST_TENANTS + 1):
        heard.refused(1, str(number))
    assert counted(heard, "0") == {}
    assert counted(heard, "1") == counted(heard, str(MOST_TENANTS)) == {"refused_requests": 1}


def test_a_step_is_counted_and_remembered():
    heard = telemetry(live=3)
    begins, ends, goes_on = request(1, answer=1), request(2, answer=5), request(3, answer=2)
    outcome = Outcome([goes_on], [7], [Progress(begins, 7, None), Progress(ends, 7, FinishReason.LENGTH)])
    step = Step(1, 9, *[()] * 7, advance=(Advance(0, 4, ()),), decode=(1, 2))
    heard.planned(10.0)
    heard.stepped(step, StepResult(1, 9, (7, 7, 7), run_us=30), outcome, LoopTimes(10.0, 20.0, 5.0))
    [shown] = heard.journal.steps(8)
    assert (shown.number, shown.plan_us, shown.wait_us, shown.commit_us, shown.run_us) == (9, 10, 20, 5, 30)
    assert (shown.prompt_tokens, shown.decoding, shown.began, shown.ended) == (4, 2, 1, 1)
    assert (shown.running, shown.waiting, shown.preempted) == (0, 3, 0)
    assert heard.journal.steps(9) == ()
    stats = asdict(heard.stats)
    assert {name: value for name, value in stats.items() if value} == {
        "steps": 1, "generated_tokens": 3, "computed_tokens": 6, "plan_us": 10.0, "wait_us": 20.0, "commit_us": 5.0,
        "run_us": 30.0,
    }  # fmt: skip


def test_the_latest_ends_are_remembered_and_their_tokens_shown_on_request():
    heard = telemetry()
    for number in range(KEPT_ENDED + 2):
        heard.ended(request(number), "stop", 1.0)
    ended = heard.journal.all_ended(with_tokens=True)
    assert len(ended) == KEPT_ENDED and ended[0].id == 2
    assert ended[0].tokens == ((1,) * 4, (1,))
    assert heard.journal.all_ended(with_tokens=False)[0].tokens is None
