"""The words of token-wise operations, and what computes them on one kind of device.

Suffixes: T tokens    C channels    H query heads    K key heads    D numbers of a head    R rotary numbers of a head
"""

import enum
import math
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Norm(NamedTuple):
    """x / sqrt(mean(x^2) + eps) * scale, over as many numbers as `scale` has (arXiv 1910.07467). Centered, x is what it
    is more than its mean (arXiv 1607.06450)."""

    scale: Tensor  # [C] float32
    eps: float
    rounds_first: bool = False  # what is scaled has been rounded to x's dtype before
    is_centered: bool = False


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


class Gating(NamedTuple):
    """What becomes of gates and the numbers beside them: activation(gate) * (other + added).

    With a limit no gate is above it, and no other number further from zero (GPT-OSS, arXiv 2508.10925).
    """

    activation: Activation
    limit: float = math.inf
    is_cut_after: bool = False  # gates are cut behind their activation, not before it
    by_turns: bool = False  # a gate and its other number side by side, not all gates first
    steepness: float = 1.0  # of SiLU: gate * sigmoid(steepness * gate)
    added: float = 0.0

    @property
    def is_plain(self) -> bool:
        """Whether nothing is cut, added or interleaved."""
        return self == Gating(self.activation)


class Places(NamedTuple):
    """Where new keys and values go: see `kernels/paged_attention/protocol.py`."""

    view: Tensor  # [pages,tokens,K,D+Dv]
    page_T: Tensor  # int64
    offset_T: Tensor  # int64


class Operations(Protocol):
    """What `cpu.py` and `triton.py` have in common: `reference.py` says what each computes."""

    def is_available(self) -> bool:
        """Whether this machine can compile them."""
        ...

    def normed(self, x: Tensor, norm: Norm, dtype: torch.dtype | None = None) -> Tensor: ...

    def add_norm(
        self, x: Tensor, added: Tensor, after: Norm | None, before: Norm | None, added_scale: float
    ) -> tuple[Tensor, Tensor]: ...

    def activate(self, x: Tensor, activation: Activation) -> Tensor: ...

    def gate(self, gate_up: Tensor, gating: Gating) -> Tensor: ...

    def prepare_heads(
        self,
        qkv_TC: Tensor,
        heads: int,
        kv_heads: int,
        head_dim: int,
        norms: tuple[Norm | None, Norm | None],
        cos_TR: Tensor | None,
        sin_TR: Tensor | None,
        rotary: Rotary,
        rotary_dim: int,
        query_factor_T: Tensor | None,
    ) -> None: ...
