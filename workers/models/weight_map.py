"""Where a parameter of the model comes from: one tensor of the files, or several, put together.

Checkpoints are older than the modules that read them: experts are stored one by one and held as one tensor, parts have
had other names. transformers knows how each family's names go; here its renamings are followed, and what has to be put
together is, so that reading a slice of a parameter still reads only that slice of the files.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Chunk,
    Concatenate,
    ErnieFuseAndSplitTextVisionExperts,
    Inkling2LoopDequantizeExperts,
    Inkling2LoopMergeMessageQueries,
    Inkling2UnpadVocab,
    Interleave,
    MergeModulelist,
    Split,
    Transpose,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ...errors import CorruptCheckpoint, UnsupportedModel
from ...kernels.products.codes import CodeKind, Codes, every_other_row, side_by_side, stacked
from ..checkpoint.files import Checkpoint
from ..checkpoint.json_file import clipped
from ..checkpoint.packed.formats import PLAIN, USED_ELSEWHERE, Packed
from .families import EXPERTS_ONE_BY_ONE
from .unpacked import Unpacked

SCALE_LIKE = re.compile("scale|zero|qweight|packed|_blocks|g_idx")
"""Last names of tensors that say how others are to be read."""

ONE_EXPERT = re.compile(r"(?P<layer>.*?)(moe\.)?experts\.\d+\.(?P<part>gate|up|down)_proj\.weight")
"""Some tools store experts one by one that the family's own checkpoints hold together."""

NO_NUMBER = 255
"""As a scale in e8m0."""


