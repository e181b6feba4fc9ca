"""What watching costs: an engine at work, with a console that asks once a second, and without.

    python bench/console.py [--blocks 100000] [--streams 32] [--rounds 10] [--seconds 6]

Prints one JSON object. In each round the engine works for so many seconds alone and so many watched, in turns; a
process of its own asks for all that the page asks for, map and all, and reads it. `watched_over_alone` is the median of
the rounds' ratios. `map_ms` is what the controller itself takes for the map of a pool in which every block is kept.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

WATCHER = """
import sys, time, urllib.request
url, key = sys.argv[1:]
while True:
    started = time.monotonic()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {key}", "Accept-Encoding": "gzip"})
    print(len(urllib.request.urlopen(request).read()), flush=True)
    time.sleep(max(0, 1 - (time.monotonic() - started)))
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", type=int, default=100_000)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=6)
    args = parser.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        sys.path.insert(0, str(Path(__file__).parent))
        from engine import _gemma

        sys.path.pop(0)
        found = asyncio.run(_measure(_gemma(Path(folder) / "gemma"), args))
    json.dump({"benchmark": "console", "map_ms": _map_ms(args.blocks), **found}, sys.stdout, indent=2)
    print()


async def _measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    from intarsia.deploy.front_end.access import Access, AccessSettings
    from intarsia.deploy.front_end.front_end import FrontEnd
    from intarsia.deploy.http.server import HttpServer
    from intarsia.deploy.openai.app import make_app
    from intarsia.deploy.settings.options import engine_settings
    from intarsia.deploy.start.launch import start_engine
    from intarsia.deploy.start.own_ray import ensure_ray
    from intarsia.proto.request import SamplingParams

    ensure_ray(1)
    trial = await start_engine(engine_settings(model, kv_cache_memory="64MiB"))
    page_bytes = trial.client.info.kv_cache_bytes // (trial.client.info.num_blocks + 1)
    await trial.shutdown()
    engine = await start_engine(engine_settings(model, kv_cache_memory=page_bytes * (args.blocks + 1)))
    front_end = FrontEnd(engine.client, None)
    server = HttpServer(make_app(lambda: front_end, Access(AccessSettings(admin_key=("key",)))))
    url = await server.start(port=0)
    rng, tokens = random.Random(0), 0

    async def stream() -> None:
        nonlocal tokens
        while True:
            prompt = [rng.randrange(1, 512) for _ in range(rng.randint(16, 128))]
            sampling = SamplingParams(temperature=0, max_tokens=rng.randint(64, 256), ignore_eos=True)
            async for delta in engine.client.generate(prompt, sampling):
                tokens += len(delta.token_ids)

    streams = [asyncio.ensure_future(stream()) for _ in range(args.streams)]
    await asyncio.sleep(args.seconds)  # warm

    async def rate() -> float:
        before, started = tokens, time.perf_counter()
        await asyncio.sleep(args.seconds)
        return (tokens - before) / (time.perf_counter() - started)

    alone, watched, looks, sizes = [], [], 0, []
    for number in range(args.rounds):
        for is_watched in (False, True) if number % 2 else (True, False):
            if not is_watched:
                alone.append(await rate())
                continue
            command = [sys.executable, "-c", WATCHER, f"{url}/console/view", "key"]
            watcher = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            await asyncio.sleep(1)  # until Python is there
            watched.append(await rate())
            watcher.terminate()
            found = [int(line) for line in watcher.communicate()[0].split()]
            looks, sizes = looks + len(found), sizes + found
    for each in streams:
        each.cancel()
    await asyncio.gather(*streams, return_exceptions=True)
    blocks = engine.client.info.num_blocks
    await server.stop()
    with contextlib.suppress(Exception):
        await engine.shutdown()
    return {
        "blocks": blocks,
        "streams": args.streams,
        "rounds": args.rounds,
        "tokens_per_s": {
            "alone": round(statistics.median(alone), 1),
            "watched": round(statistics.median(watched), 1),
        },
        "watched_over_alone": round(statistics.median(w / a for w, a in zip(watched, alone, strict=True)), 4),
        "looks_per_s": round(looks / args.rounds / (args.seconds + 1), 2),
        "bytes_per_look": round(statistics.median(sizes)),
        "all": {"alone": [round(v) for v in alone], "watched": [round(v) for v in watched]},
    }


def _map_ms(blocks: int) -> float:
    from intarsia.kvcache.ids import RequestId
    from intarsia.kvcache.pool import BlockPool
    from intarsia.kvcache.reach import Full, Sliding
    from intarsia.tests.kvcache.plans import plan_of

    pool = BlockPool(plan_of(Full(), Sliding(64), blocks=blocks + 1))
    for group, taken in zip(pool.groups, pool.take([blocks // 2, blocks - blocks // 2], RequestId(1)), strict=True):
        group.name(taken, [b"%d/%d" % (group.group, block) for block in taken])
        group.give_back(taken)
    took = []
    for _ in range(15):
        started = time.perf_counter()
        pool.map()
        took.append(time.perf_counter() - started)
    return round(statistics.median(took) * 1e3, 2)


if __name__ == "__main__":
    main()
