"""`intarsia bench serve` beside vLLM's tool and guidellm: the same load for the same server, in turns.

    python bench/beside_tools.py [--url URL --model NAME --tokenizer DIR] [--rounds 3] [--vllm-path DIR:DIR]

Without --url the server is one of this program's own, which answers by the clock: a first token after 300 ms, then one
every 20 ms, however busy the machine is. So what differs is what the tools measure, and not what the server did. The
model's folder of the demo gives the tokenizer. vLLM's tool is run as a client only (`vllm.benchmarks.serve`), with
--vllm-path in front of its module path; a tool that is not installed is told so and left out.

Prints one JSON object: each tool's figures, medians of the rounds, and theirs divided by ours. Exits with 1 if one is
further from ours than --within.
"""

import argparse
import asyncio
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
DEMO = HERE / "deploy" / "demo" / "model"
FIRST_S, NEXT_S = 0.3, 0.02
MODEL = "paced"

VLLM = (
    "import argparse; from vllm.benchmarks.serve import add_cli_args, main; parser = argparse.ArgumentParser(); "
    "add_cli_args(parser); main(parser.parse_args())"
)

Figures = Mapping[str, float]
"""Rates per second, times in milliseconds."""


class Absent(RuntimeError):
    """A tool is not here; the text says why."""


