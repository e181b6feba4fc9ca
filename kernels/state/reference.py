"""The recurrences, one token at a time: what they are, and the oracle of every faster way.

Each function takes the states of N rows, constants, and one token of each row; it returns the outputs and the new
states. Sums are in float32; a convolution's inputs are kept in the model's own dtype. A row's result depends on that
row alone, and not on how a prompt was cut into chunks: the same bits come out. Suffixes are explained in `protocol.py`.
"""

from collections.abc import Sequence
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ..transfer import Transfer
from .protocol import Recurrence, StateBatch, Wave, waves


def convolve_step(window_NCW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """A causal convolution of each channel over its latest inputs, of which the state holds all but the newest.

    constants: weight [C,W+1], bias [C]    inputs: x [N,C]    returns [N,C]
    """
    weight, bias = constants
    (x,) = inputs
    seen = torch.cat((window_NCW, x.unsqueeze(-1)), dim=-1)
    return (seen * weight).sum(-1) + bias, seen[..., 1:]


def silu_convolve_step(
    window_NCW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same, then x / (1 + exp(-x))."""
    out, window_NCW = convolve_step(window_NCW, constants, inputs)
    return F.silu(out), window_NCW


def gated_convolve_step(
    window_NCW: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same between two gates.

    inputs: before [N,C]  x [N,C]  after [N,C]    returns [N,C]
    """
    before, x, after = inputs
    out, window_NCW = convolve_step(window_NCW, constants, (before * x,))
    return after * out, window_NCW


def of_each_head(x_NGK: Tensor, v_NHV: Tensor) -> Tensor:
    """[N,H,K]: neighbours among the heads share one of G."""
    times = v_NHV.shape[1] // x_NGK.shape[1]
    return x_NGK if times == 1 else x_NGK.repeat_interleave(times, dim=1)


def linear_attention_step(
    state_NHKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """S = exp(g) S + k v;  o = q S.  Mamba-2 (arXiv 2405.21060) and lightning attention (arXiv 2401.04658) are this.

    inputs: q [N,G,K]  k [N,G,K]  v [N,H,V]  g [N,H], at most 0    returns [N,H,V]
    H/G neighbours among the heads share q and k.
    """
    q, k, v, g = inputs
    q, k = of_each_head(q, v), of_each_head(k, v)
    state = g.exp()[..., None, None] * state_NHKV + k.unsqueeze(-1) * v.unsqueeze(-2)
    return (q.unsqueeze(-1) * state).sum(-2), state


def gated_delta_step(
    state_NHKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """S = exp(g) S;  S += k (beta (v - k S));  o = q S.  Gated delta net, arXiv 2412.06464.

    inputs: q [N,G,K]  k [N,G,K]  v [N,H,V]  g [N,H], at most 0  beta [N,H]    returns [N,H,V]
    H/G neighbours among the heads share q and k.
    """
    q, k, v, g, beta = inputs
    q, k = of_each_head(q, v), of_each_head(k, v)
    state = g.exp()[..., None, None] * state_NHKV
    error = v - (k.unsqueeze(-1) * state).sum(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return (q.unsqueeze(-1) * state).sum(-2), state


def keyed_delta_step(
    state_NHKV: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The same where each number of a key decays by itself. Kimi delta attention, arXiv 2510.26692.

    inputs: q [N,G,K]  k [N,G,K]  v [N,H,V]  g [N,H,K], at most 0  beta [N,H]    returns [N,H,V]
    """
    q, k, v, g, beta = inputs
    q, k = of_each_head(q, v), of_each_head(k, v)
    state = g.exp().unsqueeze(-1) * state_NHKV
    error = v - (k.unsqueeze(-1) * state).sum(-2)
    state = state + k.unsqueeze(-1) * (beta.unsqueeze(-1) * error).unsqueeze(-2)
    return (q.unsqueeze(-1) * state).sum(-2), state


def selective_scan_step(
    state_NCS: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """h = exp(dt A) h + dt x B;  y = h C.  Mamba, arXiv 2312.00752.

    constants: A [C,S], negative    inputs: x [N,C]  dt [N,C]  B [N,S]  C [N,S]    returns [N,C]
    """
    (A,) = constants
    x, dt, B, C = inputs
    state = (dt.unsqueeze(-1) * A).exp() * state_NCS + (dt * x).unsqueeze(-1) * B.unsqueeze(-2)
    return (state * C.unsqueeze(-2)).sum(-1), state


def decaying_sum_step(sum_NC: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """h = exp(g) h + x;  y = h.  RG-LRU (arXiv 2402.19427) is this.

    inputs: x [N,C]  g [N,C], at most 0    returns [N,C]
    """
    x, g = inputs
    total = g.exp() * sum_NC + x
    return total, total


CONVOLUTION = Recurrence("convolution", convolve_step)
SILU_CONVOLUTION = Recurrence("silu_convolution", silu_convolve_step)
GATED_CONVOLUTION = Recurrence("gated_convolution", gated_convolve_step)
LINEAR_ATTENTION = Recurrence("linear_attention", linear_attention_step)
GATED_DELTA = Recurrence("gated_delta", gated_delta_step)
KEYED_DELTA = Recurrence("keyed_delta", keyed_delta_step)
SELECTIVE_SCAN = Recurrence("selective_scan", selective_scan_step)
DECAYING_SUM = Recurrence("decaying_sum", decaying_sum_step)


class ReferenceStates:
    """Token by token."""

    name: ClassVar[str] = "reference"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu", "cuda"})
    mixed_frames: ClassVar[bool] = False

    @classmethod
    def lacks(cls) -> str | None:
        return None

    def prepare(self, batch: StateBatch, device: torch.device) -> list[Wave]:
        return waves(batch)

    def frame(self, rows: int, tokens: int, device: torch.device) -> None:
        return None

    def refill(self, frame: None, batch: StateBatch, transfer: Transfer) -> bool:
        raise AssertionError("there are no frames")

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[Wave],
    ) -> Tensor:  # fmt: skip
        outputs: dict[int, Tensor] = {}
        for piece in (piece for wave in meta for piece in wave):
            own = pages[piece.page]
            state = (torch.zeros_like(own) if piece.is_new else own).unsqueeze(0)
            for token in range(piece.start, piece.end):
                row = [values[token : token + 1] for values in inputs]
                outputs[token], state = recurrence.step(state, constants, row)
            own.copy_(state[0])
            if piece.saved_to is not None:
                pages[piece.saved_to] = state[0]
        return torch.cat([outputs[token] for token in sorted(outputs)])
