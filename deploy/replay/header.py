"""The first line of an operation trace: a model's layers, a memory, and how prefixes are kept."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ...errors import InvalidSetting
from ...kvcache.eviction import policy_named
from ...kvcache.manager import CacheManager
from ...kvcache.plan import EXPECTED_TOKENS, MemoryPlan, PlanSettings
from ...kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from ...kvcache.settings import CacheSettings
from ...kvcache.spec import LayerSpec, StateTensor
from ...kvcache.strategies import plan_layered, plan_memory
from ..tools.model_layers import model_layers

DTYPE_BYTES = {
    "bf16": 2, "bfloat16": 2, "fp16": 2, "float16": 2, "fp32": 4, "float32": 4, "fp8": 1, "float8_e4m3fn": 1, "int8": 1,
}  # fmt: skip

LAYER_TYPES = ("full", "sliding", "chunked", "mamba", "mla", "cross")

HUGE_BYTES = 1 << 60


def make_manager(header: Mapping[str, Any], strategy: str | None = None, policy: str | None = None) -> CacheManager:
    """The manager that a header describes. strategy, policy: instead of the header's own.

    Raises `InvalidSetting`, naming the field, for whatever cannot be.
    """
    layers, max_tokens = _layers(header)
    settings = PlanSettings(
        memory_bytes=HUGE_BYTES,
        block_tokens=_whole(header, "block_size", 16, least=1),
        strategy=strategy or header.get("strategy", "auto"),
        expected_average_seq_len=header.get("expected_average_seq_len"),
        encoder_tokens=_whole(header, "encoder_tokens", 0, least=0),
    )
    settings = replace(settings, memory_bytes=_memory(header, layers, settings))
    plan = plan_memory(layers, settings, max_tokens)
    caching = header.get("caching", True)
    if not isinstance(caching, bool):
        raise InvalidSetting(f"caching must be true or false, got {caching!r}", field="caching")
    return CacheManager(
        plan, CacheSettings(prefix_caching=caching), policy=policy_named(policy or header.get("policy", "worth"))
    )


def _layers(header: Mapping[str, Any]) -> tuple[tuple[LayerSpec, ...], int | None]:
    model = header.get("model", header)
    if isinstance(model, str):
        known = model_layers(model, _whole(header, "tensor_parallel_size", 1, least=1))
        return known.layers, known.max_tokens
    if not isinstance(model, Mapping) or not isinstance(model.get("layers"), list) or not model["layers"]:
        raise InvalidSetting('a header needs "model": a name, or {"layers": [...]} with at least one', field="model")
    names: dict[str, int] = {}
    specs = []
    for index, layer in enumerate(model["layers"]):
        if not isinstance(layer, Mapping):
            raise InvalidSetting(f"layer {index} must be an object, got {layer!r}", field="layers")
        try:
            specs.append(_layer(index, layer, names))
        except InvalidSetting as refusal:
            raise InvalidSetting(f"layer {index}: {refusal}", field=refusal.field or "layers") from None
        if "name" in layer:
            names[layer["name"]] = index
    return tuple(specs), None


def _layer(index: int, layer: Mapping[str, Any], names: Mapping[str, int]) -> LayerSpec:
    kind = layer.get("type")
    if kind not in LAYER_TYPES:
        raise InvalidSetting(f"type must be one of {', '.join(LAYER_TYPES)}; got {kind!r}", field="layers")
    source = layer.get("shares")
    if source is not None and source not in names:
        raise InvalidSetting(f"shares the pages of {source!r}, which no layer before it is named", field="layers")
    shares = names[source] if source is not None else None
    is_draft = bool(layer.get("draft", False))
    if kind == "mamba":
        return LayerSpec(index, State(), state=_state(layer), shares=shares, is_draft=is_draft)
    heads = _whole(layer, "kv_heads", 1 if kind == "mla" else None, least=1)
    head = _whole(layer, "head", None, least=1)
    value = 0 if kind == "mla" else _whole(layer, "v_head", head, least=1)
    return LayerSpec(
        index, _reach(kind, layer), heads, head, value, _item_bytes(layer.get("dtype", "bf16")), shares=shares,
        is_draft=is_draft,
    )  # fmt: skip


def _reach(kind: str, layer: Mapping[str, Any]) -> Reach:
    if kind == "sliding":
        return Sliding(_whole(layer, "window", None, least=None))
    if kind == "chunked":
        return Chunked(_whole(layer, "chunk", None, least=None))
    return Cross() if kind == "cross" else Full()


def _state(layer: Mapping[str, Any]) -> tuple[StateTensor, ...]:
    shapes, dtypes = layer.get("shapes"), layer.get("dtypes")
    if not isinstance(shapes, list) or not shapes:
        raise InvalidSetting('a mamba layer needs "shapes", a list of at least one shape', field="layers")
    dtypes = dtypes if dtypes is not None else ["bf16"] * len(shapes)
    if not isinstance(dtypes, list) or len(dtypes) != len(shapes):
        raise InvalidSetting(f"{len(shapes)} shapes need as many dtypes, got {dtypes!r}", field="layers")
    for shape in shapes:
        if not isinstance(shape, list) or not shape or any(not isinstance(n, int) or n < 1 for n in shape):
            raise InvalidSetting(f"a shape is a list of positive whole numbers, got {shape!r}", field="layers")
    return tuple(StateTensor(tuple(shape), _item_bytes(d)) for shape, d in zip(shapes, dtypes, strict=True))


def _item_bytes(dtype: Any) -> int:
    if dtype not in DTYPE_BYTES:
        raise InvalidSetting(f"dtype must be one of {', '.join(DTYPE_BYTES)}; got {dtype!r}", field="dtype")
    return DTYPE_BYTES[dtype]


def _memory(header: Mapping[str, Any], layers: tuple[LayerSpec, ...], settings: PlanSettings) -> int:
    """Bytes, as given, or those of so many blocks of the layered plan."""
    if ("kv_bytes" in header) == ("num_blocks" in header):
        raise InvalidSetting('a header needs either "num_blocks" or "kv_bytes"', field="kv_bytes")
    if "kv_bytes" in header:
        return _whole(header, "kv_bytes", None, least=1)
    blocks = _whole(header, "num_blocks", None, least=1)
    if blocks > 2**31:
        raise InvalidSetting(f"num_blocks must be at most {2**31}, got {blocks}", field="num_blocks")
    return blocks * _block_bytes(layers, settings)


def _block_bytes(layers: tuple[LayerSpec, ...], settings: PlanSettings) -> int:
    owners = [layer for layer in layers if layer.shares is None]
    all_layers = sum(layer.page_bytes(settings.block_tokens) for layer in owners)
    try:
        plan: MemoryPlan = plan_layered(owners, replace(settings, memory_bytes=1000 * all_layers), EXPECTED_TOKENS)
        return plan.arenas[0].page_bytes
    except InvalidSetting:
        return all_layers


def _whole(fields: Mapping[str, Any], name: str, default: int | None, least: int | None) -> int:
    value = fields.get(name, default)
    if isinstance(value, float) and math.isfinite(value) and value == int(value):
        value = int(value)
    if not isinstance(value, int) or isinstance(value, bool):
        said = "is missing" if value is None else f"must be a whole number, got {value!r}"
        raise InvalidSetting(f"{name} {said}", field=name)
    if least is not None and value < least:
        raise InvalidSetting(f"{name} must be at least {least}, got {value}", field=name)
    return value
