"""Parts of a transformers module computed in one call instead of many: norms, gated MLPs, the way into attention.

Families write the same arithmetic in many ways, and near copies of it that differ in one step. So nothing is told by
name: one forward pass is watched, and a module is taken over where, for what it was given, our way of it gives what it
gave. What does not match any of our ways stays as it is.

One thing a pass can not show: a clamp that nothing in it reached. So only families that the tests put through the gate
are looked at, and no code that came with a checkpoint.

On a CPU with a C++ compiler; elsewhere nothing is taken over. A decode step of 32 requests through six layers of Gemma
3's kind took 8.6 ms without this and 5.4 ms with it (`bench/engine.py throughput`, two threads).
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from ...kernels.tokenwise import Activation, Norm, Turn
from ...kernels.tokenwise import cpu as native
from ..layers.attention import PagedAttention, Seen
from .linear import PackedLinear, merge_linears

logger = logging.getLogger(__name__)

Way = TypeVar("Way")

MLP_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))
ATTENTION_NAMES = ("q_proj", "k_proj", "v_proj")
OUTPUT_NAMES = ("o_proj", "out_proj")
NORM_NAMES = (("q_norm", "k_norm"), ("q_layernorm", "k_layernorm"))

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2, torch.float16: 4e-3}
"""Of what all numbers sum to, in size. What computes something else is off by more; of several ways the nearest is
taken."""


class Call(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any


class Watch:
    """What modules were given, and gave, in one forward pass."""

    def __init__(self, model: nn.Module, attention: PagedAttention):
        self.model = model
        self.attention = attention
        self._calls: dict[nn.Module, list[Call]] = {}

    @contextmanager
    def open(self) -> Iterator[None]:
        """Watch what runs in this block."""

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            self._calls.setdefault(module, []).append(Call(args, kwargs, output))

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in self.model.modules()]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def call(self, module: nn.Module) -> Call | None:
        """None where it was not called, or several times."""
        calls = self._calls.get(module, [])
        return calls[0] if len(calls) == 1 else None

    def tensor_in(self, module: nn.Module) -> Tensor | None:
        """What the module was called with, if that was a tensor and nothing else."""
        call = self.call(module)
        if call is None or len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], Tensor):
            return None
        return call.args[0]


def fuse(watch: Watch, device: torch.device) -> None:
    """Take over what was seen to compute what we can compute. Called after the pass, in inference mode.

    device: where the model lies; nothing is taken over but on a CPU, whose memory is all that C++ can read
    """
    if (
        device.type != "cpu"
        or not native.is_available()
        or not type(watch.model).__module__.startswith("transformers.")
    ):
        return
    counts = {
        name: sum(take(module, watch) for module in list(watch.model.modules()) if _is_as_written(module))
        for name, take in (("attention", _take_attention), ("MLP", _take_mlp), ("norm", _take_norm))
    }
    logger.info("computed in one call each: %s", ", ".join(f"{count} x {name}" for name, count in counts.items()))


def _is_as_written(module: nn.Module) -> bool:
    """Neither hooked nor given a forward pass of its own, by us or anybody."""
    return not (module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module))


def _error(ours: Tensor, theirs: Tensor) -> float:
    """How far from each other, as a share of `theirs`; infinite for what can not be compared."""
    if ours.shape != theirs.shape:
        return math.inf
    error, size = (ours.float() - theirs.float()).abs().sum(), theirs.float().abs().sum()
    return float(error / size) if size > 0 else math.inf


def _is_same(ours: Tensor, theirs: Tensor) -> bool:
    return _error(ours, theirs) <= TOLERANCE[theirs.dtype]


def _nearest(ways: Iterable[Way], error: Callable[[Way], float], dtype: torch.dtype) -> Way | None:
    """The way with the least error; None if it is too large. Nobody is NaN's neighbour."""
    errors = [(off, n, way) for n, way in enumerate(ways) if (off := error(way)) <= TOLERANCE[dtype]]
    return min(errors, key=lambda each: each[:2])[2] if errors else None


def _is_linear(module: Any) -> bool:
    return type(module) in (nn.Linear, PackedLinear) and _is_as_written(module)


# -- norms -----------------------------------------------------------------------------------------------------------


class FusedNorm(nn.Module):
    norm: Norm

    def forward(self, x: Tensor) -> Tensor:
        return native.rms_norm(x, self.norm)


def _take_norm(module: nn.Module, watch: Watch) -> bool:
    x, norm = watch.tensor_in(module), _norm_of(module, watch)
    if x is None or norm is None:
        return False
    module.__class__ = FusedNorm
    module.norm = norm  # type: ignore[assignment]
    return True


def _norm_of(module: Any, watch: Watch) -> Norm | None:
    """What an RMS norm computes; None if the module is something else."""
    x, call = watch.tensor_in(module), watch.call(module)
    weight, eps = getattr(module, "weight", None), getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if x is None or call is None or not isinstance(weight, Tensor) or weight.ndim != 1 or not isinstance(eps, float):
        return None
    if x.shape[-1:] != weight.shape or len(list(module.parameters())) != 1 or not _is_as_written(module):
        return None
    ways = [
        Norm((weight.float() + offset).contiguous(), eps, rounds_first)
        for offset, rounds_first in itertools.product((0.0, 1.0), (False, True))
    ]
    return _nearest(ways, lambda norm: _error(native.rms_norm(x, norm), call.output), x.dtype)


# -- gated MLPs ------------------------------------------------------------------------------------------------------


class FusedMLP(nn.Module):
    gate_up: nn.Linear
    down: nn.Linear
    activation: Activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(native.gate(self.gate_up(x), self.activation))


