"""What a start can be refused for by the files, the settings and the machine alone: within two seconds, before torch is
imported and Ray is started; only a family that the tests do not cover takes longer, when it is met for the first time
(`proof/gate.py`). Whether the cluster that RAY_ADDRESS names answers, `controller.ray_address` finds out.

    files of the checkpoint -> length, ranks, layout of the cache -> backend, GPUs -> memory -> ports -> family

Of a model of the Hub that is not here, what needs no file of it is judged before anything is fetched, and what its
config tells before its weights are.

What only the loaded model knows is judged later, by the parts that know it; what both can tell, both tell in the same
words, for it is the same function.
"""

import os
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ...controller.admission.overload import free_host_bytes
from ...controller.startup import EngineSettings
from ...errors import InvalidSetting, ModelNotFound, UnsupportedModel
from ...kernels.names import ATTENTION_BACKENDS, no_such_backend
from ...kvcache.spec import LayerSpec
from ...kvcache.strategies import plan_memory
from ...proto.worker import check_gpus, check_length
from ...workers.checkpoint.config_schema import text_config
from ...workers.checkpoint.files import CONFIG, Checkpoint, read_config
from ...workers.checkpoint.layer_specs import local_kv_heads, read_layers
from ...workers.checkpoint.packed.description import read_description
from ..checkpoints.model_dir import FoundModel, find_model, is_hub_name
from ..checkpoints.weights import ITEM_BYTES, dtype_of, weigh, weights_in
from ..front_end.tokenizer import check_tokenizer, read_template
from ..proof.gate import check_right, has_gpu
from ..settings.options import wanted_settings
from ..settings.ports import check_ports as check_ports
from ..settings.table import EngineArguments

NVIDIA = re.compile(r"nvidia\d+")

SAYS_ALL = "layer_types", "head_dim", "num_key_value_heads", "num_kv_shared_layers", "max_position_embeddings"
"""Fields of a config out of which its layers are known without transformers, which knows what a family leaves out."""

SHARES_NOTHING = {"gemma2", "gemma3_text", "llama", "mistral", "ministral", "ministral3", "qwen3", "olmo3", "smollm3"}
"""Families of plain attention layers, all with keys and values of their own."""


def judged(model: str, given: EngineArguments, before_fetch: Callable[[], None] = lambda: None) -> EngineSettings:
    """The settings of an engine that can be made here. A model of the Hub that is not here is fetched: what can be
    refused without it is refused before that, and what its config tells before its weights come.

    model: as it was named. before_fetch: raises what else a start is refused for

    Raises as `engine_settings` and `check_engine`."""
    wanted = wanted_settings(**given)

    def judge(folder: Path | None) -> None:
        if folder is None:
            before_fetch()
            check_without_model(wanted.engine)
        else:
            _check_beside_weights(folder, wanted.of(FoundModel(folder)))

    settings = wanted.of(find_model(model, wanted.revision, judge=judge))
    try:
        check_engine(settings)
    except ModelNotFound as error:
        if is_hub_name(model):
            raise ModelNotFound(f"{error} To complete the download: hf download {model}", field="model") from None
        raise
    return settings


def check_engine(settings: EngineSettings) -> None:
    """Raises `InvalidSetting` and `ModelError` for what cannot become an engine here."""
    checkpoint = Checkpoint(settings.model.model_dir)
    _check_described(checkpoint.config, settings)
    _check_devices(settings)
    if _is_all_known():
        weights = weight_bytes(checkpoint, settings.model.dtype, expands=expands(settings))
        check_memory(weights, settings, free_host_bytes())
    _check_right(checkpoint.config, settings)


def check_without_model(settings: EngineSettings) -> None:
    """Raises `InvalidSetting` and `ModelError` for what no model becomes an engine with here."""
    if settings.model.tokenizer_dir is not None:
        check_tokenizer(settings.model)
    elif settings.model.chat_template is not None:
        read_template(settings.model.chat_template)
    _check_devices(settings)


def _check_beside_weights(folder: Path, settings: EngineSettings) -> None:
    """As `check_engine`, before the weights are in the folder."""
    config = read_config(folder / CONFIG)
    read_description(folder, config)
    _check_described(config, settings)
    _check_right(config, settings)


def _check_right(config: Mapping[str, Any], settings: EngineSettings) -> None:
    model = settings.model
    check_right(model.model_dir, config, model.tensor_parallel_size, runs_own_code=model.trust_remote_code)


def _check_described(config: Mapping[str, Any], settings: EngineSettings) -> None:
    check_tokenizer(settings.model)
    text = text_config(config)
    _check_shape(text, settings)


def _check_devices(settings: EngineSettings) -> None:
    _check_backend(settings.model.attention_backend, has_gpu=not _is_all_known())
    if not _is_elsewhere():
        check_gpus(settings.model.tensor_parallel_size, num_gpus(), "this machine")


