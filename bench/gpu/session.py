"""An engine in this process, without Ray and without sockets: the product's own classes, and what the bench adds.

What it adds to the workers: prompts can be passed over, so that 64 requests of 4,096 tokens decode at once; and decode
steps can be run in phases, with graphs, under a profiler, without graphs.
"""

import asyncio
import contextlib
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .device import Bench
from .models import config_of, cut
from .shapes import Engine as Asked
from .weights import random_weights, write_config

MODEL_TOKENS = 69_632
"""The longest request that is asked for, with room for its answer."""
TINY_TOKENS = 256
SOME_BYTES, LEAST_BYTES = 6 << 30, 2 << 30
"""For keys and values, where the engine is not alone."""
MOST_ROWS = 64
TINY_ROWS = 2


class Ran(NamedTuple):
    """A step that was run."""

    rows: int
    tokens: int
    is_decode: bool
    run_us: float  # that the worker took, waiting for the device included
    ended: float


@dataclass
class Phase:
    """Decode steps of all rows that are measured together."""

    name: str
    steps: int
    enter: Callable[[], None] = lambda: None
    leave: Callable[[], None] = lambda: None
    run_us: list[float] = field(default_factory=list)


class Workers:
    """One rank, called directly: what an engine needs of its workers."""

    def __init__(self) -> None:
        from intarsia.workers.worker import Worker

        self.worker = Worker()
        self.facts: Any = None
        self.ran: list[Ran] = []
        self.skips_prompts = False
        self.phases: deque[Phase] = deque()
        self.phase_rows = 0
        self.phases_done = asyncio.Event()

    @property
    def runner(self) -> Any:
        return self.worker._runner

    async def load(self, settings: Any) -> Any:
        self.facts = self.worker.load(settings)
        return self.facts

    async def allocate(self, plan: Any, limits: Any) -> None:
        self.worker.allocate(plan, limits)
        from intarsia.kernels.paged_attention import upload

        forward = self.runner.forward

        def skipping(rows: Any, saves: Any = (), asked: Any = ()) -> Tensor:  # as `ModelRunner.forward`
            if self.skips_prompts and (rows.query_lens > 1).any():
                self.runner.last_tokens.resume(upload(rows.slots[rows.finishes], self.runner.model.device))
                return torch.zeros(int(rows.finishes.sum()), self.facts.vocab_size, device=self.runner.model.device)
            return forward(rows, saves, asked)

        self.runner.forward = skipping

    async def spare_memory(self, trial: Any, limits: Any, share: float) -> int | None:
        return self.worker.spare_memory(trial, limits, share)

    async def prepare_form(self, kind: str, text: str) -> None:
        raise NotImplementedError("nothing is asked in a form")

    async def status(self) -> list[Any]:
        return [self.worker.status()]

    async def rebuild(self) -> None:
        from intarsia.controller.losses import NoRoom

        raise NoRoom("there are no others")

    async def lost(self) -> Any:
        await asyncio.Event().wait()

    async def start_step(self, step: Any) -> Any:
        tokens = len(step.decode) + sum(advance.tokens for advance in step.advance)
        rows = len(step.decode) + len(step.advance)
        is_decode = tokens == rows and not step.admit
        phase = self.phases[0] if self.phases and is_decode and rows == self.phase_rows else None
        if phase is not None and not phase.run_us:
            phase.enter()
        ongoing = self.worker.launch(step)
        await asyncio.sleep(0)
        while not ongoing.has_ended():  # the next step is planned and launched meanwhile
            await asyncio.sleep(0)
        result = ongoing.result()
        if result.error is not None:
            raise RuntimeError(result.error)
        self.ran.append(Ran(rows, tokens, is_decode, result.run_us, time.perf_counter()))
        if phase is not None:
            self._count(phase, result.run_us)
        await asyncio.sleep(0)
        return result

    def _count(self, phase: Phase, run_us: float) -> None:
        phase.run_us.append(run_us)
        if len(phase.run_us) == phase.steps:
            phase.leave()
            self.phases.popleft()
            if not self.phases:
                self.phases_done.set()


class Answer:
    """What came for a request, and when."""

    def __init__(self) -> None:
        self.asked = time.perf_counter()
        self.times: list[float] = []  # of its tokens
        self.error: Exception | None = None
        self.done = asyncio.Event()

    def sink(self, delivery: Any) -> None:
        count = len(delivery.tokens) + sum(len(delta.token_ids) for _, delta in delivery.deltas)
        self.times += [time.perf_counter()] * count
        for _, self.error in delivery.errors:
            pass
        if self.error or any(delta.finish_reason for _, delta in delivery.deltas):
            self.done.set()


