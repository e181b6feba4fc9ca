"""The layers of a model that need not be loaded: from its directory, its config.json, or its name."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import IntarsiaError, InvalidSetting, ModelError, ModelNotFound
from ...kvcache.spec import LayerSpec
from ...workers.checkpoint.files import CONFIG, Checkpoint, read_config
from ...workers.checkpoint.json_file import clipped
from ..checkpoints.hub import HUB_NAME, folder_in_cache
from ..checkpoints.known_models import known_model
from ..checkpoints.weights import Weights, weigh

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of one cached number."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a plan is made for."""

    model: str
    layers: tuple[LayerSpec, ...]  # one rank's share
    max_tokens: int | None  # of one request
    encoder_tokens: int  # of one image
    weights: Weights | str | None = None  # text: why they cannot be told; None: there are none, or nobody knows


def model_layers(model: str, tensor_parallel_size: int = 1, dtype: str = "bfloat16") -> ModelLayers:
    """Raises `InvalidSetting` for an unknown model, `ModelError` for a config that cannot be read."""
    if tensor_parallel_size < 1:
        raise InvalidSetting(
            f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}", field="tensor_parallel_size"
        )
    if dtype not in ITEM_BYTES:
        raise InvalidSetting(f"dtype must be one of {', '.join(ITEM_BYTES)}; got {dtype!r}", field="dtype")
    path = Path(model)
    if path.exists():
        return _from_config(path, tensor_parallel_size, dtype)
    if (here := folder_in_cache(model) if HUB_NAME.fullmatch(model) else None) and (here / CONFIG).is_file():
        return replace(_from_config(here, tensor_parallel_size, dtype), model=model)
    known = known_model(model)
    layers = known.layers(tensor_parallel_size, ITEM_BYTES[dtype])
    weights = None if known.weight_bytes is None else Weights("bfloat16", known.weight_bytes, {}, 0)
    return ModelLayers(known.id, layers, known.max_position, known.encoder_tokens, weights)


def _from_config(path: Path, tensor_parallel_size: int, dtype: str) -> ModelLayers:
    directory = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidSetting(f"{path} holds no config.json", field="model")
    fields = read_config(file)
    from transformers import AutoConfig  # slow to import, and not needed for known models

    from ...workers.checkpoint.layer_specs import complete_layer_types, read_layers

    try:
        config = AutoConfig.for_model(**fields).get_text_config()
        complete_layer_types(config, fields)
        layers = read_layers(config, tensor_parallel_size, ITEM_BYTES[dtype])
    except IntarsiaError:
        raise
    except Exception as error:  # noqa: BLE001  it raises whatever it meets
        raise InvalidSetting(
            f"{file} is not a config that transformers knows: {clipped(str(error), 400)}", field="model"
        ) from None
    longest = getattr(config, "max_position_embeddings", None)
    return ModelLayers(directory.resolve().name, layers, longest, 0, _weights(directory))


def _weights(folder: Path) -> Weights | str | None:
    """A plan needs none: what is wrong with them is told, and hinders nothing."""
    try:
        return weigh(Checkpoint(folder), "auto")
    except ModelNotFound:
        return None
    except ModelError as error:
        return str(error)
