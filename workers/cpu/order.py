"""In which order a model sums, and what people are told about it.

On a CPU kernels of our own sum in one order: a token's logits depend on its sequence alone, not on what is computed
beside it or on how its prompt was cut. Where torch multiplies the rows of prompts much faster, they go its way, unless
`same_bits` asks for the order at any price.

On a GPU `same_bits` takes products of our own in place of torch's, so that a row's logits do not depend on the other
rows of its step. They do depend on how its prompt was cut, since rows of one query and of several are computed by
different kernels.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...errors import InvalidSetting
from ...kernels.paged_attention import Backend
from ...kernels.products import NativeLinear, TritonLinear
from ...kernels.products.ways import way_of

SUMS = frozenset({
    "mm", "addmm", "mv", "dot", "bmm", "baddbmm", "_grouped_mm", "convolution", "mean", "sum", "cumsum", "var",
    "var_mean", "_softmax", "logsumexp", "linalg_vector_norm", "native_layer_norm", "native_group_norm",
    "_fused_rms_norm", "index_add",
})  # fmt: skip
"""Operators of torch."""

SHORT_SOFTMAX = 1024


class SumOrder(NamedTuple):
    """How products and attention of one model are computed."""

    is_one: bool
    torch_from_rows: float = math.inf  # products of so many rows and more go torch's way
    note: str | None = None  # for people, where the order is not one


def sum_order(dtype: torch.dtype, device: torch.device, same_bits: bool, ranks: int = 1) -> SumOrder:
    """Measured once per machine, in less than a second.

    Raises  InvalidSetting if `same_bits` asks for what this machine, or this dtype, cannot have
    """
    if device.type == "cuda":
        return _on_gpu(same_bits, ranks)
    short = str(dtype).removeprefix("torch.")
    lack = NativeLinear.lacks() if device.type == "cpu" else None
    # Where there is no such order at all.
    why_not = None
    if device.type != "cpu":
        why_not = f"the model is on {device}"
    elif lack is not None:
        why_not = f"its kernels {lack}"
    elif dtype not in NativeLinear.dtypes:
        why_not = f"the model is in {short}; take float32 or bfloat16"
    if why_not is not None and same_bits:
        raise _refused(why_not)
    if lack is not None:
        return SumOrder(
            False,
            note=f"torch's kernels compute instead of our own, which {lack}. That is slower, and the last bits of an "
            "answer may depend on what is computed beside it",
        )
    if why_not is not None:
        return SumOrder(False)
    # Where there is, it may cost too much to be taken unasked.
    way = way_of(dtype)
    if same_bits or way.torch_from_rows is None:
        return SumOrder(True)
    return SumOrder(
        False,
        way.torch_from_rows,
        f"{short} {way.told}. The last bits of an answer may therefore depend on what is computed beside it; "
        "--same-bits takes one order for all",
    )


def _refused(why_not: str) -> InvalidSetting:
    return InvalidSetting(f"same_bits cannot be had: {why_not}. Leave same_bits out.", field="same_bits")


def _on_gpu(same_bits: bool, ranks: int) -> SumOrder:
    if same_bits and ranks > 1:
        raise _refused(f"{ranks} ranks add up what each has in an order that depends on how much that is")
    if same_bits and (lack := TritonLinear.lacks()) is not None:
        raise _refused(f"its kernels' Triton {lack}")
    return SumOrder(same_bits)


class _OtherSums(TorchDispatchMode):
    """Notes operators of torch that sum floating-point numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        name = function.overloadpacket.__name__
        first = out[0] if isinstance(out, tuple | list) else out
        # Over a short last axis each row is summed by a warp of its own.
        is_short = name == "_softmax" and args[0].shape[-1] <= SHORT_SOFTMAX
        if name in SUMS and isinstance(first, Tensor) and first.is_floating_point() and not is_short:
            self.names.add(name)
        return out


def check_sums(attention: Backend, forward: Callable[[], object], *, chooses: bool = False) -> None:
    """Run a step of a model that is to keep the order on a GPU. chooses: some layers attend to tokens that they choose

    Raises `InvalidSetting` if its attention does not, or if some of it is summed by torch, whose order depends on how
    many rows there are
    """
    if not attention.capabilities.one_order:
        raise _refused(f"attention backend '{attention.name}' cuts its sums by what rows a step has")
    if chooses:  # among more tokens than the step at hand has
        raise _refused("layers of this model choose tokens by torch's products, whose sums depend on a step's rows")
    with _OtherSums() as seen:
        forward()
    if seen.names:
        raise _refused(
            f"layers of this model are computed by torch's {', '.join(sorted(seen.names))}, whose sums depend on how "
            "many rows a step has"
        )
