"""Can a tenant find out what another one asked? By the time to the first token, by what is said to be cached, and by
all figures that its key can read.

    python -m intarsia.tests.faults.tenants --rounds 60

Two tenants with keys of their own. One asks a long prompt; the other asks the same one, and another one that no one
asked before. If prefixes were shared, the first of these would be answered sooner. As a control the first tenant asks
its prompt again, which must be much sooner. Around each prompt of the one, the other reads what there is to read:
`/metrics`, the load, the state of the cache, the events of the cache; none of it may move. Prints JSON; exits with 1 if
anything was shared.
"""

import asyncio
import contextlib
import random
import statistics
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import httpx

from intarsia import SamplingParams
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.front_end.access import Access, AccessSettings
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.kvcache.events import Event, Removed

from .program import program
from .service import service

PROMPT_TOKENS = 1500

ONE = SamplingParams(max_tokens=1, temperature=0)

READ = ("metrics", "load", "cache_state", "events")

Timed = tuple[float, int]
"""Milliseconds to the first token, and how many of the prompt's tokens are said to be cached."""


async def first_token(client: AsyncClient, prompt: list[int]) -> Timed:
    started = time.perf_counter()
    cached = 0
    async for chunk in client.generate(prompt, ONE):
        cached = chunk.usage.cached_tokens if chunk.usage else cached
    return (time.perf_counter() - started) * 1e3, cached


def sooner(left: list[float], right: list[float]) -> float:
    """How often one of the left is less than one of the right: 0.5 if there is nothing to tell them by."""
    return sum(a < b for a in left for b in right) / (len(left) * len(right))


class Reader:
    """All that a key can read beside its answers."""

    def __init__(self, client: AsyncClient, url: str, key: str):
        self._client = client
        self._url = url
        self._key = key
        self.told: list[Event] = []
        self._watching = asyncio.ensure_future(self._watch())

    async def _watch(self) -> None:
        async with contextlib.aclosing(self._client.watch_cache()) as watch:
            async for events in watch:  # own blocks make room for others': a tenant that asks again finds that out, too
                self.told += [event for event in events if not isinstance(event, Removed)]

    async def read(self) -> list[Any]:
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {self._key}"}) as http:
            metrics = (await http.get(f"{self._url}/metrics")).text
        return [metrics, await self._client.load(), await self._client.cache_state(), list(self.told)]

    async def close(self) -> None:
        self._watching.cancel()
        await asyncio.gather(self._watching, return_exceptions=True)


async def run(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("oak carpenters\nash smiths\n")
        async with service(kv_cache_memory="32MiB") as served:
            access = Access(AccessSettings(api_key_file=str(keys)))
            server = GrpcServer(served.front_end, access)
            web = HttpServer(make_app(lambda: served.front_end, access), access)
            address, url = await server.start(port=0), await web.start(port=0)
            moved: Counter[str] = Counter()
            again: list[Timed] = []
            same: list[Timed] = []
            fresh: list[Timed] = []
            async with AsyncClient(address, api_key="oak") as mine, AsyncClient(address, api_key="ash") as theirs:
                reader = Reader(theirs, url, "ash")
                for _ in range(rounds):
                    prompt = [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)]
                    other = [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)]
                    await asyncio.sleep(0.1)  # what is still on its way of the reader's own
                    figures = await reader.read()
                    await first_token(mine, prompt)
                    await asyncio.sleep(0.1)
                    differ = [name for name, a, b in zip(READ, figures, await reader.read(), strict=True) if a != b]
                    moved.update(differ)
                    probes = [(same, prompt), (fresh, other)]
                    rng.shuffle(probes)
                    for found, asked in probes:
                        found.append(await first_token(theirs, asked))
                    again.append(await first_token(mine, prompt))
                await reader.close()
            await web.stop()
            await server.stop()
    times = {name: [ms for ms, _ in found] for name, found in (("again", again), ("same", same), ("fresh", fresh))}
    return {
        "seed": seed,
        "rounds": rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "first_token_ms": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "cached_tokens": {"again": min(cached for _, cached in again), "same": max(cached for _, cached in same)},
        "figures_moved": dict(moved),
        "same_sooner_than_fresh": round(sooner(times["same"], times["fresh"]), 3),
        "again_sooner_than_fresh": round(sooner(times["again"], times["fresh"]), 3),
    }


def is_fine(found: dict[str, Any]) -> bool:
    return not found["cached_tokens"]["same"] and not found["figures_moved"] and found["same_sooner_than_fresh"] <= 0.65


if __name__ == "__main__":
    program(__doc__, run, is_fine, rounds=60)
