"""A product in plain torch: what the fast ones must equal, but for the order of their sums."""

from dataclasses import replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from .codes import CodeKind, Codes
from .protocol import CodesLinear, SortedRows


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x [R,inputs], weight [outputs,inputs], bias [outputs]. Returns [R,outputs] of x's dtype; sums are in float32."""
    out = x.float() @ weight.float().T
    return (out if bias is None else out + bias.float()).to(x.dtype)


def grouped_product(x: Tensor, weights: Tensor, biases: Tensor | None, group_of: Tensor) -> Tensor:
    """The same with a weight of its own for each row. weights [G,outputs,inputs], biases [G,outputs], group_of [R]."""
    rows = [
        product(x[r : r + 1], weights[g], None if biases is None else biases[g])
        for r, g in enumerate(group_of.tolist())
    ]
    return torch.cat(rows)


def sort_rows(groups_TK: Tensor, count: int) -> SortedRows:
    """groups_TK: int64, of each token its groups, of `count` that there are."""
    groups, order = groups_TK.flatten().sort(stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    first = torch.searchsorted(groups, torch.arange(count + 1, device=order.device))
    return SortedRows(first, order // groups_TK.shape[1], place.view(groups_TK.shape))


class ExpandedCodes:
    """Weights in fewer bits [N,K] or [E,N,K], expanded for each product."""

    def __init__(self, codes: Codes, dtype: torch.dtype, biases: Tensor | None = None):
        """biases: [E,N]"""
        self.groups, self.outputs, self.inputs = (1, *codes.shape)[-3:]
        self.dtype = dtype
        self._codes = codes
        self._biases = biases

    @staticmethod
    def takes(codes: Codes) -> bool:
        return True

    def product(self, x_RI: Tensor) -> Tensor:
        return F.linear(x_RI, self._codes.numbers(self.dtype), None if self._biases is None else self._biases[0])

    def grouped_product(self, x_RI: Tensor, first_row: Tensor, row_of: Tensor | None = None) -> Tensor:
        rows = x_RI if row_of is None else x_RI[row_of]
        out = rows.new_empty(len(rows), self.outputs)
        first = first_row.tolist()
        for g in range(self.groups):
            if first[g] < first[g + 1]:
                bias = None if self._biases is None else self._biases[g]
                part = slice(first[g], first[g + 1])
                out[part] = F.linear(rows[part], self._codes.of_expert(g).numbers(self.dtype), bias)
        return out


class ReferenceCodesLinear(CodesLinear):
    """On any device, slowly."""

    dtypes: ClassVar[frozenset[torch.dtype]] = frozenset({torch.float32, torch.bfloat16, torch.float16})
    has_neighbours: ClassVar[bool] = True

    weights = ExpandedCodes

    @classmethod
    def lacks(cls) -> str | None:
        return None

    def settle(self) -> None:
        """Codes are read as they are."""

    def rows(self, numbers: Tensor) -> Tensor:
        return self.codes.rows_at(numbers).numbers(self.dtype)

    def forward(self, input: Tensor) -> Tensor:
        return F.linear(input, self.codes.numbers(self.dtype), self.bias)


# -- products in whole numbers -----------------------------------------------------------------------------------------

INPUT_BLOCK = 32
"""Inputs of a row that share a scale."""

NOTHING = 1e-30
"""Inputs so small, all of a block, are zero."""


class RoundedInputs(NamedTuple):
    """Rows whose numbers are bytes, of 32 columns each times one float32."""

    bytes_RK: Tensor  # int64, from -127 to 127; zeros fill the last block up
    scale_RB: Tensor  # float32


def rounded_inputs(x_RK: Tensor) -> RoundedInputs:
    """The largest of each block is 127 or -127; others are rounded to the nearest, ties to even."""
    x = F.pad(x_RK.float(), (0, -x_RK.shape[1] % INPUT_BLOCK)).unflatten(1, (-1, INPUT_BLOCK))
    largest = x.abs().amax(-1, keepdim=True)
    is_nothing = largest < NOTHING
    times = torch.where(is_nothing, 0, torch.full_like(largest, 127) / largest)
    scale = torch.where(is_nothing, 0, largest / 127)
    return RoundedInputs((x * times).round().long().flatten(1), scale.squeeze(-1))


def run_columns(codes: Codes) -> int | None:
    """Columns whose products of bytes are summed as whole numbers: those that a block and a group have in common.
    None: groups are of other sizes, or begin elsewhere."""
    if codes.scale.shape[-1] == 1:
        return INPUT_BLOCK
    return next((run for run in (INPUT_BLOCK, 16) if codes.columns % run == 0 and codes.offset % run == 0), None)


def integer_product(codes: Codes, x_RK: Tensor, fuses: bool = True) -> Tensor:
    """x [R,K] times a weight [N,K]: whole numbers, then float32 in the order of columns. Returns float32 [R,N].

    fuses: whether a product and its sum are rounded once
    """
    run = run_columns(codes)
    assert run is not None, "its groups are not those of a product in whole numbers"
    times = 2 if codes.kind is CodeKind.E2M1 else 1  # that makes whole numbers of its numbers
    plain = replace(codes, factor=None)
    scale_GN, least_GN = plain.whole_scale().T, None if codes.least is None else plain.whole_least().T
    group_runs = len(scale_GN) * codes.columns if len(scale_GN) == 1 else codes.columns // run
    first = 0 if len(scale_GN) == 1 else codes.offset // run
    # Whole numbers, exactly.
    x = rounded_inputs(x_RK if codes.order is None else x_RK[:, codes.order])
    bytes_uRk = x.bytes_RK.unflatten(1, (-1, run)).transpose(0, 1).double()
    weight = F.pad(codes.centred() * times, (0, x.bytes_RK.shape[1] - codes.shape[1]))
    sums_uRN = (bytes_uRk @ weight.double().unflatten(1, (-1, run)).permute(1, 2, 0)).float()
    # In float32, a run after the other.
    fused = _fused if fuses else torch.addcmul
    total, of_group = torch.zeros_like(sums_uRN[0]), torch.zeros_like(sums_uRN[0])
    runs = -(-codes.shape[1] // run)
    for u in range(runs):
        x_scale = x.scale_RB[:, u * run // INPUT_BLOCK].unsqueeze(1)
        of_group = fused(of_group, sums_uRN[u], x_scale)
        group, place = divmod(first + u, group_runs)
        if place < group_runs - 1 and u < runs - 1:
            continue
        total = fused(total, of_group, scale_GN[group])
        if least_GN is not None:
            total = fused(total, bytes_uRk[u].sum(1, keepdim=True).float() * x_scale, -least_GN[group])
        of_group = torch.zeros_like(total)
    total = total / times
    if codes.factor is None:
        return total
    return total / codes.factor if codes.divides else total * codes.factor


def _fused(total: Tensor, one: Tensor, other: Tensor) -> Tensor:
    """total + one * other, rounded once."""
    return (total.double() + one.double() * other.double()).float()
