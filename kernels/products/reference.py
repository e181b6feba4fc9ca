"""A product in plain torch: what the fast ones must equal, but for the order of their sums."""

import torch
from torch import Tensor

from .protocol import SortedRows


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
