"""Products on a GPU with weights that stay in fewer bits: see `unpacking_kernels.py`.

Tiles and cuts are those of `triton.py`. One or two rows are multiplied in another way, and many by torch, with the
weight expanded before; `OrderedTritonCodes` leaves both out, so that a row's result depends on that row alone.
"""

import functools
from dataclasses import replace
from math import gcd, inf
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two
from .codes import CodeKind, Codes, as_bytes
from .protocol import CodesLinear
from .triton import OUTPUTS, PRECISION, PROGRAMS, Launch, Tile, TritonWeights, cut_inputs, tile_for

SCALE_KINDS = {
    torch.float32: 0, torch.bfloat16: 0, torch.float16: 0, torch.float8_e4m3fn: 1, torch.uint8: 2,
    torch.float8_e8m0fnu: 2,
}  # fmt: skip
"""As the kernel counts them."""

WARPS = 8
"""Of a program, for few rows too: with four, registers that unpack do not suffice."""

MOST_FEW = 2
"""Rows of a group that are multiplied without matrix instructions: on an H100 one takes 0.6 of the time that it takes
with them, two 0.8, four 1.2."""
EXPANDED_FROM_ROWS = 320
"""From there on a weight is expanded first, for torch's product. On an H100 2,048 rows would else take three times as
long as with weights in 16 bits."""
EXPANDED_BYTES = 256 << 20
"""Of a weight that are expanded at once."""
FEW_OUTPUTS, FEW_WARPS, FEW_STAGES = 64, 4, 1
"""Of a tile of few rows."""
FEW_PROGRAMS, LEAST_FEW_CUT = 1056, 512

KINDS = frozenset({CodeKind.INT4, CodeKind.E2M1, CodeKind.INT8, CodeKind.E4M3, CodeKind.UINT8})


