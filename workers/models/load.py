"""How a transformers module is loaded: built empty, filled with this rank's slices, hooked up to our attention."""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
)

from ...errors import CorruptCheckpoint, IntarsiaError, OutOfMemory, UnsupportedModel
from ...kvcache.plan import MemoryPlan
from ...proto.worker import ModelFacts, ModelSettings
from ..checkpoint.files import Checkpoint
from ..checkpoint.json_file import clipped
from ..checkpoint.layer_specs import complete_layer_types, read_layers
from ..cpu.linear import pack_linears
from ..families import WITH_ENCODER, mend
from ..known_families import check_family
from ..layers import adapters
from ..layers.attention import IMPLEMENTATION, PagedAttention
from ..layers.cross import CrossAttention
from ..layers.latent import READ_WEIGHTS
from ..layers.mixers import cut_mixers
from ..layers.states import PagedStates
from ..memory import is_lack_of_memory
from ..pages import Pages
from ..pictures.tiling import tile_tokens
from ..tensor_parallel import Slice, TensorParallel, count_own_heads
from .weight_map import Source, find_sources

logger = logging.getLogger(__name__)

GIB = 2**30

SAMPLING = "temperature", "top_k", "top_p", "min_p", "repetition_penalty"
"""What generation_config.json may ask for, under the names of `SamplingParams`."""


class LoadedModel:
    """A model ready to run packed tokens, as soon as it has pages."""

    def __init__(
        self,
        module: nn.Module,
        attention: PagedAttention,
        states: PagedStates,
        cross: CrossAttention | None,
        facts: ModelFacts,
        device: torch.device,
        is_tested: bool,
    ):
        """is_tested: of a family that the tests know."""
        self.module = module
        self.attention = attention
        self.states = states
        self.cross = cross
        self.facts = facts
        self.device = device
        self.is_tested = is_tested
        self._pages: Pages | None = None
        self._run: Callable[..., Any] = module

    def compile(self) -> None:
        """Let torch compile what runs from now on. Attention is one opaque operator to it, states it leaves alone."""
        from torch._dynamo import config

        # Around states each layer is compiled by itself, and beyond this many torch would go on uncompiled, silently.
        config.recompile_limit = max(config.recompile_limit, 16 * len(self.facts.layers))
        self._run = torch.compile(self.module, dynamic=True)

    def allocate(self, plan: MemoryPlan, backend: str | None) -> None:
        """Pages as the plan lays them out. backend: by which states are computed; None: the fastest."""
        self._pages = None  # the old pages go before the new ones come
        self.attention.forget_pages()
        self.states.forget_pages()
        if self.cross is not None:
            self.cross.forget_pages()
        try:
            self._pages = Pages(plan, self.facts.layers, getattr(torch, self.facts.dtype), self.device)
        except Exception as error:
            if not is_lack_of_memory(error):
                raise
            raise OutOfMemory(  # which may pass: a process that was lost may still hold its own
                f"{plan.memory_bytes / GIB:.2f} GiB for keys and values (kv_cache_memory) do not fit on {self.device} "
                f"beside weights of {self.facts.weight_bytes / GIB:.2f} GiB. Lower kv_cache_memory.",
                field="kv_cache_memory",
            ) from None
        self.attention.use(self._pages, plan)
        self.states.use(self._pages, backend)
        if self.cross is not None:
            self.cross.use(self._pages, plan, backend)

    def forward(self, tokens_T: Tensor, positions_T: Tensor, keep_T: Tensor | None = None) -> Tensor:
        """Logits of packed tokens, of those in `keep_T` alone if given. [T or K, vocabulary].

        Who computes what over which pages is known from `begin_step` of attention, states and cross-attention.
        """
        # transformers leaves cross layers out unless it sees an encoder's output; ours know theirs.
        extra = {"cross_attention_states": torch.empty(0)} if self.cross is not None else {}
        output = self._run(
            input_ids=tokens_T.unsqueeze(0),
            position_ids=positions_T.unsqueeze(0),
            use_cache=False,
            logits_to_keep=0 if keep_T is None else keep_T,
            **extra,
        )
        return output.logits[0]

    @property
    def pages(self) -> Pages:
        assert self._pages is not None, "allocate pages first"
        return self._pages


