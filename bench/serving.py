"""What serving costs: 64 streams at once, straight from the engine, through its own HTTP server, and through Ray Serve.

    python bench/serving.py [--streams 64] [--new-tokens 256] [--rounds 3] [--stream-interval-s 0] [--haproxy]
    python bench/serving.py --chat [..]

Prints one JSON object: tokens per second of each way, and its share of the engine's own in the same round, medians of
the rounds. The model is that of `bench/engine.py`; everything shares this machine's cores, the client too, which does
no more than read the bytes of server-sent events. Ways take turns.

--chat: instead, what the formats of answers and the request log cost, by chat through the engine's own HTTP server. The
same prompts, as text, of a model that calls tools and thinks as Qwen 3: with neither; with both; and with both and a
tool to call. A prefix is looked up for each of them, so each has its causes told.
"""

import argparse
import asyncio
import contextlib
import importlib.util
import json
import os
import random
import re
import statistics
import string
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any


def main() -> None:
    args = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.haproxy:  # of Serve's processes, which Ray starts with this environment
        os.environ |= {"RAY_SERVE_ENABLE_HA_PROXY": "1", "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0"}
    with tempfile.TemporaryDirectory() as folder:
        model = _engine_bench()._gemma(Path(folder) / "gemma")
        with contextlib.redirect_stdout(sys.stderr):  # Ray has things to say when Serve ends
            found = asyncio.run((_measure_chat if args.chat else _measure)(model, args))
    speed = {way: statistics.median(values) for way, values in found.items()}
    first = next(iter(found))
    shares = {
        way: [value / alone for value, alone in zip(values, found[first], strict=True)] for way, values in found.items()
    }
    json.dump(
        {
            "benchmark": "serving, chat" if args.chat else "serving",
            "streams": args.streams,
            "new_tokens": args.new_tokens,
            "rounds": args.rounds,
            "stream_interval_s": args.stream_interval_s,
            "haproxy": args.haproxy,
            "tokens_per_s": {way: round(value, 1) for way, value in speed.items()},
            f"of_{first}": {way: round(statistics.median(values), 3) for way, values in shares.items()},
            "all": {way: [round(value, 1) for value in values] for way, values in found.items()},
        },
        sys.stdout,
        indent=2,
    )
    print()


async def _measure(model: str, args: argparse.Namespace) -> dict[str, list[float]]:
    import ray
    from ray import serve

    from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
    from intarsia.deploy.http.server import HttpServer
    from intarsia.deploy.openai.app import make_app
    from intarsia.deploy.serve_app import app
    from intarsia.deploy.settings.options import engine_settings
    from intarsia.deploy.start.launch import start_engine
    from intarsia.deploy.start.own_ray import ensure_ray

    settings: dict[str, Any] = {"kv_cache_memory": "256MiB", "enable_prefix_caching": False, "max_num_seqs": 64}
    ensure_ray(4)
    engine = await start_engine(engine_settings(model, **settings))
    front_end = FrontEnd(engine.client, None, FrontEndSettings(args.stream_interval_s))
    server = HttpServer(make_app(lambda: front_end))
    own_port = int((await server.start(port=0)).rpartition(":")[2])
    serve_port = _free_port()
    serve.start(http_options={"host": "127.0.0.1", "port": serve_port})
    await asyncio.to_thread(serve.run, app({"model": model, "stream_interval_s": args.stream_interval_s, **settings}))
    ways: dict[str, Callable[[], Awaitable[float]]] = {
        "engine": lambda: _engine_streams(engine.client, args),
        "http": lambda: _http_streams(own_port, args),
        "serve": lambda: _http_streams(serve_port, args),
    }
    found = await _in_turns(ways, args.rounds)
    await asyncio.to_thread(serve.shutdown)
    await server.stop()
    await engine.shutdown()
    ray.shutdown()
    return found


async def _measure_chat(model: str, args: argparse.Namespace) -> dict[str, list[float]]:
    import ray

    from intarsia.deploy.front_end.front_end import FrontEnd, FrontEndSettings
    from intarsia.deploy.front_end.request_log import RequestLog
    from intarsia.deploy.front_end.tokenizer import Tokenizer
    from intarsia.deploy.http.server import HttpServer
    from intarsia.deploy.openai.app import make_app
    from intarsia.deploy.settings.options import engine_settings
    from intarsia.deploy.start.launch import start_engine
    from intarsia.deploy.start.own_ray import ensure_ray

    _save_tokenizer(model)
    ensure_ray(4)
    engine = await start_engine(engine_settings(model, kv_cache_memory="256MiB", max_num_seqs=64))
    tokenizer = Tokenizer.load(model)
    plain = FrontEnd(engine.client, tokenizer, FrontEndSettings(args.stream_interval_s))
    named = FrontEndSettings(args.stream_interval_s, tool_call_parser="hermes", reasoning_parser="qwen3")
    parsing = FrontEnd(engine.client, tokenizer, named)
    with open(os.devnull, "w") as nowhere:
        log = RequestLog("line", nowhere)
        servers = HttpServer(make_app(lambda: plain)), HttpServer(make_app(lambda: parsing, request_log=log))
        ports = [int((await server.start(port=0)).rpartition(":")[2]) for server in servers]
        ways: dict[str, Callable[[], Awaitable[float]]] = {
            "plain": lambda: _http_streams(ports[0], args, _asked_in_chat()),
            "formats_and_log": lambda: _http_streams(ports[1], args, _asked_in_chat()),
            "formats_log_and_tool": lambda: _http_streams(ports[1], args, _asked_in_chat(tools=[SAW])),
        }
        found = await _in_turns(ways, args.rounds)
        log.close()
    for server in servers:
        await server.stop()
    await engine.shutdown()
    ray.shutdown()
    return found


