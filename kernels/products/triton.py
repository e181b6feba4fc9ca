"""Products on a GPU by our own kernels: see `triton_kernels.py`.

A row's result depends on that row alone. torch's products (cuBLAS) choose their tiles, and where they cut sums, by the
number of rows; they are taken unless someone asks for the same bits. Experts of decode steps are computed here anyway:
a few launches do what takes torch dozens.
"""

import functools
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two
from . import reference
from .protocol import PackedLinear, SortedRows

PROGRAMS = 264
"""That a product should have: two for each processor of an H100. Where outputs give fewer, inputs are cut."""
LEAST_CUT = 512
"""Inputs. A shorter cut costs more to add up than it gains."""
OUTPUTS = 128
"""Of a tile. The matrix instruction must be the same for all tiles, as it says in which order it sums."""
COMBINED = 1024
"""Numbers of a program."""
SORTED_AT_ONCE = 8192
"""Rows times groups that the program which sorts rows compares in one go."""
SORT_WARPS = 8
MOST_SORTED = 1 << 18
"""Rows times groups. More are sorted by torch, in many launches: one program would take longer."""


PRECISION = {"PRECISION": "ieee"}


class Tile(NamedTuple):
    rows: int
    block: int  # inputs that are read at once
    warps: int
    stages: int


def tile_for(rows: int, itemsize: int, groups: int = 1, capability: int | None = None) -> Tile:
    """For a product of so many rows. A warp group multiplies 64 rows at a time in either. Sums that come back into
    registers fit those of twice as many warps; beside the places of many groups' rows, 16 warps have too few.

    capability: of the GPU; None: the one at hand
    """
    block = 128 // itemsize
    tile = Tile(64, block, 4, 4) if rows <= 64 else Tile(128, block, 8, 3)
    has_more = gpu.is_blackwell(capability) and (rows <= 64 or groups == 1)
    return tile._replace(warps=2 * tile.warps) if has_more else tile


