"""Checkpoints in fewer bits beside the same weights in bfloat16: memory, loading and decode steps on a CPU.

    python bench/packed.py [FORMAT ..] [--ways cpu cpu-int8] [--layers 16] [--rounds 3] [--threads 2]

A model of Llama's 1B shape with random weights is written once in each format, with as many layers as asked. Each round
takes one format and way after the other in a process of its own, bfloat16 among them, so that ratios are of neighbours.
Prints one JSON object: bytes of weights in files and of the process beside them, seconds to load and to read the file,
tokens per second of 1 and 16 streams and of prompts; of each the median, and of the ratios to bfloat16.
"""

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STREAMS = 1, 16
NEW_TOKENS = 48
PROMPT_TOKENS = 512
WAYS = "cpu", "cpu-int8"
PLAIN = "bfloat16"
USUAL = "fp8-blocks", "fp8-rows", "int8", "w4a16", "awq", "gptq", "nvfp4", "mxfp4"
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "eos_token_id": None,
    "bos_token_id": None,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("formats", nargs="*", default=USUAL)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--as-one", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.as_one:
        path, way = args.as_one
        print(json.dumps(asyncio.run(_measured(Path(path), way, args.threads))))
        return
    cases = {PLAIN: (PLAIN, "auto")}
    cases |= {f"{name} {way}": (name, way) for name in args.formats for way in args.ways}
    found: dict[str, list[dict[str, float]]] = {case: [] for case in cases}
    with tempfile.TemporaryDirectory() as folder:
        for name in (PLAIN, *args.formats):
            _write(Path(folder, name), name, args.layers)
        for _ in range(args.rounds):
            for case, (name, way) in cases.items():
                found[case].append(_in_process(Path(folder, name), way, args.threads))
    print(json.dumps({"layers": args.layers, "threads": args.threads, "formats": _told(found)}, indent=1))


def _told(found: dict[str, list[dict[str, float]]]) -> dict[str, dict[str, float]]:
    told = {}
    for name, rounds in found.items():
        row = {key: _short(statistics.median(each[key] for each in rounds)) for key in rounds[0]}
        for key in (*(f"tokens_per_s_{streams}" for streams in STREAMS), "prompt_tokens_per_s"):
            ratios = [here[key] / plain[key] for here, plain in zip(rounds, found[PLAIN], strict=True)]
            row[f"{key}_over_bfloat16"] = _short(statistics.median(ratios))
        told[name] = row
    return told


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _in_process(path: Path, way: str, threads: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--as-one", str(path), way, "--threads", str(threads)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def _write(path: Path, name: str, layers: int) -> None:
    """One file, a tensor after the other."""
    import torch
    from safetensors.torch import save_file

    from intarsia.tests.packing import FORMATS

    path.mkdir()
    generator = torch.Generator().manual_seed(0)
    format = FORMATS.get(name)
    tensors = {}
    for weight, shape in _shapes(layers).items():
        values = torch.randn(shape, generator=generator) * 0.02 if len(shape) == 2 else torch.ones(shape)
        if format is None or not weight.endswith("_proj.weight"):
            tensors[weight] = values.bfloat16()
            continue
        parts, _ = format.pack(values)
        module = weight.removesuffix(".weight")
        tensors |= {f"{module}.{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = CONFIG | {"num_hidden_layers": layers}
    if format is not None:
        config["quantization_config"] = dict(format.config)
    (path / "config.json").write_text(json.dumps(config))


def _shapes(layers: int) -> dict[str, tuple[int, ...]]:
    hidden, inner, kv = CONFIG["hidden_size"], CONFIG["intermediate_size"], 512
    linear = {
        "self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,),
    }  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (CONFIG["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    return shapes | {f"model.layers.{n}.{name}.weight": shape for n in range(layers) for name, shape in linear.items()}


async def _measured(path: Path, way: str, threads: int) -> dict[str, float]:
    from intarsia.proto.request import SamplingParams
    from intarsia.tests.local import LocalWorkers, complete, make_engine

    file = path / "model.safetensors"
    read_s = _took_s(lambda: file.read_bytes())
    before = _resident_bytes()
    workers = LocalWorkers()
    started = time.perf_counter()
    settings = {"dtype": "bfloat16", "kv_cache_memory": "64MiB", "cpu_threads": threads, "packed_products": way}
    engine = await make_engine(path, workers, **settings)
    load_s = time.perf_counter() - started
    row: dict[str, float] = {
        "file_bytes": file.stat().st_size,
        "weight_bytes": engine.info.weight_bytes,
        "private_beside_weights_and_pages_bytes": _resident_bytes() - before - engine.info.weight_bytes - 2**26,
        "most_resident_bytes": _peak_bytes() - before,
        "read_s": read_s,
        "load_s": load_s,
        "load_gb_per_s": file.stat().st_size / load_s / 1e9,
    }
    asked = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for streams in STREAMS:
        prompts = [[(7 * n + k) % 31000 for k in range(16)] for n in range(streams)]
        await complete(engine, prompts, asked)
        started = time.perf_counter()
        await complete(engine, prompts, asked)
        row[f"tokens_per_s_{streams}"] = streams * NEW_TOKENS / (time.perf_counter() - started)
    asked = SamplingParams(temperature=0, max_tokens=1, ignore_eos=True)
    took_s = []
    for number in range(3):
        started = time.perf_counter()
        await complete(engine, [[(11 * number + 3 * k) % 31000 for k in range(PROMPT_TOKENS)]], asked)
        took_s.append(time.perf_counter() - started)
    row["prompt_tokens_per_s"] = PROMPT_TOKENS / min(took_s)
    return row


def _took_s(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def _resident_bytes() -> int:
    """Of this process alone: without files that are mapped."""
    return _status("RssAnon")


def _peak_bytes() -> int:
    """With files that are mapped."""
    return _status("VmHWM")


def _status(name: str) -> int:
    line = next(each for each in Path("/proc/self/status").read_text().splitlines() if each.startswith(f"{name}:"))
    return int(line.split()[1]) * 1024


if __name__ == "__main__":
    main()
