"""An engine answers with the small copy, and every token is held against what transformers computes."""

import asyncio
from bisect import bisect_left
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ...controller.engine import Engine
from ...controller.startup import EngineSettings, build_engine
from ...errors import IntarsiaError, InvalidSetting
from ...kvcache.plan import MemoryPlan, PlanSettings
from ...kvcache.spec import LayerSpec
from ...kvcache.strategies import plan_memory
from ...proto.messages import Delivery
from ...proto.request import USUAL_OPTIONS, GenerateRequest, SamplingParams
from ..settings.options import engine_settings
from .local_workers import LocalWorkers
from .scaled import POSITIONS, VOCABULARY

LENGTHS = 5, 29, 41, 58
"""Tokens of the prompts: shorter than a window, and several windows long."""

NEW_TOKENS = 24
NEAR = 2e-3
"""Log-probabilities that differ by less are the same. Sums in another order differ by 1e-5 and less."""

TIE = 1e-3
"""Logits of the oracle that lie closer together than this may trade places."""

POOL = "4MiB"


class Case(NamedTuple):
    """How the engine is set up."""

    name: str
    block_tokens: int
    chunk_tokens: int  # of a prompt, computed at once
    is_tight: bool = False  # a pool in which the longest request fits, but not all of them


CASES = (
    Case("blocks of 5, chunks of 13", 5, 13),
    Case("blocks of 16, whole prompts", 16, POSITIONS),
    Case("a pool for one", 5, 64, is_tight=True),
)


class Difference(NamedTuple):
    """Where an answer first leaves what transformers computes."""

    case: str
    ranks: int
    prompt_tokens: int
    position: int
    off: float  # of a log-probability; infinite where another token was chosen
    what: str

    @property
    def told(self) -> str:
        place = f"{self.case}, {self.ranks} ranks: {self.what}"
        by = "another token is said" if self.off == float("inf") else f"a log-probability is {self.off:.2g} off"
        return f"{place}: with a prompt of {self.prompt_tokens} tokens, at position {self.position} {by}"


class Answer:
    """Collects what an engine brings to one request."""

    def __init__(self):
        self.tokens: list[int] = []
        self.logprobs: list[float] = []
        self.prompt_logprobs: list[float] = []
        self.cached_tokens = 0
        self.error: IntarsiaError | None = None
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
        if self.error or is_last:
            self.done.set()


def prompts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


async def first_difference(folder: Path, oracle: Any, ranks: int, seed: int) -> Difference | None:
    """None: whatever the engine does with the copy, it answers as the oracle does. Raises what an engine raises."""
    for case in CASES:
        asked = [*prompts(seed), *(prompts(seed + 1) if case.is_tight else ())]
        async with _engine(folder, case, ranks) as engine:
            found = await _differs(engine, oracle, asked, case, ranks)
        if found is not None:
            return found
    return None


async def _differs(engine: Engine, oracle: Any, asked: list[list[int]], case: Case, ranks: int) -> Difference | None:
    greedy = {"temperature": 0.0, "max_tokens": NEW_TOKENS, "ignore_eos": True, "logprobs": 0}
    # All of it, prompts too: none of it out of the cache.
    first = await answers_of(engine, asked, SamplingParams(**greedy, prompt_logprobs=0))
    for prompt, answer in zip(asked, first, strict=True):
        found = _against(oracle, prompt, answer)
        if found is not None:
            return Difference(case.name, ranks, len(prompt), *found, "computed")
    # Again, out of the cache.
    again = await answers_of(engine, asked, SamplingParams(**greedy))
    for prompt, answer in zip(asked, again, strict=True):
        found = _against(oracle, prompt, answer)
        if found is not None:
            what = f"{answer.cached_tokens} tokens found in the cache"
            return Difference(case.name, ranks, len(prompt), *found, what)
    return None


@torch.inference_mode()
def _against(oracle: Any, prompt: list[int], answer: Answer) -> tuple[int, float] | None:
    """The first position that differs, and by how much."""
    if answer.error is not None:
        raise answer.error
    tokens = torch.tensor([*prompt, *answer.tokens])
    logits = oracle(tokens.unsqueeze(0), use_cache=False).logits[0, :-1].double()
    logprobs = logits.log_softmax(-1)
    meant = logprobs.gather(1, tokens[1:].unsqueeze(1)).squeeze(1)
    ours = torch.tensor([*answer.prompt_logprobs, *answer.logprobs], dtype=torch.float64)
    start = len(meant) - len(ours)
    off = (ours - meant[start:]).abs()
    off = torch.where(off.isnan(), torch.inf, off)
    # Whatever it said, it was to be the likeliest.
    said = len(prompt) - 1 - start
    behind = logits[len(prompt) - 1 :].amax(-1) - logits[len(prompt) - 1 :].gather(1, tokens[len(prompt) :, None])[:, 0]
    off[said:] = torch.where(behind > TIE, torch.inf, off[said:])
    wrong = (off > NEAR).nonzero()
    if not len(wrong):
        return None
    place = int(wrong[0])
    return start + place + 1, float(off[place])


# -- the engine --------------------------------------------------------------------------------------------------------


@asynccontextmanager
async def _engine(folder: Path, case: Case, ranks: int) -> AsyncIterator[Engine]:
    workers = LocalWorkers(ranks)
    try:
        await workers.meet()
        settings = settings_of(folder, case, ranks, POOL)
        if case.is_tight:
            facts = await workers.load(settings.model)
            longest = max(LENGTHS) + NEW_TOKENS
            settings = settings_of(
                folder, case, ranks, str(least_memory(facts.layers, case.block_tokens, longest, POSITIONS))
            )
        yield await build_engine(settings, workers)
    finally:
        workers.close()


def settings_of(folder: Path, case: Case, ranks: int, memory: str, **others: Any) -> EngineSettings:
    """memory: for keys and values, of each rank"""
    return engine_settings(
        str(folder),
        dtype="float32",
        tensor_parallel_size=ranks,
        block_size=case.block_tokens,
        max_prefill_chunk_tokens=case.chunk_tokens,
        max_num_seqs=8,
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


async def answers_of(engine: Engine, asked: Sequence[Sequence[int]], sampling: SamplingParams) -> list[Answer]:
    """All at once, to their ends."""
    answers = [Answer() for _ in asked]
    loop = asyncio.create_task(engine.run())
    try:
        for n, (prompt, answer) in enumerate(zip(asked, answers, strict=True)):
            options, size = USUAL_OPTIONS, len(prompt)
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