class Session:
    """An engine with a model of random weights, asked by the cases of one job."""

    def __init__(self, asked: Asked, bench: Bench, *, is_cut: bool = False):
        """is_cut: a few layers of each kind, which launch the same kernels as all of them"""
        self.bench, self.asked = bench, asked
        self.workers = Workers()
        self.config = config_of(asked.model, bench.is_rehearsed)
        self._is_cut = is_cut
        if is_cut:
            self.config = cut(self.config)
        self._folder = tempfile.TemporaryDirectory(prefix="gpu-battery-model-")
        self._loop = asyncio.new_event_loop()
        self._handles = 0
        started = time.perf_counter()
        with random_weights(bench):
            self.engine = self._loop.run_until_complete(self._build())
        self._fill_pages()
        self.start_s = time.perf_counter() - started

    async def _build(self) -> Any:
        from intarsia.controller.scheduling.settings import SchedulerSettings
        from intarsia.controller.startup import EngineSettings, build_engine
        from intarsia.kvcache.plan import PlanSettings
        from intarsia.proto.worker import ModelSettings

        tiny = self.bench.is_rehearsed
        folder = write_config(Path(self._folder.name), self.config)
        model = ModelSettings(str(folder), dtype=self.config["dtype"], enforce_eager=self.asked.enforce_eager)
        settings = EngineSettings(
            model=model,
            plan=PlanSettings(memory_bytes=4 << 20 if tiny else LEAST_BYTES if self._is_cut else SOME_BYTES),
            scheduler=SchedulerSettings(
                max_num_seqs=self.most_rows, max_num_batched_tokens=32 if tiny else 2048, prefill_share=1.0
            ),
            max_model_len=TINY_TOKENS if tiny else MODEL_TOKENS,
            prefix_caching=False,
            gpu_memory_utilization=None if tiny or self._is_cut or self.asked.is_peer else 0.9,
        )
        return await build_engine(settings, self.workers)

    @property
    def most_rows(self) -> int:
        return TINY_ROWS if self.bench.is_rehearsed else MOST_ROWS

    @property
    def module(self) -> Any:
        return self.workers.runner.model.module

    def _fill_pages(self) -> None:
        """With numbers: zeros would be multiplied with less power."""
        dtype = getattr(torch, self.workers.facts.dtype)
        for group in self.workers.runner.model.pages._whole:
            for pages in group:
                for part in pages.split(1 << 14):
                    part.view(dtype).normal_()

    def refusal(self) -> str | None:
        """Why decode steps are not recorded, if they are not."""
        graphs = self.workers.runner.graphs
        if graphs is None:
            return "no steps are recorded"
        return graphs.refusal or next(iter(graphs.refusals.values()), None)

    def fits(self, sizes: Sequence[tuple[int, int]], more: int) -> bool:
        """Whether the pages hold so many requests of so many tokens each, and `more` that come."""
        plan = self.engine._manager.plan
        return sum(rows / max(1e-9, plan.concurrency(length + more)) for rows, length in sizes) <= 1

    # -- requests ------------------------------------------------------------------------------------------------------

    def run(self, work: Callable[[], Any]) -> Any:
        """A coroutine beside the engine's loop. What is left of requests afterwards is ended."""

        async def beside() -> Any:
            loop = asyncio.ensure_future(self.engine.run())
            asked = asyncio.ensure_future(work())
            try:
                await asyncio.wait({loop, asked}, return_when=asyncio.FIRST_COMPLETED)
                if not asked.done():
                    raise RuntimeError(f"the engine stopped: {self.engine.failure}")
                return asked.result()
            finally:
                asked.cancel()
                for request in list(self.engine._live):
                    self.engine.abort(request)
                await self._idle()
                loop.cancel()
                await asyncio.gather(loop, asked, return_exceptions=True)

        return self._loop.run_until_complete(beside())

    async def _idle(self) -> None:
        """Until the steps under way have been answered."""
        for _ in range(200):
            if self.engine.failure is not None or not (self.engine._live or self.engine._under_way):
                return
            await asyncio.sleep(0.005)

    def submit(self, length: int, new_tokens: int) -> Answer:
        """A prompt of random tokens."""
        from intarsia.proto.request import USUAL_OPTIONS, GenerateRequest, SamplingParams

        vocab = self.workers.facts.vocab_size
        prompt = torch.randint(1, vocab, (length,), device="cpu").tolist()
        sampling = SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True)
        answer = Answer()
        request = GenerateRequest(
            prompt, sampling, (), USUAL_OPTIONS, stream_interval_s=0.0, prompt_tokens=length, is_known=False
        )
        self.engine.submit(request, self._handles, answer.sink)
        self._handles += 1
        return answer

    def in_phases(self, lengths: Sequence[int], phases: Sequence[Phase]) -> None:
        """Decode steps of rows of about so many tokens, whose prompts were passed over."""
        workers, rows = self.workers, len(lengths)
        budget = sum(phase.steps for phase in phases) + rows * 4 + sum(lengths) // 512 + 32

        async def work() -> None:
            workers.phases_done.clear()
            workers.phase_rows = rows
            workers.phases = deque(phases)
            answers = [self.submit(length, budget) for length in lengths]
            done = asyncio.ensure_future(workers.phases_done.wait())
            ends = asyncio.gather(*(answer.done.wait() for answer in answers))
            await asyncio.wait({done, asyncio.ensure_future(ends)}, return_when=asyncio.FIRST_COMPLETED)
            if not done.done():
                done.cancel()
                raise RuntimeError(f"the requests ended before {[phase.name for phase in workers.phases]}")

        with self.skipping():
            try:
                self.run(work)
            finally:
                workers.phases.clear()

    @contextlib.contextmanager
    def skipping(self) -> Iterator[None]:
        self.workers.skips_prompts = True
        try:
            yield
        finally:
            self.workers.skips_prompts = False

    @contextlib.contextmanager
    def without_graphs(self) -> Iterator[None]:
        runner = self.workers.runner
        graphs, runner.graphs = runner.graphs, None
        try:
            yield
        finally:
            runner.graphs = graphs
