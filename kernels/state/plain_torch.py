"""The recurrences many tokens at a time, in plain torch.

Rows with one token take one step together. A prompt is cut into chunks; within a chunk all tokens see each other
through matrix products, and a chunk's effect on the state is one more product (arXiv 2405.21060, arXiv 2412.06464).
Decays are only ever multiplied over spans, as exp of a difference of running sums that is at most 0, so nothing
overflows.

Suffixes, beyond those of `protocol.py`:    L, M tokens of a chunk
"""

from collections.abc import Callable, Sequence
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..transfer import Transfer
from .protocol import Piece, Recurrence, StateBatch, waves
from .reference import (
    CONVOLUTION,
    DECAYING_SUM,
    GATED_CONVOLUTION,
    GATED_DELTA,
    KEYED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SILU_CONVOLUTION,
    of_each_head,
)

CHUNK_TOKENS = 64
KEYED_CHUNK_TOKENS = 16
"""Where each number of a key decays by itself: of every two tokens of a chunk there are as many decays."""

SPARE_PAGE = -1
"""The last one."""

Run = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], tuple[Tensor, Tensor]]
"""(state [..], constants, inputs [T,..] each) -> (outputs [T,..], new state): T tokens of one row."""


class Singles(NamedTuple):
    """Pieces of one token each: they take one step together."""

    tokens: Tensor | slice  # [N]
    pages: Tensor  # [N]
    new: Tensor | None  # [N]: true where the state is zero
    saved: tuple[Tensor, Tensor] | None  # (which of N, the pages their states also go to)


class SplitWave(NamedTuple):
    """A wave, its pieces of one token apart from the others."""

    singles: Singles | None
    longer: tuple[Piece, ...]


class ChunkedStates:
    """The default on a CPU without a compiler; runs unchanged on a GPU."""

    name: ClassVar[str] = "torch"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    mixed_frames: ClassVar[bool] = False

    @classmethod
    def lacks(cls) -> str | None:
        return None

    def prepare(self, batch: StateBatch, device: torch.device) -> list[SplitWave]:
        result = []
        for wave in waves(batch):
            single = [piece for piece in wave if piece.is_single]
            longer = tuple(piece for piece in wave if not piece.is_single)
            result.append(SplitWave(_singles(single, device) if single else None, longer))
        return result

    def frame(self, rows: int, tokens: int, device: torch.device) -> list[SplitWave] | None:
        no_pages = np.zeros(rows, dtype=np.int32)
        ones = StateBatch(no_pages, no_pages + 1, no_pages != 0)
        return self.prepare(ones, device) if tokens == rows else None

    def refill(self, frame: list[SplitWave], batch: StateBatch, transfer: Transfer) -> bool:
        singles = frame[0].singles
        assert singles is not None
        if batch.saves or batch.is_new.any():
            return False
        lacking = len(singles.pages) - len(batch.pages)
        transfer.put(singles.pages, np.pad(batch.pages, (0, lacking), constant_values=SPARE_PAGE))
        return True

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[SplitWave],
    ) -> Tensor:  # fmt: skip
        run = RUNS[recurrence.name]
        out: Tensor | None = None
        for wave in meta:
            if wave.singles is not None:
                result = _step(recurrence, pages, constants, inputs, wave.singles)
                out = _room(inputs, result) if out is None else out
                out[wave.singles.tokens] = result
            for piece in wave.longer:
                result = run_piece(run, pages, constants, inputs, piece)
                out = _room(inputs, result) if out is None else out
                out[piece.start : piece.end] = result
        assert out is not None, "a step has at least one token"
        return out


def run_piece(run: Run, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor], piece: Piece) -> Tensor:
    """One piece by itself, from the state in its page, which ends up with the new state. Returns [tokens,..]."""
    own = pages[piece.page]
    state = (torch.zeros_like(own) if piece.is_new else own).to(inputs[-1].dtype)
    result, state = run(state, constants, [values[piece.start : piece.end] for values in inputs])
    own.copy_(state)
    if piece.saved_to is not None:
        pages[piece.saved_to] = state
    return result


