"""Engines for the small copy, in this process, and what they are asked."""

import asyncio
from bisect import bisect_left
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ...controller.engine import Engine
from ...controller.startup import EngineSettings
from ...errors import IntarsiaError, InvalidSetting
from ...kvcache.plan import MemoryPlan, PlanSettings
from ...kvcache.spec import LayerSpec
from ...kvcache.strategies import plan_memory
from ...proto.messages import Delivery
from ...proto.request import USUAL_OPTIONS, GenerateRequest, RequestOptions, SamplingParams
from ..settings.options import engine_settings

POOL = "64MiB"
URGENT = RequestOptions(priority=-10)


class Case(NamedTuple):
    """How the engine is set up."""

    name: str
    block_tokens: int
    chunk_tokens: int  # of a prompt, computed at once
    is_tight: bool = False  # a pool in which the longest request fits, but not all of them


class Answer:
    """Collects what an engine brings to one request."""

    def __init__(self):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.cached_tokens = 0
        self.error: IntarsiaError | None = None
        self.began = asyncio.Event()
        self.done = asyncio.Event()

    def take(self, delivery: Delivery) -> None:
        self.tokens += delivery.tokens
        is_last = False
        for _, delta in delivery.deltas:
            self.tokens += delta.token_ids
            self.logprobs += [row.logprob for row in delta.logprobs or ()]
            self.prompt_logprobs += [row.logprob for row in delta.prompt_logprobs or ()]
            self.cached_tokens = delta.num_cached_tokens
            is_last = is_last or delta.finish_reason is not None
        for _, self.error in delivery.errors:
            pass
        self.began.set()
        if self.error or is_last:
            self.done.set()


def settings_of(folder: Path, case: Case, ranks: int, memory: str, **others: Any) -> EngineSettings:
    """memory: for keys and values, of each rank"""
    return engine_settings(
        str(folder),
        dtype="float32",
        tensor_parallel_size=ranks,
        block_size=case.block_tokens,
        max_prefill_chunk_tokens=case.chunk_tokens,
        max_num_seqs=8,
        cpu_threads=1,
        kv_cache_memory=memory,
        **others,
    )


def least_memory(
    layers: tuple[LayerSpec, ...], block_tokens: int, tokens: int, positions: int, encoder_tokens: int = 0
) -> int:
    """Bytes on a rank in which a request of so many tokens just fits, to a kibibyte, and a large page to spare.

    positions: tokens of the longest text
    """

    def plan(kibibytes: int) -> MemoryPlan | None:
        try:
            return plan_memory(
                layers, PlanSettings(kibibytes << 10, block_tokens, encoder_tokens=encoder_tokens), positions
            )
        except InvalidSetting:
            return None

    fits = bisect_left(range(8192), True, key=lambda n: (made := plan(n + 1)) is not None and made.fits(tokens)) + 1
    made = plan(fits)
    assert made is not None
    return (fits << 10) + made.arenas[0].page_bytes


async def answers_of(
    engine: Engine, asked: Sequence[Sequence[int]], sampling: SamplingParams, *, last_is_urgent: bool = False
) -> list[Answer]:
    """All at once, to their ends. last_is_urgent: the last one comes when the first has begun, and before all others"""
    answers = [Answer() for _ in asked]
    loop = asyncio.create_task(engine.run())
    try:
        for n, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            is_urgent = last_is_urgent and n == len(asked) - 1
            if is_urgent:
                await answers[0].began.wait()
            options, size = URGENT if is_urgent else USUAL_OPTIONS, len(prompt)
            request = GenerateRequest(
                prompt, sampling, (), options, stream_interval_s=0.0, prompt_tokens=size, is_known=False
            )
            engine.submit(request, n, answer.take)
        await asyncio.gather(*(answer.done.wait() for answer in answers))
        await asyncio.sleep(0)
    finally:
        loop.cancel()
        await asyncio.gather(loop, return_exceptions=True)
    return answers
