"""How a transformers module is loaded: built empty, filled with this rank's slices, hooked up to our attention."""

import contextlib
import logging
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
)

from ...errors import CorruptCheckpoint, IntarsiaError, ModelNotFound, UnsupportedModel
from ...kvcache.spec import LayerSpec
from ...proto.worker import ModelFacts, ModelSettings
from ..checkpoint.files import Checkpoint
from ..checkpoint.json_file import clipped
from ..checkpoint.layer_specs import (
    ENTRIES,
    complete_layer_types,
    positions_of,
    read_layers,
    told_copies,
    told_prefix,
)
from ..checkpoint.spellings import config_of
from ..cpu.experts import pack_experts
from ..cpu.linear import hold_linears, widen_logits
from ..cpu.order import sum_order
from ..known_families import check_not_refused, is_known
from ..layers.adapters import Paged, bind
from ..layers.attention import IMPLEMENTATION, PagedAttention
from ..layers.chosen import ChoosingAttention
from ..layers.compressed import CompressingAttention
from ..layers.cross import CrossAttention
from ..layers.own_ways import know_implementation
from ..layers.patches import patch_rotary_dim
from ..layers.refusals import check_causal
from ..layers.states import PagedStates
from ..memory import is_lack_of_memory, is_of_the_device
from ..pictures.tiling import tile_tokens
from ..tensor_parallel import TensorParallel
from .families import WITH_ENCODER
from .kept import keeper_of, kept_bytes
from .loaded_model import LoadedModel
from .text_part import around, has_own_class, text_part_class
from .weights import fill_weights

logger = logging.getLogger(__name__)

SAMPLING = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
"""What generation_config.json may ask for, under the names of `SamplingParams`."""


