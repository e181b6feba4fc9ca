"""Everything worth knowing about our kernels on a GPU, in one command.

    python bench/gpu_battery.py -o battery.json [--parts ceilings,errors,attention,states,engine] [--smoke]

    ceilings    what this device copies per second, and multiplies
    errors      every backend against float64, in every dtype, over pages that are NaN wherever a row has no live token
    attention   each backend and torch's own attention (on keys that need no pages): us, GB/s, TFLOP/s, and how that
                compares with the ceilings, with FlashAttention, with torch
    states      the recurrences in place, beside plain torch
    engine      a model with random weights: decode with and without CUDA graphs, what a step costs beside its kernels,
                and tokens per second beside transformers' continuous batching

Prints a table as it goes and writes JSON at the end (after each part, so that nothing measured is lost). A time is the
median over the repeats, between CUDA events, with inputs that rotate so that the cache does not hold them. A backend
that is not installed, or refuses a case, is a line that says why. FlashAttention is looked for as `FlashBackend` does.

--smoke runs tiny cases wherever it is, without a GPU in Triton's interpreter: it shows that the command works, and its
times mean nothing.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

PARTS = ("ceilings", "errors", "attention", "states", "engine")


@dataclass(frozen=True)
class Case:
    """Rows of (queries, tokens of the sequence), and the layer they run through."""

    name: str
    rows: tuple[tuple[int, int], ...]
    heads: int = 32
    kv_heads: int = 8
    key_dim: int = 128
    value_dim: int = 128
    block_tokens: int = 16
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: bool = False
    latent: bool = False

    def visible(self, position: int) -> int:
        if self.chunk is not None:
            return position % self.chunk + 1
        return min(position + 1, self.window or position + 1)

    @property
    def flops(self) -> float:
        """Of both products: every query with every key it sees."""
        pairs = sum(self.visible(end - n - 1) for queries, end in self.rows for n in range(queries))
        return 2.0 * pairs * self.heads * (self.key_dim + self.value_dim)

    def bytes(self, itemsize: int) -> float:
        """That must be read and written at least: the keys and values some query of a row sees, once, and q and out."""
        width = self.key_dim if self.latent else self.key_dim + self.value_dim
        keys = sum(min(end, self.visible(end - queries) + queries - 1) for queries, end in self.rows)
        tokens = sum(queries for queries, _ in self.rows)
        return itemsize * (keys * self.kv_heads * width + tokens * self.heads * (self.key_dim + self.value_dim))


def decode(rows: int, length: int) -> tuple[tuple[int, int], ...]:
    return ((1, length),) * rows


CASES = (
    Case("decode 64 x 4k", decode(64, 4096)),
    Case("decode 64 x 4k, page 64", decode(64, 4096), block_tokens=64),
    Case("decode 1 x 32k", decode(1, 32768)),
    Case("decode 8 x 8k", decode(8, 8192)),
    Case("decode 256 x 1k", decode(256, 1024)),
    *(Case(f"decode 64 x {length // 1024}k, window 1k", decode(64, length), window=1024) for length in (2048, 16384)),
    Case("decode 64 x 16k, chunk 8k", decode(64, 16000), chunk=8192),
    Case("decode 64 x 4k, head 64, sinks", decode(64, 4096), heads=64, key_dim=64, value_dim=64, sinks=True),
    Case("decode 64 x 4k, head 256, softcap", decode(64, 4096), 16, 8, 256, 256, softcap=50.0),
    Case("decode 64 x 4k, latent", decode(64, 4096), 16, 1, 576, 512, 64, latent=True),
    Case("prefill 8k", ((8192, 8192),)),
    Case("prefill 2k on 14k", ((2048, 16384),)),
    Case("prefill 8k, window 1k", ((8192, 8192),), window=1024),
    Case("prefill 8k, head 256", ((8192, 8192),), 16, 8, 256, 256),
    Case("prefill 4 x 2k, head 64", ((2048, 2048),) * 4, 64, 8, 64, 64),
    Case("mixed: 63 x 4k decode, prefill 1k on 3k", (*decode(63, 4096), (1024, 4096))),
)
SMOKE_CASES = (
    Case("decode 3 x 40", decode(3, 40), 4, 2, 32, 32),
    Case("prefill 20 on 20, window 16", ((20, 40),), 4, 2, 32, 32, window=16),
)

ERROR_CASES = (
    Case("ragged decode", ((1, 1), (1, 15), (1, 16), (1, 17), (1, 700), (1, 333)), 8, 2, 64, 64),
    Case("prompts", ((33, 33), (1, 9), (7, 90), (150, 150)), 8, 2, 64, 64),
    Case("window", ((33, 33), (1, 90), (1, 11), (7, 90), (150, 180)), 8, 2, 64, 64, window=12),
    Case("chunk", ((33, 33), (1, 90), (1, 49), (150, 180)), 8, 2, 64, 64, chunk=48),
    Case("softcap and sinks", ((33, 33), (1, 90), (7, 90)), 8, 2, 64, 64, softcap=2.0, sinks=True),
    Case("sinks", ((33, 33), (1, 90), (7, 90)), 8, 2, 64, 64, sinks=True),
    Case("heads of 80, pages of 24", ((33, 33), (1, 90), (7, 90)), 8, 2, 80, 80, block_tokens=24),
    Case("heads of 192 and 128", ((33, 33), (1, 90), (7, 90)), 8, 2, 192, 128),
    Case("heads of 256", ((33, 33), (1, 90), (7, 90)), 8, 2, 256, 256),
    Case("latent", ((33, 33), (1, 90), (7, 90)), 16, 1, 576, 512, latent=True),
    Case("one kv head of 71", ((5, 5), (1, 90)), 71, 1, 64, 64),
    Case("long split row", ((1, 20000),), 8, 2, 128, 128),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_battery.json"))
    parser.add_argument("--parts", type=lambda text: text.split(","), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--model-billions", type=float, default=1.0, help="parameters of the engine's model")
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := set(args.parts) - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}; choose from {', '.join(PARTS)}")
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.smoke:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    import torch

    if not args.smoke and not torch.cuda.is_available():
        parser.error("there is no GPU here; --smoke shows that the command works without one")
    if args.peer:
        print(json.dumps(_continuous(args.model, args.smoke)))
        return
    bench = Bench(torch.device("cpu" if args.smoke else "cuda"), 2 if args.smoke else args.repeats, args.smoke)
    report: dict[str, Any] = {"benchmark": "gpu battery", **about(bench)}
    say(report)
    work = {"ceilings": ceilings, "errors": errors, "attention": attention, "states": states}
    for part in args.parts:
        report[part] = engine(bench, args) if part == "engine" else work[part](bench, report.get("ceilings", {}))
        args.output.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {args.output}")
    if any(row.get("wrong") for row in report.get("errors", [])):
        sys.exit("a backend is wrong: see 'errors'")


def short(number: float) -> float:
    """To four digits."""
    return float(f"{number:.4g}")


def say(row: dict[str, Any]) -> None:
    print("  ".join(f"{name} {value}" for name, value in row.items()), flush=True)


def about(bench: "Bench") -> dict[str, Any]:
    import importlib.metadata

    import torch

    versions = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    for name in ("triton", "transformers", "vllm", "vllm-flash-attn"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    device = "none: a smoke test" if bench.is_smoke else torch.cuda.get_device_name()
    return {"date": time.strftime("%Y-%m-%d"), "device": device, "versions": versions}


class Bench:
    """A device, and how to time work on it."""

    CACHE_BYTES = 256 << 20
    """More than any cache holds: inputs of a case are repeated until they take as much."""

    def __init__(self, device: Any, repeats: int, is_smoke: bool):
        self.device, self.repeats, self.is_smoke = device, repeats, is_smoke

    def copies_of(self, size_bytes: float) -> int:
        return 1 if self.is_smoke else max(1, min(16, -(-self.CACHE_BYTES // max(1, int(size_bytes)))))

    def median_us(self, calls: list[Callable[[], Any]]) -> float:
        """Of one call; the calls take turns."""
        import torch

        for call in calls[:3]:
            call()
        took = []
        for n in range(self.repeats):
            call = calls[n % len(calls)]
            if self.device.type == "cuda":
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                torch.cuda.synchronize()
                start.record()
                call()
                end.record()
                end.synchronize()
                took.append(start.elapsed_time(end) * 1e3)
            else:
                started = time.perf_counter()
                call()
                took.append((time.perf_counter() - started) * 1e6)
        return round(statistics.median(took), 2)

    def graphed(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """The same work without Python's part in it, where that is possible."""
        import torch

        if self.device.type != "cuda":
            return call
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay


