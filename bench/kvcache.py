"""What the cache manager costs, without a model: one decode step of many requests, a prefill, a lookup, a hash.

    python bench/kvcache.py [--requests 256] [--tokens 2048] [--steps 64]

Prints one JSON object. Layouts are those of real models, by their groups; blocks of 16 tokens.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence

from intarsia.kvcache.manager import CacheManager, RequestId
from intarsia.kvcache.plan import Group, MemoryPlan
from intarsia.kvcache.prefix import chain_hashes
from intarsia.kvcache.reach import Full, Reach, Sliding

BLOCK_TOKENS = 16

LAYOUTS: dict[str, Sequence[Reach]] = {
    "full": [Full()],
    "gpt-oss-20b": [Full(), Sliding(128)],
    "gemma-3-27b": [Full()] + [Sliding(1024)] * 6,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=64)
    args = parser.parse_args()
    rows = [measure(name, reaches, args) for name, reaches in LAYOUTS.items()]
    prompt = _prompt(0, args.tokens)
    hash_us = _median_us(lambda: chain_hashes(prompt, BLOCK_TOKENS, key=b"k" * 32), 200)
    result = {"benchmark": "kvcache", **vars(args), "hash_prompt_us": hash_us, "python": sys.version.split()[0]}
    json.dump(result | {"rows": rows}, sys.stdout, indent=2)
    print()


def measure(name: str, reaches: Sequence[Reach], args: argparse.Namespace) -> dict[str, float | str]:
    """Costs of one layout. Decode steps include block borders: requests stand at different places in their blocks."""
    groups = tuple(Group(reach, (n,), BLOCK_TOKENS) for n, reach in enumerate(reaches))
    blocks = (args.tokens + args.steps + BLOCK_TOKENS) // BLOCK_TOKENS * len(groups) * (args.requests + 2)
    manager = CacheManager(MemoryPlan("layered", groups, 1, 64, blocks, 0.0))
    prompts = [_prompt(n, args.tokens + n % BLOCK_TOKENS) for n in range(args.requests)]
    prefills = [_time_us(lambda n=n: _prefill(manager, RequestId(n), prompts[n])) for n in range(args.requests)]
    again = prompts[0] + [1]
    lookup_us = _median_us(lambda: manager.lookup(again), 50)
    steps = []
    for _ in range(args.steps):
        for prompt in prompts:
            prompt.append(1)
        steps.append(_time_us(lambda: _decode(manager, prompts)))
    return {
        "layout": name,
        "groups": len(groups),
        "prefill_us": round(statistics.median(prefills), 1),
        "warm_lookup_us": lookup_us,
        "decode_step_mean_us": round(statistics.mean(steps), 1),
        "decode_step_max_us": round(max(steps), 1),
    }


def _prefill(manager: CacheManager, request: RequestId, prompt: list[int]) -> None:
    manager.open(request, manager.lookup(prompt))
    manager.extend(request, len(prompt))
    manager.commit(request, prompt, len(prompt))


def _decode(manager: CacheManager, prompts: list[list[int]]) -> None:
    for n, prompt in enumerate(prompts):
        manager.extend(RequestId(n), len(prompt))
    for n, prompt in enumerate(prompts):
        manager.commit(RequestId(n), prompt, len(prompt))


def _prompt(seed: int, tokens: int) -> list[int]:
    return [(seed * 7919 + n) % 50_000 for n in range(tokens)]


def _time_us(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return (time.perf_counter() - started) * 1e6


def _median_us(work: Callable[[], object], repeats: int) -> float:
    return round(statistics.median(_time_us(work) for _ in range(repeats)), 1)


if __name__ == "__main__":
    main()