class Source(Protocol):
    """A tensor that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def origin(self) -> str:
        """File, tensor and scheme, for messages."""
        ...

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) along `dim`; the whole of it by default."""
        ...

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        """The same in fewer bits, [.., outputs, inputs]. None: it is not stored so, or cannot be cut there."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the files."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.name)

    @property
    def origin(self) -> str:
        return f"{self.checkpoint.file_of(self.name)}: {self.name}"

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        return self.checkpoint.read(self.name, dim, start, stop)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        return None


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape, one after the other along a new first dimension: experts."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    @property
    def origin(self) -> str:
        return _origin_of_several(self.parts)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim == 0:
            some = [part.read() for part in self.parts[start:stop]]
            return torch.stack(some) if some else torch.empty(0, *self.parts[0].shape)
        return torch.stack([part.read(dim - 1, start, stop) for part in self.parts])

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        if dim == 0:
            parts = [part.codes() for part in self.parts[start:stop]]
        else:
            parts = [part.codes(dim - 1, start, stop) for part in self.parts]
        return all_of(parts, stacked)


@dataclass(frozen=True, slots=True)
class Joined:
    """Tensors side by side along a dimension: gate and up."""

    parts: tuple[Source, ...]
    joined_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.parts[0].shape)
        shape[self.joined_dim] = sum(part.shape[self.joined_dim] for part in self.parts)
        return tuple(shape)

    @property
    def origin(self) -> str:
        return _origin_of_several(self.parts)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim != self.joined_dim:
            return torch.cat([part.read(dim, start, stop) for part in self.parts], dim=self.joined_dim)
        pieces = [part.read(dim, *cut) for part, *cut in self._pieces(start, stop)]
        return torch.cat(pieces, dim=dim) if pieces else self.parts[0].read(dim, 0, 0)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        if self.joined_dim != len(self.shape) - 2:  # along inputs, whose scales would have to be joined too
            return None
        if dim != self.joined_dim:
            return all_of([part.codes(dim, start, stop) for part in self.parts], side_by_side)
        return all_of([part.codes(dim, *cut) for part, *cut in self._pieces(start, stop)], side_by_side)

    def _pieces(self, start: int, stop: int | None) -> Iterator[tuple[Source, int, int]]:
        """Parts that are among [start, stop) of the joined dimension, and what is of each."""
        stop = self.shape[self.joined_dim] if stop is None else stop
        at = 0
        for part in self.parts:
            length = part.shape[self.joined_dim]
            if start < at + length and at < stop:
                yield part, max(start - at, 0), min(stop - at, length)
            at += length


@dataclass(frozen=True, slots=True)
class Part:
    """Elements [first, last) of a tensor along a dimension: one of several that are stored as one."""

    whole: Source
    part_dim: int
    first: int
    last: int

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.whole.shape)
        shape[self.part_dim] = self.last - self.first
        return tuple(shape)

    @property
    def origin(self) -> str:
        return self.whole.origin

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim != self.part_dim:
            return self.whole.read(dim, start, stop).narrow(self.part_dim, self.first, self.last - self.first)
        return self.whole.read(dim, *self._within(start, stop))

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        return self.whole.codes(dim, *self._within(start, stop)) if dim == self.part_dim else None

    def _within(self, start: int, stop: int | None) -> tuple[int, int]:
        return self.first + start, self.last if stop is None else min(self.first + stop, self.last)


@dataclass(frozen=True, slots=True)
class InTurns:
    """Two halves of a tensor, of which the files hold one element each in turn: gate and up (Inkling).

    stored  g0 u0 g1 u1 g2 u2      read  g0 g1 g2 u0 u1 u2"""

    stored: Source
    turn_dim: int

    @property
    def shape(self) -> tuple[int, ...]:
        return self.stored.shape

    @property
    def origin(self) -> str:
        return self.stored.origin

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim != self.turn_dim:
            both = self.stored.read(dim, start, stop).unflatten(self.turn_dim, (-1, 2))
            return torch.cat(both.unbind(self.turn_dim + 1), dim=self.turn_dim)
        pairs = self._pairs(start, stop)
        stored = {each: self.stored.read(dim, *each).unflatten(dim, (-1, 2)) for each in set(pairs.values())}
        pieces = [stored[each].select(dim + 1, half) for half, each in pairs.items()]
        return torch.cat(pieces, dim=dim) if pieces else self.stored.read(dim, 0, 0)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        if self.turn_dim != len(self.shape) - 2:  # along inputs, whose scales are of several
            return None
        slices = dict.fromkeys(range(2), (start, stop)) if dim != self.turn_dim else self._pairs(start, stop)
        stored = {each: self.stored.codes(dim, *each) for each in set(slices.values())}
        both = [(half, stored[each]) for half, each in slices.items()]
        return all_of([None if codes is None else every_other_row(codes, half) for half, codes in both], side_by_side)

    def _pairs(self, start: int, stop: int | None) -> dict[int, tuple[int, int]]:
        """By half that elements [start, stop) are of: from where to where the pairs are stored that they are in."""
        half = self.shape[self.turn_dim] // 2
        stop = 2 * half if stop is None else stop
        ranges = {n: (max(start - n * half, 0), min(stop - n * half, half)) for n in range(2)}
        return {n: (2 * first, 2 * last) for n, (first, last) in ranges.items() if first < last}


def all_of(parts: Sequence[Codes | None], join: Callable[[Sequence[Codes]], Codes | None]) -> Codes | None:
    """None: some of them are, or they cannot be joined."""
    there = [part for part in parts if part is not None]
    return join(there) if there and len(there) == len(parts) else None


@dataclass(frozen=True, slots=True)
class Turned:
    """A tensor whose last two of three dimensions are held the other way round."""

    part: Source

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, inputs = self.part.shape
        return experts, inputs, outputs

    @property
    def origin(self) -> str:
        return self.part.origin

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        return self.part.read((0, 2, 1)[dim], start, stop).transpose(1, 2)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        return self.part.codes((0, 2, 1)[dim], start, stop)


@dataclass(frozen=True, slots=True)
class TurnedMatrix:
    """A matrix that is stored the other way round."""

    part: Source

    @property
    def shape(self) -> tuple[int, ...]:
        return self.part.shape[::-1]

    @property
    def origin(self) -> str:
        return self.part.origin

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        return self.part.read(1 - dim, start, stop).T.contiguous()

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        return None  # whose scales would be along the other dimension


@dataclass(frozen=True, slots=True)
class Mxfp4:
    """Experts of gpt-oss as released: pairs of 4-bit floats, and a power of two for each 32 of them.

    Stored as [experts, outputs, inputs / 32, 16] and [experts, outputs, inputs / 32]; held as [experts, inputs,
    outputs]. Source: OCP Microscaling Formats (MX) 1.0.
    """

    blocks: Source
    scales: Source

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, half = self.blocks.shape
        return experts, groups * half * 2, outputs

    @property
    def origin(self) -> str:
        return f"{self.blocks.origin} (MXFP4, with {self.scales.origin})"

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        codes, first = self._outward(dim, start, stop)
        numbers = codes.numbers(torch.bfloat16).transpose(1, 2)
        if dim != 1:
            return numbers
        stop = self.shape[1] if stop is None else stop
        return numbers[:, start - first : stop - first]

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        codes, first = self._outward(dim, start, stop)
        stop = self.shape[dim] if stop is None else stop
        return codes.cut(1, start - first, stop - first) if dim == 1 else codes

    def _outward(self, dim: int, start: int, stop: int | None) -> tuple[Codes, int]:
        """Inputs are read from the beginning of a group to the end of one. Returns the first that was read, too."""
        stop = self.shape[dim] if stop is None else stop
        stored, first, last = {0: 0, 1: 2, 2: 1}[dim], start, stop
        if dim == 1:
            first, last = start // 32, -(-stop // 32)
        blocks, scales = self.blocks.read(stored, first, last), self.scales.read(stored, first, last)
        if bool((scales.view(torch.uint8) == NO_NUMBER).any()):
            raise CorruptCheckpoint(f"{self.origin}: some of its numbers are no finite numbers", field="model")
        codes = Codes(CodeKind.E2M1, blocks.flatten(-2), scales, columns=32)
        return codes, first * 32 if dim == 1 else first


def dim_of_rows(source: Source) -> int:
    """Along which of its dimensions the outputs of a weight lie."""
    return len(source.shape) - (1 if isinstance(source, Turned | Mxfp4) else 2)


def _origin_of_several(parts: Sequence[Source]) -> str:
    return f"{parts[0].origin}{f' and {len(parts) - 1} more' if len(parts) > 1 else ''}"


def find_sources(module: PreTrainedModel, checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Source]:
    """Full name of a parameter or buffer of `module` -> where it comes from. Other tensors of the files are left out.

    dtype: of the numbers of packed weights
    Raises `UnsupportedModel` when transformers puts a family's tensors together in a way that is not known here, and
    `CorruptCheckpoint` for numbers of a parameter that nothing says how to read.
    """
    transforms = get_model_conversion_mapping(module, add_legacy=False)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    wanted, model_type = module.state_dict(), module.config.model_type
    sources: dict[str, Source] = {}
    pieces: dict[str, dict[str, list[str]]] = {}  # parameter -> pattern -> stored names

    def renamed(stored: str) -> tuple[str | None, str | None]:
        name, pattern = rename_source_key(stored, renamings, converters, module.base_model_prefix, wanted)
        found = _in_text_model(name, wanted)
        if found is None and stored in wanted:  # renamed away, as DeepSeek-V4's last norm as transformers writes it
            return stored, None
        return found, pattern

    def parameter_of(stored: str) -> tuple[str | None, str | None]:
        name, pattern = renamed(stored)
        if name is None and (one := ONE_EXPERT.fullmatch(stored)) and model_type in EXPERTS_ONE_BY_ONE:
            together = "down_proj" if one["part"] == "down" else "gate_up_proj"
            return renamed(f"{one['layer']}experts.{together}")[0], one["part"]
        return name, pattern

    # Each stored tensor, and each weight that several make, is a parameter, or a piece of one, or of no use here.
    stored_sources = _stored_sources(checkpoint, dtype)
    for stored, source in stored_sources.items():
        name, pattern = parameter_of(stored)
        if name is None:
            _check_unused(checkpoint, stored, parameter_of)
            continue
        if isinstance(source, Stored) and wanted[name].is_floating_point():
            _check_plain(checkpoint, stored)
        if pattern is None:
            packed = checkpoint.packed.weights.get(stored)
            if isinstance(packed, Packed) and packed.experts and EXPERTS_ONE_BY_ONE.get(model_type):
                source = _turned_experts(checkpoint, packed, dtype)
            sources[name] = source
        else:
            pieces.setdefault(name, {}).setdefault(pattern, []).append(stored)
    # Pieces are put together in the order in which their pattern numbers them.
    for name, by_pattern in pieces.items():
        if set(by_pattern) <= {"gate", "up", "down"}:
            parts = [
                [stored_sources[each] for each in sorted(by_pattern[part], key=_numbers)]
                for part in ("gate", "up", "down")
                if part in by_pattern
            ]
            whole = _put_together(name, parts, (MergeModulelist(0), Concatenate(1)))
            sources[name] = Turned(whole) if EXPERTS_ONE_BY_ONE[model_type] else whole
            continue
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        ordered = [sorted(by_pattern.get(pattern, ()), key=_numbers) for pattern in converter.source_patterns]
        parts = [[stored_sources[each] for each in names] for names in ordered if names]
        sources |= _converted(name, parts, converter, wanted)
    return sources


def _converted(
    name: str, parts: list[list[Source]], converter: WeightConverter, wanted: Mapping[str, Tensor]
) -> dict[str, Source]:
    """What a parameter, and those beside it, are made of. parts: by pattern of `converter`, in order
    wanted: parameters by their full names"""
    match converter.operations:
        case [*before, Split() | Chunk(num_shards_attribute=None) as split]:
            whole = _put_together(name, parts, before)
            names = [name.replace(converter.target_patterns[0], each) for each in converter.target_patterns]
            return _taken_apart(whole, {each: wanted[each].shape[split.dim] for each in names}, split.dim)
        case [Inkling2LoopMergeMessageQueries()]:
            return {name: _of_messages(parts[0][0], parts[1][0])}
        case [Inkling2UnpadVocab()]:  # rows for tokens that there are not
            return {name: Part(parts[0][0], 0, 0, len(wanted[name]))}
        case [ErnieFuseAndSplitTextVisionExperts(stack_dim=0, concat_dim=1)]:
            targets = converter.target_patterns
            names = [name.replace(targets[0], each) for each in targets]
            together = (MergeModulelist(0), Concatenate(1))
            shares = zip(names, _shares(parts, len(targets)), strict=True)
            return {full_name: _put_together(full_name, share, together) for full_name, share in shares}
        case [Transpose(dim0=0, dim1=1, check_dims=False)] if len(wanted[name].shape) == 2:
            return {name: TurnedMatrix(parts[0][0])}
        case [Transpose(dim0=1, dim1=2) as turn] if len(wanted[name].shape) == 3:
            is_as_held = turn.check_dims and parts[0][0].shape == tuple(wanted[name].shape)
            return {name: parts[0][0] if is_as_held else Turned(parts[0][0])}
        case operations:
            return {name: _put_together(name, parts, operations)}


def _of_messages(queries: Source, of_keys: Source) -> Source:
    """[layers,4,..] of a loop: for queries, keys, values and MLPs. The files have two rows of each layer: the first and
    the last of them; and those between."""
    outer = [Part(queries, 0, n, n + 1) for n in range(queries.shape[0])]
    layers = range(0, len(outer), 2)
    return Stacked(tuple(Joined((outer[n], Part(of_keys, 0, n, n + 2), outer[n + 1]), 0) for n in layers))


def _shares(parts: list[list[Source]], kinds: int) -> Iterator[list[list[Source]]]:
    """Of experts that are numbered through: those of each kind, in equal numbers."""
    sizes = [-(-len(group) // kinds) for group in parts]
    for n in range(kinds):
        yield [group[n * size : (n + 1) * size] for group, size in zip(parts, sizes, strict=True)]


def _taken_apart(whole: Source, lengths: Mapping[str, int], dim: int) -> dict[str, Source]:
    """lengths: of each parameter along `dim`, in their order"""
    if whole.shape[dim] != sum(lengths.values()):
        raise CorruptCheckpoint(
            f"{whole.origin} has shape {list(whole.shape)}; config.json makes {', '.join(lengths)} of it, which have "
            f"{sum(lengths.values())} along dimension {dim}",
            field="model",
        )
    ends = list(accumulate(lengths.values()))
    return {
        name: Part(whole, dim, last - length, last) for (name, length), last in zip(lengths.items(), ends, strict=True)
    }


def _stored_sources(checkpoint: Checkpoint, dtype: torch.dtype) -> dict[str, Source]:
    """Of weights, by the names that they have or would have in a file of 16-bit numbers."""
    packed = checkpoint.packed
    found: dict[str, Source] = {
        name: Stored(checkpoint, name) for name in checkpoint.names() if name not in packed.taken
    }
    for name, weight in packed.weights.items():
        if isinstance(weight, Packed) and weight.experts:
            found[name] = _all_experts(checkpoint, weight, dtype)
        elif isinstance(weight, Packed):
            found[name] = Unpacked(checkpoint, weight, dtype)
        else:
            found[name] = Mxfp4(Stored(checkpoint, weight.codes), Stored(checkpoint, weight.scale))
    return found


def _all_experts(checkpoint: Checkpoint, packed: Packed, dtype: torch.dtype) -> Stacked:
    return Stacked(tuple(Unpacked(checkpoint, packed, dtype, n) for n in range(packed.experts)))


def _turned_experts(checkpoint: Checkpoint, packed: Packed, dtype: torch.dtype) -> Turned:
    """Of a family that holds their inputs before their outputs, as its files do that have all of them in one tensor."""
    return Turned(_all_experts(checkpoint, packed if packed.is_turned else packed.turned(), dtype))


def _check_plain(checkpoint: Checkpoint, stored: str) -> None:
    """Numbers of a weight that need a scale, or are packed, must not be taken for the weight."""
    tensor = checkpoint.stored(stored)
    if tensor.dtype not in PLAIN:
        said = checkpoint.description
        told = "nothing describes them" if said is None else f"{said.place} does not"
        raise CorruptCheckpoint(
            f"{checkpoint.path / tensor.file}: {stored} holds {tensor.dtype} {list(tensor.shape)}, and no scheme that "
            f"is known says how these become weights; {told}. Scales may be missing, or have another name.",
            field="model",
        )


def _check_unused(checkpoint: Checkpoint, stored: str, parameter_of: Callable[[str], tuple[str | None, Any]]) -> None:
    """A scale that is never read makes a weight of the model wrong, and so may whatever else is beside a packed one,
    unless it belongs to a part that is not loaded."""
    module, _, last = stored.rpartition(".")
    is_packed = f"{module}.weight" in checkpoint.packed.weights
    if last in USED_ELSEWHERE or not (SCALE_LIKE.search(last) or is_packed):
        return
    if last == "bias" and not bool(checkpoint.read(stored).any()):
        return  # some tools write them to modules that have none
    of_weight = [f"{module}.weight", f"{module}.{re.sub('_(scale.*|blocks|scales)$', '', last)}"]
    if any(parameter_of(each)[0] is not None for each in of_weight):
        if not is_packed and of_weight[0] in checkpoint.names():
            _check_plain(checkpoint, of_weight[0])  # which says more
        raise CorruptCheckpoint(
            f"{checkpoint.file_of(stored)}: {stored} would never be read: it is no part of "
            f"{_scheme(checkpoint, module)}. Weights without it would be wrong.",
            field="model",
        )


def _scheme(checkpoint: Checkpoint, module: str) -> str:
    name = f"{module}.weight"
    packed = checkpoint.packed.weights.get(name)
    if isinstance(packed, Packed):
        return f"{name} as it is read, which is as {packed.format}"
    if name in checkpoint.names():
        return f"{name} as it is read, which is as plain {checkpoint.stored(name).dtype}"
    beside = sorted(each for each in checkpoint.names() if each.startswith(f"{module}."))
    return f"a scheme that is known, with no more than {clipped(', '.join(beside), 200)}"


def _put_together(name: str, parts: list[list[Source]], operations: Sequence[Any]) -> Source:
    for operation in operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            _check_shapes(name, [group for group in parts if len(group) > 1], None)
            parts = [[Stacked(tuple(group))] for group in parts]
        elif isinstance(operation, Concatenate):
            _check_shapes(name, [[part for group in parts for part in group]], operation.dim)
            parts = [[Joined(tuple(part for group in parts for part in group), operation.dim)]]
        elif isinstance(operation, Inkling2LoopDequantizeExperts) and len(parts) == 1:
            continue  # they are plain numbers
        elif isinstance(operation, Interleave) and not operation.inverse:
            parts = [[InTurns(parts[0][0], operation.dim)]]
        else:
            raise UnsupportedModel(
                f"{name} is made of other tensors by {operation}, which is not known here", field="model"
            )
    return parts[0][0]


def _check_shapes(name: str, groups: Sequence[Sequence[Source]], joined_dim: int | None) -> None:
    """Of tensors that make one, where they have to be alike. Raises `CorruptCheckpoint`."""

    def alike(source: Source) -> list[int]:
        return [length for dim, length in enumerate(source.shape) if dim != joined_dim]

    for group in groups:
        odd = next((source for source in group if alike(source) != alike(group[0])), None)
        if odd is not None:
            raise CorruptCheckpoint(
                f"{odd.origin} has shape {list(odd.shape)}; {group[0].origin}, with which it makes {name}, has "
                f"{list(group[0].shape)}",
                field="model",
            )


def _in_text_model(name: str, wanted: dict[str, Any]) -> str | None:
    """A text model may be read from the checkpoint of a multimodal model around it, and the other way round."""
    for prefix, instead in (
        ("", ""),
        ("language_model.", ""),
        ("model.language_model.", "model."),
        ("model.", "model.language_model."),
    ):
        if name.startswith(prefix) and instead + name.removeprefix(prefix) in wanted:
            return instead + name.removeprefix(prefix)
    return None


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
