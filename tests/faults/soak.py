"""All kinds of use for a long time: what is held must not grow.

    python -m intarsia.tests.faults.soak --minutes 60

Streams over gRPC and HTTP that are read to the end or left, prompts in common and of their own, answers of a given
form, several answers to one prompt, and requests that are refused. A tenth of the time more, before it begins, is for
warming up. Memory and open files of every process are noted all along, and files and threads also at rest, before it
and after it: libraries have threads that come when all others are busy, and go when nothing is to do. Prints JSON;
exits with 1 if memory grew by more than 20 MB, files or threads by any, or blocks are left.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

import httpx

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.http_server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.errors import IntarsiaError
from intarsia.workers.environment import resident_bytes

from .processes import open_files, threads_by_name, watched
from .program import program
from .service import PROMPTS, answered, draw, read, service

STREAMS = 24

SAMPLE_EVERY_S = 5.0

REST_S = 60.0
"""gRPC ends a thread that had nothing to do for 20 s, and clients connections after 5."""

MOST_GROWTH_BYTES = 20_000_000


class Held(NamedTuple):
    """What a process has."""

    bytes: int
    files: int
    threads: Counter[str]  # by name

    @classmethod
    def by(cls, pid: int) -> "Held":
        return cls(resident_bytes(pid), open_files(pid), threads_by_name(pid))


Sample = dict[str, Held]
"""By process."""


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
            use = Use(client, http, await answered(client, draw(rng, 64, 10, 120)), rng)

            async def sample() -> Sample:
                return {name: Held.by(pid) for name, pid in (await watched(served)).items()}

            async def at_rest() -> Sample:
                await asyncio.sleep(REST_S)
                return await sample()

            await _go_on(use, minutes / 10, sample)
            before = await at_rest()
            samples = await _go_on(use, minutes, sample)
            after = await at_rest()
            count = await served.engine.recount()
        await server.stop()
    tenth = max(1, len(samples) // 10)

    def by_tenth(name: str, what: Callable[[Held], float]) -> list[float]:
        each = [what(sample[name]) for sample in samples]
        return [statistics.median(each[i : i + tenth]) for i in range(0, len(each) - tenth + 1, tenth)]

    mb = {name: by_tenth(name, lambda held: held.bytes / 1e6) for name in before}
    files = {name: by_tenth(name, lambda held: held.files) for name in before}
    threads = {name: by_tenth(name, lambda held: held.threads.total()) for name in before}
    return {
        "seed": seed,
        "minutes": minutes,
        "answers": use.answers,
        "left": use.left,
        "refused": use.refused,
        "wrong": len(use.wrong),
        "growth_mb": {name: round(each[-1] - each[0], 2) for name, each in mb.items()},
        "mb_by_tenth": {name: [round(median) for median in each] for name, each in mb.items()},
        "growth_files": {name: each[-1] - each[0] for name, each in files.items()},
        "growth_threads": {name: each[-1] - each[0] for name, each in threads.items()},
        "growth_files_at_rest": {name: after[name].files - before[name].files for name in before},
        "growth_threads_at_rest": {name: (after[name].threads - before[name].threads).total() for name in before},
        "more_threads": {name: dict(samples[-1][name].threads - samples[0][name].threads) for name in before},
        "more_threads_at_rest": {name: dict(after[name].threads - before[name].threads) for name in before},
        "all_blocks_free": count.all_free,
        "examples": use.wrong[:5],
    }


async def _go_on(use: Use, minutes: float, sample: Callable[[], Awaitable[Sample]]) -> list[Sample]:
    """All streams at once for so long; what was held meanwhile."""
    until_s = time.monotonic() + 60 * minutes
    samples: list[Sample] = []

    async def stream() -> None:
        while time.monotonic() < until_s:
            await use.one()

    async def note() -> None:
        while time.monotonic() < until_s:
            samples.append(await sample())
            if len(samples) % 60 == 0:
                shown = {name: round(held.bytes / 1e6) for name, held in samples[-1].items()}
                print(f"{use.answers} answers; MB: {shown}", file=sys.stderr, flush=True)
            await asyncio.sleep(SAMPLE_EVERY_S)

    await asyncio.gather(note(), *(stream() for _ in range(STREAMS)))
    return samples


def is_fine(found: dict[str, Any]) -> bool:
    grew = any(each * 1e6 > MOST_GROWTH_BYTES for each in found["growth_mb"].values())
    constant = ("growth_files", "growth_files_at_rest", "growth_threads_at_rest")
    grew |= any(each > 0 for what in constant for each in found[what].values())
    return not grew and not found["wrong"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, minutes=60.0)