def load_model(
    settings: ModelSettings,
    parallel: TensorParallel,
    device: torch.device,
    watch: Callable[[int, int], None] = lambda done, total: None,
) -> LoadedModel:
    """Load this rank's share of the checkpoint. Raises `ModelError` or `InvalidSetting`.

    watch: told now and then how many of how many parameters are there
    """
    checkpoint = Checkpoint(settings.model_dir)
    with blaming_config(settings.model_dir):
        return _load(settings, checkpoint, parallel, device, watch)


@contextlib.contextmanager
def blaming_config(model_dir: str) -> Iterator[None]:
    """What a config says may be in bounds and still be nothing that a model can be made of: transformers and torch
    then raise whatever they meet. Raises `UnsupportedModel` with their words; lack of memory stays what it is."""
    try:
        yield
    except (IntarsiaError, ConnectionError):
        raise
    except Exception as error:
        if is_lack_of_memory(error):
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
    whole = _read_config(settings)
    config = whole.get_text_config()
    family_note = check_family((whole.model_type, config.model_type), allow_generic=settings.allow_generic)
    notes = [complete_layer_types(config, checkpoint.config), family_note]
    for note in filter(None, notes):
        logger.warning(note)
    dtype = _dtype(settings, config)
    layers = read_layers(config, parallel.size, dtype.itemsize)
    module = _build(whole, config, dtype, settings)
    vocab_size = module.get_input_embeddings().num_embeddings
    _fill(module, checkpoint, parallel, config, dtype, device, watch)
    mend(module, config)
    attention = PagedAttention(layers, dtype, device)
    states = PagedStates(device)
    adapters.bind(module, attention, states, parallel)
    cross = CrossAttention(module, settings.model_dir, layers, dtype) if whole is not config else None
    generation = _generation_config(settings)
    facts = ModelFacts(
        architecture=type(module).__name__,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        layers=layers,
        weight_bytes=sum(p.numel() * p.element_size() for p in module.parameters()),
        vocab_size=vocab_size,
        max_positions=config.max_position_embeddings,
        eos_token_ids=_eos_token_ids(generation, config),
        sampling_defaults=tuple((name, value) for name in SAMPLING if (value := getattr(generation, name)) is not None),
        image_token_id=whole.image_token_index if cross is not None else None,
        image_tokens=whole.vision_config.max_num_tiles * tile_tokens(whole.vision_config) if cross is not None else 0,
        notes=tuple(filter(None, notes)),
    )
    if not settings.torch_compile:  # which sees no further than an operator it does not know
        pack_linears(module, device, leave=READ_WEIGHTS)
    return LoadedModel(module.eval(), attention, states, cross, facts, device, is_tested=family_note is None)


def _build(whole: Any, config: Any, dtype: torch.dtype, settings: ModelSettings) -> Any:
    """The module, without memory for its weights. whole: the config of a model with its encoder, or `config` itself."""
    config._attn_implementation = IMPLEMENTATION
    make = AutoModelForCausalLM
    if whole is not config:
        whole.vision_config._attn_implementation = "sdpa"
        make = AutoModelForImageTextToText
    try:
        with torch.device("meta"):
            return make.from_config(whole, dtype=dtype, trust_remote_code=settings.trust_remote_code)
    except (KeyError, ValueError, TypeError, NotImplementedError, ImportError) as error:
        raise UnsupportedModel(
            f"{config.model_type} can not be built with an attention of ours: {type(error).__name__}: "
            f"{clipped(str(error))}",
            field="model",
        ) from error


def _read_config(settings: ModelSettings) -> Any:
    """Of the text model; of the whole model where its encoder is part of what runs."""
    try:
        config = AutoConfig.from_pretrained(
            settings.model_dir, trust_remote_code=settings.trust_remote_code, local_files_only=True
        )
        text = config.get_text_config()
    except (ValueError, KeyError, TypeError, OSError, AttributeError) as error:
        raise UnsupportedModel(
            f"transformers can not read {settings.model_dir}/config.json: {clipped(str(error), 400)}", field="model"
        ) from error
    if config.model_type in WITH_ENCODER:
        return config
    has_code = settings.trust_remote_code and "AutoModelForCausalLM" in getattr(config, "auto_map", {})
    if type(text) not in AutoModelForCausalLM._model_mapping and not has_code:
        raise UnsupportedModel(
            f"model_type {text.model_type!r} is not a causal language model that transformers knows", field="model"
        )
    return text


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
            f"{settings.model_dir}/generation_config.json can not be used: {clipped(str(error))}", field="model"
        ) from error


