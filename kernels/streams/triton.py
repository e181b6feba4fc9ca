"""On a GPU: two launches of our own kernels."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two
from .protocol import Mixing, check

TOKENS = 16
"""Of a tile: the fewest that matrix units take."""
FEWEST = 32
"""Weights of a tile: of 16, some numbers would be spilled on Hopper."""
MOST_PARTS = 16
"""Into which the width is cut, so that few tokens keep many processors busy."""
BLOCK = 64
CHANNELS = 512


def is_available() -> bool:
    return gpu.missing() is None


@functools.cache
def _kernels() -> Any:
    from . import triton_kernels  # here and not above: triton may be missing

    return triton_kernels


class Sizes(NamedTuple):
    """How the work is cut, by what a model is alone: so are a token's sums."""

    width: int
    part: int  # numbers of the width that a program multiplies
    parts: int
    padded: int  # weights, and the sum of squares

    @classmethod
    def of(cls, count: int, channels: int, weights: int) -> "Sizes":
        width = count * channels
        part = max(BLOCK, power_of_two(-(-width // MOST_PARTS)))
        return cls(width, part, -(-width // part), max(FEWEST, power_of_two(weights + 1)))


def collapse(streams_TNC: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """As `reference.collapse`, of a number of streams that is a power of two."""
    check(streams_TNC, mixing)
    streams_TNC = dense(streams_TNC)
    tokens, count, channels = streams_TNC.shape
    weights, is_last = len(mixing.product_MD), mixing.parts == 1
    sizes = Sizes.of(count, channels, weights)
    parts, padded = sizes.parts, sizes.padded
    made = functools.partial(torch.empty, dtype=torch.float32, device=streams_TNC.device)
    collapsed_TC = torch.empty((tokens, channels), dtype=streams_TNC.dtype, device=streams_TNC.device)
    after_TN, mixed_TNN = (None, None) if is_last else (made((tokens, count)), made((tokens, count, count)))
    if tokens == 0:
        return collapsed_TC, after_TN, mixed_TNN
    sums = made((tokens, parts, padded))
    _kernels().multiply[-(-tokens // TOKENS), parts](
        streams_TNC, mixing.product_MD, sums, tokens,
        WIDTH=sizes.width, WEIGHTS=weights, PADDED=padded, PART=sizes.part, BLOCK=BLOCK, TOKENS=TOKENS, PARTS=parts,
    )  # fmt: skip
    _kernels().finish[(tokens,)](
        streams_TNC, sums, mixing.base_M, mixing.scale, collapsed_TC, *(sums if is_last else after_TN,),
        *(sums if is_last else mixed_TNN,), mixing.norm_eps, mixing.eps,
        WIDTH=sizes.width, COUNT=count, CHANNELS=channels, PADDED=padded, PARTS=parts, ROUNDS=mixing.rounds,
        BLOCK=min(CHANNELS, power_of_two(channels)), IS_LAST=is_last,
    )  # fmt: skip
    return collapsed_TC, after_TN, mixed_TNN
