"""Two checkouts in turns, round by round: 64 streams straight from the engine, and through the HTTP server.

    python bench/in_turns.py OTHER_CHECKOUT [--rounds 16] [--streams 64] [--new-tokens 256]

Both checkouts start their engines at the beginning, each in an interpreter of its own (`.venv` of that checkout), and
only one of them works at a time. On a machine whose speed changes from minute to minute the ratio of two neighbouring
rounds says more than figures of two runs. Prints one JSON object: medians of both, and of the ratios here / there, of
tokens per second and of the front end's CPU seconds for a round.
"""

import argparse
import asyncio
import contextlib
import importlib
import importlib.util
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
WAYS = ("engine", "http")
PLACES = (
    "deploy.front_end.front_end", "deploy.http.server", "deploy.openai.app", "deploy.settings.options",
    "deploy.start.launch", "deploy.start.own_ray",
    "deploy.front_end", "deploy.http_server", "deploy.settings", "deploy.launch", "controller.launch",
)  # fmt: skip
"""Where modules of the package are, and where they were in earlier checkouts."""

FIGURES = ("tokens_per_s", "front_end_cpu_s")


def main() -> None:
    args = _arguments()
    if args.as_checkout:
        asyncio.run(_serve_rounds(Path(args.other), args))
        return
    sides = {"here": Side(HERE, args), "there": Side(Path(args.other).resolve(), args)}
    found: dict[str, dict[str, list[dict[str, float]]]] = {way: {side: [] for side in sides} for way in WAYS}
    for number in range(args.rounds + 1):
        for way in WAYS:
            for name in sorted(sides, reverse=bool(number % 2)):
                measured = sides[name].round(way)
                if number:  # the first is for warming up
                    found[way][name].append(measured)
    for side in sides.values():
        side.end()
    told = {way: {figure: _compared(found[way], figure) for figure in FIGURES} for way in WAYS}
    json.dump({"benchmark": "in_turns", "rounds": args.rounds, **told}, sys.stdout, indent=2)
    print()


def _compared(sides: dict[str, list[dict[str, float]]], figure: str) -> dict[str, float]:
    here, there = ([each[figure] for each in sides[name]] for name in ("here", "there"))
    ratio = statistics.median(a / b for a, b in zip(here, there, strict=True))
    return {
        "here": round(statistics.median(here), 3),
        "there": round(statistics.median(there), 3),
        "median_of_ratios": round(ratio, 3),
    }


class Side:
    """A checkout's engine and server, in a process that does one round when it is told to."""

    def __init__(self, checkout: Path, args: argparse.Namespace):
        command = [str(checkout / ".venv/bin/python"), str(Path(__file__).resolve()), str(checkout), "--as-checkout"]
        sizes = ["--streams", str(args.streams), "--new-tokens", str(args.new_tokens)]
        self._process = subprocess.Popen(
            command + sizes, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    def round(self, way: str) -> dict[str, float]:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(way + "\n")
        self._process.stdin.flush()
        for line in self._process.stdout:  # beside what Ray prints
            if line.startswith("{"):
                return json.loads(line)
        sys.exit("a side has ended early")

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(120)


async def _serve_rounds(checkout: Path, args: argparse.Namespace) -> None:
    """By that checkout's own code, its benchmark's streams included."""
    import ray

    front_end_settings = _of_ours("FrontEndSettings")
    make_front_end, make_server, make_app = _of_ours("FrontEnd"), _of_ours("HttpServer"), _of_ours("make_app")
    engine_settings, start_engine, ensure_ray = map(_of_ours, ("engine_settings", "start_engine", "ensure_ray"))

    os.environ["HF_HUB_OFFLINE"] = "1"
    serving = _module(checkout / "bench/serving.py")
    ensure_ray(4)
    with tempfile.TemporaryDirectory() as folder:
        model = serving._engine_bench()._gemma(Path(folder) / "gemma")
        settings = engine_settings(
            model, kv_cache_memory="256MiB", enable_prefix_caching=False, max_num_seqs=args.streams
        )
        engine = await start_engine(settings)
        front_end = make_front_end(engine.client, None, front_end_settings(0.0))
        server = make_server(make_app(lambda: front_end))
        port = int((await server.start(port=0)).rpartition(":")[2])
        while way := (await asyncio.to_thread(sys.stdin.readline)).strip():
            began_s = time.process_time()
            is_engine = way == "engine"
            speed = await (
                serving._engine_streams(engine.client, args) if is_engine else serving._http_streams(port, args)
            )
            measured = {"tokens_per_s": speed, "front_end_cpu_s": time.process_time() - began_s}
            print(json.dumps(measured), flush=True)
        await server.stop()
        await engine.shutdown()
    ray.shutdown()


def _of_ours(name: str) -> Any:
    """Something of that checkout, in the first module of `PLACES` that has it."""
    for place in PLACES:
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(f"intarsia.{place}"), name)
    raise SystemExit(f"this checkout has no {name} where it was at any time")


def _module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", help="the other checkout, with its .venv")
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--as-checkout", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
