"""The words of routing.

Suffixes: T tokens    E experts    K experts that a token goes to
"""

import enum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

MOST_EXPERTS = 1024


class Scoring(enum.IntEnum):
    """What makes scores of logits. Numbered as in `cpu_routing.cpp` and `triton_kernels.py`."""

    SOFTMAX = 0
    SIGMOID = 1
    SQRT_SOFTPLUS = 2


class Routing(NamedTuple):
    """How a token's experts are chosen and weighed. Of equal ones the first is chosen.

    With groups, experts are neighbours in groups of equal size, and only those of the best groups are chosen. A group
    is worth the sum of its two best (DeepSeek-V3, arXiv 2412.19437).
    """

    most: int  # K
    scoring: Scoring
    is_of_chosen: bool = False  # experts are chosen by their logits, and scores are of those alone
    rounds: bool = False  # each step to the dtype of the logits, not the last one alone to that of the shares
    groups: int = 1
    most_groups: int = 1  # that experts are chosen of
    least: float | None = None  # shares are divided by this and their sum; None: they are scores
    scale: float = 1.0  # of all shares
    dtype: torch.dtype | None = None  # of shares; None: that of the logits
    bias_E: Tensor | None = None  # float32, dense: added to scores for the choice alone
    scale_E: Tensor | None = None  # float32, dense: of each expert's shares


class Operations(Protocol):
    """What `cpu.py` and `triton.py` have in common."""

    def is_available(self) -> bool:
        """Whether this machine can compile it."""
        ...

    def route(self, logits_TE: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
        """Returns shares [T,K] and experts [T,K], int64, the best first."""
        ...


def check(logits_TE: Tensor, routing: Routing) -> None:
    experts = logits_TE.shape[1]
    assert experts <= MOST_EXPERTS, f"{experts} experts are more than {MOST_EXPERTS}"
    assert 0 < routing.most <= experts, f"{routing.most} of {experts} experts"
    assert experts % routing.groups == 0, f"{experts} experts in {routing.groups} groups"
    for x in (routing.bias_E, routing.scale_E):
        assert x is None or (x.dtype == torch.float32 and x.shape == (experts,)), "a number for each expert"