def cut_few(inputs: int, outputs: int) -> int:
    """As `cut_inputs`, for few rows."""
    cuts = min(FEW_PROGRAMS // -(-outputs // FEW_OUTPUTS), inputs // LEAST_FEW_CUT)
    return inputs if cuts < 2 else -(-inputs // cuts // 64) * 64


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


FLOATS = {CodeKind.E2M1: 2.0**14, CodeKind.E4M3: 2.0**8}
"""What such codes are multiplied with, once their bits are those of a float16."""


def _has_base(codes: Codes) -> bool:
    """Whether something is subtracted from floats, or their scales would overflow with their power of two."""
    unit = FLOATS.get(codes.kind)
    if unit is None:
        return False
    largest = codes.whole_scale().abs().nan_to_num(0.0, 0.0).max() * unit
    return codes.zero is not None or codes.middle != 0 or not bool(largest.isfinite())


def _in_words(blocks: Tensor, kind: CodeKind) -> Tensor:
    """Codes of blocks, uint8 [..,bytes] with the first column's bits lowest, as kernels take them, int32 [..,words]."""
    if kind is CodeKind.INT8:
        blocks = blocks ^ 128  # so that the least of them is 0
    if kind.bits == 4:
        blocks = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    words = blocks.unflatten(-1, (32 // kind.bits, -1)).mT
    if kind.bits == 4:
        words = words[..., 0::2] | words[..., 1::2] << 4
    return words.contiguous().view(torch.int32).squeeze(-1)


def _from_words(words: Tensor, kind: CodeKind) -> Tensor:
    """The same the other way round."""
    codes = words.contiguous().unsqueeze(-1).view(torch.uint8)
    if kind.bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    blocks = codes.mT.flatten(-2)
    if kind.bits == 4:
        blocks = blocks[..., 0::2] | blocks[..., 1::2] << 4
    return blocks ^ 128 if kind is CodeKind.INT8 else blocks


class TritonCodes(TritonWeights):
    """Weights in fewer bits, of one or more groups: their codes in tiles, scales along the outputs."""

    most_few: ClassVar[int] = MOST_FEW
    expanded_from_rows: ClassVar[float] = EXPANDED_FROM_ROWS

    def __init__(self, codes: Codes, dtype: torch.dtype, biases: Tensor | None = None):
        """codes: [N,K] or [E,N,K]. dtype: of the rows to come, and of results. biases: [E,N]"""
        self.groups, self.outputs, self.inputs = (1, *codes.shape)[-3:]
        self._biases = None if biases is None else biases.contiguous()
        self._cut = cut_inputs(self.inputs, self.outputs)
        self._is_grouped = codes.codes.dim() == 3
        self._block = tile_for(1, dtype.itemsize).block
        self._bytes = self._block * codes.kind.bits // 8  # of a block
        whole = codes if self._is_grouped else codes.as_group()
        padded = F.pad(whole.codes, (0, -whole.codes.shape[-1] % self._bytes))
        self._codes = _in_words(padded.unflatten(2, (-1, self._bytes)).transpose(1, 2), codes.kind)
        self._scale = as_bytes(whole.scale).mT.contiguous()
        self._zero = None if whole.zero is None else whole.zero.mT.contiguous()
        self._factor = None if whole.factor is None else whole.factor.float().contiguous()
        self._form = replace(codes.without_numbers(), zero=None)
        self._constants = self._constants_of(codes)

    def _constants_of(self, codes: Codes) -> dict[str, Any]:
        return {
            "KIND": int(codes.kind),
            "EACH": 32 // codes.kind.bits,
            "MIDDLE": codes.middle,
            "SCALE_KIND": SCALE_KINDS[codes.scale.dtype],
            "HAS_ZERO": codes.zero is not None,
            "FACTOR": 0 if codes.factor is None else 2 if codes.divides else 1,
            "HAS_ORDER": codes.order is not None,
            "COLUMNS": codes.columns,
            "OFFSET": codes.offset,
            "SCALES": codes.scale.shape[-1],
            "RUN": run_of(codes.columns, codes.offset, self.inputs, self._block),
            "HAS_BASE": _has_base(codes),
            "HAS_NAN": codes.kind is CodeKind.E4M3 and bool(((codes.codes & 127) == 127).any()),
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
        blocks = _from_words(self._codes, self._form.kind)
        whole = blocks.transpose(1, 2).flatten(2)[..., : self.inputs * self._form.kind.bits // 8].contiguous()
        scale = self._scale.mT.contiguous().view(self._form.scale.dtype)
        zero = None if self._zero is None else self._zero.mT.contiguous()
        grouped = replace(self._form, codes=whole, scale=scale, zero=zero, factor=self._factor)
        return grouped if self._is_grouped else grouped.of_expert(0)

    def product(self, x_RI: Tensor) -> Tensor:
        if len(x_RI) < self.expanded_from_rows:
            return super().product(x_RI)
        bias = None if self._biases is None else self._biases[0]
        at_once = max(OUTPUTS, EXPANDED_BYTES // (self.inputs * x_RI.itemsize) // OUTPUTS * OUTPUTS)
        if at_once >= self.outputs:
            return F.linear(x_RI, self.expanded(x_RI.dtype, 0, self.outputs), bias)
        out = x_RI.new_empty(len(x_RI), self.outputs)
        for start in range(0, self.outputs, at_once):
            stop = min(start + at_once, self.outputs)
            part = None if bias is None else bias[start:stop]
            out[:, start:stop] = F.linear(x_RI, self.expanded(x_RI.dtype, start, stop), part)
        return out

    def expanded(self, dtype: torch.dtype, start: int, stop: int) -> Tensor:
        """The numbers of some outputs of the first group, [stop - start, inputs]. start: a multiple of `OUTPUTS`"""
        numbers = torch.empty(stop - start, self.inputs, dtype=dtype, device=self._codes.device)
        block = self._block
        _kernels().expand[-(-len(numbers) // OUTPUTS), -(-self.inputs // block)](
            *self._operands(), numbers, start, stop, self.outputs,
            INPUTS=self.inputs, OUTPUTS=OUTPUTS, BLOCK=block, num_warps=WARPS, **self._constants,
        )  # fmt: skip
        return numbers

    def _launch(self, rows: int, itemsize: int) -> Launch:
        if rows > self.most_few:
            tile = unpacking_tile(rows, itemsize)
            kernel, constants = _kernels().unpacked_product, self._constants | PRECISION
            return Launch(kernel, constants, tile, OUTPUTS, self._cut, PROGRAMS)
        tile = Tile(power_of_two(rows), self._block, FEW_WARPS, FEW_STAGES)
        constants = self._constants | {"STAGES": FEW_STAGES}
        cut = cut_few(self.inputs, self.outputs)
        return Launch(_kernels().product_of_few, constants, tile, FEW_OUTPUTS, cut, FEW_PROGRAMS)

    def _operands(self) -> tuple[Tensor, ...]:
        zero, factor, order = (
            self._codes if each is None else each for each in (self._zero, self._factor, self._form.order)
        )
        return self._codes, self._scale, zero, factor, order


class OrderedTritonCodes(TritonCodes):
    """The same, summed in one order for any number of rows."""

    most_few: ClassVar[int] = 0
    expanded_from_rows: ClassVar[float] = inf


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


class OrderedTritonCodesLinear(TritonCodesLinear):
    """The same, for `same_bits`."""

    weights = OrderedTritonCodes
