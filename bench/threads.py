"""How many threads should compute on a CPU that the controller, the front end and clients work on, too.

    python bench/threads.py [--streams 16 48 120] [--seconds 6] [--rounds 3]

Prints one JSON object: tokens per second and milliseconds per step of the demo model behind its gRPC server, by how
many streams are open and how many threads compute: what the worker chooses for itself, one, or all cores. Medians of
the rounds, in which all take turns; clients are in the front end's process.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

CHOSEN = "chosen"


def main() -> None:
    args = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with contextlib.redirect_stdout(sys.stderr):  # Ray has things to say when it ends
        found = asyncio.run(_measure(args))
    json.dump(
        {
            "benchmark": "threads",
            "cores": _cores(),
            "rounds": args.rounds,
            "seconds": args.seconds,
            "streams": {
                streams: {
                    threads: {
                        "tokens_per_s": round(statistics.median(speeds)),
                        "step_ms": round(1e3 * streams / statistics.median(speeds), 2),
                        "of_chosen": round(_median_ratio(speeds, by_threads[CHOSEN]), 2),
                        "all": [round(speed) for speed in speeds],
                    }
                    for threads, speeds in by_threads.items()
                }
                for streams, by_threads in found.items()
            },
        },
        sys.stdout,
        indent=2,
    )
    print()


Speeds = dict[int, dict[str, list[float]]]
"""Tokens per second in each round, by streams and threads."""


async def _measure(args: argparse.Namespace) -> Speeds:
    import ray

    from intarsia.deploy.start.own_ray import ensure_ray
    from intarsia.tests.faults.service import service

    choices = {CHOSEN: None, "1": 1, str(_cores()): _cores()}
    found: Speeds = {streams: defaultdict(list) for streams in args.streams}
    ensure_ray(2 * len(choices))
    async with contextlib.AsyncExitStack() as stack:
        services = {
            name: await stack.enter_async_context(
                service(cpu_threads=threads, max_num_seqs=max(args.streams), enable_prefix_caching=False)
            )
            for name, threads in choices.items()
        }
        for round_ in range(args.rounds + 1):
            for streams in args.streams:
                for name, served in services.items():
                    speed = await _tokens_per_s(served.address, streams, args.seconds)
                    if round_:  # the first one warms up
                        found[streams][name].append(speed)
    ray.shutdown()
    return found


async def _tokens_per_s(address: str, streams: int, seconds: float) -> float:
    from intarsia import SamplingParams
    from intarsia.deploy.client import AsyncClient
    from intarsia.tests.faults.service import PROMPTS

    rng = random.Random(0)
    tokens = 0

    async def stream(client: Any) -> None:
        nonlocal tokens
        while True:
            answer = client.generate(rng.choice(PROMPTS), SamplingParams(max_tokens=200, ignore_eos=True))
            async with contextlib.aclosing(answer):
                async for chunk in answer:
                    tokens += len(chunk.token_ids)

    async with AsyncClient(address) as client:
        running = [asyncio.create_task(stream(client)) for _ in range(streams)]
        await asyncio.sleep(seconds / 3)  # until all of them decode
        before, started_s = tokens, time.perf_counter()
        await asyncio.sleep(seconds)
        speed = (tokens - before) / (time.perf_counter() - started_s)
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return speed


def _median_ratio(values: list[float], others: list[float]) -> float:
    return statistics.median(value / other for value, other in zip(values, others, strict=True))


def _cores() -> int:
    return len(os.sched_getaffinity(0))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="+", default=[16, 48, 120])
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
