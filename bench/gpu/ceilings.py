"""What the device does at best: bytes copied and read, products, launches, and bytes to and from host memory.

All of random numbers: zeros take less power, so a device computes with them at a higher clock.
"""

from collections.abc import Iterator
from functools import partial

import torch

from intarsia.kernels.paged_attention import FlashBackend

from .device import Bench
from .lines import short
from .parts import Case, Row

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    size, side = (1 << 12, 32) if is_rehearsed else (1 << 30, 8192)
    return [
        Case("device", _device),
        Case("copy", partial(_copy, size)),
        Case("read", partial(_read, size)),
        *(Case(f"products, {str(dtype)[6:]}", partial(_product, side, dtype)) for dtype in DTYPES),
        Case("products of few rows", partial(_thin, 32 if is_rehearsed else 16384)),
        Case("launches", _launches),
        Case("host memory", partial(_host, size)),
    ]


def _device(bench: Bench) -> Iterator[Row]:
    """What it is, and whether there is a FlashAttention to be had."""
    properties = torch.cuda.get_device_properties(bench.device)
    row = {"device": properties.name, "memory_gb": short(properties.total_memory / 1e9)}
    row |= {"processors": properties.multi_processor_count, "cuda": torch.version.cuda}
    yield {**row, "flash_attention": FlashBackend.lacks() or "is here"}


def _copy(size: int, bench: Bench) -> Iterator[Row]:
    source, target = bench.random_bytes(size), bench.random_bytes(size)
    timing = bench.time([lambda: target.copy_(source)])
    yield {"copy_gb_per_s": short(2 * size / timing.us / 1e3), **timing.row()}


def _read(size: int, bench: Bench) -> Iterator[Row]:
    """A sum reads everything and writes next to nothing."""
    numbers = bench.random(size // 4)
    timing = bench.time([lambda: numbers.sum()])
    yield {"read_gb_per_s": short(size / timing.us / 1e3), **timing.row()}


def _product(side: int, dtype: torch.dtype, bench: Bench) -> Iterator[Row]:
    """float32 is not rounded to TF32 unless torch is asked for that."""
    side = side if dtype is not torch.float32 else max(32, side // 4)
    a, b = (bench.random(side, side, dtype=dtype) for _ in range(2))
    timing = bench.time([lambda: a @ b])
    yield {f"{str(dtype)[6:]}_tflop_per_s": short(2 * side**3 / timing.us / 1e6), "side": side, **timing.row()}


def _thin(width: int, bench: Bench) -> Iterator[Row]:
    """As in a decode step: weights are read once for few rows."""
    dtype = torch.bfloat16
    weights = [bench.random(width, width // 2, dtype=dtype) for _ in range(2)]
    for rows in (1, 16, 64):
        x = bench.random(rows, width // 2, dtype=dtype)
        timing = bench.time([partial(torch.nn.functional.linear, x, weight) for weight in weights])
        yield {"rows": rows, **timing.row(), "gb_per_s": short(weights[0].numel() * 2 / timing.us / 1e3)}


def _launches(bench: Bench) -> Iterator[Row]:
    """The least kernel: within a graph, and launched by Python."""
    small = bench.random(16)
    inside, outside = bench.time([small.neg_]), bench.time([small.neg_], may_record=False)
    yield {"launch_us_in_graph": inside.us, "launch_us": outside.us}


def _host(size: int, bench: Bench) -> Iterator[Row]:
    """Pinned, in one piece: what swaps and uploads can reach."""
    pinned = torch.empty(size // 4, dtype=torch.uint8, pin_memory=True)
    on_device = bench.random_bytes(size // 4)
    for name, target, source in (("upload", on_device, pinned), ("download", pinned, on_device)):
        us = bench.time(
            [lambda target=target, source=source: target.copy_(source, non_blocking=True)], may_record=False
        ).us
        yield {f"{name}_gb_per_s": short(size / 4 / us / 1e3)}