# -- ceilings --------------------------------------------------------------------------------------------------------


def ceilings(bench: Bench, _: dict[str, Any]) -> dict[str, float]:
    import torch

    size = 1 << 12 if bench.is_smoke else 1 << 30
    source, target = (torch.zeros(size, dtype=torch.uint8, device=bench.device) for _ in range(2))
    copy_us = bench.median_us([lambda: target.copy_(source)])
    side = 64 if bench.is_smoke else 8192
    a, b = (torch.randn(side, side, device=bench.device, dtype=torch.bfloat16) for _ in range(2))
    product_us = bench.median_us([lambda: a @ b])
    found = {
        "copy_gb_per_s": short(2 * size / copy_us / 1e3),
        "matmul_tflop_per_s": short(2 * side**3 / product_us / 1e6),
        "launch_us": bench.median_us([lambda: target[:16].zero_()]),
    }
    say(found)
    return found


# -- errors ----------------------------------------------------------------------------------------------------------


class World:
    """A case made real: permuted tables, pages that are NaN wherever no query looks."""

    def __init__(self, case: Case, dtype: Any, device: Any, poison: bool = True, seed: int = 0):
        import numpy as np
        import torch

        from intarsia.kernels.paged_attention import GroupBatch, LayerParams

        generator = torch.Generator(device=device).manual_seed(seed)
        query_lens, kv_lens = np.array(case.rows, dtype=np.int32).T
        blocks = -(-int(kv_lens.max()) // case.block_tokens)
        order = np.random.default_rng(seed).permutation(len(case.rows) * blocks) + 1
        table = order.reshape(len(case.rows), blocks).astype(np.int32)
        width = case.key_dim if case.latent else case.key_dim + case.value_dim
        shape = (len(order) + 1, case.block_tokens, case.kv_heads, width)
        if poison:
            self.pages = torch.full(shape, float("nan"), dtype=dtype, device=device)
            for row, end in enumerate(kv_lens.tolist()):
                block, offset = np.divmod(np.arange(end), case.block_tokens)
                places = (torch.from_numpy(table[row, block].astype(np.int64)), torch.from_numpy(offset))
                tokens = torch.randn(end, *shape[2:], generator=generator, device=device).to(dtype)
                self.pages[tuple(place.to(device) for place in places)] = tokens
        else:
            self.pages = torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)
        tokens = int(query_lens.sum())
        self.q = torch.randn(tokens, case.heads, case.key_dim, generator=generator, device=device).to(dtype)
        self.out = torch.full((tokens, case.heads, case.value_dim), float("nan"), dtype=dtype, device=device)
        sinks = torch.randn(case.heads, generator=generator, device=device) if case.sinks else None
        scale = case.key_dim**-0.5
        self.params = LayerParams(scale, case.softcap, sinks, case.value_dim if case.latent else None)
        self.batch = GroupBatch(table, query_lens, kv_lens, case.block_tokens, case.window, case.chunk)

    def run(self, backend: Any, meta: Any) -> Any:
        backend.attend(self.q, self.pages, self.params, meta, self.out)
        return self.out


