"""A scheduler, a manager and a simulated worker that tests step by hand."""

from collections import deque
from collections.abc import Sequence
from typing import Any

from intarsia.controller.request import Request
from intarsia.controller.scheduling.outcome import Outcome
from intarsia.controller.scheduling.scheduler import Scheduler
from intarsia.controller.scheduling.settings import SchedulerSettings
from intarsia.kvcache.check import recount
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.reach import Reach
from intarsia.kvcache.settings import CacheSettings
from intarsia.proto.request import USUAL_OPTIONS, FinishReason, RequestOptions, SamplingParams
from intarsia.proto.step import StepResult
from intarsia.tests.kvcache.plans import plan_of
from intarsia.tests.simulated import SimulatedWorker

PROMPT = [1, 2, 3, 4, 5, 6, 7]


def request_of(
    prompt: Sequence[int] = (1,),
    max_tokens: int = 8,
    number: int = 1,
    *,
    stop: Sequence[int] = (),
    options: RequestOptions = USUAL_OPTIONS,
    arrival_s: float = 0.0,
) -> Request:
    return Request(
        id=RequestId(number),
        tokens=list(prompt),
        prompt_tokens=len(prompt),
        sampling=SamplingParams(max_tokens=max_tokens),
        seed=0,
        stop_token_ids=frozenset(stop),
        max_total_tokens=len(prompt) + max_tokens,
        options=options,
        arrival_s=arrival_s,
    )


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
        self, prompt: list[int], max_tokens: int, stop: tuple[int, ...] = (), options: RequestOptions = USUAL_OPTIONS
    ) -> Request:
        return self.add_family(prompt, max_tokens, 1, stop, options)[0]

    def add_family(
        self,
        prompt: list[int],
        max_tokens: int,
        answers: int,
        stop: tuple[int, ...] = (),
        options: RequestOptions = USUAL_OPTIONS,
    ) -> list[Request]:
        """A request with forks: several answers to one prompt."""
        family = [self._request(prompt, max_tokens, stop, options) for _ in range(answers)]
        self.scheduler.add(family[0], family[1:])
        return family

    def _request(self, prompt: list[int], max_tokens: int, stop: tuple[int, ...], options: RequestOptions) -> Request:
        self._count += 1
        request = request_of(prompt, max_tokens, self._count, stop=stop, options=options)
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
