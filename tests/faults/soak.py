"""All kinds of use for a long time: what is held must not grow.

    python -m intarsia.tests.faults.soak --minutes 60

Streams over gRPC and HTTP that are read to the end or left, prompts in common and of their own, answers of a given
form, several answers to one prompt, and requests that are refused; from a process of their own. A tenth of the time
more, before it begins, is for warming up. Memory, open files and threads of every process of the service are noted all
along, and at rest before and after. Prints JSON; exits with 1 if memory grew by more than 20 MB, files or threads by
any, be it in use or at rest, or blocks are left.
"""

import asyncio
import contextlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, field
from itertools import count
from typing import Any, NamedTuple

import httpx

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.environment import resident_bytes
from intarsia.errors import IntarsiaError

from .processes import clients_apart, open_files, threads_by_name, watch, watched
from .program import program
from .service import PROMPTS, Known, answered, draw, read, service

STREAMS = 24

SAMPLE_EVERY_S = 5.0
SHOWN_EVERY = 60
"""Samples, while it goes on."""

REST_S = 60.0
"""Until connections that are not used are closed."""

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


@dataclass(slots=True)
class Used:
    """What became of it."""

    answers: int = 0
    left: int = 0
    refused: int = 0
    wrong: list[str] = field(default_factory=list)


class Use:
    """Streams of mixed use."""

    def __init__(self, client: AsyncClient, http: httpx.AsyncClient, known: list[Known], rng: random.Random):
        self.used = Used()
        self._client, self._http, self._known, self._rng = client, http, known, rng

    async def one(self) -> None:
        rng = self._rng
        kind = rng.choice(
            [self._known_answer] * 4 + [self._own_prompt, self._left, self._by_http, self._form, self._bad]
        )
        try:
            await kind()
        except (IntarsiaError, httpx.HTTPError) as error:
            self.used.wrong.append(f"{kind.__name__}: {type(error).__name__}: {error}")

    async def _known_answer(self) -> None:
        fault = await read(self._client, self._rng.choice(self._known))
        self.used.answers += 1
        if fault is not None:
            self.used.wrong.append(fault)

    async def _own_prompt(self) -> None:
        rng = self._rng
        prompt = [rng.randrange(32, 127) for _ in range(rng.randint(1, 1000))]
        async for _ in self._client.generate(
            prompt, SamplingParams(max_tokens=rng.randint(1, 60), n=rng.randint(1, 3))
        ):
            pass
        self.used.answers += 1

    async def _left(self) -> None:
        answer = self._client.generate(self._rng.choice(PROMPTS), SamplingParams(max_tokens=500, ignore_eos=True))
        async with contextlib.aclosing(answer):
            for _ in range(self._rng.randint(0, 30)):
                await anext(answer, None)  # it may be whole: pieces hold what has come since the last
        self.used.left += 1

    async def _by_http(self) -> None:
        body = {
            "model": "demo",
            "messages": [{"role": "user", "content": self._rng.choice(PROMPTS)}],
            "max_tokens": self._rng.randint(1, 50),
            "stream": self._rng.random() < 0.5,
        }
        answer = await self._http.post("/v1/chat/completions", json=body)
        if answer.status_code != 200:
            self.used.wrong.append(f"HTTP {answer.status_code}: {answer.text[:200]}")
        self.used.answers += 1

    async def _form(self) -> None:
        regex = f"[a-z]{{{self._rng.randint(1, 50)}}}"
        async for _ in self._client.generate("Hello", SamplingParams(max_tokens=20, regex=regex)):
            pass
        self.used.answers += 1

    async def _bad(self) -> None:
        refused = await self._http.post("/v1/completions", json={"model": "demo", "prompt": "x", "max_tokens": -1})
        if refused.status_code != 400:
            self.used.wrong.append(f"a bad request got {refused.status_code}")
        self.used.refused += 1


async def _clients(address: str, url: str, known: list[Known], minutes: float, seed: int) -> Used:
    rng = random.Random(seed)
    async with AsyncClient(address) as client, httpx.AsyncClient(base_url=url, timeout=120) as http:
        use = Use(client, http, known, rng)
        until_s = time.monotonic() + 60 * minutes

        async def stream() -> None:
            while time.monotonic() < until_s:
                await use.one()

        await asyncio.gather(*(stream() for _ in range(STREAMS)))
    return use.used


async def run(minutes: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with service(served_model_name="demo") as served:
        async with AsyncClient(served.address) as client:
            known = await answered(client, draw(rng, 64, 10, 120))
        server = HttpServer(make_app(lambda: served.front_end))
        url = await server.start(port=0)

        numbers = count(1)

        async def sample() -> Sample:
            held = {name: Held.by(pid) for name, pid in (await watched(served)).items()}
            if (number := next(numbers)) % SHOWN_EVERY == 0:
                shown = {name: round(each.bytes / 1e6) for name, each in held.items()}
                print(f"{number * SAMPLE_EVERY_S:g} s; MB: {shown}", file=sys.stderr, flush=True)
            return held

        async def in_use(clients: Executor, minutes: float) -> tuple[Used, list[Sample]]:
            about = served.address, url, known, minutes, rng.randrange(2**32)
            return await watch(clients, _clients, *about, sample=sample, every_s=SAMPLE_EVERY_S)

        async def at_rest() -> Sample:
            await asyncio.sleep(REST_S)
            return await sample()

        with clients_apart() as clients:
            await in_use(clients, minutes / 10)
            before = await at_rest()
            used, samples = await in_use(clients, minutes)
            after = await at_rest()
        recounted = await served.engine.recount()
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
        "answers": used.answers,
        "left": used.left,
        "refused": used.refused,
        "wrong": len(used.wrong),
        "growth_mb": {name: round(each[-1] - each[0], 2) for name, each in mb.items()},
        "mb_by_tenth": {name: [round(median) for median in each] for name, each in mb.items()},
        "growth_files": {name: each[-1] - each[0] for name, each in files.items()},
        "growth_threads": {name: each[-1] - each[0] for name, each in threads.items()},
        "growth_files_at_rest": {name: after[name].files - before[name].files for name in before},
        "growth_threads_at_rest": {name: after[name].threads.total() - before[name].threads.total() for name in before},
        "more_threads": {name: dict(samples[-1][name].threads - samples[0][name].threads) for name in before},
        "more_threads_at_rest": {name: dict(after[name].threads - before[name].threads) for name in before},
        "all_blocks_free": recounted.all_free,
        "examples": used.wrong[:5],
    }


def is_fine(found: dict[str, Any]) -> bool:
    grew = any(each * 1e6 > MOST_GROWTH_BYTES for each in found["growth_mb"].values())
    constant = "growth_files", "growth_threads", "growth_files_at_rest", "growth_threads_at_rest"
    grew |= any(each > 0 for what in constant for each in found[what].values())
    return not grew and not found["wrong"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, minutes=60.0)