def needs_of(case: Case, dtype: Any) -> Any:
    from intarsia.kernels.paged_attention import Needs

    return Needs(
        dtype, case.heads, case.kv_heads, case.key_dim, case.value_dim, case.window is not None,
        case.chunk is not None, case.softcap is not None, case.sinks, case.latent, case.block_tokens,
    )  # fmt: skip


def backends(bench: Bench) -> Iterator[tuple[str, Any]]:
    """Those that may run here by name, or why not."""
    from intarsia.kernels.paged_attention import BACKENDS

    for kind in BACKENDS:
        is_interpreted = bench.is_smoke and kind.name == "triton"
        if bench.device.type not in kind.capabilities.devices and not is_interpreted:
            continue
        yield kind.name, kind.lacks() or kind()


def refusal(backend: Any, case: Case, dtype: Any, bench: Bench) -> str | None:
    """Why a backend does not run a case, if it does not."""
    if isinstance(backend, str):
        return backend
    capabilities = replace(backend.capabilities, devices=frozenset({bench.device.type}))
    return capabilities.refusal(needs_of(case, dtype), bench.device)


def errors(bench: Bench, _: dict[str, Any]) -> list[dict[str, Any]]:
    """Allowed is what flash-attention allows: twice the error of plain torch in the same dtype."""
    import torch

    from intarsia.kernels.paged_attention import ReferenceBackend

    rows = []
    for dtype in (torch.float32, torch.float16) if bench.is_smoke else (torch.float32, torch.bfloat16, torch.float16):
        for case in ERROR_CASES[:2] if bench.is_smoke else ERROR_CASES:
            world = World(case, dtype, bench.device)
            judge = ReferenceBackend(torch.float64)
            double = World(case, dtype, bench.device)
            double.pages, double.q, double.out = double.pages.double(), double.q.double(), double.out.double()
            truth = double.run(judge, judge.prepare(double.batch, bench.device)).clone()
            plain = ReferenceBackend()
            allowed = (world.run(plain, plain.prepare(world.batch, bench.device)).double() - truth).abs().max()
            allowed = max(2 * float(allowed), 1e-6 * max(1.0, float(truth.abs().max())))
            for name, backend in backends(bench):
                row: dict[str, Any] = {"case": case.name, "dtype": str(dtype)[6:], "backend": name}
                if reason := refusal(backend, case, dtype, bench):
                    row["skipped"] = reason
                else:
                    world.out.fill_(float("nan"))
                    if not backend.capabilities.any_bytes:
                        row["over_nan_pages"] = bool(
                            world.run(backend, backend.prepare(world.batch, bench.device)).isfinite().all()
                        )
                        world.pages.nan_to_num_()
                        world.out.fill_(float("nan"))
                    error = (world.run(backend, backend.prepare(world.batch, bench.device)).double() - truth).abs()
                    error = float(error.max())
                    row |= {"error": f"{error:.2e}", "allowed": f"{allowed:.2e}", "wrong": not error <= allowed}
                say(row)
                rows.append(row)
    return rows