def _singles(pieces: list[Piece], device: torch.device) -> Singles:
    def tensor(values: list) -> Tensor:
        return torch.tensor(values).to(device, non_blocking=True)

    tokens = [piece.start for piece in pieces]
    side_by_side = tokens[-1] - tokens[0] + 1 == len(tokens)
    saved = [n for n, piece in enumerate(pieces) if piece.saved_to is not None]
    return Singles(
        slice(tokens[0], tokens[-1] + 1) if side_by_side else tensor(tokens),
        tensor([piece.page for piece in pieces]),
        tensor([piece.is_new for piece in pieces]) if any(piece.is_new for piece in pieces) else None,
        (tensor(saved), tensor([pieces[n].saved_to for n in saved])) if saved else None,
    )


def _room(inputs: Sequence[Tensor], like: Tensor) -> Tensor:
    return like.new_empty((len(inputs[0]), *like.shape[1:]))


def _step(
    recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor], singles: Singles
) -> Tensor:
    states = pages[singles.pages].to(inputs[-1].dtype)
    if singles.new is not None:
        states[singles.new] = 0
    result, states = recurrence.step(states, constants, [values[singles.tokens] for values in inputs])
    states = states.to(pages.dtype)
    pages[singles.pages] = states
    if singles.saved is not None:
        which, saved_to = singles.saved
        pages[saved_to] = states[which]
    return result


