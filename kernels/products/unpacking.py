"""Products on a GPU with weights that stay in fewer bits: see `unpacking_kernels.py`.

A row's result depends on that row alone, as of all products of `triton.py`, whose tiles and cuts are taken here, too.
"""

import functools
from dataclasses import replace
from math import gcd
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..toolchain import triton as gpu
from .codes import CodeKind, Codes, as_bytes
from .protocol import CodesLinear
from .triton import Tile, TritonWeights, cut_inputs, tile_for

SCALE_KINDS = {
    torch.float32: 0, torch.bfloat16: 0, torch.float16: 0, torch.float8_e4m3fn: 1, torch.uint8: 2,
    torch.float8_e8m0fnu: 2,
}  # fmt: skip
"""As the kernel counts them."""

WARPS = 8
"""Of a program, for few rows too: with four, registers that unpack do not suffice."""

KINDS = frozenset({CodeKind.INT4, CodeKind.E2M1, CodeKind.INT8, CodeKind.E4M3, CodeKind.UINT8})


def unpacking_tile(rows: int, itemsize: int) -> Tile:
    return tile_for(rows, itemsize)._replace(warps=WARPS)


@functools.cache
def _kernels() -> Any:
    from . import unpacking_kernels  # here and not above: triton may be missing

    return unpacking_kernels


def run_of(columns: int, offset: int, inputs: int, block: int) -> int:
    """How many columns side by side share a scale, wherever they begin: a power of two."""
    if offset + inputs <= columns:
        return block
    common = gcd(columns, offset, block)
    return common & -common


class TritonCodes(TritonWeights):
    """Weights in fewer bits, of one or more groups: their codes in tiles, scales along the outputs."""

    def __init__(self, codes: Codes, dtype: torch.dtype, biases: Tensor | None = None):
        """codes: [N,K] or [E,N,K]. dtype: of the rows to come, and of results. biases: [E,N]"""
        self.groups, self.outputs, self.inputs = (1, *codes.shape)[-3:]
        self._biases = None if biases is None else biases.contiguous()
        self._cut = cut_inputs(self.inputs, self.outputs)
        self._is_grouped = codes.codes.dim() == 3
        self._bytes = tile_for(1, dtype.itemsize).block * codes.kind.bits // 8  # of a block
        whole = codes if self._is_grouped else codes.as_group()
        padded = F.pad(whole.codes, (0, -whole.codes.shape[-1] % self._bytes))
        self._codes = padded.unflatten(2, (-1, self._bytes)).transpose(1, 2).contiguous()
        self._scale = as_bytes(whole.scale).mT.contiguous()
        self._zero = None if whole.zero is None else whole.zero.mT.contiguous()
        self._factor = None if whole.factor is None else whole.factor.float().contiguous()
        self._form = replace(codes.without_numbers(), zero=None)
        self._constants = self._constants_of(codes, tile_for(1, dtype.itemsize).block)

    def _constants_of(self, codes: Codes, block: int) -> dict[str, Any]:
        return {
            "KIND": int(codes.kind),
            "EACH": 8 // codes.kind.bits,
            "MIDDLE": codes.middle,
            "SCALE_KIND": SCALE_KINDS[codes.scale.dtype],
            "HAS_ZERO": codes.zero is not None,
            "FACTOR": 0 if codes.factor is None else 2 if codes.divides else 1,
            "HAS_ORDER": codes.order is not None,
            "COLUMNS": codes.columns,
            "OFFSET": codes.offset,
            "SCALES": codes.scale.shape[-1],
            "RUN": run_of(codes.columns, codes.offset, self.inputs, block),
        }

    @staticmethod
    def takes(codes: Codes) -> bool:
        is_even = codes.columns % 2 == 0 and codes.offset % 2 == 0
        has_more = any(each is not None for each in (codes.high, codes.least, codes.block_scale, codes.block_least))
        return is_even and not has_more and codes.kind in KINDS and codes.scale.dtype in SCALE_KINDS

    @property
    def nbytes(self) -> int:
        held = (self._codes, self._scale, self._zero, self._factor, self._form.order)
        return sum(tensor.nbytes for tensor in held if tensor is not None)

    def codes(self) -> Codes:
        """What it was made of."""
        whole = self._codes.transpose(1, 2).flatten(2)[..., : self.inputs * self._form.kind.bits // 8].contiguous()
        scale = self._scale.mT.contiguous().view(self._form.scale.dtype)
        zero = None if self._zero is None else self._zero.mT.contiguous()
        grouped = replace(self._form, codes=whole, scale=scale, zero=zero, factor=self._factor)
        return grouped if self._is_grouped else grouped.of_expert(0)

    def _tile(self, rows: int, itemsize: int) -> Tile:
        return unpacking_tile(rows, itemsize)

    def _operands(self) -> tuple[Any, tuple[Tensor, ...], dict[str, Any]]:
        zero, factor, order = (
            self._codes if each is None else each for each in (self._zero, self._factor, self._form.order)
        )
        return _kernels().unpacked_product, (self._codes, self._scale, zero, factor, order), self._constants


class TritonCodesLinear(CodesLinear):
    """On a GPU with Triton."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    has_neighbours: ClassVar[bool] = False

    weights = TritonCodes

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    def rows(self, numbers: Tensor) -> Tensor:
        whole = self.codes.numbers(self.dtype)
        return whole[numbers.to(whole.device)]

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.product(input.flatten(0, -2)).view(*input.shape[:-1], self.packed.outputs)
