"""Sessions used in turn, more of them than fit: how many of a round are found again.

    python bench/cycles.py [--families llama gpt-oss ...] [--rounds 8]

The memory holds 23 sessions of 16,384 tokens, with what it takes to go on at their ends, in blocks of 512. Prints one
JSON object: for each family of models, policy, and number of sessions, those found in each round

    alone   sessions in turn and nothing else
    fresh   after every second session a prompt of the same length that never comes again
    ends    in each round every eighth session is over, and another one takes its place
"""

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from policies import FAMILIES

from intarsia.deploy.replay.names import block_names
from intarsia.deploy.replay.prefill import extend_by_chunk
from intarsia.deploy.replay.traces import TraceRequest
from intarsia.deploy.tools.model_layers import model_layers
from intarsia.kvcache.eviction import policy_named
from intarsia.kvcache.ids import RequestId
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.prefix import GivenChain
from intarsia.kvcache.strategies import plan_memory

TOKENS, BLOCK_TOKENS, CHUNK_TOKENS = 16_384, 512, 8192
FITTING, SESSIONS = 23, (23, 24, 26, 30, 40)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=8)
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for family, mix, policy, sessions in itertools.product(
        args.families, ("alone", "fresh", "ends"), ("lru", "worth"), SESSIONS
    ):
        found = _found(FAMILIES[family], mix, policy, sessions, args.rounds)
        rows.append({"family": family, "mix": mix, "policy": policy, "sessions": sessions, "found": found})
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    json.dump({"benchmark": "cycles", "fitting": FITTING, "rows": rows}, sys.stdout)
    print()


def _found(model: str, mix: str, policy: str, sessions: int, rounds: int) -> list[int]:
    """Sessions found in each round."""
    layers = model_layers(model).layers
    each_bytes = plan_memory(layers, PlanSettings(1 << 44, BLOCK_TOKENS, "auto"), None).bytes_held(TOKENS)
    plan = plan_memory(layers, PlanSettings(int(each_bytes * (FITTING + 1)), BLOCK_TOKENS, "auto"), None)
    manager = CacheManager(plan, policy=policy_named(policy))
    numbers, fresh = itertools.count(), itertools.count(10**6)
    found = []
    for round_ in range(rounds):
        found.append(0)
        for prompt, counts in _prompts(mix, sessions, round_, fresh):
            hit_tokens = _serve(manager, RequestId(next(numbers)), prompt)
            found[-1] += counts and hit_tokens >= TOKENS - BLOCK_TOKENS
    return found


def _prompts(mix: str, sessions: int, round_: int, fresh: Iterator[int]) -> Iterator[tuple[int, bool]]:
    for n in range(sessions):
        ended = (round_ + n) // 8 if mix == "ends" else 0  # times that this place has been taken by another one
        yield n + 1000 * ended, True
        if mix == "fresh" and n % 2:
            yield next(fresh), False


def _serve(manager: CacheManager, request: RequestId, prompt: int) -> int:
    ids = [prompt * 1000 + n for n in range(TOKENS // BLOCK_TOKENS)]
    chain = GivenChain(block_names(TraceRequest(TOKENS + 1, ids, BLOCK_TOKENS), BLOCK_TOKENS), TOKENS + 1)
    hit = manager.lookup(chain)
    manager.open(request, hit)
    length = hit.tokens
    while length < TOKENS + 1:
        length = extend_by_chunk(manager, request, min(TOKENS + 1, length + CHUNK_TOKENS), length)
        manager.commit(request)
    manager.release(request, length)
    return hit.tokens


if __name__ == "__main__":
    main()
