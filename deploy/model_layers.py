"""The layers of a model that need not be loaded: from its directory, its config.json, or its name."""

import json
from dataclasses import dataclass
from pathlib import Path

from ..errors import InvalidSetting
from ..kvcache.spec import LayerSpec
from .known_models import known_model

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Of one cached number."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a plan is made for."""

    model: str
    layers: tuple[LayerSpec, ...]  # one rank's share
    max_tokens: int | None  # of one request
    encoder_tokens: int  # of one image


def model_layers(model: str, tensor_parallel_size: int = 1, dtype: str = "bfloat16") -> ModelLayers:
    """Raises `InvalidSetting` for a model nobody knows, `ModelError` for a config that can not be read."""
    if tensor_parallel_size < 1:
        raise InvalidSetting(
            f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}", field="tensor_parallel_size"
        )
    if dtype not in ITEM_BYTES:
        raise InvalidSetting(f"dtype must be one of {', '.join(ITEM_BYTES)}; got {dtype!r}", field="dtype")
    path = Path(model)
    if path.exists():
        return _from_config(path, tensor_parallel_size, dtype)
    known = known_model(model)
    layers = known.layers(tensor_parallel_size, ITEM_BYTES[dtype])
    return ModelLayers(known.id, layers, known.max_position, known.encoder_tokens)


def _from_config(path: Path, tensor_parallel_size: int, dtype: str) -> ModelLayers:
    directory = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidSetting(f"{path} holds no config.json", field="model")
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise InvalidSetting(f"{file} can not be read as JSON: {error}", field="model") from None
    from transformers import AutoConfig  # slow to import, and not needed for known models

    from ..workers.layers import complete_layer_types, read_layers

    try:
        config = AutoConfig.for_model(**fields).get_text_config()
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise InvalidSetting(f"{file} is not a config that transformers knows: {error}", field="model") from None
    complete_layer_types(config, fields)
    layers = read_layers(config, tensor_parallel_size, ITEM_BYTES[dtype])
    return ModelLayers(directory.resolve().name, layers, getattr(config, "max_position_embeddings", None), 0)