def cut_inputs(inputs: int, outputs: int) -> int:
    """Of a weight: how many inputs are summed before a cut."""
    cuts = min(PROGRAMS // -(-outputs // OUTPUTS), inputs // LEAST_CUT)
    return inputs if cuts < 2 else -(-inputs // cuts // 64) * 64


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # here and not above: triton may be missing

    return triton_kernels


class Launch(NamedTuple):
    """How rows are multiplied, by their number."""

    kernel: Any
    constants: dict[str, Any]
    tile: Tile
    outputs: int  # of a tile
    cut: int  # inputs that are summed before a cut
    programs: int  # that a product should have; where tiles give fewer, each cut has a program


class TritonWeights:
    """Weights [G,outputs,inputs] of one or more groups, and biases [G,outputs]: as they are."""

    def __init__(self, weights: Tensor, biases: Tensor | None = None):
        self.groups, self.outputs, self.inputs = weights.shape
        self._weights = weights.contiguous()
        self._biases = None if biases is None else biases.contiguous()
        self._cut = cut_inputs(self.inputs, self.outputs)

    def product(self, x_RI: Tensor) -> Tensor:
        """Of every row with the first group's weight. Returns [R,outputs]."""
        return self._run(x_RI, len(x_RI), None, None)

    def grouped_product(self, x_RI: Tensor, first_row: Tensor, row_of: Tensor | None = None) -> Tensor:
        """Rows first_row[g] to first_row[g + 1] of the result [N,outputs] are those of group g.

        first_row: [G+1] int64, from 0 to N. row_of: [N] int64: which row of x each of them is; None: the same
        """
        return self._run(x_RI, len(x_RI) if row_of is None else len(row_of), first_row, row_of)

    def _run(self, x_RI: Tensor, count: int, first_row: Tensor | None, row_of: Tensor | None) -> Tensor:
        x_RI = dense(x_RI)
        out = x_RI.new_empty(count, self.outputs)
        if count == 0:
            return out
        # The tile depends on the rows of a step, which changes no bit: each output is summed in the same order.
        groups = 1 if first_row is None else self.groups
        kernel, constants, tile, width, cut, programs = self._launch(-(-count // groups), x_RI.itemsize)
        tiles = -(-count // tile.rows) if first_row is None else min(count, groups + count // tile.rows)
        across, cuts = -(-self.outputs // width), -(-self.inputs // cut)
        is_cut = cuts > 1 and tiles * across < programs
        parts = out.new_empty((cuts, count, self.outputs), dtype=torch.float32) if is_cut else out
        bias, first = out if self._biases is None else self._biases, out if first_row is None else first_row
        common = {
            "GROUPS_PADDED": 0 if first_row is None else power_of_two(self.groups),
            "HAS_BIAS": self._biases is not None,
        }
        kernel[tiles, across, cuts if is_cut else 1](
            x_RI, *self._operands(), bias, out, parts, first, out if row_of is None else row_of,
            count, self.outputs, self.groups, x_RI.stride(0),
            INPUTS=self.inputs, CUT=cut, HAS_TOKENS=row_of is not None, IS_CUT=is_cut,
            ROWS=tile.rows, OUTPUTS=width, BLOCK=tile.block,
            num_warps=tile.warps, num_stages=tile.stages, **common, **constants,
        )  # fmt: skip
        if is_cut:
            _kernels().add_cuts[count, -(-self.outputs // OUTPUTS)](
                parts, bias, out, first, count, self.outputs, self.groups, CUTS=cuts, OUTPUTS=OUTPUTS, **common
            )
        return out

    def _launch(self, rows: int, itemsize: int) -> Launch:
        """rows: of a group, on average"""
        return Launch(
            _kernels().product, PRECISION, tile_for(rows, itemsize, self.groups), OUTPUTS, self._cut, PROGRAMS
        )

    def _operands(self) -> tuple[Tensor, ...]:
        """What the kernel is given of the weights."""
        return (self._weights,)


def combine(x_ND: Tensor, row_of: Tensor, shares: Tensor) -> Tensor:
    """Rows of x, added up by their shares in float32. row_of [R,K] int64, shares [R,K]. Returns [R,D]."""
    rows, experts = row_of.shape
    width = x_ND.shape[1]
    out = x_ND.new_empty(rows, width)
    row_of, shares = dense(row_of), dense(shares)
    if rows:
        _kernels().combine[rows, -(-width // COMBINED)](
            x_ND, row_of, shares, out, width, row_of.stride(0), shares.stride(0), EXPERTS=experts, BLOCK=COMBINED
        )
    return out


def sort_rows(groups_TK: Tensor, count: int) -> SortedRows:
    """As in `reference.py`, in one launch where rows are not too many."""
    rows, padded = groups_TK.numel(), power_of_two(count)
    if rows * padded > MOST_SORTED:
        return reference.sort_rows(groups_TK, count)
    groups_TK = groups_TK.contiguous()
    first, place_TK = groups_TK.new_empty(count + 1), torch.empty_like(groups_TK)
    token = groups_TK.new_empty(rows)
    block = min(power_of_two(rows), max(16, SORTED_AT_ONCE // padded))
    _kernels().sort_rows[(1,)](
        groups_TK, first, token, place_TK, rows, count,
        PICKS=groups_TK.shape[1], GROUPS_PADDED=padded, BLOCK=block, num_warps=SORT_WARPS,
    )  # fmt: skip
    return SortedRows(first, token, place_TK)


class TritonLinear(PackedLinear):
    """On a GPU, for `same_bits`. Its weight stays as it is, so others may share it."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    has_neighbours: ClassVar[bool] = True

    packed: TritonWeights

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    @classmethod
    def take_over(cls, linear: nn.Linear) -> Self:
        module: Any = linear
        module.__class__ = cls
        biases = None if module.bias is None else module.bias.detach().unsqueeze(0)
        module.packed = TritonWeights(module.weight.detach().unsqueeze(0), biases)
        return module

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        weight = self._parameters["weight"]
        assert weight is not None
        return weight

    @property
    def outputs(self) -> int:
        return len(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        return self.packed.product(input.flatten(0, -2)).view(*input.shape[:-1], self.packed.outputs)
