"""The layers of a model that need not be loaded: from its directory, its config.json, or its name."""

from dataclasses import dataclass, replace
from pathlib import Path

from ...errors import IntarsiaError, InvalidSetting, ModelError, ModelNotFound
from ...kvcache.spec import LayerSpec
from ...workers.checkpoint.config_schema import text_config
from ...workers.checkpoint.files import CONFIG, Checkpoint, read_config
from ...workers.checkpoint.json_file import clipped
from ...workers.checkpoint.layer_specs import complete_layer_types, read_layers, told_copies
from ..checkpoints.gguf import SUFFIX
from ..checkpoints.hub import HUB_NAME, folder_in_cache
from ..checkpoints.hub_gguf import GgufName, gguf_in_cache, gguf_name, says_gguf
from ..checkpoints.known_models import known_model
from ..checkpoints.known_weights import known_release, known_weights, usual_parts
from ..checkpoints.real_models import gguf_checkpoint, real_checkpoint
from ..checkpoints.weights import Weights, dtype_of, shapes_of, weigh
from ..checkpoints.weights_as import Mix, Recipe, recipe_of, weights_as

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "fp8": 1}
"""Bytes of one cached number."""


@dataclass(frozen=True, slots=True)
class ModelLayers:
    """What a plan is made for."""

    model: str
    layers: tuple[LayerSpec, ...]  # one rank's share
    max_tokens: int | None  # of one request
    encoder_tokens: int  # of one image
    weights: Weights | str | None = None  # text: why they cannot be told; None: there are none, or it is not known
    about_weights: str = ""  # what they are taken for
    about_copies: str = ""  # what it costs that some heads are on several ranks


def model_layers(
    model: str, tensor_parallel_size: int = 1, dtype: str = "bfloat16", weights_format: str | None = None
) -> ModelLayers:
    """weights_format: as which the weights are counted; None: as they are

    Raises `InvalidSetting` for an unknown model, `ModelError` for a config that cannot be read."""
    if tensor_parallel_size < 1:
        raise InvalidSetting(
            f"tensor_parallel_size must be at least 1, got {tensor_parallel_size}", field="tensor_parallel_size"
        )
    if dtype not in ITEM_BYTES:
        raise InvalidSetting(f"dtype must be one of {', '.join(ITEM_BYTES)}; got {dtype!r}", field="dtype")
    recipe = None if weights_format is None else recipe_of(weights_format)
    if (here := _on_this_machine(model)) is None:
        return _known(model, tensor_parallel_size, dtype, weights_format)
    found = replace(_from_config(here, tensor_parallel_size, dtype), model=_called(model, here))
    if recipe is None:
        return found
    return replace(found, weights=_weights_as(here, recipe), about_weights=_usual(weights_format or ""))


def _on_this_machine(model: str) -> Path | None:
    """A folder, a config.json, or the folder of a GGUF file or of a model that is in the Hub's cache."""
    path = Path(model)
    if path.is_dir() or (path.exists() and path.suffix.lower() != SUFFIX):
        return path
    if real := real_checkpoint(model):
        return real.folder
    named = gguf_name(model) or (GgufName(model) if HUB_NAME.fullmatch(model) and says_gguf(model) else None)
    if named is not None and (files := gguf_in_cache(named)):
        return gguf_checkpoint(files).folder
    here = folder_in_cache(model) if HUB_NAME.fullmatch(model) else None
    return here if here is not None and (here / CONFIG).is_file() else None


def _called(model: str, here: Path) -> str:
    """What the report calls it: as it was named, or by its folder."""
    path = Path(model)
    return (here if here.is_dir() else here.parent).resolve().name if path == here else model


def _known(model: str, tensor_parallel_size: int, dtype: str, weights_format: str | None) -> ModelLayers:
    """Of a model of the table, as it is released, in the format of another release, or in one that is asked for."""
    release = known_release(model)
    known = known_model(model) if release is None else release.model
    packed = None if release is None else release.packed
    packed = packed if weights_format is None else usual_parts(weights_format)
    layers, alone = (known.layers(size, ITEM_BYTES[dtype]) for size in (tensor_parallel_size, 1))
    copies = told_copies(layers, alone, tensor_parallel_size) or ""
    about = f"a release of {known.id}, its weights by what is usual" if release is not None else ""
    about = about if weights_format is None else _usual(weights_format)
    name = known.id if release is None else release.id
    weights = known_weights(known, packed)
    if weights is None and packed is not None:
        weights, about = f"what the weights of {known.id} take so is not known", ""
    return ModelLayers(name, layers, known.max_position, known.encoder_tokens, weights, about, copies)


def _usual(weights_format: str) -> str:
    """What is packed in a format, in words."""
    if isinstance(recipe_of(weights_format), Mix):
        return f"as {weights_format.upper()} is usual: all weights with rows and columns but routers and convolutions"
    return (
        f"as {weights_format.upper()} is usual: linear layers and experts; embeddings, outputs, norms, routers, "
        "convolutions and what belongs to a state stay"
    )


def _from_config(path: Path, tensor_parallel_size: int, dtype: str) -> ModelLayers:
    directory = path if path.is_dir() else path.parent
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise InvalidSetting(f"{path} holds no config.json", field="model")
    fields = read_config(file)
    from transformers import AutoConfig  # slow to import, and not needed for known models

    try:
        config = AutoConfig.for_model(**fields).get_text_config()
        complete_layer_types(config, fields)
        layers, alone = (read_layers(config, size, ITEM_BYTES[dtype]) for size in (tensor_parallel_size, 1))
    except IntarsiaError:
        raise
    except Exception as error:  # noqa: BLE001  it raises whatever it meets
        raise InvalidSetting(
            f"{file} is not a config that transformers knows: {clipped(str(error), 400)}", field="model"
        ) from None
    longest = getattr(config, "max_position_embeddings", None)
    copies = told_copies(layers, alone, tensor_parallel_size) or ""
    return ModelLayers(directory.resolve().name, layers, longest, 0, _weights(directory), about_copies=copies)


def _weights_as(path: Path, recipe: Recipe | Mix) -> Weights | str:
    try:
        checkpoint = Checkpoint(path if path.is_dir() else path.parent)
    except ModelNotFound:
        return "there are no weights whose shapes a format could be counted for"
    except ModelError as error:
        return str(error)
    name = dtype_of(text_config(checkpoint.config), "auto", checkpoint.config)
    return weights_as(shapes_of(checkpoint), recipe, name)


def _weights(folder: Path) -> Weights | str | None:
    """A plan needs none: what is wrong with them is told, and hinders nothing."""
    try:
        return weigh(Checkpoint(folder), "auto")
    except ModelNotFound:
        return None
    except ModelError as error:
        return str(error)
