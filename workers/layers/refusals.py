"""What makes a module's attention one that cannot be paged, in words."""

from collections.abc import Mapping

from torch import Tensor, nn

from ...errors import UnsupportedModel
from ...kvcache.spec import LayerSpec


def check_causal(model: nn.Module) -> None:
    """Raises `UnsupportedModel` for attention of which keys and values of a text change when the text goes on."""
    for path, module in model.named_modules():
        if hasattr(module, "layer_idx") and getattr(module, "is_causal", None) is False:
            raise UnsupportedModel(
                f"{path} ({type(module).__name__}) is no causal attention: it sees later tokens, or an encoder's "
                "output. What a text left in the cache would be wrong when the text goes on.",
                field="model",
            )


def check_written(layers: Mapping[int, LayerSpec], layer: int, k_TKD: Tensor, v_TKD: Tensor) -> None:
    """Raises `UnsupportedModel` for keys and values that are not what pages are laid out for."""
    spec = layers.get(layer)
    if spec is None:
        raise UnsupportedModel(
            f"a module attends as layer {layer}; by its config the model has {len(layers)} layers that attend, the "
            f"last of them {max(layers, default=None)}",
            field="model",
        )
    there, meant = (k_TKD.shape[1], k_TKD.shape[2], v_TKD.shape[2]), (spec.kv_heads, spec.key_dim, spec.value_dim)
    if there != meant:
        raise UnsupportedModel(
            f"layer {layer} makes {there[0]} key-value heads with keys of {there[1]} and values of {there[2]} numbers; "
            f"by its config it would be {meant[0]} of {meant[1]} and {meant[2]}",
            field="model",
        )