def _eos_token_ids(generation: GenerationConfig, config: Any) -> tuple[int, ...]:
    """generation_config.json knows best (chat models end turns with a token of their own); else config.json. Some
    say -1 for none."""
    eos = config.eos_token_id if generation.eos_token_id is None else generation.eos_token_id
    if eos is None:
        return ()
    return tuple(token for token in (eos if isinstance(eos, list | tuple) else (eos,)) if token >= 0)


def _fill(
    module: PreTrainedModel,
    checkpoint: Checkpoint,
    parallel: TensorParallel,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    watch: Callable[[int, int], None],
) -> None:
    """Give every parameter its memory: this rank's slice, read from the files. Tied parameters share theirs."""
    styles = parallel.plan(module, config)
    if parallel.size > 1:
        styles |= cut_mixers(module, parallel.size)
    sources = find_sources(module, checkpoint)
    module.tie_weights()
    total = sum(empty.numel() for empty in module.parameters())
    done = 0
    filled: dict[int, nn.Parameter] = {}
    missing: list[str] = []
    for path, owner in module.named_modules():
        style = styles.get(path)
        whole_shapes = {name: tuple(empty.shape) for name, empty in owner.named_parameters(recurse=False)}
        for name, empty in list(owner.named_parameters(recurse=False)):
            full_name = _full_name(path, name)
            if id(empty) not in filled and full_name not in sources:
                missing.append(full_name)
                continue
            if id(empty) not in filled:
                part = parallel.slice_of(path, name, whole_shapes[name], style, config) if style else None
                value = _read(checkpoint, sources[full_name], full_name, whole_shapes[name], part)
                filled[id(empty)] = nn.Parameter(value.to(device=device, dtype=dtype), requires_grad=False)
                done += empty.numel()
                watch(done, total)
            setattr(owner, name, filled[id(empty)])
        if style is not None:
            parallel.install(owner, style, whole_shapes.get("weight", ()))
    if missing:
        raise CorruptCheckpoint(
            f"{checkpoint.path} lacks {len(missing)} of the model's tensors, the first of them {missing[0]}. "
            "The files are incomplete, or they are of another model than config.json says.",
            field="model",
            missing=len(missing),
        )
    if parallel.size > 1:
        count_own_heads(module)
    _fill_buffers(module, sources, device)


def _fill_buffers(module: PreTrainedModel, sources: Mapping[str, Source], device: torch.device) -> None:
    """Buffers (rotary tables, scales) come from the checkpoint, or are computed by the model's own initialisation."""
    for parameter in module.parameters():
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]  tells transformers to leave it alone
    for path, owner in module.named_modules():
        for name, empty in list(owner.named_buffers(recurse=False)):
            source = sources.get(_full_name(path, name))
            value = torch.empty_like(empty, device=device) if source is None else source.read()
            value = value.to(device=device, dtype=empty.dtype)
            value._is_hf_initialized = source is not None  # type: ignore[attr-defined]
            owner._buffers[name] = value
            owner._is_hf_initialized = False  # type: ignore[assignment]  its buffers that were not stored are due
    module.initialize_weights()


def _read(checkpoint: Checkpoint, source: Source, name: str, shape: tuple[int, ...], part: Slice | None) -> Tensor:
    """The tensor, or `part` of it; what the slice asks beyond its end is zero."""
    if source.shape != shape:
        raise CorruptCheckpoint(
            f"{checkpoint.path}: tensor {name} has shape {source.shape}; config.json makes it {shape}", field="model"
        )
    if part is None:
        return source.read()
    if part.ranges == ((0, 0),):  # zero on this rank
        return torch.zeros(shape)
    dim, length = part.dim, shape[part.dim]
    pieces = [source.read(dim, min(start, length), min(stop, length)) for start, stop in part.ranges]
    lacking = sum(stop - start for start, stop in part.ranges) - sum(piece.shape[dim] for piece in pieces)
    if lacking:
        pieces.append(pieces[0].new_zeros((*shape[:dim], lacking, *shape[dim + 1 :])))
    return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=dim)


def _full_name(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
