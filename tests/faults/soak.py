"""All kinds of use for a long time: what is held must not grow.

    python -m intarsia.tests.faults.soak --minutes 60

Streams over gRPC and HTTP that are read to the end or left, prompts in common and of their own, answers of a given
form, several answers to one prompt, and requests that are refused. Memory, open files and threads of every process are
noted all along; the first tenth is for warming up. Prints JSON; exits with 1 if memory grew by more than 20 MB, files
or threads by any, or blocks are left.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from typing import Any

import httpx

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.http_server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.errors import IntarsiaError
from intarsia.workers.environment import resident_bytes

from .processes import open_files, threads, threads_by_name, watched
from .program import program
from .service import PROMPTS, answered, draw, read, service

STREAMS = 24

SAMPLE_EVERY_S = 5.0

MOST_GROWTH_BYTES = 20_000_000

Sample = dict[str, tuple[int, int, int]]
"""By process: bytes, files, threads."""


class Use:
    """One stream of mixed use."""

    def __init__(self, client: AsyncClient, http: httpx.AsyncClient, known: list[Any], rng: random.Random):
        self.answers = self.refused = self.left = 0
        self.wrong: list[str] = []
        self._client, self._http, self._known, self._rng = client, http, known, rng

    async def one(self) -> None:
        rng = self._rng
        kind = rng.choice(
            [self._known_answer] * 4 + [self._own_prompt, self._left, self._by_http, self._form, self._bad]
        )
        try:
            await kind()
        except (IntarsiaError, httpx.HTTPError) as error:
            self.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _known_answer(self) -> None:
        fault = await read(self._client, self._rng.choice(self._known))
        self.answers += 1
        if fault is not None:
            self.wrong.append(fault)

    async def _own_prompt(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(32, 127) for _ in range(rng.randint(1, 1000))]
        async for _ in self._client.generate(
            prompt, SamplingParams(max_tokens=rng.randint(1, 60), n=rng.randint(1, 3))
        ):
            pass
        self.answers += 1

    async def _left(self) -> None:
        answer = self._client.generate(self._rng.choice(PROMPTS), SamplingParams(max_tokens=500, ignore_eos=True))
        async with contextlib.aclosing(answer):
            for _ in range(self._rng.randint(0, 30)):
                await anext(answer)
        self.left += 1

    async def _by_http(self) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": self._rng.choice(PROMPTS)}],
            "max_tokens": self._rng.randint(1, 50),
            "stream": self._rng.random() < 0.5,
        }
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code not in (200, 400):  # 400: a model without a chat template says so
            self.wrong.append(f"HTTP {answer.status_code}: {answer.text[:200]}")
        self.answers += 1

    async def _form(self) -> None:
        regex = f"[a-z]{{{self._rng.randint(1, 50)}}}"
        async for _ in self._client.generate("Hello", SamplingParams(max_tokens=20, regex=regex)):
            pass
        self.answers += 1

    async def _bad(self) -> None:
        refused = await self._http.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": -1})
        if refused.status_code != 400:
            self.wrong.append(f"a bad request got {refused.status_code}")
        self.refused += 1


async def run(minutes: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with service(served_model_name="demo") as served, AsyncClient(served.address) as client:
        server = HttpServer(make_app(lambda: served.front_end))
        async with httpx.AsyncClient(base_url=await server.start(port=0), timeout=120) as http:
            known = await answered(client, draw(rng, 64, 10, 120))
            use = Use(client, http, known, rng)
            until_s = time.monotonic() + 60 * minutes
            warm_s = time.monotonic() + 60 * minutes / 10
            samples: list[Sample] = []
            kinds: list[dict[str, Counter[str]]] = []  # of threads: when it was warm, and now

            async def go_on() -> None:
                while time.monotonic() < until_s:
                    await use.one()

            async def sample() -> None:
                while time.monotonic() < until_s:
                    pids = (await watched(served)).items()
                    samples.append({name: (resident_bytes(p), open_files(p), threads(p)) for name, p in pids})
                    if time.monotonic() >= warm_s:
                        kinds[1:] = [{name: threads_by_name(p) for name, p in pids}]
                    if len(samples) % 60 == 0:
                        shown = {name: round(held[0] / 1e6) for name, held in samples[-1].items()}
                        print(f"{use.answers} answers; MB: {shown}", file=sys.stderr, flush=True)
                    await asyncio.sleep(SAMPLE_EVERY_S)

            await asyncio.gather(sample(), *(go_on() for _ in range(STREAMS)))
            while (load := await served.engine.client.load()).running + load.waiting:
                await asyncio.sleep(0.01)
            count = await served.engine.recount()
        await server.stop()
    warm = samples[len(samples) // 10 :]
    tenth = max(1, len(warm) // 10)

    def grown(name: str, what: int) -> float:
        first = statistics.median(sample[name][what] for sample in warm[:tenth])
        return statistics.median(sample[name][what] for sample in warm[-tenth:]) - first

    def by_tenth(name: str) -> list[int]:
        sizes = [sample[name][0] for sample in warm]
        return [round(statistics.median(sizes[i : i + tenth]) / 1e6) for i in range(0, len(sizes), tenth)]

    names = list(warm[0])
    return {
        "seed": seed,
        "minutes": minutes,
        "answers": use.answers,
        "left": use.left,
        "refused": use.refused,
        "wrong": len(use.wrong),
        "growth_mb": {name: round(grown(name, 0) / 1e6, 2) for name in names},
        "mb_by_tenth": {name: by_tenth(name) for name in names},
        "growth_files": {name: grown(name, 1) for name in names},
        "growth_threads": {name: grown(name, 2) for name in names},
        "more_threads": {name: dict(kinds[-1][name] - kinds[0][name]) for name in names},
        "all_blocks_free": count.all_free,
        "examples": use.wrong[:5],
    }


def is_fine(found: dict[str, Any]) -> bool:
    grew = any(each * 1e6 > MOST_GROWTH_BYTES for each in found["growth_mb"].values())
    grew |= any(each > 0 for what in ("growth_files", "growth_threads") for each in found[what].values())
    return not grew and not found["wrong"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, minutes=60.0)
