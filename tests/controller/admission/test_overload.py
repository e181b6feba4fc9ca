"""Who is told to come later, and when."""

from itertools import count
from typing import Any

import pytest

from intarsia.controller.admission.overload import FEWEST, LONGEST_FULL_S, MIB, OverloadGuard, OverloadSettings
from intarsia.controller.request import Request
from intarsia.errors import InvalidSetting, Overloaded
from intarsia.kvcache.ids import RequestId
from intarsia.proto.request import RequestOptions, SamplingParams

NUMBERS = count()


class Bench:
    """A guard with a clock and a memory of its own. So many have seats; one of them ends every so often."""

    def __init__(self, seats: int = 1, **settings: Any):
        self.now_s = 0.0
        self.free = 10**12
        self.guard = OverloadGuard(
            OverloadSettings(**settings),
            self,
            lambda: self.now_s,
            lambda: self.free,
        )
        self.waiting: list[Request] = []
        self.seated: list[Request] = []
        self.seats = seats
        self.begins_at_once = True  # the first token comes with the seat

    @property
    def is_full(self) -> bool:
        return bool(self.waiting)

    @property
    def num_seats(self) -> int:
        return self.seats

    def come(self, tenant: str = "", tokens: int = 10, timeout_s: float | None = None) -> Request:
        self.guard.check(tenant, tokens, 0, 1, timeout_s)
        request = Request(
            RequestId(next(NUMBERS)),
            [1] * tokens,
            tokens,
            SamplingParams(),
            0,
            frozenset(),
            100,
            RequestOptions(tenant=tenant),
        )
        self.guard.entered([request])
        self.waiting.append(request)
        if self.begins_at_once:
            self.seat()
        return request

    def seat(self, most: int = 1000) -> None:
        for _ in range(min(most, len(self.waiting), self.seats - len(self.seated))):
            self.seated.append(self.waiting.pop(0))
            self.guard.began(self.seated[-1])

    def serve(self, requests: int, each_s: float = 1.0) -> None:
        for _ in range(requests):
            self.now_s += each_s
            self.guard.left(self.seated.pop(0))
            if self.begins_at_once:
                self.seat()

    def flood(self) -> int:
        """How many come in before one is refused."""
        for come in range(10_000):
            try:
                self.come()
            except Overloaded:
                return come
        raise AssertionError("no request is refused")


def test_a_request_that_would_wait_too_long_is_told_when_to_come_back():
    bench = Bench(max_wait_s=10)
    for _ in range(30):
        bench.come()  # how long it takes is not known yet
    bench.serve(FEWEST)
    with pytest.raises(Overloaded, match=r"in about 2\d\.\d s, and max_wait_s is 10") as refusal:
        bench.come()
    assert refusal.value.retryable and 10 < (refusal.value.retry_after_s or 0) < 20
    assert refusal.value.details["full_for_s"] == LONGEST_FULL_S
    bench.serve(15)
    bench.come()


def test_a_flood_over_full_seats_is_bounded_from_its_first_second():
    """Eight seats, and one is free every second: ten may wait, before and after enough have ended to measure it."""
    bench = Bench(seats=8, max_wait_s=10)
    for _ in range(40):
        while len(bench.seated) < 8:
            bench.come()
        bench.serve(1)
    bench.come()
    assert bench.flood() in range(8, 12)
    for _ in range(20):
        bench.serve(1)
        assert bench.flood() in range(3)


def test_a_flood_of_an_idle_engine_is_bounded_by_how_long_those_who_run_have_run():
    bench = Bench(seats=8, max_wait_s=10)
    bench.serve(0)
    for _ in range(30):
        bench.come()  # nothing is known
    bench.now_s += 8
    assert bench.flood() == 0, "a second or more for each seat, and 22 wait"


def test_free_seats_are_not_waited_for_whatever_others_do():
    bench = Bench(seats=3, max_wait_s=10)
    bench.come()
    bench.now_s += 1000
    bench.come()
    bench.come()


