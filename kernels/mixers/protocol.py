"""The words of what a state mixer does around its recurrence.

Suffixes: T tokens    C channels    H heads    G heads of keys, each shared by H/G neighbours    K, V sizes
"""

import enum
from typing import NamedTuple

from torch import Tensor


class DeltaSizes(NamedTuple):
    """Of a gated delta net on this rank."""

    key_heads: int
    keys: int
    heads: int
    values: int
    least: float = 0.0  # of a logarithm of decay, below 0; 0: there is none


class Mamba2Sizes(NamedTuple):
    """Of a Mamba-2 mixer on this rank."""

    heads: int
    values: int
    groups: int
    keys: int
    limits: tuple[float, float]  # of a time step


class Order(enum.IntEnum):
    """Numbered as in `cpu_mixers.cpp`."""

    NO_NORM = 0
    NORM_FIRST = 1
    GATE_FIRST = 2


class Function(enum.IntEnum):
    """Of numbers one by one. Numbered as in `cpu_mixers.cpp`."""

    SOFTPLUS = 0
    SILU = 1
    SIGMOID = 2


class GatedNorm(NamedTuple):
    """y * gate(..) in which y, or the product, is divided by the root of its mean square, and times `weight`."""

    order: Order
    weight: Tensor | None  # [C] float32; none without a norm
    eps: float
    width: int  # of channels whose mean is taken together
    rounds: bool = False  # to the gate's dtype before each step, as transformers' norm of gated delta nets does
    gate: Function = Function.SILU
