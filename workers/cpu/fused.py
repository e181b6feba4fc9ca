"""Parts of a transformers module computed in one call instead of many: norms, gated MLPs, the way into attention,
routers, residual streams; and decoder layers made of them.

Families write the same arithmetic in many ways. `fused_table.py` names the classes of modules whose forward pass is one
that we have in C++ and in Triton; those are taken over here, with their weights. Everything else stays as it is.

On a CPU with a C++ compiler and on a GPU with Triton; elsewhere nothing is taken over. A decode step of 32 requests
through six layers of Gemma 3's kind took 8.6 ms on a CPU without this and 5.4 ms with it (`bench/engine.py throughput`,
two threads). On a GPU a layer of Gemma 3 is 10 kernels, not 83 (`tests/workers/test_gpu_launches.py`).
"""

import inspect
import logging
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from typing import Any, TypeVar

import torch
from torch import nn

from ...kernels.products import PackedLinear
from ...kernels.routing import Operations as RoutingOperations
from ...kernels.routing import operations_of as routing_operations_of
from ...kernels.streams import Mixing
from ...kernels.streams import Operations as StreamOperations
from ...kernels.streams import operations_of as stream_operations_of
from ...kernels.streams.protocol import MOST_STREAMS
from ...kernels.tokenwise import Activation, Norm, Operations, Rotary, operations_of
from ...kernels.tokenwise import cpu as native
from ...kernels.tokenwise import triton as on_gpu
from ...kernels.toolchain import calls
from ..layers.attention import PagedAttention
from .decoder_layer import Buffers, LayerOfCalls
from .fused_modules import (
    FusedActivation,
    FusedAttention,
    FusedLayer,
    FusedMLP,
    FusedNorm,
    FusedRouter,
    FusedStreams,
    Heads,
    LayerAttention,
    LayerParts,
    QueryFactor,
    WritingAttention,
)
from .fused_table import ACTIVATIONS, ATTENTIONS, DECODER_LAYERS, GATED_MLPS, NORMS, ROUTERS, STREAMS, StreamsKind
from .gates import take_gates
from .linear import merge_linears, outputs_of
from .stack import Layers, Stack

logger = logging.getLogger(__name__)

PROJECTIONS = "q_proj", "k_proj", "v_proj"

Kind = TypeVar("Kind")


def fuse(model: nn.Module, attention: PagedAttention, device: torch.device) -> None:
    """Take over the modules that the table names.

    attention: what it has learnt of each layer is kept (`PagedAttention.learn`)
    device: where the model lies, which says whose memory is read
    """
    operations = operations_of(device.type)
    if operations is None:
        return
    buffers = Buffers(attention.dtype) if operations is native else None
    takers = {
        "attention": partial(_take_attention, attention, operations, {}),
        "MLP": partial(_take_mlp, operations),
        "router": partial(_take_router, routing_operations_of(device.type)),
        "streams": partial(_take_streams, stream_operations_of(device.type)),
        "norm": partial(_take_norm, operations),
        "activation": partial(_take_activation, operations),
        "layer": partial(_take_layer, operations, attention.dtype, buffers),
    }
    counts = {name: sum(map(take, list(model.modules()))) for name, take in takers.items()}
    if buffers is not None:
        write_down(model, buffers, attention)
        take_gates(model)
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what merged weights were made of is of other sizes than all that comes
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


def _take_norm(operations: Operations, module: Any) -> bool:
    norm = _norm_of(module)
    if norm is None:
        return False
    module.__class__ = FusedNorm
    module.norm, module.operations = norm, operations
    return True


def _norm_of(module: Any) -> Norm | None:
    """What a norm computes; None if the module is something else, or has no weight, or one for each head."""
    kind = _entry(NORMS, module)
    weight = None if kind is None else getattr(module, "weight", None)  # a packed linear's would be unpacked
    if kind is None or weight is None or weight.dim() != 1:
        return None
    eps = module.eps if hasattr(module, "eps") else module.variance_epsilon
    return Norm((weight.float() + kind.offset).contiguous(), eps, kind.rounds_first, kind.is_centered)


# -- activations that are left -----------------------------------------------------------------------------------------


def _take_activation(operations: Operations, module: Any) -> bool:
    """torch computes the last numbers of a tensor in another way than the others, so that a token's may depend on how
    many there are."""
    activation = ACTIVATIONS.get(type(module).__name__) if _is_as_written(module) else None
    if activation is None:
        return False
    module.__class__ = FusedActivation
    module.activation, module.operations = activation, operations
    return True