# -- attention -------------------------------------------------------------------------------------------------------


def attention(bench: Bench, limits: dict[str, Any]) -> list[dict[str, Any]]:
    import torch

    dtype = torch.float32 if bench.is_smoke else torch.bfloat16
    rows = []
    for case in SMOKE_CASES if bench.is_smoke else CASES:
        found: dict[str, float] = {}
        worlds = [
            World(case, dtype, bench.device, poison=False, seed=n)
            for n in range(bench.copies_of(case.bytes(dtype.itemsize)))
        ]
        for name, backend in backends(bench):
            if name == "reference" and not bench.is_smoke:
                continue
            if reason := refusal(backend, case, dtype, bench):
                row = {"case": case.name, "backend": name, "skipped": reason}
            else:
                metas = [backend.prepare(world.batch, bench.device) for world in worlds]
                calls = [
                    bench.graphed(lambda w=world, m=meta, b=backend: w.run(b, m))
                    for world, meta in zip(worlds, metas, strict=True)
                ]
                found[name] = bench.median_us(calls)
                row = {"case": case.name, "backend": name, **rates(case, dtype, found[name], limits)}
            say(row)
            rows.append(row)
        sdpa = torch_attention(case, dtype, bench)
        if sdpa is not None:
            found["torch dense"] = bench.median_us([sdpa])
            row = {"case": case.name, "backend": "torch dense", **rates(case, dtype, found["torch dense"], limits)}
            say(row)
            rows.append(row)
        ratios = {
            f"triton_to_{peer.replace(' ', '_')}": round(found[peer] / found["triton"], 3)
            for peer in ("flash", "torch dense", "torch")
            if peer in found and "triton" in found
        }
        say({"case": case.name, **ratios})
        rows.append({"case": case.name, **ratios})
    return rows


def rates(case: Case, dtype: Any, us: float, limits: dict[str, Any]) -> dict[str, Any]:
    size, flops = case.bytes(dtype.itemsize), case.flops
    row = {"us": us, "gb_per_s": short(size / us / 1e3), "tflop_per_s": short(flops / us / 1e6)}
    if limits:
        floor_us = max(
            size / limits["copy_gb_per_s"] / 1e3,
            flops / limits["matmul_tflop_per_s"] / 1e6,
        )
        row["floor_us"] = short(floor_us)
        row["times_floor"] = round(us / floor_us, 3)
    return row


