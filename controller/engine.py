"""The engine: plan a step, run it on the workers, commit it, hand out the tokens; repeat.

A plain class on an event loop. `actor.py` puts it into the Ray actor that users meet; tests run it as it is.
"""

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from ..errors import EngineUnavailable, IntarsiaError, InvalidRequest, RequestTooLarge
from ..kvcache.check import Recount, recount
from ..kvcache.manager import CacheManager, RequestId
from ..proto.step import Step, StepResult
from .images import Gallery, Image, lay_out
from .info import EngineInfo
from .request import Request, SamplingParams
from .scheduler import Progress, Scheduler

logger = logging.getLogger(__name__)


class StepRunner(Protocol):
    """Whoever runs steps: the worker group, or one worker in this process."""

    def start_step(self, step: Step) -> Awaitable[StepResult]:
        """Send a step on its way at once; its answer comes later. Answers are awaited in the order of steps."""
        ...


class TokenLogprobs(NamedTuple):
    """Natural-log probabilities at one position."""

    token_id: int  # the chosen token
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob) of the most probable tokens, best first


class TokenDelta(NamedTuple):
    """What a step brought to one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one per token, when asked for
    finish_reason: str | None  # None while running, else "stop" or "length"
    num_cached_tokens: int  # of the prompt, found in the prefix cache


Outlet = Callable[[list[tuple[str, TokenDelta | IntarsiaError]]], None]
"""Takes what one step brought to the requests of one front end: (the front end's request id, delta or error)."""


@dataclass(slots=True)
class EngineStats:
    """Counters since the start. Times are of the controller process, in microseconds."""

    steps: int = 0
    generated_tokens: int = 0
    computed_tokens: int = 0
    finished_requests: int = 0
    aborted_requests: int = 0
    preemptions: int = 0
    plan_us: float = 0.0  # choosing the work of a step, and its blocks
    commit_us: float = 0.0  # entering its tokens, naming and giving back blocks, handing out
    wait_us: float = 0.0  # with nothing to do but wait for a worker's answer
    run_us: float = 0.0  # that rank 0 spent on steps


class _Caller(NamedTuple):
    outlet: Outlet
    external_id: str


class Engine:
    """Owns the scheduler and the block pool. All methods are called on one event loop."""

    def __init__(
        self, info: EngineInfo, scheduler: Scheduler, manager: CacheManager, workers: StepRunner, depth: int = 2
    ):
        """depth: steps under way at once. 2: one runs while the next is planned; 1: each waits for the one before."""
        self.info = info
        self.stats = EngineStats()
        self._scheduler = scheduler
        self._manager = manager
        self._workers = workers
        self._callers: dict[RequestId, _Caller] = {}
        self._next_id = 0
        self._depth = depth
        self._under_way: deque[tuple[Step, asyncio.Future[StepResult]]] = deque()  # oldest first
        self._wake = asyncio.Event()
        self._failure: IntarsiaError | None = None

    # -- requests ----------------------------------------------------------------------------------------------------

    def submit(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams,
        external_id: str,
        outlet: Outlet,
        images: Sequence[Image] = (),
    ) -> RequestId:
        """Queue a request; its tokens go to `outlet`. Raises `InvalidRequest` if it can not be served as asked."""
        if self._failure is not None:
            raise self._failure
        max_total_tokens = self._check(tokens, sampling)
        gallery = self._lay_out(tokens, images)
        self._next_id += 1
        request = Request(
            id=RequestId(self._next_id),
            tokens=list(tokens),
            prompt_tokens=len(tokens),
            sampling=sampling,
            seed=secrets.randbits(63) if sampling.seed is None else sampling.seed,
            stop_token_ids=frozenset(sampling.stop_token_ids)
            | (frozenset() if sampling.ignore_eos else frozenset(self.info.eos_token_ids)),
            max_total_tokens=max_total_tokens,
            gallery=gallery,
        )
        self._callers[request.id] = _Caller(outlet, external_id)
        self._scheduler.add(request)
        self._wake.set()
        return request.id

    def abort(self, request_id: RequestId) -> None:
        """Stop a request and free its blocks. Unknown or finished ones are left alone."""
        if self._callers.pop(request_id, None) is not None and self._scheduler.abort(request_id):
            self.stats.aborted_requests += 1
            self._wake.set()

    def recount(self) -> Recount:
        """Count every block from the tables. Raises `AssertionError` on any contradiction."""
        return recount(self._manager)

    def reset_prefix_cache(self) -> None:
        self._manager.reset_prefix_cache()

    # -- the loop ----------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until cancelled. When the workers are lost every request is told, and new ones are refused."""
        try:
            while True:
                self._send_steps()
                if self._under_way:
                    await self._finish_oldest()
                else:
                    await self._wait_for_work()
        except IntarsiaError as error:
            logger.error("the engine stops: %s", error)
            self._fail(error)
        except Exception as error:  # a bug of ours must still reach every waiting caller
            logger.exception("the engine stops on an internal error")
            self._fail(
                EngineUnavailable(f"the engine stopped on an internal error: {error!r}. See the controller's log.")
            )
        finally:
            for _, answer in self._under_way:
                answer.cancel()

    def _send_steps(self) -> None:
        """Keep the workers busy: while one step runs, the next one waits at their door."""
        while len(self._under_way) < self._depth and self._scheduler.has_work:
            started = time.perf_counter()
            step = self._scheduler.plan_step()
            self.stats.plan_us += (time.perf_counter() - started) * 1e6
            if step is None:
                return
            self._under_way.append((step, asyncio.ensure_future(self._workers.start_step(step))))

    async def _finish_oldest(self) -> None:
        """Wait for the answer to the oldest step; new requests need not wait for it if there is room for a step."""
        step, answer = self._under_way[0]
        started = time.perf_counter()
        if len(self._under_way) < self._depth:
            self._wake.clear()
            woken = asyncio.ensure_future(self._wake.wait())
            await asyncio.wait((answer, woken), return_when=asyncio.FIRST_COMPLETED)
            woken.cancel()
            if not answer.done():
                return
        result = await answer
        answered = time.perf_counter()
        self._under_way.popleft()
        progress = self._scheduler.commit(result)
        self._deliver(progress)
        commit_us = (time.perf_counter() - answered) * 1e6
        self._count(step, result, len(progress), wait_us=(answered - started) * 1e6, commit_us=commit_us)
        # Let front ends submit, abort and receive before the next plan, even if no await above had to wait.
        await asyncio.sleep(0)

    async def _wait_for_work(self) -> None:
        await asyncio.sleep(0)
        while not self._scheduler.has_work:
            self._wake.clear()
            await self._wake.wait()

    def _deliver(self, progress: list[Progress]) -> None:
        """One call per front end and step, whatever the number of its requests."""
        batches: dict[Outlet, list[tuple[str, TokenDelta | IntarsiaError]]] = defaultdict(list)
        for entry in progress:
            request = entry.request
            caller = self._callers.get(request.id)
            if caller is None:
                continue
            batches[caller.outlet].append((caller.external_id, _delta(entry)))
            if entry.finish_reason is not None:
                del self._callers[request.id]
                self.stats.finished_requests += 1
        for outlet, batch in batches.items():
            outlet(batch)

    def _fail(self, error: IntarsiaError) -> None:
        self._failure = error
        for caller in self._callers.values():
            caller.outlet([(caller.external_id, error)])
        self._callers.clear()

    def _count(self, step: Step, result: StepResult, tokens: int, *, wait_us: float, commit_us: float) -> None:
        stats = self.stats
        stats.steps += 1
        stats.generated_tokens += tokens
        stats.computed_tokens += sum(advance.tokens for advance in step.advance)
        stats.preemptions = self._scheduler.preemptions
        stats.wait_us += wait_us
        stats.commit_us += commit_us
        stats.run_us += result.run_us

    # -- at the door -------------------------------------------------------------------------------------------------

    def _check(self, tokens: Sequence[int], sampling: SamplingParams) -> int:
        """Refuse what can never be served. Returns the length at which the sequence ends at the latest."""
        info = self.info
        if len(tokens) == 0:
            raise InvalidRequest("the prompt is empty; it needs at least 1 token", field="prompt")
        if len(tokens) >= info.max_model_len:
            raise InvalidRequest(
                f"the prompt has {len(tokens)} tokens; max_model_len is {info.max_model_len}, which leaves room for "
                f"prompts of up to {info.max_model_len - 1} tokens and one new token. Shorten the prompt.",
                field="prompt",
                asked=len(tokens),
                limit=info.max_model_len - 1,
            )
        if set(map(type, tokens)) != {int}:
            position, token = next((n, t) for n, t in enumerate(tokens) if type(t) is not int)
            raise InvalidRequest(f"prompt token {token!r} at position {position} is no whole number", field="prompt")
        if min(tokens) < 0 or max(tokens) >= info.vocab_size:
            position, token = next((n, t) for n, t in enumerate(tokens) if not 0 <= t < info.vocab_size)
            raise InvalidRequest(
                f"prompt token {token} at position {position} is not in the vocabulary of {info.vocab_size} tokens",
                field="prompt",
                asked=token,
                limit=info.vocab_size - 1,
            )
        strange = next((token for token, _ in sampling.biases if token >= info.vocab_size), None)
        if strange is not None:
            raise InvalidRequest(
                f"logit_bias names token {strange}, which is not in the vocabulary of {info.vocab_size} tokens",
                field="logit_bias",
                asked=strange,
                limit=info.vocab_size - 1,
            )
        total_tokens = min(len(tokens) + sampling.max_tokens, info.max_model_len)
        if not self._manager.fits(total_tokens):
            raise RequestTooLarge(
                f"{len(tokens)} prompt tokens + {sampling.max_tokens} new ones need "
                f"{self._manager.plan.blocks_alone(total_tokens)} blocks; the whole pool has {info.num_blocks}. "
                "Ask for fewer tokens, or start the engine with a larger kv_cache_memory.",
                field="max_tokens",
                asked=self._manager.plan.blocks_alone(total_tokens),
                limit=info.num_blocks,
            )
        return total_tokens

    def _lay_out(self, tokens: Sequence[int], images: Sequence[Image]) -> Gallery | None:
        info = self.info
        if not images and (info.image_token_id is None or info.image_token_id not in tokens):
            return None
        if info.image_token_id is None:
            raise InvalidRequest(f"{info.model} takes no images, and the request has {len(images)}", field="images")
        if len(images) > info.max_images_per_request:
            raise InvalidRequest(
                f"the request has {len(images)} images; max_images_per_request is {info.max_images_per_request}. Send "
                "fewer, or start the engine with a larger one.",
                field="images",
                asked=len(images),
                limit=info.max_images_per_request,
            )
        places = tokens.count(info.image_token_id)
        if places != len(images):
            raise InvalidRequest(
                f"the prompt has {places} image tokens (id {info.image_token_id}) and the request {len(images)} "
                "images. Put one image token where each image belongs.",
                field="images",
                asked=len(images),
                limit=places,
            )
        return lay_out(tokens, info.image_token_id, images, self._manager.plan.block_tokens)


def _delta(entry: Progress) -> TokenDelta:
    sampled = entry.sampled
    logprobs = None
    if sampled.logprob is not None:
        logprobs = (TokenLogprobs(sampled.token, sampled.logprob, sampled.top),)
    reason = entry.finish_reason.value if entry.finish_reason else None
    return TokenDelta((sampled.token,), logprobs, reason, entry.request.cached_tokens)
