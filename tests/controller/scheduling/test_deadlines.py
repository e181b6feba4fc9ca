import math

from intarsia.controller.request import Request
from intarsia.controller.scheduling.deadlines import Deadlines
from intarsia.kvcache.check import recount
from intarsia.kvcache.reach import Full
from intarsia.proto.request import RequestOptions
from intarsia.tests.controller.scheduling.by_hand import PROMPT, Bench, request_of
from intarsia.tests.simulated import continuation


def request(number: int, timeout_s: float | None) -> Request:
    return request_of(number=number, options=RequestOptions(timeout_s=timeout_s), arrival_s=100.0)


def test_deadlines_pass_in_their_order_and_once():
    deadlines = Deadlines()
    for number, timeout_s in ((1, 9.0), (2, 5.0), (3, None), (4, 7.0)):
        deadlines.add(request(number, timeout_s))
    assert deadlines.next_s == 105.0
    assert deadlines.pass_by(104.9) == []
    assert deadlines.pass_by(107.0) == [2, 4]
    assert deadlines.next_s == 109.0
    assert deadlines.pass_by(200.0) == [1]
    assert deadlines.next_s == math.inf


def test_a_request_without_a_time_limit_has_no_deadline():
    deadlines, unlimited = Deadlines(), request(1, None)
    deadlines.add(unlimited)
    assert deadlines.next_s == unlimited.deadline_s == math.inf


# In a scheduler


def test_a_request_whose_time_is_over_is_given_up_wherever_it_is():
    bench = Bench(Full(), max_num_seqs=1, depth=2)
    runs = bench.add(PROMPT, max_tokens=50, options=RequestOptions(timeout_s=5.0))
    waits = bench.add(PROMPT, max_tokens=50, options=RequestOptions(timeout_s=4.0))
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
    bench.add(PROMPT, max_tokens=3, options=RequestOptions(timeout_s=5.0))
    bench.run()
    bench.now_s += 10
    bench.scheduler.plan_step()
    assert bench.scheduler.take_expired() == []
