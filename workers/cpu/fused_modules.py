"""Parts of a model as we compute them, in one call each of C++ or of a GPU: see `kernels/tokenwise`."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...kernels.paged_attention import GroupMeta, LayerParams
from ...kernels.routing import Operations as RoutingOperations
from ...kernels.routing import Routing
from ...kernels.streams import Mixing
from ...kernels.streams import Operations as StreamOperations
from ...kernels.tokenwise import Activation, Gating, Norm, Operations, Places, Rotary
from ...kernels.tokenwise import triton as on_gpu
from ..layers.attention import PagedAttention


class FusedNorm(nn.Module):
    norm: Norm
    operations: Operations
    dtype: torch.dtype | None = None  # of what it gives; None: of what it is given

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.normed(x, self.norm, self.dtype)


class FusedActivation(nn.Module):
    activation: Activation
    operations: Operations

    def forward(self, x: Tensor) -> Tensor:
        return self.operations.activate(x, self.activation)


class FusedMLP(nn.Module):
    gate_up: nn.Linear
    down: nn.Linear
    gating: Gating
    operations: Operations

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.operations.gate(self.gate_up(x), self.gating))


class FusedRouter(nn.Module):
    """Of its own parts, those that make logits are left."""

    logits: Callable[[Any, Tensor], Tensor]  # of this module and hidden states [T,D]
    routing: Routing
    routing_operations: RoutingOperations

    def forward(self, hidden_states: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns logits, shares and experts."""
        logits_TE = self.logits(self, hidden_states.reshape(-1, hidden_states.shape[-1]))
        routing = self.routing if bias_E is None else self.routing._replace(bias_E=bias_E.float())
        return logits_TE, *self.routing_operations.route(logits_TE, routing)


class FusedStreams(nn.Module):
    """Several residual streams become one: what goes into a block, and how its output comes back, or the last."""

    mixing: Mixing
    stream_operations: StreamOperations

    def forward(self, hidden_streams: Tensor) -> tuple[Tensor, Tensor, Tensor] | Tensor:
        collapsed_TC, after_TN, mixed_TNN = self.stream_operations.collapse(hidden_streams[0], self.mixing)
        if after_TN is None or mixed_TNN is None:
            return collapsed_TC.unsqueeze(0)
        return after_TN.unsqueeze(0), mixed_TNN.unsqueeze(0), collapsed_TC.unsqueeze(0)


class LayerAttention(NamedTuple):
    """`PagedAttention.attend_packed` of one layer, with the constants it was learnt to have."""

    attention: PagedAttention
    layer: int

    def __call__(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, write: Any = None) -> Tensor:
        return self.attention.attend_packed(q_THD, k_TKD, v_TKD, self.layer, self.params, write)

    @property
    def params(self) -> LayerParams:
        return self.attention.params[self.layer]


class FusedAttention(nn.Module):
    """Queries, keys and values in one product, normed and rotated in place, then attended to."""

    qkv: nn.Linear
    out: nn.Linear
    attend: LayerAttention
    heads: "Heads"

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        q_THD, k_TKD, v_TKD = self.heads.prepare(self.qkv(hidden_states[0]), position_embeddings)
        out_THD = self.attend(q_THD, k_TKD, v_TKD)
        return self.out(out_THD.flatten(1).unsqueeze(0)), None


class WritingAttention(FusedAttention):
    """The same on a GPU, where keys are normed and rotated on their way into their pages.

    Of a layer with pages of its own: of one that reads another's nothing would be written, and so nothing prepared.
    """

    def forward(
        self, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor] | None = None, *_: Any, **__: Any
    ) -> tuple[Tensor, None]:
        qkv_TC = self.qkv(hidden_states[0])
        write = partial(self.heads.prepare_and_write, qkv_TC, position_embeddings)
        out_THD = self.attend(*self.heads.split(qkv_TC), write=write)
        return self.out(out_THD.flatten(1).unsqueeze(0)), None


class QueryFactor:
    """What queries are multiplied by, by their position: 1 + beta log(1 + floor(position / span)), as Llama 4 has it.

    All layers of a pass are given the same angles, so it is computed for the first of them."""

    def __init__(self, attention: PagedAttention, beta: float, span_tokens: int):
        self._attention, self._beta, self._span_tokens = attention, beta, span_tokens
        self._angles: Any = None
        self._factor_T = torch.empty(0)

    def of_pass(self, angles: Any) -> Tensor:
        """[T] float32, rounded to the dtype of queries."""
        if angles is None or angles is not self._angles or torch.compiler.is_compiling():
            spans_T = torch.floor(self._attention.positions_T / self._span_tokens)
            factor_T = 1 + self._beta * torch.log(1 + spans_T)
            self._angles, self._factor_T = angles, factor_T.to(self._attention.dtype).float()
        return self._factor_T


