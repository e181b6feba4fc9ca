"""What an engine measures of its requests and steps over time.

Distributions are kept as counts between fixed bounds, which is what Prometheus wants and costs a bisection per value.
What is true of every decoding request of a step (how long it waited for its token) is counted for all of them at once.
"""

from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Sequence
from typing import NamedTuple

from ..kvcache.manager import CacheManager
from ..kvcache.misses import lost_tokens
from ..kvcache.sampled_worth import Forecast
from ..proto.leases import NO_LEASES, LeaseCounts
from ..proto.status import PreparedMetrics
from .latencies import Latencies, Spread
from .request import Request

QUICK_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
"""Bounds for the time to a first token."""

TOKEN_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.4,
    0.5,
    0.75,
    1.0,
    2.5,
    5.0,
    7.5,
    10.0,
)
"""Bounds for the time between two tokens."""

LONG_S = (0.01, 0.03, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0,
          240.0, 480.0, 960.0, 1920.0)  # fmt: skip
"""Bounds for whole requests and their parts."""

TOKENS = tuple(float(digit * 10**power) for power in range(7) for digit in (1, 2, 5))
"""Bounds for numbers of tokens."""

ANSWERS = (1.0, 2.0, 5.0, 10.0, 20.0)

KEPT_S = 60.0

KEPT_VALUES = 2048
"""At most, of each kind: they are sorted for each reading."""

MOST_UNMEASURED = 64
"""Steps that wait to be measured."""

PREEMPTIONS = (0.0, 1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)


