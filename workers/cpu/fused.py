"""Parts of a transformers module computed in one call instead of many: norms, gated MLPs, the way into attention.

Families write the same arithmetic in many ways. `fused_table.py` names the classes of modules whose forward pass is one
that we have in C++; those are taken over here, with their weights. Everything else stays as it is.

On a CPU with a C++ compiler; elsewhere nothing is taken over. A decode step of 32 requests through six layers of Gemma
3's kind took 8.6 ms without this and 5.4 ms with it (`bench/engine.py throughput`, two threads).
"""

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...kernels.products import PackedLinear
from ...kernels.tokenwise import Activation, Norm, Rotary
from ...kernels.tokenwise import cpu as native
from ..layers.attention import PagedAttention
from .fused_table import ACTIVATIONS, ATTENTIONS, GATED_MLPS, NORMS
from .linear import merge_linears

logger = logging.getLogger(__name__)

PROJECTIONS = "q_proj", "k_proj", "v_proj"

Kind = TypeVar("Kind")


def fuse(model: nn.Module, attention: PagedAttention, device: torch.device) -> None:
    """Take over the modules that the table names.

    attention: what it has learnt of each layer is kept (`PagedAttention.learn`)
    device: where the model lies; nothing is taken over but on a CPU, whose memory is all that C++ can read
    """
    if device.type != "cpu" or not native.is_available():
        return
    takers = {
        "attention": partial(_take_attention, attention),
        "MLP": _take_mlp,
        "norm": _take_norm,
        "activation": _take_activation,
    }
    counts = {name: sum(map(take, list(model.modules()))) for name, take in takers.items()}
    logger.info("computed in one call each: %s", ", ".join(f"{count} x {name}" for name, count in counts.items()))


def _entry(table: dict[str, Kind], module: nn.Module) -> Kind | None:
    """What the table says of a module as transformers wrote it: neither hooked nor given a forward pass of its own."""
    is_theirs = type(module).__module__.startswith("transformers.")
    return table.get(type(module).__name__) if is_theirs and _is_as_written(module) else None


def _is_as_written(module: nn.Module) -> bool:
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _are_linear(modules: Sequence[Any]) -> bool:
    return all(
        (type(module) is nn.Linear or isinstance(module, PackedLinear)) and _is_as_written(module) for module in modules
    )


def _become(module: Any, kind: type[nn.Module], **parts: Any) -> None:
    """Change this very module into one of another class. Of its own parts none is left."""
    module._modules.clear()
    module.__class__ = kind
    for name, part in parts.items():
        setattr(module, name, part)


# -- norms -----------------------------------------------------------------------------------------------------------


class FusedNorm(nn.Module):
    norm: Norm

    def forward(self, x: Tensor) -> Tensor:
        return native.rms_norm(x, self.norm)


def _take_norm(module: nn.Module) -> bool:
    norm = _norm_of(module)
    if norm is None:
        return False
    module.__class__ = FusedNorm
    module.norm = norm  # type: ignore[assignment]
    return True


def _norm_of(module: Any) -> Norm | None:
    """What an RMS norm computes; None if the module is something else, or has no weight."""
    kind, weight = _entry(NORMS, module), getattr(module, "weight", None)
    if kind is None or weight is None:
        return None
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm((weight.float() + kind.offset).contiguous(), eps, kind.rounds_first)


# -- activations that are left -----------------------------------------------------------------------------------------


class FusedActivation(nn.Module):
    activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        return native.activate(x, self.activation)


def _take_activation(module: nn.Module) -> bool:
    """torch computes the last numbers of a tensor in another way than the others, so that a token's may depend on how
    many there are."""
    activation = ACTIVATIONS.get(type(module).__name__) if _is_as_written(module) else None
    if activation is None:
        return False
    module.__class__ = FusedActivation
    module.activation = activation  # type: ignore[assignment]
    return True


# -- gated MLPs ------------------------------------------------------------------------------------------------------


class FusedMLP(nn.Module):
    gate_up: nn.Linear
    down: nn.Linear
    activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(native.gate(self.gate_up(x), self.activation))


def _take_mlp(module: nn.Module) -> bool:
    kind = _entry(GATED_MLPS, module)
    if kind is None or not kind.is_plain(module):
        return False
    activation = Activation.SILU
    if kind.activation is not None:
        named = ACTIVATIONS.get(type(getattr(module, kind.activation)).__name__)
        if named is None:
            return False
        activation = named
    products = [getattr(module, kind.gate), getattr(module, kind.up)]
    if not _are_linear(products):
        return False
    _become(module, FusedMLP, gate_up=merge_linears(products), down=getattr(module, kind.down), activation=activation)
    return True


# -- the way into attention ------------------------------------------------------------------------------------------


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
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_TC, k_TC, v_TC = qkv_TC.tensor_split((q, q + k), dim=1)
        return (
            q_TC.unflatten(1, (self.heads, -1)),
            k_TC.unflatten(1, (self.kv_heads, -1)),
            v_TC.unflatten(1, (self.kv_heads, -1)),
        )


def _take_attention(attention: PagedAttention, module: Any) -> bool:
    kind = _entry(ATTENTIONS, module)
    if kind is None:
        return False
    # Only what lies in this process as plain products can be merged into one.
    projections = [getattr(module, name) for name in PROJECTIONS]
    if not _are_linear(projections):
        return False
    if kind.angles_are_float32 and projections[0].weight.dtype != torch.float32:
        return False
    norms: tuple[Norm | None, Norm | None] = (None, None)
    if kind.norms is not None:
        query_norm, key_norm = (_norm_of(getattr(module, name)) for name in kind.norms)
        # One call norms both, so neither may be over several ranks and both must be of one kind.
        if query_norm is None or key_norm is None or query_norm[1:] != key_norm[1:]:
            return False
        norms = query_norm, key_norm
    # Of a rank that holds a slice, the heads of that slice.
    heads, kv_heads = (len(projection.weight) // module.head_dim for projection in projections[:2])
    rotary = kind.rotary if kind.rotates(module) else Rotary.NONE
    _become(
        module,
        FusedAttention,
        qkv=merge_linears(projections),
        out=getattr(module, kind.out),
        attend=attention.attend_layer(module.layer_idx),
        heads=Heads(heads, kv_heads, module.head_dim, norms, rotary, kind.angles_per_head),
    )
    return True
