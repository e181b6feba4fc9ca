"""Ten thousand batches of all kinds of requests: what each says must not depend on who is beside it.

    python -m intarsia.tests.faults.mixes --batches 10000

Requests with every kind of sampling are answered one by one first, and then in ever other company, prompts in common
and several answers among them. Tokens must be the same, and log-probabilities up to what sums in another order make.
Prints JSON; exits with 1 after any difference.
"""

import asyncio
import random
import time
from typing import Any, NamedTuple

from intarsia import SamplingParams
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.proto.request import RequestOptions

from .program import program
from .service import PROMPTS, service

AT_ONCE = 24

TOLERANCE = 1e-3
"""Of a log-probability."""


class Said(NamedTuple):
    """Of each answer."""

    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


class Asked(NamedTuple):
    prompt: list[int]
    sampling: SamplingParams
    options: RequestOptions


def draw(rng: random.Random, n: int) -> Asked:
    text = " ".join(rng.choices(PROMPTS, k=rng.randint(1, 12)))
    prompt = list(text.encode())[: rng.randint(1, 400)]
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.0}, {"temperature": 0.0, "logprobs": 5}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.1},
        {"temperature": 2.0}, {"presence_penalty": 0.5, "frequency_penalty": 0.2}, {"repetition_penalty": 1.3},
        {"logit_bias": {101: 3.0, 32: -2.0}}, {"min_tokens": 20, "max_tokens": 40}, {"regex": "[a-z ,.]{5,60}"},
        {"n": 3}, {"logprobs": 0}, {"prompt_logprobs": 2}, {"n": 2, "temperature": 0.0, "top_k": 3},
    ]  # fmt: skip
    wanted = {"max_tokens": rng.randint(1, 60), "seed": n, "temperature": 0.9} | kinds[n % len(kinds)]
    return Asked(
        prompt, SamplingParams(**wanted), RequestOptions(priority=rng.randint(-3, 3), tenant=rng.choice("abc"))
    )


async def answer(client: EngineClient, asked: Asked) -> Said:
    tokens: list[list[int]] = [[] for _ in range(asked.sampling.n)]
    logprobs: list[list[float]] = [[] for _ in tokens]
    async for delta in client.generate(asked.prompt, asked.sampling, options=asked.options):
        tokens[delta.answer] += delta.token_ids
        logprobs[delta.answer] += [row.logprob for row in (*(delta.prompt_logprobs or ()), *(delta.logprobs or ()))]
    return Said(tuple(map(tuple, tokens)), tuple(map(tuple, logprobs)))


def farthest(alone: Said, mixed: Said) -> float:
    """How much their log-probabilities differ at most."""
    pairs = [pair for rows in zip(alone.logprobs, mixed.logprobs, strict=True) for pair in zip(*rows, strict=True)]
    return max((abs(a - b) for a, b in pairs), default=0.0)


async def run(batches: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    # A small pool, so that requests are preempted and prefixes evicted, too.
    async with service(kv_cache_memory="2MiB", max_num_seqs=16, max_num_batched_tokens=256) as served:
        client = served.engine.client
        asked = [draw(rng, n) for n in range(320)]
        alone = []
        for each in asked:
            await served.engine.reset_prefix_cache()
            alone.append(await answer(client, each))
        before = await client.questions.load()
        started_s = time.monotonic()
        faults: list[str] = []
        answers = 0
        worst = 0.0

        async def go_on() -> None:
            nonlocal answers, worst
            while (await client.questions.load()).steps - before.steps < batches:
                n = rng.randrange(len(asked))
                said = await answer(client, asked[n])
                answers += 1
                if said.tokens != alone[n].tokens:
                    faults.append(f"{asked[n].sampling}: other tokens")
                    continue
                far = farthest(alone[n], said)
                worst = max(worst, far)
                if far > TOLERANCE:
                    faults.append(f"{asked[n].sampling}: log-probabilities differ by {far:.2g}")

        await asyncio.gather(*(go_on() for _ in range(AT_ONCE)))
        load = await client.questions.load()
        return {
            "seed": seed,
            "batches": load.steps - before.steps,
            "answers": answers,
            "different": len(faults),
            "log_probabilities_differ_by": worst,
            "preemptions": load.preemptions - before.preemptions,
            "cached_share": round(
                (load.cached_tokens - before.cached_tokens) / (load.prompt_tokens - before.prompt_tokens), 3
            ),
            "took_s": round(time.monotonic() - started_s),
            "all_blocks_free": (await served.engine.recount()).all_free,
            "examples": faults[:5],
        }


if __name__ == "__main__":
    program(__doc__, run, lambda found: not found["different"] and found["all_blocks_free"], batches=10_000)
