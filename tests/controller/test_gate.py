"""Who is told to come later, and when."""

from itertools import count
from typing import Any

import pytest

from intarsia.controller.gate import FEWEST_TURNS, MIB, Gate, GateSettings
from intarsia.controller.request import Request, SamplingParams, Terms
from intarsia.errors import InvalidSetting, Overloaded
from intarsia.kvcache.manager import RequestId

NUMBERS = count()


class Bench:
    """A gate with a clock and a memory of its own; somebody comes to their turn every `each_s` seconds."""

    def __init__(self, **settings: Any):
        self.now_s = 0.0
        self.free = 10**12
        self.gate = Gate(GateSettings(**settings), lambda: self.now_s, lambda: self.free)
        self.waiting: list[Request] = []

    def come(self, tenant: str = "", tokens: int = 10, timeout_s: float | None = None) -> Request:
        self.gate.check(tenant, tokens, 0, 1, timeout_s)
        request = Request(
            RequestId(next(NUMBERS)), [1] * tokens, tokens, SamplingParams(), 0, frozenset(), 100, Terms(tenant=tenant)
        )
        self.gate.entered([request])
        self.waiting.append(request)
        return request

    def serve(self, requests: int, each_s: float = 1.0) -> None:
        for _ in range(requests):
            self.now_s += each_s
            request = self.waiting.pop(0)
            self.gate.began(request)
            self.gate.left(request)


def test_whoever_would_wait_too_long_is_told_when_to_come_back():
    bench = Bench(max_wait_s=10)
    for _ in range(30):
        bench.come()  # nobody knows yet how long it takes
    bench.serve(FEWEST_TURNS)
    with pytest.raises(Overloaded, match=r"in about 2\d\.\d s, and max_wait_s is 10") as refusal:
        bench.come()
    assert refusal.value.retryable and 10 < (refusal.value.retry_after_s or 0) < 20
    bench.serve(15)
    bench.come()


def test_nobody_is_refused_for_the_wait_where_no_limit_is_set():
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
    with pytest.raises(Overloaded, match="timeout_s is 5"):
        bench.come(timeout_s=5)
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
    first, _ = bench.come("a"), bench.come("a")
    bench.come("b")
    with pytest.raises(Overloaded, match="2 requests of a are here, and max_requests_per_tenant is 2"):
        bench.come("a")
    bench.gate.began(first)
    with pytest.raises(Overloaded):
        bench.come("a")
    bench.gate.left(first)
    bench.come("a")


def test_nobody_is_taken_when_the_host_is_short_of_memory():
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
    Gate(GateSettings()).check("", 10, 0, 1, None)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("max_wait_s", 0), ("max_waiting_tokens", 0), ("max_requests_per_tenant", 0), ("min_free_bytes", -1)],
)
def test_settings_that_let_nobody_in_are_refused(setting: str, value: Any):
    with pytest.raises(InvalidSetting, match="must be"):
        GateSettings(**{setting: value})
