"""Telemetry: one object hears what becomes of each request and of each step, and keeps every figure about them.

    counts          of the engine (`EngineStats`), and the same of each tenant
    distributions   and the latencies of the last minute (`metrics.py`)
    a journal       of the latest steps and of the latest requests that ended
    spans           of traced requests that have finished

`status.py` reads them. Times are seconds of one clock, which is the scheduler's too; those of a step are microseconds.
"""

import time
from collections import Counter, deque
from collections.abc import Sized
from dataclasses import dataclass, fields
from typing import NamedTuple

from ..kvcache.misses import SALT, lost_tokens
from ..proto.status import EngineLoad
from ..proto.step import Step, StepResult
from ..proto.tracing import Tracer
from .metrics import MOST_UNMEASURED, Meter
from .request import Request
from .scheduling.outcome import Outcome
from .scheduling.scheduler import Scheduler
from .snapshot import RequestSnapshot, StepSnapshot, request_snapshot

KEPT_STEPS = 600
"""Latest steps that are remembered: some seconds of a small model, a minute of a large one."""

KEPT_ENDED = 100
"""Latest requests that have ended."""

LATE_S, SHORTEST_S = 10.0, 0.1
"""The time over which tokens per second are counted, and the least that they are divided by."""

MOST_TENANTS = 4096
"""Tenants that are counted. A server has as many as its keys name; a program of its own may salt as it likes."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start. Times are of the controller process, in microseconds."""

    steps: int = 0
    prompt_tokens: int = 0  # of answers that have begun
    cached_tokens: int = 0  # of them, found in the prefix cache
    generated_tokens: int = 0
    computed_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    expired_requests: int = 0
    refused_requests: int = 0  # because more came than can be served
    preemptions: int = 0
    swaps: int = 0  # of them, those whose blocks went to host memory
    plan_us: float = 0.0  # choosing the work of a step, and its blocks
    commit_us: float = 0.0  # entering its tokens, naming and giving back blocks, handing out
    wait_us: float = 0.0  # with nothing to do but wait for a worker's answer
    run_us: float = 0.0  # that rank 0 spent on steps
    rebuilds: int = 0  # times that the workers were lost and came back


COUNTS = tuple(each.name for each in fields(EngineStats) if each.name in EngineLoad._fields)
"""Counters that `EngineLoad` shows, too."""

COUNTED_ENDS = {
    "stop": "finished_requests",
    "length": "finished_requests",
    "abort": "aborted_requests",
    "deadline": "expired_requests",
}
"""The counter of each way in which a request ends; "error" has none."""


class LoopTimes(NamedTuple):
    """What the controller spent on one step, in microseconds."""

    plan_us: float
    wait_us: float
    commit_us: float


class Journal:
    """The latest steps and the latest requests that ended."""

    def __init__(self) -> None:
        self._steps: deque[StepSnapshot] = deque(maxlen=KEPT_STEPS)
        self._ended: deque[RequestSnapshot] = deque(maxlen=KEPT_ENDED)

    def stepped(self, step: StepSnapshot) -> None:
        self._steps.append(step)

    def ended(self, request: RequestSnapshot) -> None:
        self._ended.append(request)

    def steps(self, since: int) -> tuple[StepSnapshot, ...]:
        return tuple(step for step in self._steps if step.number > since)

    def all_ended(self, with_tokens: bool) -> tuple[RequestSnapshot, ...]:
        return tuple(self._ended) if with_tokens else tuple(each._replace(tokens=None) for each in self._ended)


