"""Which tensors of a GGUF file make which parameters of a model, as transformers has it.

The names come from transformers' tables, and what is done to a tensor from its own code: a *probe* of the tensor's
shape, whose rows are numbered, goes through it, and where the numbers come out says what was done. So weights need not
be read, and what transformers would do is done, or refused if it is of a kind that is not known here.

transformers has two such codes: converters for some architectures, and processors for the others.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ...errors import CorruptCheckpoint, UnsupportedModel
from ...workers.checkpoint.gguf.header import GgufHeader, GgufTensor
from ...workers.checkpoint.gguf.manifest import Made
from ...workers.checkpoint.gguf.tensors import shape_of
from ...workers.checkpoint.json_file import quote

PROBE_COLUMNS = 2
"""A row's number stands in each of them. Columns are never looked at."""

NOT_NEEDED = "rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors that transformers leaves out: what they say should be in the config."""

NEXT_TOKENS = "mtp."
"""What parameters of layers that guess several tokens would be called. They are not loaded."""


class Probe(NamedTuple):
    """What came of a tensor's probe."""

    tensor: GgufTensor
    parameter: str
    value: Tensor
    columns: tuple[int, ...] | None = None  # which of the file's are the first, the second, ..


class Parameters(NamedTuple):
    """What was found."""

    made: dict[str, Made]
    unused: tuple[str, ...]  # tensors that no parameter needs