def main() -> None:
    args = _arguments()
    if args.paced:
        asyncio.run(_paced(args.paced))
        return
    server = contextlib.nullcontext((args.url, args.model)) if args.url else _own_server()
    with server as (url, model), tempfile.TemporaryDirectory() as folder:
        rounds, absent = _measured(url, model, args, Path(folder))
    found = {
        tool: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
        for tool, all_ in rounds.items()
    }
    ratios = {
        tool: {name: round(value / found["intarsia"][name], 4) for name, value in figures.items()}
        for tool, figures in found.items()
        if tool != "intarsia"
    }
    far = [f"{t} {n} {r}" for t, each in ratios.items() for n, r in each.items() if abs(r - 1) > args.within]
    told = {
        "benchmark": "beside_tools",
        "server": args.url or f"paced: {FIRST_S * 1000:g} ms, then {NEXT_S * 1000:g} ms a token",
        "load": {
            name: getattr(args, name) for name in ("requests", "concurrency", "input_len", "output_len", "rounds")
        },
        "figures": {tool: {name: round(value, 3) for name, value in each.items()} for tool, each in found.items()},
        "theirs_to_ours": ratios,
        "absent": absent,
        f"further_than_{args.within:g}": far,
    }
    print(json.dumps(told, indent=2))
    sys.exit(1 if far else 0)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", default="")
    parser.add_argument("--model", default="")
    parser.add_argument("--tokenizer", default=str(DEMO))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--concurrency", type=int, default=4)
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--within", type=float, default=0.03)
    parser.add_argument("--vllm-path", default="")
    parser.add_argument("--paced", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


def _measured(
    url: str, model: str, args: argparse.Namespace, folder: Path
) -> tuple[dict[str, list[Figures]], dict[str, str]]:
    """The figures of each round by tool, and why tools were left out."""
    tools: dict[str, Callable[..., Figures]] = {"intarsia": _intarsia, "vllm": _vllm, "guidellm": _guidellm}
    found: dict[str, list[Figures]] = {name: [] for name in tools}
    absent: dict[str, str] = {}
    for number in range(args.rounds):
        for name in [each for each in tools if each not in absent]:
            try:
                found[name].append(tools[name](url, model, args, folder / f"{name}-{number}.json"))
            except Absent as error:
                absent[name] = str(error)
    return {name: each for name, each in found.items() if each}, absent


# -- the tools ---------------------------------------------------------------------------------------------------------


def _intarsia(url: str, model: str, args: argparse.Namespace, out: Path) -> Figures:
    program = Path(sys.executable).with_name("intarsia")
    printed = _run(
        str(program), "bench", "serve", "--url", url, "--model", model, "--json", "--num-prompts", args.requests,
        "--input-len", args.input_len, "--output-len", args.output_len, "--max-concurrency", args.concurrency,
    )  # fmt: skip
    return _in_vllms_names(json.loads(printed))


def _vllm(url: str, model: str, args: argparse.Namespace, out: Path) -> Figures:
    paths = os.pathsep.join(filter(None, (args.vllm_path, os.environ.get("PYTHONPATH"))))
    _run(
        sys.executable, "-c", VLLM, "--backend", "openai", "--base-url", url, "--endpoint", "/v1/completions",
        "--model", model, "--tokenizer", args.tokenizer, "--dataset-name", "random", "--random-input-len",
        args.input_len, "--random-output-len", args.output_len, "--num-prompts", args.requests, "--max-concurrency",
        args.concurrency, "--ignore-eos", "--percentile-metrics", "ttft,tpot,e2el", "--disable-tqdm", "--save-result",
        "--result-dir", out.parent, "--result-filename", out.name, PYTHONPATH=paths, VLLM_TARGET_DEVICE="cpu",
    )  # fmt: skip
    return _in_vllms_names(json.loads(out.read_text()))


def _in_vllms_names(found: Mapping[str, Any]) -> Figures:
    names = "request_throughput", "output_throughput"
    times = (f"{share}_{name}_ms" for name in ("ttft", "tpot", "e2el") for share in ("mean", "median"))
    return {name: float(found[name]) for name in (*names, *times)}


def _guidellm(url: str, model: str, args: argparse.Namespace, out: Path) -> Figures:
    _run(
        str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress",
        "--backend", f"kind=openai_http,target={url},model={model},request_format=/v1/completions",
        "--profile", f"kind=concurrent,streams={args.concurrency}",
        "--constraint", f"kind=max_requests,count={args.requests}",
        "--tokenizer", f"kind=huggingface_auto,model={args.tokenizer}",
        "--data", f"kind=synthetic_text,prompt_tokens={args.input_len},output_tokens={args.output_len}",
        "--output", f"kind=json,path={out}",
    )  # fmt: skip
    [found] = json.loads(out.read_text())["benchmarks"]
    metrics: dict[str, Any] = found["metrics"]
    # Theirs of tokens after the first is called inter-token latency; requests are told in seconds.
    times = {
        "ttft": ("time_to_first_token_ms", 1),
        "tpot": ("inter_token_latency_ms", 1),
        "e2el": ("request_latency", 1e3),
    }
    told = {
        f"{share}_{ours}_ms": metrics[theirs]["successful"][share] * scale
        for ours, (theirs, scale) in times.items()
        for share in ("mean", "median")
    }
    return {
        "request_throughput": metrics["requests_per_second"]["successful"]["mean"],
        "output_throughput": metrics["output_tokens_per_second"]["successful"]["mean"],
        **told,
    }


def _run(*command: Any, **variables: str) -> str:
    """What it prints. Raises `Absent` where the program is not there."""
    try:
        done = subprocess.run(
            list(map(str, command)),
            env=os.environ | variables,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    except FileNotFoundError as error:
        raise Absent(str(error)) from None
    if done.returncode != 0:
        missing = [line for line in done.stderr.splitlines() if line.startswith("ModuleNotFoundError")]
        if missing:
            raise Absent(missing[-1])
        raise RuntimeError(f"{command[0]} ended with {done.returncode}: {done.stderr[-1500:]}")
    return done.stdout


# -- the server --------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _own_server() -> Iterator[tuple[str, str]]:
    """In a process of its own."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, __file__, "--paced", str(port)])
    try:
        url, until = f"http://127.0.0.1:{port}", time.monotonic() + 30
        while True:
            try:
                urllib.request.urlopen(f"{url}/health", timeout=1).close()
                break
            except OSError:
                if time.monotonic() > until:
                    raise
                time.sleep(0.1)
        yield url, MODEL
    finally:
        process.terminate()
        process.wait()


async def _paced(port: int) -> None:
    """Each token of an answer comes at its time."""
    from aiohttp import web

    async def models(request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": MODEL, "object": "model", "max_model_len": 8192}]})

    async def health(request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def complete(request: web.Request) -> web.StreamResponse:
        asked, began_s = await request.json(), time.monotonic()
        tokens, prompt = int(asked["max_tokens"]), asked["prompt"]
        size = len(prompt) if isinstance(prompt, list) else len(prompt.encode())
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)

        async def send(choices: list[Any], usage: dict[str, int] | None = None) -> None:
            event = {"id": "x", "object": "text_completion", "model": MODEL, "choices": choices, "usage": usage}
            await answer.write(b"data: %s\n\n" % json.dumps(event).encode())

        for number in range(tokens):
            await asyncio.sleep(max(0.0, began_s + FIRST_S + number * NEXT_S - time.monotonic()))
            is_last = number == tokens - 1
            await send([{"index": 0, "text": "a", "finish_reason": "length" if is_last else None}])
        usage = {"prompt_tokens": size, "completion_tokens": tokens, "total_tokens": size + tokens}
        await send([], usage)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    app = web.Application()
    app.add_routes([web.get("/v1/models", models), web.get("/health", health), web.post("/v1/completions", complete)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    main()