def torch_attention(case: Case, dtype: Any, bench: Bench) -> Callable[[], Any] | None:
    """scaled_dot_product_attention on dense keys, for cases that it can be asked at all."""
    import torch
    import torch.nn.functional as F

    queries, length = case.rows[0]
    if len(set(case.rows)) > 1 or case.latent or case.softcap or case.sinks or case.chunk:
        return None
    if case.window is not None or (queries not in (1, length)):
        return None
    shape = (len(case.rows), case.kv_heads, length)
    q = torch.randn(len(case.rows), case.heads, queries, case.key_dim, dtype=dtype, device=bench.device)
    k = torch.randn(*shape, case.key_dim, dtype=dtype, device=bench.device)
    v = torch.randn(*shape, case.value_dim, dtype=dtype, device=bench.device)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=queries > 1, enable_gqa=True)


# -- states ----------------------------------------------------------------------------------------------------------


def states(bench: Bench, limits: dict[str, Any]) -> list[dict[str, Any]]:
    import numpy as np
    import torch
    import torch.nn.functional as F

    from intarsia.kernels.state import (
        CONVOLUTION,
        GATED_DELTA,
        LINEAR_ATTENTION,
        SELECTIVE_SCAN,
        ChunkedStates,
        StateBatch,
        TritonStates,
    )  # fmt: skip

    big = not bench.is_smoke
    H, K, V, C, S, W = (80, 128, 64, 5120, 16, 3) if big else (2, 16, 16, 32, 4, 3)
    shapes = {
        "mamba-2": (LINEAR_ATTENTION, (H, K, V)),
        "gated delta": (GATED_DELTA, (H // 2, K, K)),
        "mamba-1": (SELECTIVE_SCAN, (C, S)),
        "convolution": (CONVOLUTION, (C, W)),
    }
    rows = []
    for name, (recurrence, shape) in shapes.items():
        for count, length in ((64, 1), (1, 8192)) if big else ((3, 1), (1, 20)):
            tokens, dtype = count * length, torch.bfloat16 if name == "convolution" and big else torch.float32
            torch.manual_seed(0)

            def draw(*size: int, dtype: Any = dtype) -> Any:
                return torch.randn(*size, device=bench.device).to(dtype)

            if name == "convolution":
                constants, inputs = (draw(C, W + 1), draw(C)), (draw(tokens, C),)
            elif name == "mamba-1":
                constants = (-draw(C, S).abs(),)
                inputs = (draw(tokens, C), draw(tokens, C).abs(), draw(tokens, S), draw(tokens, S))
            else:
                heads, keys, values = shape
                q, k = (F.normalize(draw(tokens, heads, keys), dim=-1) for _ in range(2))
                constants, inputs = (), (q, k, draw(tokens, heads, values), -draw(tokens, heads).abs())
                if name == "gated delta":
                    inputs = (*inputs, draw(tokens, heads).sigmoid())
            pages = torch.zeros(count + 1, *shape, dtype=dtype, device=bench.device)
            batch = StateBatch(np.arange(1, count + 1), np.full(count, length), np.zeros(count, dtype=bool))
            size = pages.element_size() * 2 * count * pages[0].numel()
            size += sum(x.numel() * x.element_size() for x in inputs)
            found, outs = {}, {}
            for kind in (TritonStates, ChunkedStates):
                row: dict[str, Any] = {"case": f"{name} {count} x {length}", "backend": kind.name}
                if lacks := kind.lacks():
                    row["skipped"] = lacks
                else:
                    backend = kind()
                    meta = backend.prepare(batch, bench.device)
                    pages.zero_()
                    scan = partial(backend.scan, recurrence, pages, constants, inputs, meta)
                    outs[kind.name] = scan().float()
                    found[kind.name] = bench.median_us([scan])
                    row |= {"us": found[kind.name], "gb_per_s": round(size / found[kind.name] / 1e3, 1)}
                    if limits:
                        row["times_floor"] = round(found[kind.name] * limits["copy_gb_per_s"] * 1e3 / size, 3)
                say(row)
                rows.append(row)
            if len(found) == 2:
                difference = float((outs["triton"] - outs["torch"]).abs().max())
                row = {
                    "case": f"{name} {count} x {length}",
                    "triton_to_torch": round(found["torch"] / found["triton"], 3),
                    "difference": f"{difference:.2e}",
                }
                say(row)
                rows.append(row)
    return rows


# -- the engine ------------------------------------------------------------------------------------------------------


def engine(bench: Bench, args: argparse.Namespace) -> dict[str, Any]:
    """Requests of 256 tokens and 128 new ones, on a Gemma 3 shape of the asked size: random weights, bfloat16."""
    with tempfile.TemporaryDirectory() as folder:
        model = _model(Path(folder), args.model_billions, bench.is_smoke)
        found: dict[str, Any] = {"model_billions": args.model_billions, "requests": []}
        for count in (2,) if bench.is_smoke else (1, 32, 128):
            row: dict[str, Any] = {"requests": count}
            row["graphs"] = _ours(model, count, bench.is_smoke, enforce_eager=False)
            row["eager"] = _ours(model, count, bench.is_smoke, enforce_eager=True)
            say(row)
            found["requests"].append(row)
        command = [sys.executable, __file__, "--peer", "continuous", "--model", model]
        done = subprocess.run(
            command + ["--smoke"] * bench.is_smoke, capture_output=True, text=True, timeout=900, check=False
        )
        if done.returncode:
            found["continuous_batching"] = {"failed": done.stderr.strip().splitlines()[-1:]}
        else:
            found["continuous_batching"] = json.loads(done.stdout.strip().splitlines()[-1])
            ours = found["requests"][-1]["graphs"]["tokens_per_s"]
            found["over_continuous_batching"] = round(ours / found["continuous_batching"]["tokens_per_s"], 3)
        say(found["continuous_batching"])
    return found


def _model(folder: Path, billions: float, is_smoke: bool) -> str:
    import torch
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    width = 64 if is_smoke else 1152 if billions <= 2 else 2560
    layers = (
        2 if is_smoke else max(6, round(billions / (1.0 if billions <= 2 else 3.9) * (26 if billions <= 2 else 34)))
    )
    config = Gemma3TextConfig(
        vocab_size=512 if is_smoke else 262144, hidden_size=width, intermediate_size=width * (2 if is_smoke else 6),
        num_attention_heads=4 if width < 2560 else 8, num_key_value_heads=1 if width < 2560 else 4,
        head_dim=32 if is_smoke else 256, num_hidden_layers=layers, sliding_window=512,
        max_position_embeddings=8192, eos_token_id=None, bos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    dtype = torch.float32 if is_smoke else torch.bfloat16
    with torch.device("cpu" if is_smoke else "cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
    path = str(folder / "model")
    model.save_pretrained(path)
    return path


def _prompts(count: int, is_smoke: bool, seed: int) -> list[list[int]]:
    import random

    rng = random.Random(seed)
    return [[rng.randrange(1, 512) for _ in range(8 if is_smoke else 256)] for _ in range(count)]


def _ours(model: str, count: int, is_smoke: bool, enforce_eager: bool) -> dict[str, float]:
    from intarsia import LLM, SamplingParams

    new = 4 if is_smoke else 128
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    memory: dict[str, Any] = {"kv_cache_memory": "16MiB"} if is_smoke else {}
    with LLM(model, enable_prefix_caching=False, enforce_eager=enforce_eager, max_num_seqs=128, **memory) as llm:
        llm.generate(_prompts(count, is_smoke, 1), params)
        before = llm.stats()
        started = time.perf_counter()
        llm.generate(_prompts(count, is_smoke, 0), params)
        seconds = time.perf_counter() - started
        spent = {name: value - before[name] for name, value in llm.stats().items()}
    return {
        "tokens_per_s": round(count * new / seconds, 1),
        "step_us": round(seconds * 1e6 / spent["steps"], 1),
        "worker_us_per_step": round(spent["run_us"] / spent["steps"], 1),
        "controller_us_per_step": round((spent["plan_us"] + spent["commit_us"]) / spent["steps"], 1),
    }


def _continuous(model: str, is_smoke: bool) -> dict[str, float]:
    import torch
    from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

    count, new = (2, 4) if is_smoke else (128, 128)
    peer: Any = AutoModelForCausalLM.from_pretrained(model, dtype="auto", attn_implementation="sdpa").eval()
    peer.to("cpu" if is_smoke else "cuda")
    config = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)

    def once(seed: int) -> float:
        started = time.perf_counter()
        peer.generate_batch(
            inputs=_prompts(count, is_smoke, seed),
            generation_config=config,
            continuous_batching_config=ContinuousBatchingConfig(),
            progress_bar=False,
        )
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - started

    once(1)
    return {"tokens_per_s": round(count * new / once(0), 1)}


if __name__ == "__main__":
    main()