class Distribution:
    """How often values fell between bounds. `counts` has one more entry than `bounds`: for what is above them all."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0):
        self.bounds = tuple(bounds)
        self.counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.sum = total

    def to_wire(self) -> tuple[Sequence[float], Sequence[int], float]:
        return self.bounds, self.counts, self.sum

    @classmethod
    def from_wire(cls, wire: tuple[Sequence[float], Sequence[int], float]) -> "Distribution":
        return cls(*wire)

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def quantile(self, share: float) -> float | None:
        """About the value below which so much of them lies; None if there are none. Linear between two bounds."""
        left = share * sum(self.counts)
        if not left:
            return None
        low = 0.0
        for bound, count in zip(self.bounds, self.counts, strict=False):
            if count >= left:
                return low + (bound - low) * left / count
            left -= count
            low = bound
        return low


class GroupMetrics(NamedTuple):
    """Of one group of layers."""

    kind: str
    blocks: int  # that it could have if all of its memory were its own
    held_blocks: int
    known_blocks: int  # that carry a known prefix, held or not
    evicted_blocks: int  # since the start


class Metrics(NamedTuple):
    """What was measured since the start, as it travels."""

    distributions: dict[str, Distribution]
    finished: dict[str, int]  # answers by why they ended
    lost_tokens: dict[str, int]  # of prompts: cached once and computed again, by cause
    groups: tuple[GroupMetrics, ...]
    forecasts: tuple[Forecast, ...] = ()  # of each kind of memory
    prepared: PreparedMetrics | None = None  # None while none was wanted
    leases: LeaseCounts = NO_LEASES


class Window:
    """Values of the last minute, at most so many. Each may count several times."""

    def __init__(self) -> None:
        self._values: deque[tuple[float, float, int]] = deque(maxlen=KEPT_VALUES)  # when, what, how many times

    def add(self, value_s: float, now_s: float, times: int = 1) -> None:
        self._values.append((now_s, value_s, times))

    def spread(self, now_s: float) -> Spread:
        while self._values and self._values[0][0] < now_s - KEPT_S:
            self._values.popleft()
        ordered = sorted((value_s, times) for _, value_s, times in self._values)
        return Spread(_below(ordered, 0.5), _below(ordered, 0.95))


def _below(ordered: Sequence[tuple[float, int]], share: float) -> float | None:
    """The smallest value that so much of them do not exceed."""
    left = share * sum(times for _, times in ordered)
    for value, times in ordered:
        left -= times
        if left <= 0:
            return value
    return None


class Meter:
    """Measures. All times are seconds of one clock, which the scheduler's is, too.

    Steps are noted in `steps`. They are measured before the next reading, or many at once.
    """

    def __init__(self) -> None:
        self.first_token_s = Distribution(QUICK_S)
        self.between_tokens_s = Distribution(TOKEN_S)
        self.mean_between_tokens_s = Distribution(TOKEN_S)  # of whole answers
        self.request_s = Distribution(LONG_S)
        self.queue_s = Distribution(LONG_S)
        self.inference_s = Distribution(LONG_S)
        self.prefill_s = Distribution(LONG_S)
        self.decode_s = Distribution(LONG_S)
        self.prompt_tokens = Distribution(TOKENS)
        self.computed_prompt_tokens = Distribution(TOKENS)
        self.generated_tokens = Distribution(TOKENS)
        self.max_tokens = Distribution(TOKENS)
        self.answers = Distribution(ANSWERS)
        self.preemptions = Distribution(PREEMPTIONS)
        self.step_tokens = Distribution(TOKENS)
        self._late_first_token, self._late_next_token, self._late_queue = Window(), Window(), Window()
        self._finished: Counter[str] = Counter()
        self._lost: Counter[str] = Counter()
        self._last_tokens_s: float | None = None  # when a step last brought tokens
        self.steps: list[tuple[int, int, float]] = []  # (tokens, answers that got a further one, when it ended)

    def submitted(self, answers: int, max_tokens: int) -> None:
        self.answers.observe(answers)
        self.max_tokens.observe(max_tokens)

    def measure_steps(self) -> None:
        """Measure the noted steps, in their order: each computed and drew so many tokens."""
        steps, self.steps = self.steps, []
        for tokens, decoded, ended_s in steps:
            self.step_tokens.observe(tokens)
            if decoded and self._last_tokens_s is not None:
                self.between_tokens_s.observe(ended_s - self._last_tokens_s, decoded)
                self._late_next_token.add(ended_s - self._last_tokens_s, ended_s, decoded)
            self._last_tokens_s = ended_s

    def began(self, request: Request, now_s: float) -> None:
        """Its first token has come."""
        request.first_token_s = now_s
        self.first_token_s.observe(now_s - request.arrival_s)
        self._late_first_token.add(now_s - request.arrival_s, now_s)
        self._late_queue.add(request.queue_s, now_s)
        self.prompt_tokens.observe(request.prompt_tokens)
        self.computed_prompt_tokens.observe(request.prompt_tokens - request.cached_tokens)
        if len(request.misses) > 1:  # the first of them was never known
            for cause, tokens in lost_tokens(request.misses).items():
                self._lost[cause] += tokens

    def finished(self, request: Request, reason: str, now_s: float) -> None:
        """It has come to its end, at its last token."""
        self.ended(reason)
        generated = len(request.tokens) - request.prompt_tokens
        self.generated_tokens.observe(generated)
        self.preemptions.observe(request.preemptions)
        if not request.first_token_s:  # it came from an engine that was lost
            return
        self.request_s.observe(now_s - request.arrival_s)
        self.queue_s.observe(request.queue_s)
        self.inference_s.observe(now_s - request.admitted_s)
        self.prefill_s.observe(request.first_token_s - request.admitted_s)
        self.decode_s.observe(now_s - request.first_token_s)
        if generated > 1:
            self.mean_between_tokens_s.observe((now_s - request.first_token_s) / (generated - 1))

    def ended(self, reason: str) -> None:
        """One answer less, however that came."""
        self._finished[reason] += 1

    def latencies(self, now_s: float) -> Latencies:
        """Of late."""
        self.measure_steps()
        windows = self._late_first_token, self._late_next_token, self._late_queue
        return Latencies(*(window.spread(now_s) for window in windows))

    def read(self, manager: CacheManager) -> Metrics:
        self.measure_steps()
        pool, plan = manager.pool, manager.plan
        return Metrics(
            {name: each for name, each in vars(self).items() if isinstance(each, Distribution)},
            dict(self._finished),
            dict(self._lost),
            tuple(
                GroupMetrics(
                    group.reach.name, plan.blocks_of(group), blocks.num_held, len(blocks.index), blocks.num_evicted
                )
                for group, blocks in zip(plan.groups, pool.groups, strict=True)
            ),
        )
