"""What each module of a model computes, found out by watching it run a prompt.

`Observer` notes what modules are given and give. `findings` tries, for each module, all ways in which one of our calls
could compute it, and says by how much the nearest of them is off.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from intarsia.kernels.routing import Routing, Scoring
from intarsia.kernels.routing import cpu as routing
from intarsia.kernels.streams import cpu as streams
from intarsia.kernels.tokenwise import Activation, Gating, Norm, Rotary
from intarsia.kernels.tokenwise import cpu as native
from intarsia.workers.cpu.fused import PROJECTIONS, mixing_of, query_factor_of
from intarsia.workers.cpu.fused_modules import (
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    FusedRouter,
    FusedStreams,
    Heads,
    QueryFactor,
    tensor_of,
)
from intarsia.workers.cpu.fused_table import DECODER_LAYERS, NORMS, ROUTERS, STREAMS, DecoderLayerKind, StreamsKind
from intarsia.workers.models.loaded_model import LoadedModel

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Of what all numbers sum to, in size. What computes something else is off by more."""

OUTPUTS = "o_proj", "out_proj"
QK_NORMS = ("q_norm", "k_norm"), ("q_layernorm", "k_layernorm")
MLP_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("gate_up_proj", "down_proj")


class Call(NamedTuple):
    """One call of a module."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    value: Any  # the output as it was then: some models go on with it in place


class Attended(NamedTuple):
    """What a layer's attention was given, and gave."""

    q_THD: Tensor
    k_TKD: Tensor
    v_TKD: Tensor
    out_THD: Tensor


class Observer:
    """What modules were given, and gave, in the first forward pass that ran in `watching`."""

    def __init__(self, model: LoadedModel):
        self.model = model
        self._calls: dict[nn.Module, Call] = {}
        self.attended: dict[int, Attended] = {}  # by layer

    @contextmanager
    def watching(self) -> Iterator[None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            value = output.clone() if isinstance(output, Tensor) else output
            self._calls.setdefault(module, Call(args, kwargs, output, value))

        attention = self.model.attention
        attend = attention.attend_packed

        def note_attention(q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, params: Any) -> Tensor:
            out_THD = attend(q_THD, k_TKD, v_TKD, layer, params)
            self.attended.setdefault(layer, Attended(q_THD, k_TKD, v_TKD, out_THD))
            return out_THD

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in self.model.module.modules()]
        attention.attend_packed = note_attention  # type: ignore[method-assign]
        try:
            yield
        finally:
            del attention.attend_packed
            for hook in hooks:
                hook.remove()

    def call(self, module: Any) -> Call | None:
        return self._calls.get(module)

    def tensor_in(self, module: Any) -> Tensor | None:
        """What the module was called with, if that was a tensor and nothing else."""
        call = self.call(module)
        if call is None or len(call.args) != 1 or call.kwargs or not isinstance(call.args[0], Tensor):
            return None
        return call.args[0]


class Finding(NamedTuple):
    """What one of our calls can compute, and by which error of all its ways."""

    name: str
    kind: type[nn.Module]
    least: float
    error_of: Callable[[Any], float]  # of a module that was made of it


def findings(seen: Observer) -> Iterator[Finding]:
    for name, module in seen.model.module.named_modules():
        for find in (norm_found, mlp_found, attention_found, router_found, streams_found, layer_found):
            if (finding := find(name, module, seen)) is not None:
                yield finding


def norm_found(name: str, module: Any, seen: Observer) -> Finding | None:
    x, weight = seen.tensor_in(module), getattr(module, "weight", None)
    eps = getattr(module, "eps", getattr(module, "variance_epsilon", None))
    if x is None or not isinstance(weight, Tensor) or not isinstance(eps, float) or x.shape[-1:] != weight.shape:
        return None
    output = seen.call(module).value  # type: ignore[union-attr]
    least = min(error_of(native.normed(x, norm), output) for norm in norms_of(weight, eps))
    return Finding(name, FusedNorm, least, lambda ours: error_of(ours(x), output))