def test_a_burst_into_an_idle_engine_takes_all_its_seats_however_long_answers_take():
    """Its prompts take several steps: few have begun while the others come, and none needs to end for them."""
    bench = Bench(seats=64, max_wait_s=60)
    for _ in range(20):
        bench.come()
        bench.serve(1, each_s=100)
    bench.begins_at_once = False
    for _ in range(64):
        bench.come()
        bench.now_s += 0.01
        bench.seat(len(bench.waiting) // 16)
    with pytest.raises(Overloaded):
        for _ in range(64):
            bench.come()


def test_prompts_that_take_longer_than_one_may_wait_are_refused_though_seats_are_free():
    bench = Bench(seats=64, max_wait_s=10)
    bench.begins_at_once = False
    for _ in range(13):
        bench.come()
    for _ in range(FEWEST):
        bench.now_s += 2
        bench.seat(1)
        bench.serve(1, each_s=0)
    with pytest.raises(Overloaded, match=r"in about 12\.0 s, and max_wait_s is 10"):
        bench.come()
    bench.now_s += 2
    bench.seat(1)
    bench.come()


def test_what_was_seen_before_a_pause_says_nothing_after_it():
    bench = Bench(seats=2, max_wait_s=10)
    for _ in range(12):
        bench.come()
    bench.serve(FEWEST)
    for request in bench.waiting:
        bench.guard.left(request)
    bench.waiting.clear()
    bench.serve(2)
    bench.now_s += 1000
    for _ in range(8):
        bench.come()


def test_a_refusal_tells_of_pressure_for_a_second():
    bench = Bench(max_requests_per_tenant=1)
    bench.come("a")
    assert not bench.guard.is_pressed
    with pytest.raises(Overloaded):
        bench.come("a")
    assert bench.guard.is_pressed
    bench.now_s += 2
    assert not bench.guard.is_pressed


def test_more_who_wait_than_can_run_tell_of_pressure_as_long_as_they_wait():
    bench = Bench(seats=2)
    for _ in range(4):
        bench.come()
    assert not bench.guard.is_pressed
    bench.come()
    assert bench.guard.is_pressed
    bench.serve(1)
    assert not bench.guard.is_pressed


def test_no_request_is_refused_for_the_wait_where_no_limit_is_set():
    bench = Bench()
    for _ in range(3000):
        bench.come(timeout_s=0.1)
        if len(bench.waiting) > 20:
            bench.serve(1)


def test_a_request_that_would_expire_before_its_turn_is_refused_at_once():
    bench = Bench(max_wait_s=100)
    for _ in range(30):
        bench.come()
    bench.serve(10)
    with pytest.raises(Overloaded, match="timeout_s is 5") as refusal:
        bench.come(timeout_s=5)
    assert not refusal.value.details["full_for_s"], "others may have more time"
    bench.come(timeout_s=50)


def test_a_flood_of_one_tenant_does_not_keep_another_out():
    bench = Bench(max_wait_s=10)
    for _ in range(40):
        bench.come("flood")
    bench.serve(10)
    with pytest.raises(Overloaded):
        bench.come("flood")
    bench.come("single")
    bench.come("other")


def test_what_waits_is_bounded_in_tokens_but_one_request_always_may():
    bench = Bench(max_waiting_tokens=100)
    bench.come()
    bench.come(tokens=500)
    with pytest.raises(Overloaded, match="500 tokens wait for their turn, 10 more would exceed the 100"):
        bench.come(tokens=10)
    bench.serve(1)
    for _ in range(10):
        bench.come(tokens=10)
    with pytest.raises(Overloaded):
        bench.come(tokens=10)


def test_a_tenant_s_requests_are_counted_until_they_end():
    bench = Bench(max_requests_per_tenant=2)
    bench.come("a")
    bench.come("a")
    bench.come("b")
    with pytest.raises(Overloaded, match="2 requests of a are here, and max_requests_per_tenant is 2"):
        bench.come("a")
    bench.serve(1)
    bench.come("a")


def test_no_request_is_taken_when_the_host_is_short_of_memory():
    bench = Bench(min_free_bytes=100 * MIB)
    bench.come()
    bench.free = 99 * MIB
    bench.now_s += 2
    with pytest.raises(Overloaded, match="99 MiB of memory left, and 100 are kept free"):
        bench.come()
    bench.free = 101 * MIB
    bench.now_s += 2
    bench.come()


def test_the_gate_of_a_real_host_is_open():
    OverloadGuard(OverloadSettings(), Bench()).check("", 10, 0, 1, None)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_wait_s", 0), ("max_waiting_tokens", 0), ("max_requests_per_tenant", 0), ("min_free_bytes", -1)],
)
def test_settings_that_let_no_request_in_are_refused(setting: str, value: Any):
    with pytest.raises(InvalidSetting, match="must be"):
        OverloadSettings(**{setting: value})
