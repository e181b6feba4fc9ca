"""Weights that stay in the bits in which their files have them, and what multiplies with them.

One way is chosen for all layers, like an attention backend; beside it, products in whole numbers for weights whose
format rounds inputs, or for all that they take. What it cannot keep (a slice that begins within a byte, a weight that
an embedding shares, experts of a form of their own) is expanded when it is loaded.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...errors import InvalidSetting
from ...kernels.products import (
    CODES_KINDS,
    Codes,
    CodesLinear,
    ExpandedCodes,
    IntegerCodesLinear,
    NativeCodesLinear,
    PackedCodes,
    TritonCodes,
    side_by_side,
)
from ...proto.worker import ModelSettings
from ..tensor_parallel import Slice
from .weight_map import Source, all_of

NATIVE = {"cpu": "cpu", "cuda": "triton"}
"""What multiplies on a device; by its type."""

ON_DEVICE = {"cpu": ("cpu", "cpu-int8"), "cuda": ("triton",)}
"""All that does on one only."""

IN_INTEGERS = "cpu-int8"

EXPERTS = "gate_up_proj", "up_proj", "down_proj"


class KeptExperts(NamedTuple):
    """A parameter of experts [E,N,K]."""

    codes: Codes
    kind: type[CodesLinear]
    dtype: torch.dtype

    def weights(self, biases: Tensor | None) -> PackedCodes | ExpandedCodes | TritonCodes:
        return self.kind.weights(self.codes, self.dtype, biases)


@dataclass(frozen=True, slots=True)
class Keeper:
    """Keeps what it can."""

    kind: type[CodesLinear]
    dtype: torch.dtype
    device: torch.device
    in_integers: type[CodesLinear] | None = None  # with inputs rounded, for what it takes
    rounds_all: bool = False  # not only where the format does

    def kind_for(self, codes: Codes) -> type[CodesLinear] | None:
        """None: they are expanded."""
        rounded = self.in_integers if self.rounds_all or codes.rounds_inputs else None
        return next((kind for kind in (rounded, self.kind) if kind is not None and kind.weights.takes(codes)), None)

    def keep(self, owner: Any, name: str, source: Source, part: Slice | None) -> bool:
        """Whether `owner` has what it needs for its parameter `name` from now on, without the parameter."""
        is_linear = type(owner) is nn.Linear and name == "weight"
        has_experts = hasattr(owner, "is_transposed") and hasattr(owner, "has_post_expert_norm")
        if not (is_linear or (has_experts and name in EXPERTS)):
            return False
        codes = _codes(source, part)
        kind = None if codes is None else self.kind_for(codes)
        if codes is None or kind is None:
            return False
        codes = codes.moved(self.device)
        if is_linear:
            kind.hold(owner, codes, self.dtype)
        else:
            del owner._parameters[name]
            vars(owner).setdefault("kept", {})[name] = KeptExperts(codes, kind, self.dtype)
        vars(owner)["_is_hf_initialized"] = True  # tells transformers to leave it alone
        return True


def keeper_of(settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> Keeper | None:
    """None: all weights are expanded. Raises `InvalidSetting` with what the asked way lacks."""
    asked = settings.packed_products
    if asked == "expanded":
        return None
    name = NATIVE.get(device.type, "cpu") if asked == "auto" else asked
    why_not = _lacks(name, settings, dtype, device)
    if why_not is None and name == IN_INTEGERS:
        return Keeper(NativeCodesLinear, dtype, device, IntegerCodesLinear, rounds_all=True)
    if why_not is None:
        has_both = asked == "auto" and name == "cpu" and IntegerCodesLinear.lacks() is None
        return Keeper(CODES_KINDS[name], dtype, device, IntegerCodesLinear if has_both else None)
    if asked == "auto":
        return None
    raise InvalidSetting(
        f"packed_products {asked!r} cannot be had: {why_not}. Leave it out, or take 'expanded'.",
        field="packed_products",
    )


def _lacks(name: str, settings: ModelSettings, dtype: torch.dtype, device: torch.device) -> str | None:
    kind = CODES_KINDS[name]
    if settings.torch_compile:
        return "torch_compile sees no further than an operator that it does not know"
    device_type = next((each for each, ways in ON_DEVICE.items() if name in ways), device.type)
    if device_type != device.type:
        return f"the model runs on {device}"
    if dtype not in kind.dtypes:
        return f"it multiplies {', '.join(sorted(str(each) for each in kind.dtypes))}, not {dtype}"
    return kind.lacks()


def kept_bytes(module: nn.Module) -> int:
    """Of weights that are kept, before they are settled."""
    return sum(codes.nbytes for codes in _kept(module))


def _kept(module: nn.Module) -> Iterator[Codes]:
    for child in module.modules():
        if isinstance(child, CodesLinear):
            yield child.codes
        yield from (kept.codes for kept in vars(child).get("kept", {}).values())


def _codes(source: Source, part: Slice | None) -> Codes | None:
    if part is None:
        return source.codes()
    ranges = [(start, stop) for start, stop in part.ranges if start < stop]
    if not ranges or ranges[-1][1] > source.shape[part.dim]:
        return None
    if len(ranges) > 1 and part.dim != len(source.shape) - 2:  # side by side are rows, not columns
        return None
    return all_of([source.codes(part.dim, start, stop) for start, stop in ranges], side_by_side)
