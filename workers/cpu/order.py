"""In which order a CPU sums, and what people are told about it.

Kernels of our own sum in one order: a token's logits depend on its sequence alone, not on what is computed beside it or
on how its prompt was cut. Where torch multiplies the rows of prompts much faster, as by matrix units, they go its way,
unless `same_bits` asks for the order at any price.
"""

import math
from typing import NamedTuple

import torch

from ...errors import InvalidSetting
from ...kernels.products import NativeLinear
from ...kernels.products.ways import way_of


class SumOrder(NamedTuple):
    """How products and attention of one model are computed."""

    is_one: bool
    torch_from_rows: float = math.inf  # products of so many rows and more go torch's way
    note: str | None = None  # for people, where the order is not one


def sum_order(dtype: torch.dtype, device: torch.device, same_bits: bool) -> SumOrder:
    """Measured once per machine, in less than a second.

    Raises  InvalidSetting if `same_bits` asks for what this machine, or this dtype, cannot have
    """
    short = str(dtype).removeprefix("torch.")
    lack = NativeLinear.lacks() if device.type == "cpu" else None
    # Where there is no such order at all.
    why_not = None
    if device.type != "cpu":
        why_not = f"the model is on {device}; the order is kept on CPUs only"
    elif lack is not None:
        why_not = f"its kernels {lack}"
    elif dtype not in NativeLinear.dtypes:
        why_not = f"the model is in {short}; take float32 or bfloat16"
    if why_not is not None and same_bits:
        raise InvalidSetting(f"same_bits cannot be had: {why_not}. Leave same_bits out.", field="same_bits")
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
