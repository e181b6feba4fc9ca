"""What the runner says to a state backend, and what a backend must do.

Layers that see the past through a state (Mamba, linear attention, a short convolution) keep one page per request and
overwrite it token by token. Suffixes name the axes of a tensor:
    T packed tokens    N pieces    C channels    H heads    K key size    V value size    S state size

    once per group and step    meta = backend.prepare(batch, device)
    once per layer             out = backend.scan(recurrence, pages, constants, inputs, meta)

A page changes owner, so a new row may find NaN in its page. It starts from zeros, and lets none of that in.
A step comes in waves of pieces, because a state may have to be saved on the way:

    row 0   t t t t|t t t t|t t        wave 0: tokens 0-4 of row 0, saved to page 20    tokens 0-1 of row 1
    row 1   t t                        wave 1: tokens 4-8 of row 0, saved to page 21
                                       wave 2: tokens 8-10 of row 0
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from ..transfer import Transfer

Step = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor]]
"""(states [N,..], constants, inputs [N,..] each) -> (outputs [N,..], new states): one token of each of N rows."""


@dataclass(frozen=True, slots=True)
class Recurrence:
    """One way to go from a state and a token to an output and the next state. Its arithmetic is `step`."""

    name: str
    step: Step


class SaveAt(NamedTuple):
    """The state that a row has after `tokens` of its tokens of this step also goes to `page`."""

    row: int
    tokens: int
    page: int


@dataclass(frozen=True, slots=True, eq=False)
class StateBatch:
    """What each row computes in this step, for all layers of one group. Host memory.

    Shapes  pages [R]  query_lens [R]  is_new [R]: the row's first token is among them
    The packed tokens lie in row order. A negative page counts from behind.
    """

    pages: np.ndarray
    query_lens: np.ndarray
    is_new: np.ndarray
    saves: Sequence[SaveAt] = field(default=())


class Piece(NamedTuple):
    """Tokens of one row between two places at which its state is saved."""

    start: int  # among the packed tokens
    end: int
    page: int
    is_new: bool
    saved_to: int | None

    @property
    def is_single(self) -> bool:
        return self.end - self.start == 1


Wave = list[Piece]
"""Pieces that do not depend on each other: the n-th of each row."""


class StateBackend(Protocol):
    """Runs recurrences over pages."""

    name: ClassVar[str]
    devices: ClassVar[frozenset[str]]
    mixed_frames: ClassVar[bool]  # frames take rows of several tokens, new ones and states to be saved

    @classmethod
    def lacks(cls) -> str | None:
        """What this machine lacks for it, in words; None if nothing. May compile, and is asked before it is chosen."""
        ...

    def prepare(self, batch: StateBatch, device: torch.device) -> Any:
        """What all layers of the group share: which tokens run together, from which pages to which."""
        ...

    def frame(self, rows: int, tokens: int, device: torch.device) -> Any:
        """Metadata of steps of up to so many rows and tokens, of one token each if there are as many: its tensors stay
        where they are, and `scan` neither waits for the device nor looks at what they hold. Undefined before `refill`.
        None: this backend has no such thing.
        """
        ...

    def refill(self, frame: Any, batch: StateBatch, transfer: Transfer) -> bool:
        """Have another such step put into a frame. Rows that are lacking write nothing, or the last page, which is to
        be spare. False: it does not fit.
        """
        ...

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor], meta: Any
    ) -> Tensor:
        """Every row's tokens in order, from the state in its page; the page ends up with the new state.

        Shapes   pages [blocks,..] may be strided, but each is dense; inputs [T,..] each; constants are the same for all
        Returns  [T,..]
        """
        ...


def waves(batch: StateBatch) -> list[Wave]:
    """The pieces of a step, in the order in which they must run."""
    result: list[Wave] = [[]]
    saves: dict[int, list[SaveAt]] = {}
    for save in batch.saves:
        saves.setdefault(save.row, []).append(save)
    start = 0
    rows = zip(batch.pages.tolist(), batch.query_lens.tolist(), batch.is_new.tolist(), strict=True)
    for row, (page, query_len, is_new) in enumerate(rows):
        if query_len == 0:
            continue
        due = sorted(saves.get(row, ()), key=lambda save: save.tokens)
        borders: list[tuple[int, int | None]] = [(save.tokens, save.page) for save in due]
        if not borders or borders[-1][0] < query_len:
            borders.append((query_len, None))
        at = 0
        for n, (end, saved_to) in enumerate(borders):
            if n == len(result):
                result.append([])
            result[n].append(Piece(start + at, start + end, page, is_new and at == 0, saved_to))
            at = end
        start += query_len
    return result


NOWHERE = -1
"""In place of the page to which a state is saved: it is not."""