def _take_mlp(module: nn.Module, watch: Watch) -> bool:
    x, call = watch.tensor_in(module), watch.call(module)
    names = next((names for names in MLP_NAMES if all(hasattr(module, name) for name in names)), None)
    if x is None or call is None or names is None:
        return False
    gate, up, down = (getattr(module, name) for name in names)
    middle, end = watch.tensor_in(down), watch.call(down)
    if not _is_linear(gate) or not _is_linear(up) or middle is None or end is None or end.output is not call.output:
        return False
    both = torch.cat((gate(x), up(x)), dim=-1)
    activation = _nearest(Activation, lambda way: _error(native.gate(both, way), middle), x.dtype)
    if activation is None:
        return False
    _become(module, FusedMLP, gate_up=merge_linears((gate, up)), down=down, activation=activation)
    return True


def _become(module: Any, kind: type[nn.Module], **parts: Any) -> None:
    """Let a module be another one, for whoever holds it; of its own parts none is left."""
    module._modules.clear()
    module.__class__ = kind
    for name, part in parts.items():
        setattr(module, name, part)


# -- the way into attention ------------------------------------------------------------------------------------------


class FusedAttention(nn.Module):
    """Queries, keys and values in one product, normed and turned in place, then attended to."""

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
    turn: Turn
    rotary_dim: int

    def prepare(self, qkv_TC: Tensor, angles: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """angles: cosines and sines [1,T,R]. Returns q [T,H,D], k [T,K,D] and v [T,K,Dv], parts of `qkv_TC`."""
        if self.turn or any(self.norms):
            cos_TR, sin_TR = (angle[0] for angle in angles) if self.turn and angles else (None, None)
            native.prepare_heads(qkv_TC, *self[:4], cos_TR, sin_TR, self.turn, self.rotary_dim)
        q, k = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q_TC, k_TC, v_TC = qkv_TC.tensor_split((q, q + k), dim=1)
        return (
            q_TC.unflatten(1, (self.heads, -1)),
            k_TC.unflatten(1, (self.kv_heads, -1)),
            v_TC.unflatten(1, (self.kv_heads, -1)),
        )


def _take_attention(module: Any, watch: Watch) -> bool:
    call, seen = watch.call(module), watch.attention.seen.get(module)
    out = next((getattr(module, name) for name in OUTPUT_NAMES if hasattr(module, name)), None)
    linears = [getattr(module, name, None) for name in ATTENTION_NAMES]
    if call is None or seen is None or out is None or not all(map(_is_linear, linears)):
        return False
    hidden, angles = _attention_inputs(call)
    if hidden is None or not _ends_with(out, seen.out_THD, call, watch):
        return False
    for heads in _ways(module, seen, angles, watch):
        products = [linear(hidden[0]) for linear in linears]  # type: ignore[misc]
        if [product.shape[1] for product in products] != [x[0].numel() for x in (seen.q_THD, seen.k_TKD, seen.v_TKD)]:
            return False
        ours = heads.prepare(torch.cat(products, dim=1), angles)
        if all(map(_is_same, ours, (seen.q_THD, seen.k_TKD, seen.v_TKD))):
            qkv = merge_linears(linears)  # type: ignore[arg-type]
            _become(module, FusedAttention, qkv=qkv, out=out, attend=seen.attend, heads=heads)
            return True
    return False


def _attention_inputs(call: Call) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Hidden states [1,T,C], and the cosines and sines of positions [1,T,R]; None for what is no such thing."""
    hidden, angles = (
        call.kwargs.get(name, call.args[n] if n < len(call.args) else None)
        for n, name in enumerate(("hidden_states", "position_embeddings"))
    )
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        return None, None
    if not isinstance(angles, tuple) or len(angles) != 2:
        return hidden, None
    expected = (1, hidden.shape[1])
    is_plain = all(isinstance(x, Tensor) and x.shape[:2] == expected and x.dtype == hidden.dtype for x in angles)
    return hidden, angles if is_plain else None


def _ends_with(out: nn.Module, attended_THD: Tensor, call: Call, watch: Watch) -> bool:
    """Whether nothing is done between attention and the last product, nor after it."""
    given, end = watch.tensor_in(out), watch.call(out)
    return (
        given is not None
        and end is not None
        and _is_same(attended_THD.flatten(1), given[0])
        and isinstance(call.output, tuple)
        and call.output[0] is end.output
    )


def _ways(module: Any, seen: Seen, angles: tuple[Tensor, Tensor] | None, watch: Watch) -> Iterator[Heads]:
    """Ways in which queries and keys may have come about."""
    norms: tuple[Norm | None, Norm | None] = (None, None)
    for names in NORM_NAMES:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            query_norm, key_norm = (_norm_of(getattr(module, name), watch) for name in names)
            if query_norm is None or key_norm is None or query_norm[1:] != key_norm[1:]:
                return
            norms = (query_norm, key_norm)
    (_, heads, head_dim), kv_heads = seen.q_THD.shape, seen.k_TKD.shape[1]
    count = angles[0].shape[-1] if angles else 0
    turns = [(Turn.HALVES, count), (Turn.PAIRS, count), (Turn.HALVES, 2 * count), (Turn.NOT_AT_ALL, 0)]
    for turn, rotary_dim in turns:
        if rotary_dim % 2 == 0 and (0 < rotary_dim <= head_dim or turn is Turn.NOT_AT_ALL):
            yield Heads(heads, kv_heads, head_dim, norms, turn, rotary_dim)
