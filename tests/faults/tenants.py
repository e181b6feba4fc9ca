"""Can a tenant find out what another one asked? By the time to the first token, and by what is said to be cached.

    python -m intarsia.tests.faults.tenants --rounds 60

Two tenants with keys of their own. One asks a long prompt; the other asks the same one, and another one that nobody
asked before. If prefixes were shared, the first of these would be answered sooner. As a control the first tenant asks
its prompt again, which must be much sooner. Prints JSON; exits with 1 if anything was shared.
"""

import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from intarsia import SamplingParams
from intarsia.deploy.access import Access, AccessSettings
from intarsia.deploy.client import AsyncClient
from intarsia.deploy.grpc_server import GrpcServer

from .program import program
from .service import service

PROMPT_TOKENS = 1500

ONE = SamplingParams(max_tokens=1, temperature=0)

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


async def run(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("oak carpenters\nash smiths\n")
        async with service(kv_cache_memory="32MiB") as served:
            server = GrpcServer(served.front_end, Access(AccessSettings(api_key_file=str(keys))))
            address = await server.start(port=0)
            again: list[Timed] = []
            same: list[Timed] = []
            fresh: list[Timed] = []
            async with AsyncClient(address, api_key="oak") as mine, AsyncClient(address, api_key="ash") as theirs:
                for _ in range(rounds):
                    prompt = [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)]
                    other = [rng.randrange(32, 127) for _ in range(PROMPT_TOKENS)]
                    await first_token(mine, prompt)
                    probes = [(same, prompt), (fresh, other)]
                    rng.shuffle(probes)
                    for found, asked in probes:
                        found.append(await first_token(theirs, asked))
                    again.append(await first_token(mine, prompt))
            await server.stop()
    times = {name: [ms for ms, _ in found] for name, found in (("again", again), ("same", same), ("fresh", fresh))}
    return {
        "seed": seed,
        "rounds": rounds,
        "prompt_tokens": PROMPT_TOKENS,
        "first_token_ms": {name: round(statistics.median(each), 2) for name, each in times.items()},
        "cached_tokens": {"again": min(cached for _, cached in again), "same": max(cached for _, cached in same)},
        "same_sooner_than_fresh": round(sooner(times["same"], times["fresh"]), 3),
        "again_sooner_than_fresh": round(sooner(times["again"], times["fresh"]), 3),
    }


def is_fine(found: dict[str, Any]) -> bool:
    return not found["cached_tokens"]["same"] and found["same_sooner_than_fresh"] <= 0.65


if __name__ == "__main__":
    program(__doc__, run, is_fine, rounds=60)
