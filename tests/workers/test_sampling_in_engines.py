"""Penalties, biases and ends in an engine, against the same arithmetic over transformers' logits."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from intarsia.controller.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.conftest import Loop, TinyModel
from intarsia.tests.local import complete, make_engine

WANTED = SamplingParams(
    temperature=0,
    max_tokens=24,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={7: 2.0, 11: -3.0},
    stop_token_ids=tuple(range(0, models.VOCAB, 2)),
    min_tokens=20,
)


@torch.inference_mode()
def by_hand(oracle: Any, prompt: Sequence[int], params: SamplingParams) -> list[int]:
    answer: list[int] = []
    while len(answer) < params.max_tokens:
        logits = oracle(torch.tensor([[*prompt, *answer]]), use_cache=False).logits[0, -1].clone()
        for token in {*prompt, *answer}:
            logits[token] = logits[token] / 1.3 if logits[token] > 0 else logits[token] * 1.3
        for token in set(answer):
            logits[token] -= 0.7 + 0.4 * answer.count(token)
        logits[7] += 2.0
        logits[11] -= 3.0
        if len(answer) < params.min_tokens:
            logits[list(params.stop_token_ids)] = -torch.inf
        answer.append(int(logits.argmax()))
        if answer[-1] in params.stop_token_ids:
            break
    return answer


@pytest.fixture(scope="module")
def expected(tiny: Callable) -> list[list[int]]:
    model: TinyModel = tiny("gemma3")
    answers = [by_hand(models.load_oracle(model.path), prompt, WANTED) for prompt in model.prompts]
    assert all(len(answer) > 20 for answer in answers) and any(len(answer) < 24 for answer in answers)
    return answers


def test_tokens_equal_those_by_hand(tiny: Callable, expected: list[list[int]]):
    async def run() -> list[list[int]]:
        engine = await make_engine(tiny("gemma3").path)
        return [completion.token_ids for completion in await complete(engine, tiny("gemma3").prompts, WANTED)]

    assert asyncio.run(run()) == expected


def test_tokens_equal_those_by_hand_after_preemption_on_two_workers(
    tiny: Callable, expected: list[list[int]], two_workers: Any, loop: Loop
):
    """A request comes back with what it had said, and is penalised for all of it."""

    async def run() -> tuple[int, list[list[int]]]:
        engine = await make_engine(
            tiny("gemma3").path, two_workers, kv_cache_memory="29KiB", block_size=5, max_prefill_chunk_tokens=7
        )
        completions = await complete(engine, tiny("gemma3").prompts, WANTED)
        return engine.stats.preemptions, [completion.token_ids for completion in completions]

    preemptions, tokens = loop.run(run())
    assert preemptions > 0
    assert tokens == expected
