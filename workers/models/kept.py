"""Weights that stay in the bits in which their files have them, and what multiplies with them.

One way is chosen for all layers, like an attention backend; beside it, products in whole numbers for weights whose
format rounds inputs, or for all that they take. What it cannot keep (a slice that begins within a byte) is expanded
when it is loaded. An embedding looks its rows up in the output's weight where the two share one, else in a weight of
its own that is packed alike.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    OrderedTritonCodesLinear,
    PackedCodes,
    TritonCodes,
    TritonCodesLinear,
    side_by_side,
)
from ...proto.worker import ModelSettings
from ..cpu.linear import codes_linears, only_looks_up, take_embedding
from ..tensor_parallel import Slice
from .weight_map import Source, all_of, dim_of_rows

NATIVE = {"cpu": "cpu", "cuda": "triton"}
"""What multiplies on a device; by its type."""

IN_ORDER: dict[type[CodesLinear], type[CodesLinear]] = {TritonCodesLinear: OrderedTritonCodesLinear}
"""What is taken instead where a row's result is to depend on that row alone. The others sum so anyway."""

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

    def keep(self, owners: Sequence[nn.Module], name: str, source: Source, part: Slice | None) -> bool:
        """Whether all owners of a parameter have what they need from now on, without it. They call it `name`."""
        linears = [owner for owner in owners if type(owner) is nn.Linear]
        embeddings = [owner for owner in owners if only_looks_up(owner)]
        is_read = name == "weight" and len(linears) <= 1 and len(linears) + len(embeddings) == len(owners)
        is_read = is_read and (not embeddings or self.kind.has_neighbours)
        is_of_experts = len(owners) == 1 and name in EXPERTS and dim_of_rows(source) == _rows_of_experts(owners[0])
        if not (is_read or is_of_experts):
            return False
        # What can be kept of the slice?
        codes = _codes(source, part)
        kind = None if codes is None else self.kind_for(codes)
        if codes is None or kind is None:
            return False
        codes = codes.moved(self.device)
        # A linear holds it, and embeddings look it up there.
        if is_of_experts:
            del owners[0]._parameters[name]
            vars(owners[0]).setdefault("kept", {})[name] = KeptExperts(codes, kind, self.dtype)
        else:
            rows, columns = codes.shape
            linear = linears[0] if linears else nn.Linear(columns, rows, bias=False, device="meta")
            held = kind.hold(linear, codes, self.dtype)
            for embedding in embeddings:
                take_embedding(embedding, held)
        for owner in owners:
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
        kind = CODES_KINDS[name]
        kind = IN_ORDER.get(kind, kind) if settings.same_bits else kind
        has_both = asked == "auto" and name == "cpu" and IntegerCodesLinear.lacks() is None
        return Keeper(kind, dtype, device, IntegerCodesLinear if has_both else None)
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


def _rows_of_experts(module: nn.Module) -> int | None:
    """Along which dimension of their parameters the outputs of its experts lie. None: it has no experts."""
    if type(module).__name__ == "Llama4TextExperts":
        return 2
    if hasattr(module, "is_transposed") and hasattr(module, "has_post_expert_norm"):
        return 2 if module.is_transposed else 1
    return None


def _kept(module: nn.Module) -> Iterator[Codes]:
    yield from (linear.codes for linear in codes_linears(module))
    for child in module.modules():
        yield from (kept.codes for kept in vars(child).get("kept", {}).values())


def _codes(source: Source, part: Slice | None) -> Codes | None:
    if part is None:
        return source.codes()
    ranges = [(start, stop) for start, stop in part.ranges if start < stop]
    if not ranges or ranges[-1][1] > source.shape[part.dim]:
        return None
    if len(ranges) > 1 and part.dim != dim_of_rows(source):  # columns cannot be put side by side
        return None
    return all_of([source.codes(part.dim, start, stop) for start, stop in ranges], side_by_side)
