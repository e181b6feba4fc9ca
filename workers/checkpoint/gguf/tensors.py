"""The tensors of a GGUF file as the parameters of a model: their shapes, and their bytes out of the mapped file."""

import math
import mmap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..json_file import corrupt, quote
from ..safetensors_header import StoredTensor
from .header import GgufTensor, read_gguf_headers
from .manifest import Made, Manifest, read_manifest

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}
"""Kinds that are plain numbers, and torch's names for them. Others are blocks."""

ROPE_FACTORS = "rope_freqs.weight"


class GgufWeights:
    """The file of a folder, or its files, and what of it makes each parameter. Reads what it is asked for, and keeps
    nothing."""

    def __init__(self, manifest: Manifest):
        """Raises `ModelNotFound` or `CorruptCheckpoint`: the file is not what it was, or not what the manifest says."""
        self.manifest = manifest
        self.path = manifest.paths[0]
        manifest.check_files()
        self.tensors: Mapping[str, GgufTensor] = read_gguf_headers(manifest.paths).tensors
        self._mapped: dict[int, mmap.mmap] = {}
        for name, made in manifest.made.items():
            for tensor in made.tensors:
                if tensor not in self.tensors:
                    raise corrupt(f"{self.path} lacks the tensor {quote(tensor)}, of which {quote(name)} is made")
                self._check_kind(self.tensors[tensor])
            self._check_orders(name, made)

    def notes(self) -> list[str]:
        """What people should know."""
        if ROPE_FACTORS not in self.manifest.unused:
            return []
        return [
            f"{self.path} holds {ROPE_FACTORS}, by which it stretches positions; transformers does not read it, "
            "and long texts may be answered worse than by the model's own checkpoint."
        ]

    def made(self, parameter: str) -> Made:
        return self.manifest.made[parameter]

    def parts(self, parameter: str) -> list[GgufTensor]:
        """The tensors that it is made of."""
        return [self.tensors[name] for name in self.made(parameter).tensors]

    def shape(self, parameter: str) -> tuple[int, ...]:
        """Of a parameter, by the shapes of its tensors."""
        return shape_of(self.made(parameter), self.parts(parameter))

    def stored(self, parameter: str) -> StoredTensor:
        """As one tensor of the file, as large as all that make it."""
        parts = self.parts(parameter)
        place = parts[0].start, parts[0].start + sum(part.stop - part.start for part in parts)
        return StoredTensor(parameter, self.path.name, self.shape(parameter), *place, parts[0].kind.name)

    def entries(self, tensor: GgufTensor, expert: int | None = None) -> "Tensor":
        """uint8 [entries, bytes of one] along the first dimension, a view of the file.

        expert: of several along the first dimension the one that is meant, whose entries are along the second
        """
        import torch

        count = tensor.shape[0] if expert is None else tensor.shape[0] * tensor.shape[1]
        size = tensor.stop - tensor.start
        data = torch.frombuffer(self._map(tensor.part), dtype=torch.uint8, offset=tensor.start, count=size)
        entries = data.view(count, -1)
        return entries if expert is None else entries[expert * tensor.shape[1] : (expert + 1) * tensor.shape[1]]

    def _map(self, part: int) -> mmap.mmap:
        """A file. Pages are read when they are looked at, and given back when memory is short. Nothing is written."""
        if part not in self._mapped:
            with self.manifest.paths[part].open("rb") as file:
                self._mapped[part] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        return self._mapped[part]

    def _check_kind(self, tensor: GgufTensor) -> None:
        if not math.prod(tensor.shape):
            raise corrupt(f"{self.path}: the tensor {quote(tensor.name)} of shape {list(tensor.shape)} holds nothing")
        is_whole = tensor.kind.numbers == 1 and tensor.kind.name not in PLAIN
        if is_whole or (tensor.kind.name not in PLAIN and len(tensor.shape) == 1):
            raise corrupt(
                f"{self.path}: the tensor {quote(tensor.name)} of shape {list(tensor.shape)} holds {tensor.kind.name}, "
                "and no parameter of a model is stored so"
            )

    def _check_orders(self, name: str, made: Made) -> None:
        for dim, order in ((0, made.rows), (-1, made.columns)):
            if order is not None and any(len(order) != part.shape[dim] for part in self.parts(name)):
                raise corrupt(f"{self.path}: {quote(made.tensors[0])} has other rows or columns than it had")


def shape_of(made: Made, parts: Sequence[GgufTensor]) -> tuple[int, ...]:
    """Of a parameter. parts: the tensors that make it"""
    shape = list(parts[0].shape)
    if len(parts) > 1:
        shape[made.joined_dim] = sum(part.shape[made.joined_dim] for part in parts)
    if made.unit_dim is not None:
        shape.insert(made.unit_dim, 1)
    return tuple(shape)


def gguf_of(folder: Path) -> GgufWeights | None:
    """None: the weights of the folder are in safetensors files."""
    manifest = read_manifest(folder)
    return None if manifest is None else GgufWeights(manifest)