def _is_all_known() -> bool:
    """Whether all memory is this machine's: other machines, and GPUs, have their own."""
    return not _is_elsewhere() and not has_gpu()


def _is_elsewhere() -> bool:
    """Whether the engine may run on other machines, in a Ray that is there already."""
    return bool(os.environ.get("RAY_ADDRESS")) or _has_ray()


def _check_shape(text: Mapping[str, Any], settings: EngineSettings) -> None:
    """What a config says of positions and heads; what it leaves to its family is judged when that is known."""
    positions, ranks = text.get("max_position_embeddings"), settings.model.tensor_parallel_size
    if settings.max_model_len is not None and isinstance(positions, int):
        check_length(settings.max_model_len, positions)
    fields = SimpleNamespace(**text)
    if isinstance(text.get("num_attention_heads"), int) and ranks > 1:
        local_kv_heads(fields, ranks)
    layers = _layers(fields, settings)
    if layers is not None:
        plan_memory(layers, settings.plan, settings.max_model_len or positions)


def _layers(fields: SimpleNamespace, settings: EngineSettings) -> tuple[LayerSpec, ...] | None:
    """None where config.json leaves something to its family, or its layers are no plain attention."""
    is_plain = getattr(fields, "model_type", None) in SHARES_NOTHING
    said = [name for name in SAYS_ALL if getattr(fields, name, None) is not None or (is_plain and "shared" in name)]
    if not is_plain or len(said) < len(SAYS_ALL) or (settings.gpu_memory_utilization is not None and has_gpu()):
        return None
    return read_layers(fields, settings.model.tensor_parallel_size, _item_bytes(vars(fields), settings))


def _item_bytes(text: Mapping[str, Any], settings: EngineSettings) -> int:
    """The bytes of one number of the weights."""
    return ITEM_BYTES.get(dtype_of(text, settings.model.dtype), 2)


def _check_backend(name: str | None, *, has_gpu: bool) -> None:
    if name is None:
        return
    if name not in ATTENTION_BACKENDS:
        raise no_such_backend(name)
    if not has_gpu and "cpu" not in ATTENTION_BACKENDS[name]:
        here = [each for each, devices in ATTENTION_BACKENDS.items() if "cpu" in devices]
        raise UnsupportedModel(
            f"attention_backend {name} runs on a GPU, and this machine has none that torch could use; here run: "
            f"{', '.join(here)}.",
            field="attention_backend",
        )


def weight_bytes(checkpoint: Checkpoint, dtype: str, *, expands: bool = False) -> int:
    """The least bytes that the weights take on all ranks together. expands: as `Weights.total` has it"""
    return weigh(checkpoint, dtype).total(expands=expands)


def weights_in_words(settings: EngineSettings) -> str:
    """What the weights of a checkpoint take here, by their formats. Raises what `Checkpoint` does."""
    weights = weights_in(settings.model.model_dir, settings.model.dtype)
    if not weights.packed or not expands(settings):
        return weights.in_words()
    return f"{weights.in_words()}, expanded to {weights.expanded_in_words()}"


def expands(settings: EngineSettings) -> bool:
    """Whether packed weights are expanded when they are loaded, by the settings alone."""
    return settings.model.packed_products == "expanded" or settings.model.torch_compile


def check_memory(weights: int, settings: EngineSettings, free: int) -> None:
    """Check the memory of a machine without GPUs, where all workers share it. All in bytes. Raises `InvalidSetting`."""
    ranks = settings.model.tensor_parallel_size
    cache = settings.plan.memory_bytes * ranks
    if weights + cache <= free:
        return
    each = f" ({_human(settings.plan.memory_bytes)} on each of {ranks} workers)" if ranks > 1 else ""
    advice = "Lower kv_cache_memory" if weights < free else "Take a smaller model"
    raise InvalidSetting(
        f"weights of {_human(weights)} and kv_cache_memory of {_human(cache)}{each} are asked for, and this machine "
        f"has {_human(free)} of memory free. {advice}, or take a machine with more.",
        field="kv_cache_memory" if weights < free else "model",
        asked=weights + cache,
        limit=free,
    )


def _human(count: int) -> str:
    from ..terminal.banner import human_bytes

    return human_bytes(count)


def _has_ray() -> bool:
    """Whether this program uses a Ray already, which may be anywhere."""
    ray = sys.modules.get("ray")
    return ray is not None and ray.is_initialized()


def num_gpus() -> int:
    """The GPUs of this machine that Ray finds, or more: as the driver has them, and as CUDA_VISIBLE_DEVICES leaves."""
    found = sum(NVIDIA.fullmatch(name) is not None for name in os.listdir("/dev"))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return found if visible is None else min(found, len(list(filter(None, visible.split(",")))))