def load_model(
    settings: ModelSettings,
    parallel: TensorParallel,
    device: torch.device,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Load this rank's share of the checkpoint. Raises `ModelError` or `InvalidSetting`.

    watch: told now and then how many of how many parameters are there
    """
    try:
        checkpoint = Checkpoint(settings.model_dir)
    except ModelNotFound as error:  # the process that starts an engine has looked on its own machine alone
        raise ModelNotFound(
            f"{error} So says {socket.gethostname()}: each node needs it there.", field="model"
        ) from None
    with blaming_config(settings.model_dir):
        return _load(settings, checkpoint, parallel, device, watch)


@contextlib.contextmanager
def blaming_config(model_dir: str) -> Iterator[None]:
    """A config may be within bounds and still describe no model. transformers and torch then raise errors of any kind.

    Raises `UnsupportedModel` with their words. Lack of memory stays what it is, and so does a fault of a device.
    """
    try:
        yield
    except (IntarsiaError, ConnectionError):
        raise
    except Exception as error:
        if is_lack_of_memory(error) or is_of_the_device(error):
            raise
        logger.debug("what was raised for %s", model_dir, exc_info=True)
        raise UnsupportedModel(
            f"no model can be made of {model_dir} as its config.json has it: {type(error).__name__}: "
            f"{clipped(str(error))}",
            field="model",
        ) from error


def _load(
    settings: ModelSettings,
    checkpoint: Checkpoint,
    parallel: TensorParallel,
    device: torch.device,
    watch: Callable[[int, int], None],
) -> LoadedModel:
    # What the model is, and whether it may be run.
    whole = _read_config(settings)
    config = whole.get_text_config()
    dtype = _dtype(settings, config)
    order = sum_order(dtype, device, settings.same_bits, parallel.size)
    completed = complete_layer_types(config, checkpoint.config)
    layers, alone = (read_layers(config, size, dtype.itemsize) for size in (parallel.size, 1))
    copies = told_copies(layers, alone, parallel.size)
    notes = [completed, told_prefix(config), copies, order.note, *checkpoint.notes]
    for note in filter(None, notes):
        logger.warning(note)
    # A module without memory, then its weights.
    module = _build(whole, config, dtype, settings)
    check_causal(module)
    vocab_size = module.get_input_embeddings().num_embeddings
    keeper = keeper_of(settings, dtype, device)
    fill_weights(module, checkpoint, parallel, config, dtype, device, watch, keeper)
    patch_rotary_dim(module, config)
    # Layers that remember go through our pages from now on.
    attention = _kind_of_attention(layers)(layers, dtype, device)
    states = PagedStates(device)
    has_encoder = whole.model_type in WITH_ENCODER
    cross = CrossAttention(module, settings.model_dir, layers, dtype) if has_encoder else None
    bind(module, Paged(attention, states, cross, parallel))
    generation = _generation_config(settings)
    facts = ModelFacts(
        architecture=type(module).__name__,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        layers=layers,
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()) + kept_bytes(module),
        vocab_size=vocab_size,
        max_positions=positions_of(config),
        eos_token_ids=_eos_token_ids(generation, config),
        sampling_defaults=tuple((name, value) for name in SAMPLING if (value := getattr(generation, name)) is not None),
        image_token_id=whole.image_token_index if cross is not None else None,
        image_tokens=whole.vision_config.max_num_tiles * tile_tokens(whole.vision_config) if cross is not None else 0,
        notes=tuple(filter(None, notes)),
    )
    if not settings.torch_compile:  # which sees no further than an operator it does not know
        hold_linears(module, device, order.torch_from_rows, settings.same_bits)
        pack_experts(module, device, settings.same_bits)
        widen_logits(module)
    is_tested = is_known((whole.model_type, config.model_type))
    return LoadedModel(module.eval(), attention, states, cross, facts, device, is_tested, order)


def _kind_of_attention(layers: Sequence[LayerSpec]) -> type[PagedAttention]:
    """By what is kept beside keys and values: entries beside a window are attended to; of others queries choose."""
    windows = {layer.index for layer in layers if layer.reach.window_tokens is not None}
    if any(layer.entry_tokens > 1 and layer.index - ENTRIES in windows for layer in layers):
        return CompressingAttention
    chooses = any(layer.extra_token_bytes or layer.index >= ENTRIES for layer in layers)
    return ChoosingAttention if chooses else PagedAttention


def _build(whole: Any, config: Any, dtype: torch.dtype, settings: ModelSettings) -> Any:
    """The module, without memory for its weights. whole: the config of a model with its encoder, or of one whose text
    part has no class of its own, or `config` itself."""
    config._attn_implementation = IMPLEMENTATION
    know_implementation(config.model_type)
    part = None if has_own_class(config) else text_part_class(whole)
    make = AutoModelForCausalLM
    if whole.model_type in WITH_ENCODER:
        whole.vision_config._attn_implementation = "sdpa"
        make, part = AutoModelForImageTextToText, None
    try:
        with torch.device("meta"):
            if part is not None:
                return part._from_config(whole, dtype=dtype)
            return make.from_config(whole, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    except (KeyError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UnsupportedModel(
            f"{config.model_type} cannot be built with an attention of ours: {type(error).__name__}: "
            f"{clipped(str(error))}",
            field="model",
        ) from error


def _read_config(settings: ModelSettings) -> Any:
    """Of the text model; of the whole model where its encoder is part of what runs, or where the text part has no class
    of its own."""
    try:
        config = config_of(Path(settings.model_dir), trust_remote_code=settings.trust_remote_code)
        text = config.get_text_config()
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        raise UnsupportedModel(
            f"transformers cannot read {settings.model_dir}/config.json: {clipped(str(error), 400)}", field="model"
        ) from error
    has_code = settings.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if config.model_type in WITH_ENCODER:
        return config
    if not has_code:
        check_not_refused((config.model_type, text.model_type))
    if has_own_class(text) or has_code:
        return text
    if text_part_class(config) is not None:
        return config
    whole = around(text) if text is config else None
    if whole is None:
        raise UnsupportedModel(
            f"model_type {text.model_type!r} is not a causal language model that transformers knows", field="model"
        )
    return whole


def _dtype(settings: ModelSettings, config: Any) -> torch.dtype:
    name = settings.dtype
    if name == "auto":
        return config.dtype or torch.float32
    return getattr(torch, name)


def _generation_config(settings: ModelSettings) -> GenerationConfig:
    try:
        return GenerationConfig.from_pretrained(settings.model_dir, local_files_only=True)
    except OSError:  # there is no such file
        return GenerationConfig()
    except Exception as error:  # it checks some values, and trips over others
        raise CorruptCheckpoint(
            f"{settings.model_dir}/generation_config.json cannot be used: {clipped(str(error))}", field="model"
        ) from error


def _eos_token_ids(generation: GenerationConfig, config: Any) -> tuple[int, ...]:
    """generation_config.json knows best (chat models end turns with a token of their own); else config.json. Some
    say -1 for none."""
    eos = getattr(config, "eos_token_id", None) if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return ()
    return tuple(token for token in (eos if isinstance(eos, list | tuple) else (eos,)) if token >= 0)
