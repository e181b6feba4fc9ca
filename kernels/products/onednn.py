"""Products by oneDNN, as torch brings it: where there is no C++ compiler.

A step of 32 tokens through a 256 x 1024 layer takes 91 us instead of 126, of 4 tokens 26 instead of 55, of 128 tokens
314 instead of 517 (two threads, float32). `F.linear` packs weights anew in every call. torch's own compiler packs once,
by these very operators, which have no public name.

oneDNN compiles code for each shape: 0.26 ms and 0.57 MB. A step may have any number of tokens, so products have one of
a few: what is missing is filled up with zeros. Most are compiled before requests come.
"""

import time
from collections.abc import Callable
from itertools import islice, product
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from .protocol import PackedLinear

EXACT_ROWS = 16
"""A product of up to so many rows takes equally long for each number of them."""

MOST_SPARE_ROWS = 64

MOST_COMPILED, COMPILE_WITHIN_S = 320, 1.0
"""Products, before requests come. oneDNN keeps the code of 512 (`environment.py`)."""


def _dtypes() -> frozenset[torch.dtype]:
    """oneDNN has no products in bfloat16 for processors with AVX2 alone."""
    is_half_known = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)()
    return frozenset({torch.float32, torch.bfloat16} if is_half_known else {torch.float32})


class OneDnnLinear(PackedLinear):
    dtypes: ClassVar[frozenset[torch.dtype]] = _dtypes()
    has_neighbours: ClassVar[bool] = False

    packed: Any

    @classmethod
    def lacks(cls) -> str | None:
        operators = torch.ops.mkldnn
        has_all = all(hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise"))
        return None if torch.backends.mkldnn.is_available() and has_all else "this torch has no oneDNN"

    def pack(self, weight: Tensor) -> None:
        self.packed = torch.ops.mkldnn._reorder_linear_weight(weight, None)

    def rows(self, numbers: Tensor) -> Tensor:
        return self.packed.to_dense()[numbers]

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed.to_dense()

    @property
    def outputs(self) -> int:
        return self.packed.shape[0]

    def forward(self, input: Tensor) -> Tensor:
        rows = input.shape[:-1].numel()
        spare = padded_rows(rows) - rows
        if not spare:
            return self._product(input)
        padded = nn.functional.pad(input.reshape(rows, -1), (0, 0, 0, spare))
        return self._product(padded)[:rows].view(*input.shape[:-1], -1)

    def _product(self, input: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(input, self.packed, self.bias, "none", [], "")


def padded_rows(rows: int) -> int:
    """The next of four sizes per doubling, which beyond 256 are multiples of 64."""
    if rows <= EXACT_ROWS:
        return rows
    step = min(MOST_SPARE_ROWS, 1 << ((rows - 1).bit_length() - 3))
    return -(-rows // step) * step


@torch.inference_mode()
def compile_products(module: nn.Module, most_rows: int, before_rows: Callable[[int], object] = lambda _: None) -> None:
    """Run every such product of a module once, those of few rows first, as far as time and memory allow.

    before_rows: sets up what products of so many rows are run with
    """
    linears = (child for child in module.modules() if isinstance(child, OneDnnLinear))
    kinds = {(child.packed.shape, child.packed.dtype, child.bias is None): child for child in linears}
    sizes = sorted({padded_rows(rows) for rows in range(1, most_rows + 1)}) if kinds else []
    until_s = time.monotonic() + COMPILE_WITHIN_S
    for rows, linear in islice(product(sizes, kinds.values()), MOST_COMPILED):
        if time.monotonic() > until_s:
            return
        before_rows(rows)
        linear._product(torch.zeros(rows, linear.packed.shape[1], dtype=linear.packed.dtype))  # without hooks
