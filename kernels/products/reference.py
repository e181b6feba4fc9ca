"""A product in plain torch: what the fast ones must equal, but for the order of their sums."""

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from .codes import Codes
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
