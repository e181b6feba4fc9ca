"""What policies find in request traces, beside what could be had: LRU, ours, a plan that knows the future, and a bound.

    python bench/policies.py --traces DIR [--families llama gpt-oss ...] [--half first]

Four traces (DIR has the files that `TRACES` names), five families of models, five sizes of memory each, counted in
blocks of the layers that see all. Prints one JSON object: a row for each, with the share of the prompts' tokens that
was found in the second half (of the trace, or of its first half with `--half first`, on which parameters were chosen),
and `way`: how far ours is on the way from LRU to the plan. About a quarter of an hour.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any, NamedTuple

from intarsia.deploy.replay.optimum import optimum
from intarsia.deploy.replay.requests import plan_for, replay_requests
from intarsia.deploy.replay.traces import TraceRequest, read_trace
from intarsia.deploy.tools.model_layers import ModelLayers, model_layers
from intarsia.errors import InvalidSetting

LEAST_TO_WIN = 0.02
"""Between LRU and the plan; where there is less, no way is told."""


class Trace(NamedTuple):
    file: str
    longest_prompt: int | None
    block_tokens: int | None  # where the trace names none
    sizes: tuple[int, ...]


TRACES = {
    "conversation": Trace("mooncake_conversation.jsonl.gz", None, None, (1024, 2048, 4096, 8192, 16384)),
    "synthetic": Trace("mooncake_synthetic.jsonl.gz", None, None, (1024, 2048, 4096, 8192, 16384)),
    "agents": Trace("agentic_coding.jsonl.gz", 65_536, None, (1000, 1560, 2340, 3120, 4680)),
    "rag": Trace("ragpulse_rag.jsonl.gz", None, 64, (160, 320, 640, 1280, 2560)),
}

FAMILIES = {
    "llama": "llama-3.1-8b",
    "gpt-oss": "gpt-oss-20b",
    "gemma": "gemma-3-27b",
    "qwen": "qwen3.5-27b",
    "nemotron": "nemotron-h-8b",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--only", nargs="+", choices=list(TRACES), default=list(TRACES))
    parser.add_argument("--families", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--half", choices=("first", "whole"), default="whole")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in args.only:
        trace = TRACES[name]
        requests = list(read_trace(args.traces / trace.file, None, trace.block_tokens or 16, trace.longest_prompt))
        requests = requests[: len(requests) // 2] if args.half == "first" else requests
        for family in args.families:
            for size in trace.sizes:
                rows.append({"trace": name, "family": family, "blocks": size, **_row(requests, family, size)})
                print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    ways = [row["way"] for row in rows if row.get("way") is not None]
    json.dump(
        {"benchmark": "policies", "mean_way": round(statistics.mean(ways), 3), "rows": rows}, sys.stdout, indent=2
    )
    print()


def _row(requests: list[TraceRequest], family: str, size: int) -> dict[str, Any]:
    model, block_tokens = model_layers(FAMILIES[family]), requests[0].block_tokens
    memory = _full_bytes(model) * block_tokens * size
    try:
        plan = plan_for(requests, model, memory, block_tokens, "auto")
    except InvalidSetting as refusal:
        return {"refused": str(refusal)}
    began_s = time.perf_counter()
    found = {policy: _found(requests, model, memory, block_tokens, policy) for policy in ("lru", "worth")}
    best = optimum(requests, plan, len(requests) // 2)
    to_win = best.planned_rate - found["lru"]
    return {
        **found,
        "plan": best.planned_rate,
        "bound": best.bound_rate,
        "way": round((found["worth"] - found["lru"]) / to_win, 2) if to_win > LEAST_TO_WIN else None,
        "seconds": round(time.perf_counter() - began_s, 1),
    }


def _found(requests: list[TraceRequest], model: ModelLayers, memory: int, block_tokens: int, policy: str) -> float:
    result, _ = replay_requests(requests, model, memory, block_tokens=block_tokens, policy=policy)
    return result.to_json()["hit_rate_second_half"]


def _full_bytes(model: ModelLayers) -> int:
    return sum(layer.token_bytes for layer in model.layers if layer.shares is None and layer.reach.name == "full")


if __name__ == "__main__":
    main()
