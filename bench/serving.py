"""What serving costs: 64 streams at once, straight from the engine, through its own HTTP server, and through Ray Serve.

    python bench/serving.py [--streams 64] [--new-tokens 64] [--rounds 3]

Prints one JSON object: tokens per second of each way, and its share of the engine's own. The model is that of
`bench/engine.py`; everything shares this machine's cores, the client too, which reads server-sent events from plain
sockets. Ways take turns.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

WAYS = ("engine", "http", "serve")


def main() -> None:
    args = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    with tempfile.TemporaryDirectory() as folder:
        model = _engine_bench()._gemma(Path(folder) / "gemma")
        with contextlib.redirect_stdout(sys.stderr):  # Ray has things to say when Serve ends
            found = asyncio.run(_measure(model, args))
    speed = {way: statistics.median(found[way]) for way in WAYS}
    json.dump(
        {
            "benchmark": "serving",
            "streams": args.streams,
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
            "tokens_per_s": {way: round(value, 1) for way, value in speed.items()},
            "of_the_engine": {way: round(value / speed["engine"], 3) for way, value in speed.items()},
            "all": {way: [round(value, 1) for value in values] for way, values in found.items()},
        },
        sys.stdout,
        indent=2,
    )
    print()


async def _measure(model: str, args: argparse.Namespace) -> dict[str, list[float]]:
    import ray
    from ray import serve

    from intarsia.controller.launch import ensure_ray, start_engine
    from intarsia.deploy.front_end import FrontEnd
    from intarsia.deploy.http_server import HttpServer
    from intarsia.deploy.openai.app import make_app
    from intarsia.deploy.serve_app import app
    from intarsia.deploy.settings import engine_settings

    settings: dict[str, Any] = {"kv_cache_memory": "256MiB", "enable_prefix_caching": False, "max_num_seqs": 64}
    ensure_ray(4)
    found: dict[str, list[float]] = {way: [] for way in WAYS}

    async def with_engine(rounds: Callable[[Any], Awaitable[None]]) -> None:
        engine = await start_engine(engine_settings(model, **settings))
        try:
            await rounds(engine)
        finally:
            await engine.shutdown()

    async def direct(engine: Any) -> None:
        front_end = FrontEnd.of(engine.client, None)
        server = HttpServer(make_app(lambda: front_end))
        url = await server.start(port=0)
        port = int(url.rpartition(":")[2])
        for round_ in range(args.rounds + 1):
            speeds = await _engine_streams(engine.client, args), await _http_streams(port, args)
            if round_:  # the first one warms up
                found["engine"].append(speeds[0])
                found["http"].append(speeds[1])
        await server.stop()

    await with_engine(direct)
    port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    await asyncio.to_thread(serve.run, app({"model": model, **settings}))
    for round_ in range(args.rounds + 1):
        speed = await _http_streams(port, args)
        if round_:
            found["serve"].append(speed)
    await asyncio.to_thread(serve.shutdown)
    ray.shutdown()
    return found


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 512) for _ in range(rng.randint(16, 128))] for _ in range(count)]


async def _engine_streams(client: Any, args: argparse.Namespace) -> float:
    from intarsia import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in client.generate(prompt, params)])

    return await _timed([one(prompt) for prompt in _prompts(args.streams)], args)


async def _http_streams(port: int, args: argparse.Namespace) -> float:
    fixed = {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}

    async def one(prompt: list[int]) -> int:
        body = json.dumps({"prompt": prompt, **fixed}).encode()
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**20)
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        writer.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        events = 0
        while line := await reader.readline():
            events += line.startswith(b"data: {")
            if line.startswith(b"data: [DONE]"):
                break
        writer.close()
        return events

    return await _timed([one(prompt) for prompt in _prompts(args.streams)], args)


async def _timed(streams: list[Awaitable[int]], args: argparse.Namespace) -> float:
    """Tokens per second. Every token comes in a delta, or an event, of its own."""
    started = time.perf_counter()
    counts = await asyncio.gather(*streams)
    seconds = time.perf_counter() - started
    assert counts == [args.new_tokens] * args.streams, counts
    return sum(counts) / seconds


def _engine_bench() -> Any:
    spec = importlib.util.spec_from_file_location("engine_bench", Path(__file__).with_name("engine.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
