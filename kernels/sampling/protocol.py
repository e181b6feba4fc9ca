"""The words of drawing tokens, and what a backend must do.

Suffixes: R rows, each of one sequence    V vocabulary
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
from torch import Tensor

# What a request may ask for is wider than float32: outside of these a chance would be infinity divided by infinity.
HIGHEST_LOGIT = 1e30
TEMPERATURES = 1e-6, 1e30
PENALTIES = 1e-30, 1e30


class Draw(NamedTuple):
    """How a row's token is drawn."""

    temperature: float = 0.0  # 0: the most probable token
    top_k: int = 0  # 0: all
    top_p: float = 1.0
    min_p: float = 0.0  # as a share of the most probable token's
    seed: int = 0
    logprobs: int = -1  # -1: none; n: of the chosen token and the n most probable ones


class Penalties(NamedTuple):
    """Repetition weighs on all tokens of a sequence, presence and frequency on those of its answer."""

    tokens: np.ndarray  # [N] int64: of the sequence, ascending, each once
    counts: np.ndarray  # [N] int64: how often each is in the answer
    repetition: float = 1.0  # within `PENALTIES`
    presence: float = 0.0
    frequency: float = 0.0


class Changes(NamedTuple):
    """What is done to a row's logits before its token is drawn, in this order. Tokens without a logit are passed over.

    Log-probabilities are of the logits as they were.
    """

    penalties: Penalties | None = None
    forbidden: Sequence[int] = ()  # tokens that are possible only where no other is
    biases: Sequence[tuple[int, float]] = ()
    excluded: Sequence[int] = ()  # tokens that are not possible
    allowed: bytes | None = None  # a bit per token, lowest first: no others are possible. None: all are


class About(NamedTuple):
    """Natural-log probabilities of a token, and of the most probable ones in its place."""

    logprob: float
    top: tuple[tuple[int, float], ...]  # (token, logprob), best first
    rank: int  # 1: no token is more probable


Tell = Callable[[], list[tuple[int, About]]]
"""What is said about rows, each once. Waits for the device if need be; to be called once."""


class SamplingBackend(ABC):
    """Draws tokens. A row's token depends on nothing but the row, its settings and its position."""

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]]  # types, as torch calls them

    @classmethod
    def lacks(cls) -> str | None:
        """What it needs and this machine does not have."""
        return None

    @abstractmethod
    def draw(
        self,
        logits_RV: Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        changes: Sequence[Changes | None] | None = None,
    ) -> tuple[Tensor, Tell]:
        """One token per row [R] int64, and what tells about those of the rows that want it.

        Logits of any float dtype; they stay as they are, and may be overwritten before that is told.
        positions: of the token to be drawn, in its sequence
        """

    @abstractmethod
    def logprobs(self, logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[About]:
        """Of one token per row, and of the `count` most probable ones."""
