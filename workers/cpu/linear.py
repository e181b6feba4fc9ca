"""Matrix products with constant weights on a CPU: weights are packed once, in the order oneDNN's kernels read them.

A step of 32 tokens through a 256 x 1024 layer takes 91 us instead of 126, of 4 tokens 26 instead of 55, of 128 tokens
314 instead of 517 (two threads, float32). `F.linear` packs them anew in every call. torch's own compiler packs once, by
these very operators, which have no public name.

oneDNN compiles code for each shape: 0.26 ms and 0.57 MB. A step may have any number of tokens, so products have one of
a few: what is missing is filled up with zeros. Most are compiled before requests come.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from itertools import islice, product
from typing import Any

import torch
from torch import Tensor, nn

EXACT_ROWS = 16
"""A product of up to so many rows takes equally long for each number of them."""

MOST_SPARE_ROWS = 64

MOST_COMPILED, COMPILE_WITHIN_S = 320, 1.0
"""Products, before requests come. oneDNN keeps the code of 512 (`environment.py`)."""

PACKED_DTYPES = (torch.float32, torch.bfloat16)


class PackedLinear(nn.Linear):
    """An `nn.Linear` for inference. `weight` is unpacked on each request, and not kept."""

    packed: Any

    @classmethod
    def take_over(cls, linear: nn.Linear) -> None:
        """Change this very module, so that its hooks and references to it stay."""
        packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight, None)
        del linear._parameters["weight"]
        linear.__class__ = cls
        linear.packed = packed

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        return self.packed.to_dense()

    def forward(self, input: Tensor) -> Tensor:
        if torch.compiler.is_compiling():  # any number of rows is one program there
            return self._product(input)
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


def most_rows_within(size: int) -> int:
    """The most rows that are filled up to no more than this."""
    return next(rows for rows in range(size, -1, -1) if padded_rows(rows) <= size)


def pack_linears(module: nn.Module, device: torch.device, leave: Set[str] = frozenset()) -> None:
    """Pack every plain `nn.Linear` whose weight no other module uses. On a CPU; elsewhere nothing happens.

    leave: names of modules whose weight is read as it is
    """
    if device.type != "cpu" or not _can_pack():
        return
    uses = Counter(id(parameter) for owner in module.modules() for parameter in owner.parameters(recurse=False))
    for name, child in module.named_modules():
        is_own = type(child) is nn.Linear and uses[id(child.weight)] == 1 and child.weight.dtype in PACKED_DTYPES
        if is_own and name.rpartition(".")[2] not in leave:
            PackedLinear.take_over(child)  # pyright: ignore[reportArgumentType]


@torch.inference_mode()
def compile_products(module: nn.Module, most_rows: int, before_rows: Callable[[int], object] = lambda _: None) -> None:
    """Run every packed product of a module once, those of few rows first, as far as time and memory allow.

    before_rows: sets up what products of so many rows are run with
    """
    packed = (child for child in module.modules() if isinstance(child, PackedLinear))
    kinds = {(child.packed.shape, child.packed.dtype, child.bias is None): child for child in packed}
    sizes = sorted({padded_rows(rows) for rows in range(1, most_rows + 1)})
    until_s = time.monotonic() + COMPILE_WITHIN_S
    for rows, linear in islice(product(sizes, kinds.values()), MOST_COMPILED):
        if time.monotonic() > until_s:
            return
        before_rows(rows)
        linear._product(torch.zeros(rows, linear.packed.shape[1], dtype=linear.packed.dtype))  # without hooks


def merge_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One product in place of several of the same input: their outputs side by side."""
    merged = nn.Linear(linears[0].in_features, 1, bias=False, device="meta")
    merged.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    merged.out_features = len(merged.weight)
    if any(linear.bias is not None for linear in linears):
        biases = [x.weight.new_zeros(x.out_features) if x.bias is None else x.bias for x in linears]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    pack_linears(merged, merged.weight.device)
    return merged


def _can_pack() -> bool:
    operators = torch.ops.mkldnn
    return torch.backends.mkldnn.is_available() and all(
        hasattr(operators, name) for name in ("_reorder_linear_weight", "_linear_pointwise")
    )