async def _in_turns(ways: dict[str, Callable[[], Awaitable[float]]], rounds: int) -> dict[str, list[float]]:
    """Every other round backwards."""
    found: dict[str, list[float]] = {way: [] for way in ways}
    for round_ in range(rounds + 1):
        for way in list(ways)[:: -1 if round_ % 2 else 1]:
            speed = await ways[way]()
            if round_:  # the first one warms up
                found[way].append(speed)
    return found


SAW = {
    "type": "function",
    "function": {"name": "saw", "parameters": {"type": "object", "properties": {"wood": {"type": "string"}}}},
}
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"
"""Tools are not in it, so that all ways have the same prompts."""

MARKERS = ["<tool_call>", "</tool_call>", "<think>", "</think>"]


def _save_tokenizer(folder: str) -> None:
    """As many tokens as the model has: bytes, pairs of letters, and the markers of Qwen 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pairs = [f"{a}{b}" for a in string.ascii_lowercase for b in string.ascii_lowercase]
    words = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *pairs][: 512 - len(MARKERS)]
    merges = [(word[0], word[1]) for word in words if len(word) == 2]
    tokenizer = Tokenizer(models.BPE({word: n for n, word in enumerate(words)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(MARKERS)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def _asked_in_chat(**fields: Any) -> Callable[[list[int]], tuple[str, dict[str, Any]]]:
    def asked(prompt: list[int]) -> tuple[str, dict[str, Any]]:
        text = "".join(string.ascii_lowercase[token % 26] for token in prompt)
        return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **fields}

    return asked


def _asked_by_tokens(prompt: list[int]) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {"prompt": prompt}


def _prompts(count: int) -> list[list[int]]:
    rng = random.Random(0)
    return [[rng.randrange(1, 512) for _ in range(rng.randint(16, 128))] for _ in range(count)]


async def _engine_streams(client: Any, args: argparse.Namespace) -> float:
    from intarsia import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=args.new_tokens, ignore_eos=True)

    async def one(prompt: list[int]) -> int:
        return sum([len(delta.token_ids) async for delta in client.generate(prompt, params)])

    return await _timed([one(prompt) for prompt in _prompts(args.streams)], args)


async def _http_streams(port: int, args: argparse.Namespace, asked: Any = _asked_by_tokens) -> float:
    fixed = {"max_tokens": args.new_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    fixed["stream_options"] = {"include_usage": True}

    async def one(prompt: list[int]) -> int:
        path, given = asked(prompt)
        body = json.dumps({**given, **fixed}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        loop = asyncio.get_running_loop()
        transport, reader = await loop.create_connection(lambda: _Reader(loop.create_future()), "127.0.0.1", port)
        transport.write(f"{head}\r\nConnection: close\r\n\r\n".encode() + body)
        try:
            return await reader.completion_tokens
        finally:
            transport.close()

    return await _timed([one(prompt) for prompt in _prompts(args.streams)], args)


class _Reader(asyncio.Protocol):
    """Reads a stream to its end, whose last event says how many tokens there were."""

    def __init__(self, completion_tokens: "asyncio.Future[int]"):
        self.completion_tokens = completion_tokens
        self._last = b""

    def data_received(self, data: bytes) -> None:
        self._last = self._last[-1024:] + data
        if b"data: [DONE]" in data:
            found = re.search(rb'"completion_tokens":(\d+)', self._last)
            self.completion_tokens.set_result(int(found[1]) if found else 0)

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.completion_tokens.done():
            self.completion_tokens.set_exception(ConnectionError(f"the stream broke: {self._last!r}"))


async def _timed(streams: list[Awaitable[int]], args: argparse.Namespace) -> float:
    """Tokens per second."""
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
    parser.add_argument("--new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--stream-interval-s", type=float, default=0.0, help="between pieces of a stream")
    parser.add_argument("--chat", action="store_true", help="what formats of answers and the request log cost")
    parser.add_argument("--haproxy", action="store_true", help="Serve's own HAProxy instead of its Python proxy")
    return parser.parse_args()


if __name__ == "__main__":
    main()
