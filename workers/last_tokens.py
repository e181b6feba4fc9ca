"""The tokens that a GPU drew last, where it drew them: the next step need not wait until the host has read them."""

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import upload
from ..proto.worker import RunnerLimits

ON_DEVICE = -1
"""Stands for a token that the host may not have read yet."""


class LastTokens:
    """One number for each slot, and behind them what the host knows of a step: its tokens are picked out of both.

        numbers    [slot 0 | slot 1 | .. | spare slot | token 0 of the step | token 1 | ..]
        step       tokens 17 -1 9, the second of slot 1      picks  S+0  1  S+2

    All is in the order of the device's stream, so a step reads what the one before it wrote.
    """

    def __init__(self, slots: int, most_tokens: int, device: torch.device):
        self.spare_slot = slots  # of rows that only fill up a step
        self._first = slots + 1  # of the step's own tokens
        self._numbers = torch.zeros(self._first + most_tokens, dtype=torch.int64, device=device)
        self._drawing_R: Tensor | None = None  # slots of the running step, whose tokens it draws

    @classmethod
    def of(cls, limits: RunnerLimits, device: torch.device) -> "LastTokens | None":
        """None where nothing computes beside the host."""
        return None if device.type == "cpu" else cls(limits.max_num_seqs, limits.max_num_batched_tokens, device)

    def known(self, tokens: int) -> Tensor:
        """Where the first so many tokens of a step are put."""
        return self._numbers[self._first : self._first + tokens]

    def picks(self, tokens_T: np.ndarray, slots_R: np.ndarray) -> np.ndarray:
        """[T] where each token is. `ON_DEVICE` is found among the first R alone, token r being that of row r."""
        picks_T = self._first + np.arange(len(tokens_T))
        drawn = np.flatnonzero(tokens_T[: len(slots_R)] == ON_DEVICE)
        picks_T[drawn] = slots_R[drawn]
        return picks_T

    def tokens(self, picks_T: Tensor) -> Tensor:
        return self._numbers.index_select(0, picks_T)

    def begin_step(self, tokens_T: np.ndarray, slots_R: np.ndarray, drawing_R: np.ndarray) -> Tensor:
        """The step's tokens, all there. drawing_R: slots of the rows that draw one"""
        parts = tokens_T, self.picks(tokens_T, slots_R), drawing_R
        sent = upload(np.concatenate(parts), self._numbers.device)
        known_T, picks_T, drawing = sent.split([len(part) for part in parts])
        self.known(len(tokens_T)).copy_(known_T)
        self.resume(drawing)
        return self.tokens(picks_T)

    def resume(self, drawing_R: Tensor) -> None:
        """The same for a step whose tokens are at hand."""
        self._drawing_R = drawing_R

    def keep(self, drawn_R: Tensor) -> int:
        """What the running step drew. Returns what stands for it on the host."""
        assert self._drawing_R is not None, "begin a step first"
        self._numbers.index_copy_(0, self._drawing_R[: len(drawn_R)], drawn_R)
        return ON_DEVICE
