"""Tensors of a GGUF file as sources: any slice of one, as numbers or in as few bits as it is stored.

`checkpoint/gguf/` says which tensors make a parameter. Of a slice of columns whole blocks are read, and cut afterwards.
"""

import importlib
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...errors import CorruptCheckpoint
from ...kernels.products.codes import Codes, side_by_side
from ..checkpoint.gguf.header import GgufTensor
from ..checkpoint.gguf.manifest import Made
from ..checkpoint.gguf.tensors import PLAIN, GgufWeights
from .gguf_blocks import BLOCK_FORMATS, codes_of_blocks
from .unpacked import CHECKED_NUMBERS, NUMBERS_AT_ONCE, cannot_be
from .weight_map import Joined, Source, Stacked


def gguf_sources(weights: GgufWeights, dtype: torch.dtype) -> dict[str, Source]:
    """Name of a parameter -> where it comes from. dtype: of the numbers"""
    return {name: _source(weights, name, made, dtype) for name, made in weights.manifest.made.items()}


def _source(weights: GgufWeights, name: str, made: Made, dtype: torch.dtype) -> Source:
    parts: list[Source] = []
    for tensor in weights.parts(name):
        # Experts lie on top of each other: each of them is a weight like any other.
        if len(tensor.shape) == 3 and tensor.kind.name not in PLAIN:
            experts = (FromGguf(weights, tensor, made, dtype, expert) for expert in range(tensor.shape[0]))
            parts.append(Stacked(tuple(experts)))
        else:
            parts.append(FromGguf(weights, tensor, made, dtype))
    return parts[0] if len(parts) == 1 else Joined(tuple(parts), made.joined_dim)


@dataclass(frozen=True, slots=True)
class FromGguf:
    """A tensor as a `Source`: its numbers are computed in float32, and rounded once."""

    weights: GgufWeights
    tensor: GgufTensor
    made: Made
    dtype: torch.dtype
    expert: int | None = None
    """Of several along the first dimension, the one that is meant."""

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.tensor.shape if self.expert is None else self.tensor.shape[1:])
        if self.made.unit_dim is not None:
            shape.insert(self.made.unit_dim, 1)
        return tuple(shape)

    @property
    def origin(self) -> str:
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"{self.weights.path}: tensor {self.tensor.name}{expert} ({self.tensor.kind.name})"

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.shape[dim] if stop is None else stop
        made, inner = self.made, self._shape_in_file[1:]
        # Along the first dimension only these are read. Along another all are, some of them at a time.
        is_first = dim == 0 and made.unit_dim != 0
        entries = self._entries(start, stop) if is_first else self._entries(0, self._shape_in_file[0])
        pieces = [numbers.to(self.dtype).flatten() for numbers in self._numbers(entries)]
        found = torch.cat(pieces) if pieces else torch.empty(0, dtype=self.dtype)
        found = found.view(len(entries), *inner)
        if made.columns is not None:
            found = found[..., torch.tensor(made.columns)]
        if made.unit_dim is not None:
            found = found.unsqueeze(made.unit_dim)
        return found if is_first else found.narrow(dim, start, stop - start)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        """The same slice in as few bits as it is stored. None: it has no blocks, or cannot be cut there."""
        stop = self.shape[dim] if stop is None else stop
        made, block = self.made, BLOCK_FORMATS.get(self.tensor.kind.name)
        is_moved = made.is_only_moved and made.unit_dim is None
        if block is None or not is_moved or len(self.shape) != 2 or start >= stop:
            return None
        if dim == 0:
            codes = self._codes(self._entries(start, stop))
            # Columns stay where they are, and say which of the parameter's they are.
            return codes if made.columns is None else replace(codes, order=torch.tensor(made.columns).argsort())
        if made.columns is not None:
            return None
        first, last = start // block.columns, -(-stop // block.columns)
        rows = self._entries(0, self.shape[0])[:, first * block.bytes : last * block.bytes]
        before = first * block.columns
        return self._codes(rows).cut(1, start - before, stop - before)

    @property
    def _shape_in_file(self) -> tuple[int, ...]:
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]

    def _entries(self, start: int, stop: int) -> Tensor:
        """uint8 [entries, bytes of one] along the first dimension, in the parameter's order. Without an order they are
        a view of the file."""
        entries, order = self.weights.entries(self.tensor, self.expert), self.made.rows
        return entries[start:stop] if order is None else entries[torch.tensor(order[start:stop], dtype=torch.int64)]

    def _codes(self, rows: Tensor) -> Codes:
        """Made of some rows after the other: on their way to codes they take eight bits a number."""
        parts: list[Codes] = []
        for run in self._runs(rows):
            codes = codes_of_blocks(self.tensor.kind.name, run)
            if not parts:
                self._check(codes.numbers(torch.float32))
            parts.append(codes)
        joined = side_by_side(parts)
        assert joined is not None, "rows of a tensor are packed alike"
        return joined

    def _numbers(self, entries: Tensor) -> Iterator[Tensor]:
        """float32, of some entries after the other."""
        made = self.made
        for place, run in enumerate(self._runs(entries)):
            numbers = self._floats(run)
            if place == 0:
                self._check(numbers)
            if made.is_log:
                numbers = torch.log(-numbers)
            yield numbers + made.added if made.added else numbers

    def _floats(self, entries: Tensor) -> Tensor:
        """float32. Kinds of blocks that few files have are left to the gguf library."""
        kind = self.tensor.kind.name
        if kind in PLAIN:
            return entries.view(getattr(torch, PLAIN[kind])).float()
        rows = entries.view(-1, self.tensor.row_bytes)
        if kind in BLOCK_FORMATS:
            return codes_of_blocks(kind, rows).numbers(torch.float32)
        gguf: Any = importlib.import_module("gguf")  # the library: to a type checker, `import gguf` is our folder
        return torch.from_numpy(gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind]))

    def _runs(self, entries: Tensor) -> Iterator[Tensor]:
        """Of about so many numbers each."""
        numbers = math.prod(self._shape_in_file[1:])
        step = max(1, NUMBERS_AT_ONCE // max(1, numbers))
        return (entries[start : start + step].contiguous() for start in range(0, len(entries), step))

    def _check(self, numbers: Tensor) -> None:
        """By some of its rows, whether it can be a weight. Raises `CorruptCheckpoint`."""
        if numbers.numel() >= CHECKED_NUMBERS and (why_not := cannot_be(numbers)) is not None:
            raise CorruptCheckpoint(f"{self.origin}: {why_not}", field="model")