def norms_of(weight: Tensor, eps: float) -> list[Norm]:
    kinds = itertools.product((0.0, 1.0), (False, True), (False, True))
    return [Norm((weight.float() + offset).contiguous(), eps, *ways) for offset, *ways in kinds]


def mlp_found(name: str, module: Any, seen: Observer) -> Finding | None:
    x, call = seen.tensor_in(module), seen.call(module)
    is_there = lambda part: isinstance(getattr(module, part, None), nn.Module)  # noqa: E731
    names = next((names for names in MLP_NAMES if all(map(is_there, names))), None)
    if x is None or call is None or names is None:
        return None
    *before, down = (getattr(module, part) for part in names)
    both = torch.cat([product(x) for product in before], dim=-1)
    least = min(error_of(down(native.gate(both, way)), call.value) for way in gatings_of(module))
    return Finding(name, FusedMLP, least, lambda ours: error_of(ours(x), call.value))


def gatings_of(module: Any) -> Iterator[Gating]:
    """Ways in which its gates may act."""
    limits, steepness = (
        {default, *(float(vars(module)[name]) for name in names if name in vars(module))}
        for default, names in ((math.inf, ("limit", "swiglu_limit")), (1.0, ("alpha", "swiglu_alpha")))
    )
    for activation, limit, is_cut_after in itertools.product(Activation, limits, (False, True)):
        yield Gating(activation, limit, is_cut_after)
    for limit, steep, added in itertools.product(limits, steepness, (0.0, 1.0)):
        yield Gating(Activation.SILU, limit, steepness=steep, added=added)


def attention_found(name: str, module: Any, seen: Observer) -> Finding | None:
    call, attended = seen.call(module), seen.attended.get(getattr(module, "layer_idx", -1))
    merged = getattr(module, "qkv_proj", None)
    is_product = isinstance(getattr(merged, "weight", None), Tensor)
    projections = [merged] if is_product else [getattr(module, part, None) for part in PROJECTIONS]
    if call is None or attended is None or None in projections:
        return None
    hidden, angles = attention_inputs(call)
    if hidden is None or not ends_with_product(module, attended, call, seen):
        return None
    product = torch.cat([projection(hidden[0]) for projection in projections if projection], dim=1)
    if product.numel() != sum(x.numel() for x in attended[:3]):
        return None

    def error(heads: Heads) -> float:
        if angles and heads.rotary and angles[0].shape[-1] * heads.angles_per_head > heads.head_dim:
            return math.inf
        return max(map(error_of, heads.prepare(product.clone(), angles), attended[:3]))

    least = min(map(error, heads_of(module, attended, seen)))
    return Finding(name, FusedAttention, least, lambda ours: error(ours.heads))


def router_found(name: str, module: Any, seen: Observer) -> Finding | None:
    call = seen.call(module)
    output = None if call is None else call.output
    if call is None or not isinstance(output, tuple) or not all(isinstance(part, Tensor) for part in output):
        return None
    if len(output) != 3 or output[2].is_floating_point() or output[1].shape != output[2].shape:
        return None
    logits = output[0]

    def error(ours: tuple[Tensor, Tensor]) -> float:
        """Of the shares of all experts, whichever were chosen."""
        ours_TE, theirs_TE = (
            torch.zeros_like(logits, dtype=torch.float32).scatter_(1, experts, shares.float())
            for shares, experts in (ours, output[1:])
        )
        return error_of(ours_TE, theirs_TE)

    least = min(error(routing.route(logits, way)) for way in routings_of(module, call))
    return Finding(name, FusedRouter, least, lambda ours: error(ours(*call.args)[1:]))


