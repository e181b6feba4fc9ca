"""Requests whose answer is worth nothing after some time."""

import heapq
import math

from ...errors import DeadlineExceeded
from ...kvcache.ids import RequestId
from ..request import Request

NO_REQUEST = RequestId(0)


class Deadlines:
    """The deadlines of requests, in order. Those of requests that have ended pass unnoticed."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, RequestId]] = []
        self.next_s = math.inf  # the earliest of them

    def add(self, request: Request) -> None:
        """Note when the time of a request that has just arrived is over, if it has a time."""
        if request.options.timeout_s is not None:
            request.deadline_s = request.arrival_s + request.options.timeout_s
            heapq.heappush(self._heap, (request.deadline_s, request.id))
            self.next_s = self._heap[0][0]

    def wake(self, at_s: float) -> None:
        """Expired requests are looked for then, though no request's time is over."""
        heapq.heappush(self._heap, (at_s, NO_REQUEST))
        self.next_s = self._heap[0][0]

    def pass_by(self, now_s: float) -> list[RequestId]:
        """The requests whose deadlines have passed, each told once."""
        passed: list[RequestId] = []
        while self._heap and self._heap[0][0] <= now_s:
            passed.append(heapq.heappop(self._heap)[1])
        self.next_s = self._heap[0][0] if self._heap else math.inf
        return passed


def exceeded(request: Request) -> DeadlineExceeded:
    """What is said to a request whose time is over."""
    generated = len(request.tokens) - request.prompt_tokens
    state = f"{generated} tokens of at most {request.max_total_tokens - request.prompt_tokens} were generated"
    return DeadlineExceeded(
        f"the request's {request.options.timeout_s:g} s are over; {state}. Give it more time, or ask less.",
        field="timeout_s",
        generated_tokens=generated,
    )
