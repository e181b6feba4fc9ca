"""The words of products with constant weights, and what a way to compute them must do.

    linear.__class__ = kind, by kind.take_over(linear)      # once: its weight is packed, and not kept as it was
    y = linear(x)                                           # x [.., inputs] -> [.., outputs], as before

or in two steps, where weights may still be put side by side between them: kind.hold(linear, weight, dtype), then
linear.settle().

A module that is taken over keeps its hooks, and references to it stay valid. `reference.py` shows the arithmetic.
"""

import math
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor, nn

from .codes import Codes


class SortedRows(NamedTuple):
    """A row for each token and each group that it is to meet, those of one group side by side. N rows, all int64."""

    first: Tensor  # [groups + 1], from 0 to N: where the rows of a group begin
    token: Tensor  # [N]
    place_TK: Tensor  # which row each of a token's groups has


class PackedLinear(nn.Linear):
    """An `nn.Linear` for inference, whose weight lies in the order in which its product reads it."""

    dtypes: ClassVar[frozenset[torch.dtype]]
    """Of weights that it takes. Inputs have the same."""

    has_neighbours: ClassVar[bool]
    """Whether other modules may read the packed weight: an embedding by `rows`, another linear after `lend`."""

    dtype: torch.dtype
    """Of inputs and outputs, where it has neighbours."""

    torch_from_rows: float = math.inf
    """Products of so many rows and more go torch's way, where that is another."""

    held: Any = None
    """The weight as it was, or its `Codes`, until it lies as products read it."""

    is_left_out: bool = False
    """Whether what is not settled yet gives zeros, for a pass that asks for no numbers."""

    @classmethod
    def lacks(cls) -> str | None:
        """What this machine lacks for it, in words; None if nothing. May compile."""
        raise NotImplementedError

    @classmethod
    def take_over(cls, linear: nn.Linear) -> Self:
        """Change this very module. Of its weight, which may be shared, only the packed copy is kept."""
        packed = cls.hold(linear, linear.weight.detach(), linear.weight.dtype)
        packed.settle()
        return packed

    @classmethod
    def hold(cls, linear: nn.Linear, weight: Tensor | Sequence[Tensor] | Codes, dtype: torch.dtype) -> Self:
        """Change this very module, whose weight or bias may not be there yet. `settle` follows."""
        module: Any = linear
        module._parameters.pop("weight", None)
        module.__class__ = cls
        module.held, module.dtype = weight, dtype
        return module

    def settle(self) -> None:
        """Lay the weight out as products read it. Nothing changes from then on."""
        if self.held is not None:
            self.pack(self.held)
            self.held = None

    def pack(self, weight: Any) -> None:
        """weight: [outputs, inputs], or codes where it is of such"""
        raise NotImplementedError

    def lend(self, linear: nn.Linear) -> None:
        """Change another module, of the same weight and bias: it reads what is packed here."""
        raise NotImplementedError

    def rows(self, numbers: Tensor) -> Tensor:
        """Rows [N, inputs] of the weight as it was, by their numbers [N]."""
        raise NotImplementedError

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        """The weight as it was [outputs, inputs]. Once packed, it is unpacked on each request, and not kept."""
        return self.held if isinstance(self.held, Tensor) else self.rows(torch.arange(self.outputs))

    @property
    def outputs(self) -> int:
        """May be fewer than `out_features`, where a rank has a part."""
        raise NotImplementedError


class CodesLinear(PackedLinear):
    """A linear whose weight stays in the bits in which its file has it."""

    weights: ClassVar[type[Any]]
    """What its codes become in `settle`, and those of experts, with `takes(codes)` to say which it can be."""

    packed: Any
    """Of that kind, from then on."""

    def pack(self, weight: Codes) -> None:
        self.packed = self.weights(weight, self.dtype, None if self.bias is None else self.bias.unsqueeze(0))

    @property
    def inputs(self) -> int:
        """May be fewer than `in_features`, where a rank has a part."""
        return self.packed.inputs if self.held is None else self.held.shape[-1]

    @property
    def codes(self) -> Codes:
        return self.packed.codes() if self.held is None else self.held

    @property
    def outputs(self) -> int:
        return self.packed.outputs if self.held is None else self.held.shape[0]