def routings_of(module: Any, call: Call) -> Iterator[Routing]:
    """Ways in which it may choose experts and weigh them."""
    most = call.output[2].shape[1]
    biases = [None, *(x for x in (getattr(module, "e_score_correction_bias", None), *call.args[1:]) if x is not None)]
    groups = [(1, 1)] + ([(module.num_group, module.topk_group)] if hasattr(module, "num_group") else [])
    scales = {1.0, *(float(vars(module)[x]) for x in ("routed_scaling_factor", "route_scale") if x in vars(module))}
    options = Scoring, (False, True), (False, True), groups, (None, 0.0, 1e-6), scales, biases
    for scoring, is_of_chosen, rounds, (count, best), least, scale, bias in itertools.product(*options):
        if bias is None or bias.is_floating_point():
            bias_E = None if bias is None else bias.float()
            yield Routing(most, scoring, is_of_chosen, rounds, count, best, least, scale, call.output[1].dtype, bias_E)


def streams_found(name: str, module: Any, seen: Observer) -> Finding | None:
    x, call = seen.tensor_in(module), seen.call(module)
    kinds = [kind for kind in dict.fromkeys(STREAMS.values()) if hasattr(module, kind.product)]
    if x is None or call is None or not kinds or not hasattr(module, "input_norm"):
        return None
    theirs = call.output if isinstance(call.output, tuple) else (call.output,)

    def error(outputs: Any) -> float:
        ours = outputs if isinstance(outputs, tuple) else (outputs,)
        return max(error_of(our, their) for our, their in zip(ours, theirs, strict=True))

    def of_kind(kind: StreamsKind) -> float:
        collapsed, *others = streams.collapse(x[0], mixing_of(module, kind))
        return error((*(other.unsqueeze(0) for other in others if other is not None), collapsed.unsqueeze(0)))

    return Finding(name, FusedStreams, min(map(of_kind, kinds)), lambda ours: error(ours(x)))


def attention_inputs(call: Call) -> tuple[Tensor | None, tuple[Tensor, Tensor] | None]:
    """Hidden states [1,T,C], and the cosines and sines of positions [1,T,R] in their dtype or float32, if there are."""
    hidden, angles = (
        call.kwargs.get(name, call.args[n] if n < len(call.args) else None)
        for n, name in enumerate(("hidden_states", "position_embeddings"))
    )
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        return None, None
    has_angles = isinstance(angles, tuple) and angles[0].dtype in (hidden.dtype, torch.float32)
    return hidden, angles if has_angles else None


def ends_with_product(module: Any, attended: Attended, call: Call, seen: Observer) -> bool:
    """Whether nothing is done between attention and the last product, nor after it."""
    out = next((getattr(module, name) for name in OUTPUTS if hasattr(module, name)), None)
    given, end = seen.tensor_in(out), seen.call(out)
    return (
        given is not None
        and end is not None
        and error_of(attended.out_THD.flatten(1), given[0]) <= TOLERANCE[given.dtype]
        and isinstance(call.output, tuple)
        and call.output[0] is end.output
    )


def heads_of(module: Any, attended: Attended, seen: Observer) -> Iterator[Heads]:
    """Ways in which queries and keys may have come about."""
    (_, heads, head_dim), kv_heads = attended.q_THD.shape, attended.k_TKD.shape[1]
    norms: list[tuple[Norm | None, Norm | None]] = [(None, None)]
    for names in QK_NORMS:
        if all(isinstance(getattr(module, name, None), nn.Module) for name in names):
            query, key = (getattr(module, name) for name in names)
            eps = getattr(query, "eps", getattr(query, "variance_epsilon", None))
            if eps is not None and isinstance(getattr(query, "weight", None), Tensor):
                both = zip(norms_of(query.weight, eps), norms_of(key.weight, eps), strict=True)
                norms = [pair for pair in both if not pair[0].is_centered]
    ways = ((Rotary.HALVES, 1), (Rotary.PAIRS, 1), (Rotary.HALVES, 2), (Rotary.NONE, 1))
    numbers = query_factor_of(module) if hasattr(module, "config") else None
    factors = [None, *([] if numbers is None else [QueryFactor(seen.model.attention, *numbers)])]
    for (rotary, angles_per_head), both, factor in itertools.product(ways, norms, factors):
        yield Heads(heads, kv_heads, head_dim, both, rotary, angles_per_head, native, factor)


