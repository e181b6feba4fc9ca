"""Where a parameter of the model comes from: one tensor of the files, or several, put together.

Checkpoints are older than the modules that read them: experts are stored one by one and held as one tensor, parts have
had other names. transformers knows how each family's names go; here its renamings are followed, and what has to be put
together is, so that reading a slice of a parameter still reads only that slice of the files.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)

from ...errors import UnsupportedModel
from ..checkpoint.files import Checkpoint


class Source(Protocol):
    """A tensor that can be read in part."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """Elements [start, stop) along `dim`; the whole of it by default."""
        ...


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of the files."""

    checkpoint: Checkpoint
    name: str

    @property
    def shape(self) -> tuple[int, ...]:
        return self.checkpoint.shape(self.name)

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        return self.checkpoint.read(self.name, dim, start, stop)


@dataclass(frozen=True, slots=True)
class Stacked:
    """Tensors of one shape, one after the other along a new first dimension: experts."""

    parts: tuple[Source, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.parts), *self.parts[0].shape

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim == 0:
            some = [part.read() for part in self.parts[start:stop]]
            return torch.stack(some) if some else torch.empty(0, *self.parts[0].shape)
        return torch.stack([part.read(dim - 1, start, stop) for part in self.parts])


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

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim != self.joined_dim:
            return torch.cat([part.read(dim, start, stop) for part in self.parts], dim=self.joined_dim)
        stop = self.shape[dim] if stop is None else stop
        pieces, at = [], 0
        for part in self.parts:
            length = part.shape[dim]
            if start < at + length and at < stop:
                pieces.append(part.read(dim, max(start - at, 0), min(stop - at, length)))
            at += length
        return torch.cat(pieces, dim=dim) if pieces else self.parts[0].read(dim, 0, 0)


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

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        if dim == 1:  # inputs: cut in whole groups, the rest afterwards
            stop = self.shape[1] if stop is None else stop
            first, last = start // 32, -(-stop // 32)
            whole = _from_mxfp4(self.blocks.read(2, first, last), self.scales.read(2, first, last))
            return whole[:, start - first * 32 : stop - first * 32]
        stored = {0: 0, 2: 1}[dim]
        return _from_mxfp4(self.blocks.read(stored, start, stop), self.scales.read(stored, start, stop))


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def _from_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """[experts, outputs, groups, 16] and [experts, outputs, groups] -> [experts, groups * 32, outputs], bfloat16."""
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)], dtype=torch.bfloat16)
    low, high = values[(blocks & 15).int()], values[(blocks >> 4).int()]
    pairs = torch.stack((low, high), dim=-1).flatten(-2)
    exponents = (scales.int() - 127).unsqueeze(-1)
    return torch.ldexp(pairs, exponents).flatten(-2).transpose(1, 2)


def find_sources(module: PreTrainedModel, checkpoint: Checkpoint) -> dict[str, Source]:
    """Full name of a parameter or buffer of `module` -> where it comes from. Other tensors of the files are left out.

    Raises `UnsupportedModel` when transformers puts a family's tensors together in a way that is not known here.
    """
    transforms = get_model_conversion_mapping(module, add_legacy=False)
    renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    wanted = module.state_dict()
    sources: dict[str, Source] = {}
    pieces: dict[str, dict[str, list[str]]] = {}  # parameter -> pattern -> stored names
    # Each stored tensor is a parameter, or a piece of one, or of no use here.
    for stored in checkpoint.names():
        name, pattern = rename_source_key(stored, renamings, converters, module.base_model_prefix, wanted)
        name = _in_text_model(name, wanted)
        if name is None:
            continue
        if pattern is None:
            sources[name] = Stored(checkpoint, stored)
        else:
            pieces.setdefault(name, {}).setdefault(pattern, []).append(stored)
    # Pieces are put together in the order in which their pattern numbers them.
    for name, by_pattern in pieces.items():
        converter = next(c for c in converters if set(by_pattern) <= set(c.source_patterns))
        ordered = [sorted(by_pattern.get(pattern, ()), key=_numbers) for pattern in converter.source_patterns]
        sources[name] = _put_together(checkpoint, name, ordered, converter.operations)
    # What is still missing may be stored in four bits.
    for name in wanted:
        if (
            name not in sources
            and (blocks := sources.get(f"{name}_blocks"))
            and (scales := sources.get(f"{name}_scales"))
        ):
            sources[name] = Mxfp4(blocks, scales)
    return sources


def _put_together(
    checkpoint: Checkpoint, name: str, stored: Sequence[Sequence[str]], operations: Sequence[Any]
) -> Source:
    parts: list[list[Source]] = [[Stored(checkpoint, one) for one in names] for names in stored if names]
    for operation in operations:
        if isinstance(operation, MergeModulelist) and operation.dim == 0:
            parts = [[Stacked(tuple(group))] for group in parts]
        elif isinstance(operation, Concatenate):
            parts = [[Joined(tuple(part for group in parts for part in group), operation.dim)]]
        else:
            raise UnsupportedModel(
                f"{name} is made of other tensors by {operation}, which is not known here", field="model"
            )
    return parts[0][0]


def _in_text_model(name: str, wanted: dict[str, Any]) -> str | None:
    """A text model may be read from the checkpoint of a multimodal model around it."""
    plain = re.sub(r"_(blocks|scales)$", "", name)
    for prefix, instead in (("", ""), ("language_model.", ""), ("model.language_model.", "model.")):
        if plain.startswith(prefix) and instead + plain.removeprefix(prefix) in wanted:
            return instead + name.removeprefix(prefix)
    return None


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
