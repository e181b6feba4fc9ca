"""The words of residual streams (manifold-constrained hyper-connections, Xie et al. 2025).

Suffixes: T tokens    N streams    C channels    M weights of a token
"""

from typing import NamedTuple, Protocol

from torch import Tensor

MOST_STREAMS = 8


class Mixing(NamedTuple):
    """What says how a token's streams are mixed in front of a block, or after the last.

    M is N where the streams become one for good, else N + N + N * N: how they become one, how much of the block's
    output each gets, and how they are mixed among themselves."""

    product_MD: Tensor  # float32, dense; D is N * C
    base_M: Tensor  # float32
    scale: Tensor  # [1] or [3] float32: one for each of the parts of M
    norm_eps: float  # of the norm of all streams together
    eps: float  # that is added to each weight, and to what weights are divided by
    rounds: int  # in which rows and columns of the streams' mixture are made to sum up to 1

    @property
    def parts(self) -> int:
        return len(self.scale)


class Operations(Protocol):
    """What `cpu.py` and `triton.py` have in common."""

    def is_available(self) -> bool:
        """Whether this machine can compile it."""
        ...

    def collapse(self, streams_TNC: Tensor, mixing: Mixing) -> tuple[Tensor, Tensor | None, Tensor | None]: ...


def check(streams_TNC: Tensor, mixing: Mixing) -> None:
    _, streams, channels = streams_TNC.shape
    weights = streams if mixing.parts == 1 else (2 + streams) * streams
    assert streams <= MOST_STREAMS, f"{streams} streams are more than {MOST_STREAMS}"
    assert mixing.product_MD.shape == (weights, streams * channels), mixing.product_MD.shape