def layer_found(name: str, module: Any, seen: Observer) -> Finding | None:
    """A layer of which nothing is known but that some kind of the table has its parts."""
    call = seen.call(module)
    x = None if call is None else input_of(call)
    if call is None or not isinstance(x, Tensor):
        return None
    fitting = [kind for kind in dict.fromkeys(DECODER_LAYERS.values()) if has_parts(module, kind, x.shape[-1])]
    mixers = [seen.call(getattr(module, part, None)) for kind in fitting for part in kind.mixers]
    mixer = next((mixer for mixer in mixers if mixer is not None), None)
    if mixer is None or tensor_of(mixer.output).shape != x.shape:
        return None
    given, mixed, out = input_of(mixer), tensor_of(mixer.output), tensor_of(call.output)

    def error(kind: DecoderLayerKind) -> float:
        """With the norms as they are written, and what the MLP gave."""
        mlp = seen.call(getattr(module, kind.mlp))
        if mlp is None or isinstance(call.output, tuple) != kind.gives_weights or not kind.is_plain(module):
            return math.inf
        scale = 1.0 if kind.added_scale is None else getattr(module, kind.added_scale)
        normed = lambda part, tensor: tensor if part is None else getattr(module, part)(tensor)  # noqa: E731
        total = x + scale * normed(kind.after_mixer, mixed)
        final = total + scale * normed(kind.after_mlp, tensor_of(mlp.output).view(x.shape))
        inside = error_of(normed(kind.before_mixer, x), given), error_of(normed(kind.before_mlp, total), input_of(mlp))
        return max(*inside, error_of(final, out))

    is_clear = has_clear_experts(module, seen, x.shape[:-1].numel())

    def error_of_ours(ours: FusedLayer) -> float:
        found = ours.from_mixer(x, mixed).flatten(0, -2)[is_clear]
        return max(error_of(ours.into_mixer(x), given), error_of(found, out.flatten(0, -2)[is_clear]))

    return Finding(name, FusedLayer, min(map(error, fitting)), error_of_ours)


def has_clear_experts(layer: nn.Module, seen: Observer, tokens: int) -> Tensor:
    """[T] bool: of which tokens no two experts are equally good where the choice ends, so that only one is right. In 16
    bits it happens."""
    is_clear = torch.ones(tokens, dtype=torch.bool)
    for module in layer.modules():
        kind, call = ROUTERS.get(type(module).__name__), seen.call(module)
        if (
            kind is not None
            and call is not None
            and kind.is_plain(module)
            and kind.of(module).bias_E is None
            and len(call.args) == 1
        ):
            logits_TE, count = call.output[0].view(tokens, -1).float(), call.output[-1].shape[-1]
            best = logits_TE.sort(descending=True).values
            if count < best.shape[-1]:
                is_clear &= best[:, count - 1] > best[:, count]
    return is_clear


def has_parts(module: nn.Module, kind: DecoderLayerKind, width: int) -> bool:
    """Whether they are there, and the norms are such as we compute, over as many numbers as x has."""
    parts: dict[str, Any] = dict(module.named_children())
    norms = [name for name in (kind.before_mixer, kind.after_mixer, kind.before_mlp, kind.after_mlp) if name]
    return (
        {*norms, kind.mlp} <= parts.keys()
        and any(mixer in parts for mixer in kind.mixers)
        and all(type(parts[name]).__name__ in NORMS and parts[name].weight.shape == (width,) for name in norms)
    )


def input_of(call: Call) -> Any:
    return call.args[0] if call.args else call.kwargs.get("hidden_states")


def error_of(ours: Tensor, theirs: Any) -> float:
    """How far from each other, as a share of `theirs`; infinite for what cannot be compared."""
    if not isinstance(theirs, Tensor) or ours.shape != theirs.shape:
        return math.inf
    error, size = (ours.float() - theirs.float()).abs().sum(), theirs.float().abs().sum()
    return float(error / size) if size > 0 else math.inf
