"""What the runner says to a state backend, and what a backend must do.

Layers that see the past through a state (Mamba, linear attention, a short convolution) keep one page per request and
overwrite it token by token. Suffixes name the axes of a tensor:
    T packed tokens    N rows with one token each    C channels    H heads    K key size    V value size    S state size

    once per group and step    meta = prepare(batch, device)
    once per layer             out = backend.scan(recurrence, pages, constants, inputs, meta)

A page changes owner, so what a new row finds in its page may be NaN: a new row starts from zeros, whatever is there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

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
    """Who computes what in this step, for all layers of one group. Host memory.

    Shapes  pages [R]  query_lens [R]  is_new [R]: the row's first token is among them
    The packed tokens lie in row order.
    """

    pages: np.ndarray
    query_lens: np.ndarray
    is_new: np.ndarray
    saves: Sequence[SaveAt] = field(default=())


class Piece(NamedTuple):
    """Tokens of one row between two places at which its state is saved."""

    tokens: slice
    page: int
    is_new: bool
    saved_to: int | None


class Singles(NamedTuple):
    """Pieces of one token each: they take one step together."""

    tokens: Tensor | slice  # [N]
    pages: Tensor  # [N]
    new: Tensor | None  # [N]: true where the state is zero
    saved: tuple[Tensor, Tensor] | None  # (which of N, the pages their states also go to)


class Wave(NamedTuple):
    """Pieces that do not depend on each other: the n-th of each row."""

    pieces: tuple[Piece, ...]  # all of them
    singles: Singles | None  # those of one token
    longer: tuple[Piece, ...]  # the others


StateMeta = tuple[Wave, ...]


class StateBackend(Protocol):
    """Runs recurrences over pages."""

    name: ClassVar[str]

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: StateMeta,
    ) -> Tensor:  # fmt: skip
        """Every row's tokens in order, from the state in its page; the page ends up with the new state.

        Shapes   pages [blocks,..] may be strided; inputs [T,..] each; constants are the same for all tokens
        Returns  [T,..]
        """
        ...


def prepare(batch: StateBatch, device: torch.device) -> StateMeta:
    """What all layers of the group share: which tokens run together, from which pages to which."""
    waves: list[list[Piece]] = [[]]
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
            if n == len(waves):
                waves.append([])
            waves[n].append(Piece(slice(start + at, start + end), page, is_new and at == 0, saved_to))
            at = end
        start += query_len
    return tuple(_wave(pieces, device) for pieces in waves)


def _wave(pieces: list[Piece], device: torch.device) -> Wave:
    single = [piece for piece in pieces if piece.tokens.stop - piece.tokens.start == 1]
    longer = tuple(piece for piece in pieces if piece.tokens.stop - piece.tokens.start > 1)
    return Wave(tuple(pieces), _singles(single, device) if single else None, longer)


def _singles(pieces: list[Piece], device: torch.device) -> Singles:
    def tensor(values: list) -> Tensor:
        return torch.tensor(values).to(device, non_blocking=True)

    tokens = [piece.tokens.start for piece in pieces]
    side_by_side = tokens[-1] - tokens[0] + 1 == len(tokens)
    saved = [n for n, piece in enumerate(pieces) if piece.saved_to is not None]
    return Singles(
        slice(tokens[0], tokens[-1] + 1) if side_by_side else tensor(tokens),
        tensor([piece.page for piece in pieces]),
        tensor([piece.is_new for piece in pieces]) if any(piece.is_new for piece in pieces) else None,
        (tensor(saved), tensor([pieces[n].saved_to for n in saved])) if saved else None,
    )
