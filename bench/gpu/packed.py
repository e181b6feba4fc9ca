"""Products with weights in fewer bits: kernels that unpack, beside torch's product of 16 bits.

Few rows are what decode steps have: there the packed weight's bytes are the floor. `gb_per_s` is of the bytes that each
way reads, so 4 bits at a quarter of torch's time read as fast as torch does.
"""

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .device import Bench, rotating
from .parts import Case, Row
from .products import timed

if TYPE_CHECKING:
    from intarsia.kernels.products import Codes

DTYPE = torch.bfloat16
OUTPUTS, INPUTS = 4096, 14_336
TINY_OUTPUTS, TINY_INPUTS = 40, 96
ROWS, TINY_ROWS = (1, 2, 16, 64, 256, 2048), (1, 2, 3)


class Packing(NamedTuple):
    name: str
    kind: str  # of `CodeKind`
    columns: int  # that share a scale; 0: a row's
    scale: torch.dtype
    has_zero: bool = False
    middle: int = 0
    has_factor: bool = False


PACKINGS = (
    Packing("fp8, rows", "E4M3", 0, torch.float32),
    Packing("fp8, blocks of 128", "E4M3", 128, torch.bfloat16),
    Packing("mxfp8", "E4M3", 32, torch.uint8),
    Packing("int8, rows", "INT8", 0, torch.bfloat16),
    Packing("uint8, groups of 128", "UINT8", 128, torch.float16, has_zero=True),
    Packing("int4, groups of 128, zero points", "INT4", 128, torch.bfloat16, has_zero=True),
    Packing("int4, groups of 32", "INT4", 32, torch.bfloat16, middle=8),
    Packing("nvfp4", "E2M1", 16, torch.float8_e4m3fn, has_factor=True),
    Packing("mxfp4", "E2M1", 32, torch.uint8),
)


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    return [Case(each.name, partial(_multiply, each), partial(_touch, each)) for each in PACKINGS]


def _rows(bench: Bench) -> tuple[int, ...]:
    return TINY_ROWS if bench.is_rehearsed else ROWS


def _drawn(packing: Packing, bench: Bench) -> "Codes":
    """Codes at random, and scales that make numbers small."""
    from intarsia.kernels.products.codes import CodeKind, Codes

    kind = CodeKind[packing.kind]
    outputs, inputs = (TINY_OUTPUTS, TINY_INPUTS) if bench.is_rehearsed else (OUTPUTS, INPUTS)
    columns = packing.columns or inputs
    width, groups = inputs * kind.bits // 8, -(-inputs // columns)
    codes = bench.random_bytes(outputs * width).view(outputs, width)
    if kind is CodeKind.E4M3:
        codes = codes & 0b1011_1111  # none of which is no number
    is_power = packing.scale is torch.uint8
    scale = torch.full((outputs, groups), 120.0 if is_power else 1 / 128, device=bench.device).to(packing.scale)
    zero = bench.random_bytes(outputs * groups).view(outputs, groups) & 15 if packing.has_zero else None
    factor = torch.full((outputs,), 0.5, device=bench.device) if packing.has_factor else None
    return Codes(kind, codes, scale, columns, zero, packing.middle, factor)


def _touch(packing: Packing, bench: Bench) -> None:
    from intarsia.kernels.products import TritonCodes

    dtype = bench.dtype(DTYPE)
    ours = TritonCodes(_drawn(packing, bench), dtype)
    for count in _rows(bench):
        ours.product(bench.random(count, ours.inputs, dtype=dtype))


def _multiply(packing: Packing, bench: Bench) -> Iterator[Row]:
    from intarsia.kernels.products import TritonCodes

    dtype = bench.dtype(DTYPE)
    drawn = _drawn(packing, bench)
    plain = drawn.numbers(dtype)
    sizes = {"torch": float(plain.nbytes), "triton": float(drawn.nbytes)}
    theirs = [plain, *(plain.clone() for _ in range(bench.copies_of(sizes["torch"]) - 1))]
    ours = list(rotating(bench, sizes["triton"], lambda n: TritonCodes(drawn, dtype)))
    for count in _rows(bench):
        x = bench.random(count, ours[0].inputs, dtype=dtype)
        calls = {"torch": [partial(F.linear, x, each) for each in theirs]}
        calls["triton"] = [partial(each.product, x) for each in ours]
        wanted: Tensor = calls["torch"][0]().double()
        flops = 2.0 * count * plain.numel()
        for way, each in calls.items():
            about = {"rows": count, "way": way, "bytes": sizes[way]}
            yield bench.attempt(about, partial(timed, each, wanted, sizes[way], flops, bench))