class Telemetry:
    """Hears events; never acts on them. Single-threaded."""

    def __init__(self, scheduler: Scheduler, live: Sized, tracer: Tracer | None = None):
        """live: the requests that have not left
        tracer: where the spans of traced requests go; None: nowhere
        """
        self._scheduler = scheduler
        self._live = live
        self.tracer = tracer
        self.stats = EngineStats()
        self.meter = Meter()
        self.journal = Journal()
        self._tenants: dict[str, Counter[str]] = {}  # by salt, with the names of `COUNTS`

    def counts(self, salt: str | None = None) -> dict[str, int]:
        """By the names of `COUNTS`. salt: of this tenant's requests that have begun, left or were refused; None: of the
        engine."""
        if salt is None:
            return {name: getattr(self.stats, name) for name in COUNTS}
        tenant = self._tenants.get(salt, Counter())
        return {name: tenant[name] for name in COUNTS} | {"rebuilds": self.stats.rebuilds}

    def tokens_per_s(self, now_s: float) -> float | None:
        """Tokens drawn per second of late. None: none were."""
        late = [step for step in self.journal.steps(0) if step.ended_s > now_s - LATE_S]
        drawn = sum(step.decoding + step.began for step in late)
        return drawn / max(now_s - late[0].ended_s, SHORTEST_S) if drawn else None

    # -- requests ----------------------------------------------------------------------------------------------------

    def submitted(self, answers: int, max_tokens: int) -> None:
        self.meter.submitted(answers, max_tokens)

    def refused(self, requests: int, salt: str | None = None) -> None:
        """More came than can be served. salt: whose they were; None: a front end refused them, and did not say."""
        self.stats.refused_requests += requests
        if salt is not None:
            self._tenant(salt)["refused_requests"] += requests

    def began(self, request: Request, now_s: float) -> None:
        """Its first token has come."""
        self._count(request, "prompt_tokens", request.prompt_tokens)
        self._count(request, "cached_tokens", request.cached_tokens)
        self.meter.began(request, now_s)

    def left(self, request: Request) -> None:
        """It is live no longer. `ended` follows, unless it was never queued."""
        tenant = self._tenant(request.options.salt)
        tenant["generated_tokens"] += len(request.tokens) - request.prompt_tokens
        tenant["preemptions"] += request.preemptions

    def ended(self, request: Request, how: str, now_s: float) -> None:
        """It has left, and that is to be seen. how: a `FinishReason`, "abort", "deadline" or "error"."""
        counter = COUNTED_ENDS.get(how)
        if counter is not None:
            self._count(request, counter, 1)
        if counter == "finished_requests":
            self.meter.finished(request, how, now_s)
            if self.tracer is not None and request.options.trace:
                _trace(self.tracer, request, now_s)
        else:
            self.meter.ended(how)
        self.journal.ended(request_snapshot(request, how, now_s, (), with_tokens=True))

    def _count(self, request: Request, name: str, count: int) -> None:
        """For the engine and for the request's tenant."""
        setattr(self.stats, name, getattr(self.stats, name) + count)
        self._tenant(request.options.salt)[name] += count

    def _tenant(self, salt: str) -> Counter[str]:
        """The oldest tenant is forgotten for one too many."""
        tenant = self._tenants.get(salt)
        if tenant is None:
            if len(self._tenants) >= MOST_TENANTS:
                del self._tenants[next(iter(self._tenants))]
            tenant = self._tenants[salt] = Counter()
        return tenant

    # -- steps -------------------------------------------------------------------------------------------------------

    def planned(self, plan_us: float) -> None:
        """A plan was made, whether a step came of it or not."""
        self.stats.plan_us += plan_us

    def stepped(self, step: Step, result: StepResult, outcome: Outcome, times: LoopTimes) -> None:
        """A step has run, and its tokens are entered."""
        now_s, running = time.monotonic(), self._scheduler.num_seated
        stats = self.stats
        began = ended = 0
        for entry in outcome.notable:
            began += entry.request.has_just_begun
            ended += entry.finish_reason is not None
        generated = len(outcome.tokens) + len(outcome.notable)
        computed = len(step.decode) + sum(advance.tokens for advance in step.advance)
        # The first token of an answer comes with its prompt; every other one was decoded.
        decoded = generated - began
        self.meter.steps.append((computed + began, decoded, now_s))
        if len(self.meter.steps) >= MOST_UNMEASURED:
            self.meter.measure_steps()
        self.journal.stepped(
            StepSnapshot(
                number=step.number,
                ended_s=now_s,
                plan_us=int(times.plan_us),
                wait_us=int(times.wait_us),
                commit_us=int(times.commit_us),
                run_us=result.run_us,
                decoding=decoded,
                prompt_tokens=computed - decoded,
                began=began,
                ended=ended,
                running=running,
                waiting=max(0, len(self._live) - running),
                preempted=self._scheduler.preemption.preemptions - stats.preemptions,
            )
        )
        stats.steps += 1
        stats.generated_tokens += generated
        stats.computed_tokens += computed
        stats.preemptions = self._scheduler.preemption.preemptions
        stats.swaps = self._scheduler.preemption.swaps
        stats.wait_us += times.wait_us
        stats.commit_us += times.commit_us
        stats.run_us += result.run_us

    def rebuilt(self) -> None:
        """The workers were lost, and are back."""
        self.stats.rebuilds += 1


def _trace(tracer: Tracer, request: Request, ended_s: float) -> None:
    """Where the time of a finished request went, as three spans."""
    prompt = {
        "gen_ai.usage.input_tokens": request.prompt_tokens,
        "intarsia.cached_tokens": request.cached_tokens,
        # Not what another salt has: a tenant's own traces would tell what others asked.
        **{
            f"intarsia.lost_tokens.{cause}": tokens
            for cause, tokens in lost_tokens(request.misses).items()
            if cause != SALT
        },
    }
    answer = {
        "gen_ai.usage.output_tokens": len(request.tokens) - request.prompt_tokens,
        "intarsia.preemptions": request.preemptions,
    }
    first_s = request.first_token_s or request.admitted_s  # it may have had tokens when it came
    for name, start_s, end_s, about in (
        ("queue", request.arrival_s, request.admitted_s, {"intarsia.priority": request.options.priority}),
        ("prefill", request.admitted_s, first_s, prompt),
        ("decode", first_s, ended_s, answer),
    ):
        tracer.record(name, [request.options.trace], start_s, end_s, about)
