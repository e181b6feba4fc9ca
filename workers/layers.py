"""From a model's config to the kinds of its layers: what each keeps, and how far back it looks.

This is where the conventions of different models end. Everything behind it counts windows in visible tokens, the
query itself included, as transformers does for the families below.
"""

from collections.abc import Callable
from typing import Any

from ..errors import InvalidSetting, UnsupportedModel
from ..kvcache.reach import Full, Reach, Sliding
from ..kvcache.spec import LayerSpec

REACH_OF: dict[str, Callable[[Any], Reach]] = {
    "full_attention": lambda config: Full(),
    "sliding_attention": lambda config: Sliding(config.sliding_window),
}
"""What the names in `config.layer_types` mean."""


def read_layers(config: Any, tensor_parallel_size: int, item_bytes: int) -> tuple[LayerSpec, ...]:
    """The layers of a transformers text config, with one rank's share of the key and value heads.

    Raises `UnsupportedModel` for a kind of layer that is not known, `InvalidSetting` when heads do not divide.
    """
    kv_heads = local_kv_heads(config, tensor_parallel_size)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return tuple(
        LayerSpec(index, _reach(config, layer_type), kv_heads, head_dim, head_dim, item_bytes)
        for index, layer_type in enumerate(_layer_types(config))
    )


def local_kv_heads(config: Any, tensor_parallel_size: int) -> int:
    """Key and value heads on one rank. With more ranks than heads, each head lives on several ranks."""
    heads, kv_heads = config.num_attention_heads, _kv_heads(config)
    divides = kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % kv_heads == 0
    if heads % tensor_parallel_size or not divides:
        raise InvalidSetting(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the model's {heads} query heads and "
            f"{kv_heads} key-value heads. Choose a size that divides the query heads, and divides the key-value "
            "heads or is a multiple of them.",
            field="tensor_parallel_size",
            asked=tensor_parallel_size,
            query_heads=heads,
            kv_heads=kv_heads,
        )
    return max(1, kv_heads // tensor_parallel_size)


def _kv_heads(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _layer_types(config: Any) -> list[str]:
    """As the config lists them; configs without a list have one kind throughout."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is None:
        kind = "sliding_attention" if getattr(config, "sliding_window", None) else "full_attention"
        return [kind] * config.num_hidden_layers
    return list(layer_types[: config.num_hidden_layers])


def _reach(config: Any, layer_type: str) -> Reach:
    if layer_type not in REACH_OF:
        raise UnsupportedModel(
            f"{config.model_type} has layers of kind {layer_type!r}; known are {', '.join(REACH_OF)}",
            field="model",
        )
    return REACH_OF[layer_type](config)
