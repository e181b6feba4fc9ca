"""The weights of a model: every parameter of an empty module gets this rank's slice, read from the files."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...errors import CorruptCheckpoint, UnsupportedModel
from ..checkpoint.files import Checkpoint
from ..layers.adapters import cut_mixers
from ..tensor_parallel import Slice, Style, TensorParallel, count_own_heads
from .families import CUT_OTHERWISE, VOCABULARIES
from .from_gguf import gguf_sources
from .kept import Keeper
from .structure import cut_fused, plan_by_structure
from .weight_map import Source, find_sources


def styles_of(module: nn.Module, config: Any, parallel: TensorParallel) -> dict[str, Style]:
    """Module path -> how it is cut among the ranks. Empty with one rank."""
    if parallel.size == 1:
        return {}
    otherwise = CUT_OTHERWISE.get(config.model_type, {})
    plan = otherwise | plan_by_structure(module, bool(otherwise))  # of what both say, the first counts
    mixers = cut_mixers(module, parallel.size)  # which say themselves how they are cut
    if not plan and not mixers:
        raise UnsupportedModel(
            f"there is no tensor-parallel plan for {config.model_type}; run it with tensor_parallel_size 1",
            field="tensor_parallel_size",
        )
    return parallel.plan(module, plan, VOCABULARIES) | mixers | cut_fused(module)


def fill_weights(
    module: PreTrainedModel,
    checkpoint: Checkpoint,
    parallel: TensorParallel,
    config: Any,
    dtype: torch.dtype,
    device: torch.device,
    watch: Callable[[int, int], None],
    keeper: Keeper | None = None,
) -> None:
    """Give every parameter its memory: this rank's slice, read from the files. Tied parameters share theirs.

    keeper: of weights that stay in fewer bits
    """
    styles = styles_of(module, config, parallel)
    gguf = checkpoint.gguf
    sources = find_sources(module, checkpoint, dtype) if gguf is None else gguf_sources(gguf, dtype)
    module.tie_weights()
    total = sum(empty.numel() for empty in module.parameters())
    owners, shapes_of = _owners(module), _whole_shapes(module)
    kept_wide = _kept_wide(module, dtype)
    done = 0
    filled: dict[int, nn.Parameter] = {}
    missing: list[str] = []
    for path, owner in module.named_modules():
        style, shapes = styles.get(path), shapes_of[path]
        for name, empty in list(owner.named_parameters(recurse=False)):
            full_name = _full_name(path, name)
            # A tied parameter is stored once, and read once.
            if id(empty) not in filled and full_name not in sources:
                missing.append(full_name)
                continue
            if id(empty) not in filled:
                part = parallel.slice_of(path, name, shapes[name], style, config) if style else None
                source = sources[full_name]
                done += empty.numel()
                if keeper is not None and source.shape == shapes[name]:
                    is_kept = keeper.keep(owners[id(empty)], name, source, part)
                    if is_kept:
                        watch(done, total)
                        continue
                value = _read(source, full_name, shapes[name], part)
                own_dtype = torch.float32 if kept_wide(full_name) else dtype
                filled[id(empty)] = nn.Parameter(value.to(device=device, dtype=own_dtype), requires_grad=False)
                watch(done, total)
            setattr(owner, name, filled[id(empty)])
        # What the ranks add up or gather happens around the forward pass.
        if style is not None:
            parallel.install(owner, style, shapes.get("weight", ()))
    # A model with holes would answer nonsense.
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


def _kept_wide(module: PreTrainedModel, dtype: torch.dtype) -> Callable[[str], bool]:
    """Which parameters, by their full names, a family has in float32 also where the model is in fewer bits.

    transformers says parts of their names."""
    parts = sorted(module._keep_in_fp32_modules_strict or ())
    if not parts or dtype not in (torch.bfloat16, torch.float16):
        return lambda name: False
    pattern = re.compile("|".join(parts))
    return lambda name: pattern.search(name) is not None


def _owners(module: nn.Module) -> dict[int, list[nn.Module]]:
    """Of each parameter, by its identity: one module, or those that share it."""
    owners: dict[int, list[nn.Module]] = {}
    for owner in module.modules():
        for empty in owner.parameters(recurse=False):
            owners.setdefault(id(empty), []).append(owner)
    return owners


def _whole_shapes(module: nn.Module) -> dict[str, dict[str, tuple[int, ...]]]:
    """Module path -> name of a parameter -> its shape."""
    return {
        path: {name: tuple(empty.shape) for name, empty in owner.named_parameters(recurse=False)}
        for path, owner in module.named_modules()
    }


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


def _read(source: Source, name: str, shape: tuple[int, ...], part: Slice | None) -> Tensor:
    """The tensor, or `part` of it; what the slice asks beyond its end is zero."""
    if source.shape != shape:
        raise CorruptCheckpoint(
            f"{source.origin} has shape {list(source.shape)}; config.json makes {name} {list(shape)}", field="model"
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
