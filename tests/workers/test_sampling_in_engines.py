"""Penalties, biases and ends in an engine, against the same arithmetic over transformers' logits."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from intarsia.controller.engine import Engine
from intarsia.proto.messages import Delivery
from intarsia.proto.request import SamplingParams
from intarsia.tests import models
from intarsia.tests.conftest import Loop, TinyModel
from intarsia.tests.local import Completion, asking, complete, make_engine
from intarsia.tests.tiny_configs import VOCAB

WANTED = SamplingParams(
    temperature=0,
    max_tokens=24,
    presence_penalty=0.7,
    frequency_penalty=0.4,
    repetition_penalty=1.3,
    logit_bias={7: 2.0, 11: -3.0},
    stop_token_ids=tuple(range(0, VOCAB, 2)),
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


PROMPT_LOGPROBS = SamplingParams(temperature=0, max_tokens=4, prompt_logprobs=3, logprobs=2)


def check_prompt_logprobs(model: TinyModel, completions: Sequence[Completion]) -> None:
    oracle = models.load_oracle(model.path)
    for prompt, completion in zip(model.prompts, completions, strict=True):
        assert len(completion.logprobs) == 4
        with torch.inference_mode():
            truth = models.log_probabilities(oracle, prompt[:1], prompt[1:])
        assert [row.token_id for row in completion.prompt_logprobs] == prompt[1:]
        for n, row in enumerate(completion.prompt_logprobs):
            best = truth[n].topk(3)
            assert row.logprob == pytest.approx(float(truth[n, prompt[n + 1]]), abs=1e-3)
            assert [value for _, value in row.top] == pytest.approx(best.values.tolist(), abs=1e-3)


@pytest.mark.parametrize(
    "settings", [{}, {"max_prefill_chunk_tokens": 7, "block_size": 5}, {"kv_cache_memory": "96KiB", "block_size": 5}]
)
def test_prompt_logprobs_are_those_of_the_oracle_also_when_the_prompt_is_cached(tiny: Callable, settings: dict):
    model: TinyModel = tiny("gemma3")

    async def run() -> list[list[Completion]]:
        engine = await make_engine(model.path, **settings)
        return [await complete(engine, model.prompts, PROMPT_LOGPROBS) for _ in range(2)]

    for completions in asyncio.run(run()):
        check_prompt_logprobs(model, completions)


def test_prompt_logprobs_on_two_workers_beside_requests_without(tiny: Callable, two_workers: Any, loop: Loop):
    model: TinyModel = tiny("gemma3")

    async def run() -> list[Completion]:
        engine = await make_engine(model.path, two_workers, max_prefill_chunk_tokens=7)
        plain = SamplingParams(temperature=0, max_tokens=24)
        asked = [PROMPT_LOGPROBS] * len(model.prompts) + [plain] * len(model.prompts)
        return await complete(engine, [*model.prompts, *model.prompts], asked)

    completions = loop.run(run())
    check_prompt_logprobs(model, completions[: len(model.prompts)])
    assert [c.token_ids for c in completions[len(model.prompts) :]] == model.expected


@pytest.mark.parametrize("family", ["gemma3", "bamba", "qwen3_next", "llama4", "lfm2"])
@pytest.mark.parametrize("caching", [True, False])
def test_answers_that_share_their_prompt_are_those_of_as_many_requests(tiny: Callable, family: str, caching: bool):
    """Greedy ones are the oracle's; drawn ones are those of requests of their own, with the seeds that follow."""
    model: TinyModel = tiny(family)
    answers = 3

    async def run() -> tuple[list[Family], list[Completion]]:
        engine = await make_engine(model.path, enable_prefix_caching=caching, max_prefill_chunk_tokens=13, block_size=5)
        greedy = SamplingParams(temperature=0, max_tokens=24, n=answers)
        families = await complete_families(engine, model.prompts, greedy)
        drawn = SamplingParams(temperature=1.0, max_tokens=12, n=answers, seed=40)
        families += await complete_families(engine, model.prompts[:2], drawn)
        alone = [SamplingParams(temperature=1.0, max_tokens=12, seed=40 + n) for n in range(answers)]
        return families, [
            completion for prompt in model.prompts[:2] for completion in await complete(engine, [prompt] * 3, alone)
        ]

    families, alone = asyncio.run(run())
    greedy, drawn = families[: len(model.prompts)], families[len(model.prompts) :]
    assert [each.token_ids for each in greedy] == [[expected] * answers for expected in model.expected]
    assert [ids for each in drawn for ids in each.token_ids] == [completion.token_ids for completion in alone]
    assert len({tuple(ids) for ids in drawn[0].token_ids}) == answers


class Family:
    """Collects several answers to one prompt."""

    def __init__(self, answers: int):
        self.token_ids: list[list[int]] = [[] for _ in range(answers)]
        self.done = asyncio.Event()
        self._left = answers

    def sink(self, delivery: Delivery) -> None:
        for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
            self.token_ids[handle].append(token)
        assert not delivery.errors
        for handle, item in delivery.deltas:
            self.token_ids[handle] += item.token_ids
            self._left -= item.finish_reason is not None
        if self._left == 0:
            self.done.set()


async def complete_families(engine: Engine, prompts: Sequence[list[int]], params: SamplingParams) -> list[Family]:
    families = [Family(params.n) for _ in prompts]
    running = asyncio.create_task(engine.run())
    for prompt, family in zip(prompts, families, strict=True):
        engine.submit(asking(prompt, params), 0, family.sink)
    await asyncio.gather(*(family.done.wait() for family in families))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert engine.recount().all_free
    return families