def empty_model(config: Any) -> PreTrainedModel:
    """Without memory for its weights."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return model


def find_parameters(model: PreTrainedModel, header: GgufHeader, file: Path) -> Parameters:
    """Raises `CorruptCheckpoint` for a tensor that is missing, of another shape or of no use, and `UnsupportedModel`
    for one that is changed in a way that is not known here."""
    converters = _converters(header.architecture, model.config)
    if converters is not None:
        probes = list(_by_converters(model, header, converters))
    else:
        probes = list(_by_processor(model, header))
    pieces: dict[str, list[Probe]] = {}
    for probe in probes:
        pieces.setdefault(probe.parameter, []).append(probe)
    made = {parameter: made_of(parameter, probes, file) for parameter, probes in pieces.items()}
    used = {name for each in made.values() for name in each.tensors}
    unused = [name for name in header.tensors if name not in used]
    _check_all_there(model, header, made, unused, file)
    _check_shapes(model, header, made, file)
    return Parameters(made, tuple(unused))


def _probe(tensor: GgufTensor) -> Tensor:
    """Rows are numbered downward from -1, so that logarithms can be taken of their negatives."""
    *rows, columns = tensor.shape
    if not rows:
        return -torch.arange(1, columns + 1, dtype=torch.float64)
    numbers = -torch.arange(1, math.prod(rows) + 1, dtype=torch.float64).view(*rows, 1)
    return numbers.expand(*rows, min(columns, PROBE_COLUMNS)).contiguous()


# -- transformers' two ways --------------------------------------------------------------------------------------------


def _by_processor(model: PreTrainedModel, header: GgufHeader) -> Iterator[Probe]:
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    for tensor in header.tensors.values():
        together: dict[str, Tensor] = {}  # what a processor puts together of several tensors
        found = processor.process(
            weights=_probe(tensor).numpy(),
            name=tensor.name,
            tensor_key_mapping=names,
            parsed_parameters={"tensors": together},
        )
        if found.name in names:
            yield Probe(tensor, names[found.name], torch.as_tensor(found.weights))
        yield from (Probe(tensor, parameter, value) for parameter, value in together.items())


def _converters(architecture: str, config: Any) -> list[Any] | None:
    """None: transformers has none for such files, or is of a version that has none at all."""
    try:
        from transformers.integrations.gguf import get_gguf_conversion_mapping, is_gguf_arch_supported
    except ImportError:
        return None
    return get_gguf_conversion_mapping(architecture, config) if is_gguf_arch_supported(architecture) else None


def _by_converters(model: PreTrainedModel, header: GgufHeader, mapping: list[Any]) -> Iterator[Probe]:
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, WeightConverter)]
    wanted = model.state_dict()
    for tensor in header.tensors.values():
        name, pattern = rename_source_key(tensor.name, renamings, converters, model.base_model_prefix, wanted)
        if name not in wanted:
            continue
        converter = next((each for each in converters if pattern in each.source_patterns), None)
        if converter is None or pattern is None:
            yield Probe(tensor, name, _probe(tensor))
        elif len(converter.source_patterns) > 1:  # side by side, in the order of the patterns
            patterns = converter.source_patterns
            yield Probe(tensor, name, _side_by_side(_probe(tensor), patterns.index(pattern), len(patterns)))
        else:
            yield _converted(tensor, name, converter.operations)


def _converted(tensor: GgufTensor, name: str, operations: list[Any]) -> Probe:
    value, columns = _probe(tensor), None
    for operation in operations:
        if hasattr(operation, "input_permutation"):
            columns = tuple(operation.permutation.tolist())
        else:
            (value,) = operation.convert({name: value}, source_patterns=[name], target_patterns=[name]).values()
    return Probe(tensor, name, value, columns)


def _side_by_side(value: Tensor, place: int, count: int) -> Tensor:
    """Zeros where the other tensors are, as processors have it."""
    whole = value.new_zeros(value.shape[0], count * value.shape[1], *value.shape[2:])
    whole[:, place * value.shape[1] : (place + 1) * value.shape[1]] = value
    return whole


# -- what was done to a probe ------------------------------------------------------------------------------------------


def made_of(parameter: str, probes: list[Probe], file: Path) -> Made:
    if len(probes) == 1 and probes[0].value.numel() == _probe(probes[0].tensor).numel():
        return _change(parameter, probes[0], file)
    # Several tensors along the second dimension: gate and up of all experts.
    ordered = sorted(probes, key=lambda probe: _place(probe.value))
    names = tuple(probe.tensor.name for probe in ordered)
    place = 0
    for probe in ordered:
        alone = _probe(probe.tensor)
        there = probe.value[:, place : place + alone.shape[1]] if alone.dim() == 3 else None
        if there is None or not torch.equal(there, alone):
            raise _unknown(parameter, names, file)
        place += alone.shape[1]
    if place != ordered[0].value.shape[1]:
        raise CorruptCheckpoint(
            f"{file} holds only {', '.join(names)} of the tensors that make {parameter}; it is incomplete",
            field="model",
        )
    return Made(names, joined_dim=1)


def _place(value: Tensor) -> int:
    """Where along the second dimension a probe lies."""
    filled = value[0].flatten(1)[:, 0].nonzero() if value.dim() == 3 else value.new_zeros(0)
    return int(filled[0]) if len(filled) else 0


def _change(parameter: str, probe: Probe, file: Path) -> Made:
    before, after = _probe(probe.tensor), probe.value.double()
    made = Made((probe.tensor.name,), columns=probe.columns)
    # A dimension of 1 more.
    if after.dim() == before.dim() + 1:
        dims = [dim for dim in range(after.dim()) if after.squeeze(dim).shape == before.shape]
        made = replace(made, unit_dim=dims[0] if dims else None)
        after = after.squeeze(dims[0]) if dims else after
    if after.shape != before.shape:
        raise _unknown(parameter, made.tensors, file)
    # The logarithm of the negative, or one number added to all.
    added = float((after - before).flatten()[0])
    if torch.allclose(after.flatten().sort().values, torch.log(-before).flatten().sort().values, rtol=0, atol=1e-5):
        made, after = replace(made, is_log=True), -torch.exp(after).round()
    elif added and torch.equal(after, before + added):
        return replace(made, added=added)
    # Rows in another order.
    order = _order(before, after)
    if order is None:
        raise _unknown(parameter, made.tensors, file)
    return made if order == tuple(range(len(order))) else replace(made, rows=order)


def _order(before: Tensor, after: Tensor) -> tuple[int, ...] | None:
    """Which entry of the first dimension is the first, the second, ..; None: not all of them are there as they were."""
    if not len(before):
        return ()
    first = before.flatten(1)[:, 0] if before.dim() > 1 else before
    number_of = {value: place for place, value in enumerate(first.tolist())}
    found = (after.flatten(1)[:, 0] if after.dim() > 1 else after).tolist()
    if set(found) != set(number_of):
        return None
    order = tuple(number_of[value] for value in found)
    return order if torch.equal(before[torch.tensor(order)], after) else None


def _unknown(parameter: str, tensors: tuple[str, ...], file: Path) -> UnsupportedModel:
    return UnsupportedModel(
        f"{file}: transformers makes {parameter} of {', '.join(tensors)} in a way that is not known here. Use a "
        "safetensors checkpoint of the model.",
        field="model",
    )


# -- whether all is there ----------------------------------------------------------------------------------------------


def _check_all_there(
    model: PreTrainedModel, header: GgufHeader, made: Mapping[str, Made], unused: list[str], file: Path
) -> None:
    """Raises `CorruptCheckpoint` for the first parameter without a tensor, and the first tensor without a parameter."""
    copies: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        copies.setdefault(id(parameter), []).append(name)
    missing = [names[0] for names in copies.values() if not any(name in made for name in names)]
    if missing:
        raise CorruptCheckpoint(
            f"{file} lacks {len(missing)} of the model's tensors, the first of them {missing[0]}"
            f"{_gguf_name(model, header, missing[0])}. It is incomplete, or of a kind of its architecture that is not "
            "known here.",
            field="model",
        )
    layers = int(model.config.get_text_config().num_hidden_layers)
    odd = [name for name in unused if name not in NOT_NEEDED and not _is_of_later_layer(name, layers)]
    if odd:
        raise CorruptCheckpoint(
            f"{file} holds {len(odd)} tensors that the model has no use for, the first of them {quote(odd[0])}: it is "
            "of a kind of its architecture that is not known here, and its answers would be wrong.",
            field="model",
        )


def _gguf_name(model: PreTrainedModel, header: GgufHeader, parameter: str) -> str:
    """In brackets, if transformers' tables have it."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor, get_gguf_hf_weights_map

    processor = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)(config=model.config.to_dict())
    try:
        names: dict[str, str] = get_gguf_hf_weights_map(model, processor)
    except NotImplementedError:
        return ""
    found = next((stored for stored, name in names.items() if name == parameter), None)
    return "" if found is None else f" ({found})"


def _is_of_later_layer(name: str, layers: int) -> bool:
    """Layers behind the model's own guess several tokens at once. They are not loaded."""
    parts = name.split(".")
    return parts[0] == "blk" and len(parts) > 1 and parts[1].isdecimal() and int(parts[1]) >= layers


def _check_shapes(model: PreTrainedModel, header: GgufHeader, made: Mapping[str, Made], file: Path) -> None:
    wanted = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    for name, each in made.items():
        tensors = [header.tensors[tensor] for tensor in each.tensors]
        found = shape_of(each, tensors)
        if found != wanted[name]:
            stored = ", ".join(f"{tensor.name} of shape {list(tensor.shape)}" for tensor in tensors)
            raise CorruptCheckpoint(
                f"{file}: {stored} would make {name} {list(found)}, and by the file's own sizes it is "
                f"{list(wanted[name])}",
                field="model",
            )
