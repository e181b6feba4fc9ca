"""The words of token-wise operations.

Suffixes: T tokens    C channels    H query heads    K key heads    D numbers of a head    R rotary numbers of a head
"""

import enum
from typing import NamedTuple

from torch import Tensor


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * scale, over as many numbers as `scale` has (arXiv 1910.07467)."""

    scale: Tensor  # [C] float32
    eps: float
    rounds_first: bool = False  # what is scaled has been rounded to x's dtype before


class Rotary(enum.IntEnum):
    """Which two numbers of a head a rotary position rotates together (arXiv 2104.09864)."""

    NONE = 0
    HALVES = 1  # i and i + R/2
    PAIRS = 2  # 2i and 2i + 1


class Activation(enum.IntEnum):
    """Of numbers by themselves. Numbered as in `cpu_tokenwise.cpp`."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2
    SIGMOID = 3