class Heads(NamedTuple):
    """How queries and keys are made of the product of a token."""

    heads: int
    kv_heads: int
    head_dim: int
    norms: tuple[Norm | None, Norm | None]  # of queries and of keys
    rotary: Rotary
    angles_per_head: int  # numbers that are rotated, by the number of cosines
    operations: Operations
    query_factor: QueryFactor | None = None

    def prepare(self, qkv_TC: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """angles: cosines and sines [1,T,R]. Returns q [T,H,D], k [T,K,D] and v [T,K,Dv], parts of `qkv_TC`."""
        rotated, factor_T = self._rotated(angles), self._factor(angles)
        if rotated[2] or any(self.norms) or factor_T is not None:
            self.operations.prepare_heads(qkv_TC, *self[:4], *rotated, factor_T)
        return self.split(qkv_TC)

    def prepare_and_write(
        self, qkv_TC: Tensor, angles: tuple[Tensor, Tensor] | None, kv_view: Tensor, _: Tensor, __: Tensor,
        meta: GroupMeta,
    ) -> None:  # fmt: skip
        """Queries in place, keys and values into their pages: what `Backend.write` would do with them prepared."""
        places = Places(kv_view, meta.token_page, meta.token_offset)
        on_gpu.prepare_heads(qkv_TC, *self[:4], *self._rotated(angles), self._factor(angles), places)

    def _rotated(self, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor | None, Tensor | None, Rotary, int]:
        """Cosines and sines [T,R], which numbers they rotate together, and how many."""
        if not (self.rotary and angles):
            return None, None, Rotary.NONE, 0
        cos_TR, sin_TR = (angle[0] for angle in angles)
        return cos_TR, sin_TR, self.rotary, cos_TR.shape[-1] * self.angles_per_head

    def _factor(self, angles: tuple[Tensor, Tensor] | None) -> Tensor | None:
        return None if self.query_factor is None else self.query_factor.of_pass(angles)

    @property
    def changes_anything(self) -> bool:
        return bool(self.rotary) or any(self.norms) or self.query_factor is not None

    def split(self, qkv_TC: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """q [T,H,D], k [T,K,D] and v [T,K,Dv], parts of `qkv_TC`."""
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_TC, k_TC, v_TC = qkv_TC.tensor_split((q, q + k), dim=1)
        return (
            q_TC.unflatten(1, (self.heads, -1)),
            k_TC.unflatten(1, (self.kv_heads, -1)),
            v_TC.unflatten(1, (self.kv_heads, -1)),
        )


# -- decoder layers ----------------------------------------------------------------------------------------------------


class LayerParts(NamedTuple):
    """What a layer is made of. A norm that is None is not there."""

    before_mixer: Norm | None
    after_mixer: Norm | None
    before_mlp: Norm | None
    after_mlp: Norm | None
    mixer: Any  # a module: attention, or what keeps a state
    mlp: Any  # a module
    added_scale: float  # of what is added to x


class FusedLayer(nn.Module):
    """x + after(mixer(before(x))), and of that the same with an MLP as its mixer."""

    parts: LayerParts
    operations: Operations
    gives_weights: bool  # of attention, beside what it computes; ours has none
    dtype: torch.dtype  # of what its parts are given and give; x may be float32 all the same

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        mixed = self.parts.mixer(hidden_states=self.into_mixer(hidden_states), **given)
        out = self.from_mixer(hidden_states, tensor_of(mixed))
        return (out, None) if self.gives_weights else out

    def into_mixer(self, x: Tensor) -> Tensor:
        norm = self.parts.before_mixer
        return x if norm is None else self.operations.normed(x, norm, self.dtype)

    def from_mixer(self, x: Tensor, mixed: Tensor) -> Tensor:
        parts, add_norm = self.parts, self.operations.add_norm
        x, normed = add_norm(x, mixed, parts.after_mixer, parts.before_mlp, parts.added_scale)
        return add_norm(x, tensor_of(parts.mlp(normed)), parts.after_mlp, None, parts.added_scale)[0]


def tensor_of(output: Any) -> Tensor:
    """Attention gives its weights too, and some experts the scores of their router."""
    return output[0] if isinstance(output, tuple) else output