def convolve(window_CW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    weight, bias = constants
    (x_TC,) = inputs
    seen = torch.cat((window_CW, x_TC.T), dim=-1)
    out = F.conv1d(seen.unsqueeze(0), weight.unsqueeze(1), bias, groups=len(weight))
    return out[0].T, seen[:, len(x_TC) :]


def silu_convolve(window_CW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    out_TC, window_CW = convolve(window_CW, constants, inputs)
    return F.silu(out_TC), window_CW


def gated_convolve(window_CW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    before_TC, x_TC, after_TC = inputs
    out_TC, window_CW = convolve(window_CW, constants, (before_TC * x_TC,))
    return after_TC * out_TC, window_CW


def linear_attention(state_HKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    outputs = []
    for q, k, v, g in _chunks(inputs):  # [H,L,..] each
        total = g.cumsum(-1)
        seen = (q @ k.mT) * _decay_between(total)
        outputs.append(seen @ v + (q * total.exp().unsqueeze(-1)) @ state_HKV)
        state_HKV = _carry(state_HKV, total) + (k * _decay_to_end(total)).mT @ v
    return torch.cat(outputs, dim=1).transpose(0, 1), state_HKV


def gated_delta(state_HKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """What each token adds, u, depends on what the tokens before it added: a triangular system."""
    outputs = []
    for q, k, v, g, beta in _chunks(inputs):
        total = g.cumsum(-1)
        between = _decay_between(total)
        since_start = total.exp().unsqueeze(-1)
        depends = beta.unsqueeze(-1) * torch.tril(k @ k.mT * between, -1)
        wanted = beta.unsqueeze(-1) * (v - (k * since_start) @ state_HKV)
        u = torch.linalg.solve_triangular(depends, wanted, upper=False, unitriangular=True)
        outputs.append((q @ k.mT * between) @ u + (q * since_start) @ state_HKV)
        state_HKV = _carry(state_HKV, total) + (k * _decay_to_end(total)).mT @ u
    return torch.cat(outputs, dim=1).transpose(0, 1), state_HKV


def keyed_delta(state_HKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The same. A product of q and k has a decay in each of its terms."""
    outputs = []
    for q, k, v, g, beta in _chunks(inputs, KEYED_CHUNK_TOKENS):
        total = g.cumsum(-2)
        span_HLMK = total.unsqueeze(-2) - total.unsqueeze(-3)
        later = torch.ones(span_HLMK.shape[1:3], dtype=torch.bool, device=g.device).triu(1)
        k_HLMK = k.unsqueeze(-3) * span_HLMK.masked_fill_(later.unsqueeze(-1), float("-inf")).exp_()
        since_start = total.exp()
        depends = beta.unsqueeze(-1) * torch.tril((k_HLMK @ k.unsqueeze(-1)).squeeze(-1), -1)
        wanted = beta.unsqueeze(-1) * (v - (k * since_start) @ state_HKV)
        u = torch.linalg.solve_triangular(depends, wanted, upper=False, unitriangular=True)
        outputs.append((k_HLMK @ q.unsqueeze(-1)).squeeze(-1) @ u + (q * since_start) @ state_HKV)
        to_end = (total[:, -1:] - total).exp()
        state_HKV = state_HKV * since_start[:, -1].unsqueeze(-1) + (k * to_end).mT @ u
    return torch.cat(outputs, dim=1).transpose(0, 1), state_HKV


def selective_scan(state_CS: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Each channel and state decays in its own way, so there is no product to be had."""
    (A,) = constants
    x, dt, B, C = inputs
    outputs = []
    for start in range(0, len(x), CHUNK_TOKENS):
        part = slice(start, start + CHUNK_TOKENS)
        decay_LCS = (dt[part].unsqueeze(-1) * A).exp()
        added_LCS = (dt[part] * x[part]).unsqueeze(-1) * B[part].unsqueeze(-2)
        state_LCS = _merged(decay_LCS, added_LCS, state_CS)
        outputs.append((state_LCS @ C[part].unsqueeze(-1)).squeeze(-1))
        state_CS = state_LCS[-1]
    return torch.cat(outputs), state_CS


def decaying_sum(sum_C: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    outputs = []
    for x_LC, g_LC in zip(*(values.split(CHUNK_TOKENS) for values in inputs), strict=True):
        outputs.append(_merged(g_LC.exp(), x_LC, sum_C))
        sum_C = outputs[-1][-1]
    return torch.cat(outputs), sum_C


def _merged(decay: Tensor, added: Tensor, state: Tensor) -> Tensor:
    """The states after each token of a chunk, which multiplies the state by its decay and adds to it, [L,..] each.

    Neighbours are merged, then neighbours of neighbours, until every token knows all that came before it."""
    reach = 1
    while reach < len(decay):
        added = torch.cat((added[:reach], added[reach:] + decay[reach:] * added[:-reach]))
        decay = torch.cat((decay[:reach], decay[reach:] * decay[:-reach]))
        reach *= 2
    return added + decay * state


RUNS: dict[str, Run] = {
    CONVOLUTION.name: convolve,
    SILU_CONVOLUTION.name: silu_convolve,
    GATED_CONVOLUTION.name: gated_convolve,
    LINEAR_ATTENTION.name: linear_attention,
    GATED_DELTA.name: gated_delta,
    KEYED_DELTA.name: keyed_delta,
    SELECTIVE_SCAN.name: selective_scan,
    DECAYING_SUM.name: decaying_sum,
}


def _chunks(inputs: Sequence[Tensor], chunk_tokens: int = CHUNK_TOKENS):
    """Inputs [T,H,..] in chunks [H,L,..], the first two for each head."""
    q, k, v, *others = inputs
    inputs = (of_each_head(q.to(v.dtype), v), of_each_head(k.to(v.dtype), v), v, *others)
    tokens = len(v)
    for start in range(0, tokens, chunk_tokens):
        yield [values[start : start + chunk_tokens].transpose(0, 1) for values in inputs]


def _decay_between(total_HL: Tensor) -> Tensor:
    """[H,L,M]: what is left of token m when token l reads it; 0 for tokens still to come."""
    span = total_HL.unsqueeze(-1) - total_HL.unsqueeze(-2)
    return torch.tril(span).exp_().tril_()


def _decay_to_end(total_HL: Tensor) -> Tensor:
    """[H,L,1]: what is left of each token at the end of the chunk."""
    return (total_HL[:, -1:] - total_HL).exp().unsqueeze(-1)


def _carry(state_HKV: Tensor, total_HL: Tensor) -> Tensor:
    """What is left of the state at the end of the chunk."""
    return state_HKV * total_HL[:, -1, None, None].exp()
