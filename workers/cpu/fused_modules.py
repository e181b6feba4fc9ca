"""Parts of a model as we compute them, in one call of C++ each: see `kernels/tokenwise`."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor, nn

from ...kernels.tokenwise import Activation, Norm, Rotary
from ...kernels.tokenwise import cpu as native


class FusedNorm(nn.Module):
    norm: Norm

    def forward(self, x: Tensor) -> Tensor:
        return native.rms_norm(x, self.norm)


class FusedActivation(nn.Module):
    activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        return native.activate(x, self.activation)


class FusedMLP(nn.Module):
    gate_up: nn.Linear
    down: nn.Linear
    activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(native.gate(self.gate_up(x), self.activation))


class FusedAttention(nn.Module):
    """Queries, keys and values in one product, normed and rotated in place, then attended to."""

    qkv: nn.Linear
    out: nn.Linear
    attend: Callable[[Tensor, Tensor, Tensor], Tensor]  # q_THD, k_TKD, v_TKD -> out_THD
    heads: "Heads"

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        q_THD, k_TKD, v_TKD = self.heads.prepare(self.qkv(hidden_states[0]), position_embeddings)
        out_THD = self.attend(q_THD, k_TKD, v_TKD)
        return self.out(out_THD.flatten(1).unsqueeze(0)), None


class Heads(NamedTuple):
    """How queries and keys are made of the product of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[Norm | None, Norm | None]  # of queries and of keys
    rotary: Rotary
    angles_per_head: int  # numbers that are rotated, by the number of cosines

    def prepare(self, qkv_TC: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """angles: cosines and sines [1,T,R]. Returns q [T,H,D], k [T,K,D] and v [T,K,Dv], parts of `qkv_TC`."""
        if self.rotary and angles:
            cos_TR, sin_TR = (angle[0] for angle in angles)
            rotary_dim = cos_TR.shape[-1] * self.angles_per_head
            native.prepare_heads(qkv_TC, *self[:4], cos_TR, sin_TR, self.rotary, rotary_dim)
        elif any(self.norms):
            native.prepare_heads(qkv_TC, *self[:4], None, None, Rotary.NONE, 0)
        return self.split(qkv_TC)

    @property
    def changes_anything(self) -> bool:
        return bool(self.rotary) or any(self.norms)

    def split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T,H,D], k [T,K,D] and v [T,K,Dv], parts of `qkv_TC`."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_TC, k_TC, v_TC = qkv_TC.tensor_split((q, q + k), dim=1)
        return (
            q_TC.unflatten(1, (self.heads, -1)),
            k_TC.unflatten(1, (self.kv_heads, -1)),
            v_TC.unflatten(1, (self.kv_heads, -1)),
        )
