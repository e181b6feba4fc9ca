"""Decode speed of the engine beside transformers' own continuous batching, on the same tiny model in one run.

    python bench/decode.py [--requests 1,8,32] [--prompt-tokens 64] [--new-tokens 64] [--repeats 3] [--threads N]

Prints one JSON object. Both sides run greedy in float32 on the same number of threads, one after the other, in turns;
each figure is the median over the repeats. `controller_us_per_step` is the controller's own work (plan and commit);
`idle_us_per_step` is the time a step takes beyond the worker's own work on it: what the controller, the two hops and
the front end are not done with while the worker runs the step before.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SHAPE = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_hidden_layers": 6,
    "sliding_window": 64,
    "max_position_embeddings": 1024,
    "query_pre_attn_scalar": 64,
    "eos_token_id": None,
    "bos_token_id": None,
    "pad_token_id": 0,
}
"""A Gemma 3 in miniature: 5 sliding layers and a full one."""


def main() -> None:
    args = _arguments()
    # As in a worker: threads that wait must not spin. Before torch is imported.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch

    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        model = _make_checkpoint(Path(folder))
        prompts = torch.randint(1, SHAPE["vocab_size"], (max(args.requests), args.prompt_tokens)).tolist()
        from intarsia import LLM

        rows = []
        with LLM(model, kv_cache_memory="256MiB", enable_prefix_caching=False, max_num_seqs=64) as llm:
            for count in args.requests:
                runs = [
                    (_engine(llm, prompts[:count], args.new_tokens), _transformers(model, prompts[:count], args))
                    for _ in range(args.repeats)
                ]
                rows.append(_row(count, [ours for ours, _ in runs], [theirs for _, theirs in runs]))
                print(json.dumps(rows[-1]), file=sys.stderr)
    json.dump(
        {
            "benchmark": "decode",
            "model": "6-layer gemma3 shape, hidden 256, window 64, float32, random weights",
            "prompt_tokens": args.prompt_tokens,
            "new_tokens": args.new_tokens,
            "threads": args.threads,
            "repeats": args.repeats,
            "versions": _versions(),
            "rows": rows,
        },
        sys.stdout,
        indent=2,
    )
    print()


def _engine(llm: Any, prompts: list[list[int]], new_tokens: int) -> dict[str, float]:
    """One run of all prompts through the engine: tokens/s, and where the time of a step went."""
    from intarsia import SamplingParams

    before = llm.stats()
    started = time.perf_counter()
    outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True))
    seconds = time.perf_counter() - started
    after = llm.stats()
    assert all(len(output.token_ids) == new_tokens for output in outputs)
    spent = {name: after[name] - before[name] for name in after}
    return {
        "tokens_per_s": len(prompts) * new_tokens / seconds,
        "steps": spent["steps"],
        "plan_us_per_step": spent["plan_us"] / spent["steps"],
        "commit_us_per_step": spent["commit_us"] / spent["steps"],
        "worker_us_per_step": spent["run_us"] / spent["steps"],
        "idle_us_per_step": (seconds * 1e6 - spent["run_us"]) / spent["steps"],
    }


def _transformers(model: str, prompts: list[list[int]], args: argparse.Namespace) -> dict[str, float]:
    """The same work through transformers' `generate_batch`."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = GenerationConfig(max_new_tokens=args.new_tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
    started = time.perf_counter()
    outputs = peer.generate_batch(
        inputs=prompts,
        generation_config=config,
        continuous_batching_config=ContinuousBatchingConfig(),
        progress_bar=False,
    )
    seconds = time.perf_counter() - started
    generated = sum(len(output.generated_tokens) for output in outputs.values())
    assert generated == len(prompts) * args.new_tokens, f"{generated} tokens came instead"
    return {"tokens_per_s": generated / seconds}


def _row(count: int, ours: list[dict[str, float]], theirs: list[dict[str, float]]) -> dict[str, Any]:
    def median(runs: list[dict[str, float]], name: str) -> float:
        return round(statistics.median(run[name] for run in runs), 1)

    plan, commit = median(ours, "plan_us_per_step"), median(ours, "commit_us_per_step")
    return {
        "requests": count,
        "tokens_per_s": median(ours, "tokens_per_s"),
        "transformers_tokens_per_s": median(theirs, "tokens_per_s"),
        "ratio": round(median(ours, "tokens_per_s") / median(theirs, "tokens_per_s"), 2),
        "controller_us_per_step": round(plan + commit, 1),
        "plan_us_per_step": plan,
        "commit_us_per_step": commit,
        "worker_us_per_step": median(ours, "worker_us_per_step"),
        "idle_us_per_step": median(ours, "idle_us_per_step"),
    }


def _make_checkpoint(folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = Gemma3TextConfig(**SHAPE)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "ray")} | {"python": sys.version.split()[0]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=lambda text: [int(n) for n in text.split(",")], default=[1, 8, 32])
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
