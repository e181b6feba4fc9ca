"""A graph as it is recorded, and what makes it run again.

As on a GPU nothing happens to memory while a graph is recorded, and a replay runs no Python of ours but does the same
to the same memory again: every number that Python read is baked in. Torch's operators do run while they are recorded,
because their results have shapes. What they write is put back, and what they make is spoilt, so that it cannot be used.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from .ledger import Kind


@dataclass(frozen=True, slots=True)
class Node:
    """A kernel of a graph."""

    kind: Kind
    place: str
    run: Callable[[], object]


@dataclass(slots=True)
class Tape:
    """What was recorded so far."""

    nodes: list[Node] = field(default_factory=list)
    uses: list[tuple[Sequence[Tensor], Sequence[Tensor], str]] = field(default_factory=list)  # what is read, written
    _made: list[Tensor] = field(default_factory=list)
    _overwritten: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def will_write(self, targets: Sequence[Tensor]) -> None:
        self._overwritten += [(target, target.clone()) for target in targets]

    def operator(self, function: Callable[..., Any], args: Any, kwargs: Any, results: Any, at: str) -> None:
        made = fresh_tensors(results, args, kwargs)
        self._made += made

        def run() -> None:
            again = fresh_tensors(function(*args, **kwargs), args, kwargs)
            for target, result in zip(made, again, strict=True):
                target.copy_(result)

        self.nodes.append(Node(Kind.TORCH_KERNEL, at, run))

    def allocation(self, tensors: Sequence[Tensor]) -> None:
        """Memory that a kernel is going to fill. It may hold anything, and zeros are never an index out of bounds."""
        self._made += tensors
        for tensor in tensors:
            tensor.zero_()

    def other(self, kind: Kind, run: Callable[[], object], at: str) -> None:
        """A launch or a collective: it is recorded and does not run."""
        self.nodes.append(Node(kind, at, run))

    def finish(self) -> None:
        """Put memory back as it was before the recording."""
        for target, before in reversed(self._overwritten):
            target.copy_(before)
        self._overwritten.clear()
        self.spoil()

    def spoil(self) -> None:
        """Another graph has used the memory of this one."""
        for tensor in self._made:
            if tensor.dtype.is_floating_point:
                tensor.fill_(torch.nan)
            elif tensor.dtype is not torch.bool:
                tensor.fill_(-1 if tensor.dtype.is_signed else 255)


def fresh_tensors(results: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Those of `results` that have memory of their own, in order."""
    given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
    made = (leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    return [leaf for leaf in made if leaf.untyped_storage()._cdata not in given]