# -- gated MLPs ------------------------------------------------------------------------------------------------------


def _take_mlp(operations: Operations, module: nn.Module) -> bool:
    kind = _entry(GATED_MLPS, module)
    if kind is None or not kind.is_plain(module):
        return False
    activation = Activation.SILU
    if kind.activation is not None:
        named = ACTIVATIONS.get(type(getattr(module, kind.activation)).__name__)
        if named is None:
            return False
        activation = named
    names = (kind.merged,) if kind.merged else (kind.gate, kind.up)
    products = [getattr(module, name) for name in names]
    if not _are_linear(products):
        return False
    _become(
        module,
        FusedMLP,
        gate_up=merge_linears(products),
        down=getattr(module, kind.down),
        gating=kind.gating.of(module, activation),
        operations=operations,
    )
    return True


# -- routers -----------------------------------------------------------------------------------------------------------


def _take_router(operations: RoutingOperations | None, module: Any) -> bool:
    kind = _entry(ROUTERS, module)
    if kind is None or operations is None or not kind.is_plain(module):
        return False
    module.__class__ = FusedRouter
    module.logits, module.routing, module.routing_operations = kind.logits, kind.of(module), operations
    return True


# -- residual streams --------------------------------------------------------------------------------------------------


def _take_streams(operations: StreamOperations | None, module: Any) -> bool:
    kind = _entry(STREAMS, module)
    if kind is None or operations is None:
        return False
    count: int = module.hc_mult
    if count > MOST_STREAMS or count & (count - 1):  # a tile has a power of two of them
        return False
    mixing = mixing_of(module, kind)
    for name in (kind.product, kind.base, kind.scale):
        del module._parameters[name]
    _become(module, FusedStreams, mixing=mixing, stream_operations=operations)
    return True


def mixing_of(module: Any, kind: StreamsKind) -> Mixing:
    product, base, scale = (
        getattr(module, name).detach().float().contiguous() for name in (kind.product, kind.base, kind.scale)
    )
    rounds = 0 if kind.rounds is None else getattr(module, kind.rounds)
    return Mixing(product, base, scale, module.input_norm.eps, getattr(module, kind.eps), rounds)


# -- the way into attention ------------------------------------------------------------------------------------------


def _take_attention(
    attention: PagedAttention, operations: Operations, factors: dict[Any, QueryFactor], module: Any
) -> bool:
    """factors: of queries, of which layers share those of the same numbers"""
    kind = _entry(ATTENTIONS, module)
    if kind is None:
        return False
    # Only what lies in this process as plain products can be merged into one.
    projections = [getattr(module, name) for name in ((kind.merged,) if kind.merged else PROJECTIONS)]
    if not _are_linear(projections):
        return False
    norms: tuple[Norm | None, Norm | None] = (None, None)
    if kind.norms is not None and hasattr(module, kind.norms[0]):
        query_norm, key_norm = (_norm_of(getattr(module, name)) for name in kind.norms)
        # One call norms both, so neither may be over several ranks and both must be of one kind.
        if query_norm is None or key_norm is None or query_norm[1:] != key_norm[1:] or query_norm.is_centered:
            return False
        norms = query_norm, key_norm
    own_heads = _own_heads(module, projections)
    if own_heads is None:
        return False
    rotary = kind.rotary if kind.rotates(module) else Rotary.NONE
    factor = None
    if kind.has_query_factor:
        numbers = query_factor_of(module)
        if numbers is None:
            return False
        factor = factors.setdefault(numbers, QueryFactor(attention, *numbers))
    parts = Heads(*own_heads, module.head_dim, norms, rotary, kind.angles_per_head, operations, factor)
    writes = operations is on_gpu and parts.changes_anything
    _become(
        module,
        WritingAttention if writes else FusedAttention,
        qkv=merge_linears(projections),
        out=getattr(module, kind.out),
        attend=LayerAttention(attention, module.layer_idx),
        heads=parts,
    )
    return True


def query_factor_of(module: Any) -> tuple[float, int] | None:
    """Beta and span of `QueryFactor`, if the configuration has both."""
    told = getattr(module.config, "rope_parameters", None) or {}
    beta, span_tokens = (told.get(name) for name in ("llama_4_scaling_beta", "original_max_position_embeddings"))
    return None if beta is None or span_tokens is None else (beta, span_tokens)


