"""An engine in this process: the very classes that run in the cluster, without Ray and without sockets."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from intarsia.controller.engine import Engine
from intarsia.controller.losses import NoRoom
from intarsia.controller.startup import build_engine
from intarsia.deploy.front_end.images import ImageReader, read_images
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import IntarsiaError
from intarsia.kvcache.plan import MemoryPlan
from intarsia.proto.messages import Delivery
from intarsia.proto.request import USUAL_OPTIONS, GenerateRequest, Image, RequestOptions, SamplingParams
from intarsia.proto.step import Step, StepResult
from intarsia.proto.worker import ModelFacts, ModelSettings, RunnerLimits, WorkerStatus
from intarsia.workers.worker import Worker


class LocalWorkers:
    """One rank, called directly; steps still travel as packed bytes."""

    def __init__(self):
        self.worker = Worker()

    async def load(self, settings: ModelSettings) -> ModelFacts:
        return self.worker.load(settings)

    async def allocate(self, plan: MemoryPlan, limits: RunnerLimits) -> None:
        self.worker.allocate(plan, limits)

    async def spare_memory(self, trial: MemoryPlan, limits: RunnerLimits, share: float) -> int | None:
        return self.worker.spare_memory(trial, limits, share)

    async def prepare_form(self, kind: str, text: str) -> None:
        await asyncio.to_thread(self.worker.prepare_form, kind, text)

    async def status(self) -> list[WorkerStatus]:
        return [self.worker.status()]

    async def rebuild(self) -> None:
        raise NoRoom("there are no others")

    async def lost(self) -> IntarsiaError:
        await asyncio.Event().wait()
        raise AssertionError

    @property
    def refusal(self) -> str | None:
        """Why decode steps are not recorded, if they are not."""
        runner = self.worker._runner
        assert runner is not None
        if runner.graphs is None:
            return "no steps of this model are recorded"
        return runner.graphs.refusal or next(iter(runner.graphs.refusals.values()), None)

    async def start_step(self, step: Step) -> StepResult:
        assert Step.unpack(step.pack()) == step
        ongoing = self.worker.launch(Step.unpack(step.pack()))
        await asyncio.sleep(0)  # the next step is begun before this one is waited for
        result = ongoing.result()
        assert result.error is None, result.error
        return StepResult.unpack(result.pack())


def asking(
    tokens: Sequence[int],
    sampling: SamplingParams,
    images: Sequence[Image] = (),
    options: RequestOptions = USUAL_OPTIONS,
) -> GenerateRequest:
    """A new request that wants each token at once."""
    return GenerateRequest(
        tokens, sampling, images, options, stream_interval_s=0.0, prompt_tokens=len(tokens), is_known=False
    )


class Completion:
    """Collects what an engine brings to one request."""

    def __init__(self):
        self.token_ids: list[int] = []
        self.logprobs: list[Any] = []
        self.prompt_logprobs: tuple[Any, ...] = ()
        self.num_cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: IntarsiaError | None = None
        self.done = asyncio.Event()

    def sink(self, delivery: Delivery) -> None:
        self.token_ids += delivery.tokens
        for _, delta in delivery.deltas:
            self.token_ids += delta.token_ids
            self.logprobs += delta.logprobs or ()
            self.prompt_logprobs = tuple(delta.prompt_logprobs or ()) or self.prompt_logprobs
            self.num_cached_tokens = delta.num_cached_tokens
            self.finish_reason = delta.finish_reason
        for _, self.error in delivery.errors:
            pass
        if self.error or self.finish_reason:
            self.done.set()


async def make_engine(model: Path, workers: Any | None = None, **settings: Any) -> Engine:
    """An engine over `workers` (default: one in this process), with deploy's setting names."""
    defaults = {"kv_cache_memory": "4MiB", "max_num_seqs": 16, "max_images_per_request": 3}
    return await build_engine(engine_settings(str(model), **(defaults | settings)), workers or LocalWorkers())


async def complete(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    images: Sequence[Sequence[bytes]] | None = None,
) -> list[Completion]:
    """Run all prompts, with their images, at once to their ends, the engine's loop included.

    sampling: of all, or of each
    """
    completions = [Completion() for _ in prompts]
    loop = asyncio.create_task(engine.run())
    try:
        reader = ImageReader.of(engine.info)
        params = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
        asked = zip(prompts, params, images or [[] for _ in prompts], completions, strict=True)
        for n, (prompt, wanted, pictures, completion) in enumerate(asked):
            found = read_images(reader, pictures, engine.info.model)
            engine.submit(asking(prompt, wanted, found), n, completion.sink)
        await asyncio.gather(*(completion.done.wait() for completion in completions))
        await asyncio.sleep(0)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    return completions


def bits(answers: Sequence[Completion]) -> list[list[tuple[int, Any]]]:
    """Tokens and their log-probabilities, which tell logits apart that differ in their last bit."""
    return [list(zip(answer.token_ids, answer.logprobs, strict=True)) for answer in answers]
