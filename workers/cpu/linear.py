"""Which weights of a model are packed, and which products are one: see `kernels/products`."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from ...kernels.products import (
    Codes,
    CodesLinear,
    IntegerCodesLinear,
    NativeLinear,
    PackedEmbedding,
    PackedLinear,
    TritonLinear,
    linear_kind,
    side_by_side,
)
from ...kernels.products.ways import way_of


def pack_linears(
    module: nn.Module, device: torch.device, torch_from_rows: float = math.inf, same_bits: bool = False
) -> None:
    """Pack every plain `nn.Linear` on a CPU, and what is held in fewer bits. A weight of several modules is packed once
    if they are linears of the same bias or embeddings, else it stays as it is. On a GPU plain weights stay as they are,
    and nothing happens unless a row's result is to depend on that row alone.

    torch_from_rows: products of so many rows and more go torch's way
    """
    hold_linears(module, device, torch_from_rows, same_bits)
    settle_linears(module)


def hold_linears(
    module: nn.Module, device: torch.device, torch_from_rows: float = math.inf, same_bits: bool = False
) -> None:
    """The same, but that what C++ multiplies with is packed later, by `settle_linears`: some of it is merged before."""
    for linear in codes_linears(module):
        if not isinstance(linear, NativeLinear):
            linear.settle()
        linear.torch_from_rows = _torch_from_rows(linear, torch_from_rows)
    owners = _owners(module)
    for child in list(module.modules()):
        if type(child) is not nn.Linear:
            continue
        kind = linear_kind(child.weight.dtype, device, same_bits)
        others = [owner for owner in owners[id(child.weight)] if owner is not child]
        if kind is TritonLinear:
            kind.take_over(child)
            continue
        if kind is None or (others and not (kind.has_neighbours and all(_can_read(child, each) for each in others))):
            continue
        linear = kind.hold(child, child.weight.detach(), child.weight.dtype)
        if kind is not NativeLinear:
            linear.settle()
        linear.torch_from_rows = torch_from_rows
        for other in others:
            if isinstance(other, nn.Linear):
                linear.lend(other)
            else:
                take_embedding(other, linear)


def settle_linears(module: nn.Module) -> None:
    """Pack what is not packed yet."""
    for linear in _packed_linears(module):
        linear.settle()


@contextmanager
def products_left_out(module: nn.Module) -> Iterator[None]:
    """Meanwhile linears that are not settled give zeros: for a pass that asks for no numbers."""
    linears = list(_packed_linears(module))
    for linear in linears:
        linear.is_left_out = True
    try:
        yield
    finally:
        for linear in linears:
            linear.is_left_out = False


def widen_logits(module: nn.Module) -> None:
    """Logits are float32, as they are summed, in models of 16 bits as well: rounded ones tie, and are off by as much as
    all that a model rounds before."""
    outputs = module.get_output_embeddings() if isinstance(module, PreTrainedModel) else None
    if isinstance(outputs, NativeLinear):
        outputs.settle()
        outputs.packed.widen()


def codes_linears(module: nn.Module) -> Iterator[CodesLinear]:
    """Those whose weights stay in fewer bits, and those that only an embedding has; each once."""
    return (linear for linear in _packed_linears(module) if isinstance(linear, CodesLinear))


def _packed_linears(module: nn.Module) -> Iterator[PackedLinear]:
    known: set[int] = set()
    for child in module.modules():
        linear = child.output if isinstance(child, PackedEmbedding) else child
        if isinstance(linear, PackedLinear) and id(linear) not in known:
            known.add(id(linear))
            yield linear


def _torch_from_rows(linear: CodesLinear, asked: float) -> float:
    """asked: as it is of plain weights; ours for other weights may be the faster of the two for longer"""
    if not isinstance(linear, IntegerCodesLinear) or asked == math.inf:
        return asked
    own = way_of(linear.dtype, in_integers=True).torch_from_rows
    return math.inf if own is None else own


def _can_read(linear: nn.Linear, other: nn.Module) -> bool:
    """Whether another module of this weight can read it packed."""
    return (type(other) is nn.Linear and other.bias is linear.bias) or only_looks_up(other)


def _owners(module: nn.Module) -> dict[int, list[nn.Module]]:
    """Of each parameter, by its identity."""
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for parameter in owner.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append(owner)
    return owners


def merge_linears(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One product in place of several of the same input: their outputs side by side."""
    merged = nn.Linear(linears[0].in_features, 1, bias=False, device="meta")
    merged.out_features = sum(map(outputs_of, linears))
    if any(linear.bias is not None for linear in linears):
        known = next(linear.bias for linear in linears if linear.bias is not None)
        biases = [known.new_zeros(linear.out_features) if linear.bias is None else linear.bias for linear in linears]
        merged.bias = nn.Parameter(torch.cat(biases), requires_grad=False)
    first: Any = linears[0]
    codes = _joined_codes(linears)
    if codes is not None or all(type(linear) is NativeLinear for linear in linears):
        weights = [linear.weight for linear in linears] if codes is None else codes
        joined = type(first).hold(merged, weights, first.dtype)
        joined.settle()
        joined.torch_from_rows = first.torch_from_rows
        return joined
    merged.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    same_bits = isinstance(first, TritonLinear)
    pack_linears(merged, merged.weight.device, getattr(first, "torch_from_rows", math.inf), same_bits)
    return merged


def _joined_codes(linears: Sequence[nn.Linear]) -> Codes | None:
    """Weights in fewer bits stay so, if all are packed alike."""
    kept = [linear for linear in linears if isinstance(linear, CodesLinear)]
    are_alike = len(kept) == len(linears) and len({type(linear) for linear in kept}) == 1
    return side_by_side([linear.codes for linear in kept]) if are_alike else None


def outputs_of(linear: nn.Linear) -> int:
    """On this rank."""
    return linear.outputs if isinstance(linear, PackedLinear) else len(linear.weight)


# -- an embedding that looks its rows up in a linear's weight ----------------------------------------------------------


def only_looks_up(module: nn.Module) -> bool:
    """Whether it is an embedding as torch computes it. A class of transformers may scale what that returns."""
    if not isinstance(module, nn.Embedding) or "forward" in vars(module):
        return False
    return not (module.max_norm or module.sparse)


def take_embedding(module: nn.Module, output: PackedLinear) -> None:
    """Change this very module. What its class does before and after the look-up stays: `super()` finds ours."""
    embedding: Any = module
    theirs = type(embedding)
    del embedding._parameters["weight"]
    bases = (PackedEmbedding,) if theirs is nn.Embedding else (theirs, PackedEmbedding)
    embedding.__class__ = type(theirs.__name__, bases, {"__module__": theirs.__module__})
    object.__setattr__(embedding, "output", output)  # no part of it, but a neighbour