def _own_heads(module: Any, projections: Sequence[Any]) -> tuple[int, int] | None:
    """Of queries, and of keys and values, that this rank has.

    projections: of queries, keys and values, or one of all. None: this rank shares a key-value head with others, and
    one product does not tell how many queries it has"""
    counts = [outputs_of(projection) // module.head_dim for projection in projections]
    if len(counts) > 1:
        return counts[0], counts[1]
    kv_heads, rest = divmod(counts[0], module.num_key_value_groups + 2)
    return None if rest else (kv_heads * module.num_key_value_groups, kv_heads)


# -- decoder layers ----------------------------------------------------------------------------------------------------


def _take_layer(operations: Operations, dtype: torch.dtype, buffers: Buffers | None, module: Any) -> bool:
    """Its parts have been taken over before. buffers: on a CPU, which all layers share"""
    kind = _entry(DECODER_LAYERS, module)
    if kind is None or not kind.is_plain(module) or not (buffers is None or calls.is_available()):
        return False
    names = kind.before_mixer, kind.after_mixer, kind.before_mlp, kind.after_mlp
    norms = [None if name is None else getattr(module, name) for name in names]
    if not all(norm is None or (type(norm) is FusedNorm and _is_as_written(norm)) for norm in norms):
        return False
    module.__class__ = FusedLayer if buffers is None else LayerOfCalls
    module.stack, module.x_dtype = None, dtype
    module.operations, module.gives_weights, module.dtype = operations, kind.gives_weights, dtype
    module.parts = LayerParts(
        *(None if norm is None else norm.norm for norm in norms),
        mixer=next(part for name in kind.mixers if (part := getattr(module, name, None)) is not None),
        mlp=getattr(module, kind.mlp),
        added_scale=1.0 if kind.added_scale is None else float(getattr(module, kind.added_scale)),
    )
    return True


def write_down(model: nn.Module, buffers: Buffers, attention: PagedAttention) -> None:
    """Put layers into stacks. What goes from layer to layer is float32 where all layers of a module can have it so:
    each adds to it, and in 16 bits each would round it twice."""
    for owner in model.modules():
        lists = [part for part in owner.children() if isinstance(part, nn.ModuleList)]
        layers: list[Any] = [layer for part in lists for layer in part]
        for part in lists:
            if type(part) is nn.ModuleList and all(isinstance(layer, LayerOfCalls) for layer in part):
                part.__class__ = Layers
        last = [child for child in owner.children() if isinstance(child, FusedNorm) and _is_as_written(child)]
        is_wide = bool(layers) and len(last) == 1 and all(map(_reads_norms_alone, layers))
        if is_wide:
            last[0].dtype = buffers.dtype
            _widen_angles(owner, layers)
        for is_ours, some in groupby(layers, lambda layer: isinstance(layer, LayerOfCalls) and _is_as_written(layer)):
            if is_ours:
                _stack(list(some), buffers, attention, torch.float32 if is_wide else buffers.dtype)


def _stack(layers: list[Any], buffers: Buffers, attention: PagedAttention, x_dtype: torch.dtype) -> None:
    for layer in layers:
        layer.x_dtype = x_dtype
    width = next(len(norm.scale) for norm in layers[0].parts[:4] if norm is not None)
    stack = Stack(layers, buffers, attention, width)
    for layer in layers:
        layer.stack = stack


def _widen_angles(owner: nn.Module, layers: Sequence[Any]) -> None:
    """Cosines and sines are float32 where nothing but our own call reads them."""
    mixers = [layer.parts.mixer for layer in layers]
    if all(isinstance(mixer, FusedAttention) or not _is_given_angles(mixer) for mixer in mixers):
        for child in owner.children():
            if type(child).__name__.endswith("RotaryEmbedding"):
                # It gives them in the dtype of what it is given first, of which it reads nothing else.
                child.register_forward_pre_hook(lambda _, given: (given[0][..., :0].float(), *given[1:]))


def _is_given_angles(mixer: nn.Module) -> bool:
    return "position_embeddings" in inspect.signature(type(mixer).forward).parameters


def _reads_norms_alone(layer: nn.Module) -> bool:
    """Whether nothing but norms reads what goes from layer to layer."""
    return (
        isinstance(layer, LayerOfCalls)
        and _is_as_written(layer)
        and layer.parts.before_mixer is not None
        and layer.parts.before_mlp is not None
    )
