import math

from intarsia.controller.request import Request
from intarsia.controller.scheduling.deadlines import Deadlines
from intarsia.kvcache.manager import RequestId
from intarsia.proto.request import SamplingParams, Terms


def request(number: int, timeout_s: float | None) -> Request:
    return Request(
        id=RequestId(number),
        tokens=[1],
        prompt_tokens=1,
        sampling=SamplingParams(),
        seed=0,
        stop_token_ids=frozenset(),
        max_total_tokens=2,
        terms=Terms(timeout_s=timeout_s),
        arrival_s=100.0,
    )


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
