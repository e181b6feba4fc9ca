"""Random weights of real shapes, made where they are used: a folder holds config.json alone, and no file is read.

The loader of the product takes what it reads from a `Checkpoint`. Here another one stands in its place, with the same
verbs, whose tensors are made when they are read: all else about loading is the product's own.
"""

import contextlib
import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from intarsia.workers.checkpoint.files import CONFIG, read_config
from intarsia.workers.checkpoint.packed.formats import PackedTensors
from intarsia.workers.checkpoint.safetensors_header import StoredTensor
from intarsia.workers.models import load

from .device import Bench

SPREAD = 0.02


class RandomCheckpoint:
    """In place of `workers/checkpoint/files.py`'s. A tensor's numbers depend on nothing but its name."""

    description = None
    gguf = None
    notes = ()
    packed = PackedTensors({}, frozenset())

    def __init__(self, model_dir: str | Path, bench: Bench):
        self.path = Path(model_dir)
        self.config: dict[str, Any] = read_config(self.path / CONFIG)
        self._bench = bench
        config = AutoConfig.from_pretrained(self.path, local_files_only=True)
        self._dtype: Any = config.dtype
        with torch.device("meta"):
            module = AutoModelForCausalLM.from_config(config)
        self._shapes = {name: tuple(empty.shape) for name, empty in module.named_parameters()}

    def names(self) -> Iterable[str]:
        return self._shapes.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._shapes[name]

    def stored(self, name: str) -> StoredTensor:
        return StoredTensor(name, CONFIG, self._shapes[name], 0, 0, "BF16")

    def file_of(self, name: str) -> Path:
        return self.path / CONFIG

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        """On the device itself. Norms are about 1, so that numbers stay in bounds from layer to layer."""
        self._bench.seed(name)
        whole = self._bench.random(*self._shapes[name], dtype=self._dtype).mul_(SPREAD)
        if name.endswith("norm.weight"):
            whole += 1
        return whole[(slice(None),) * dim + (slice(start, stop),)]


@contextlib.contextmanager
def random_weights(bench: Bench) -> Iterator[None]:
    """Within this, models are loaded with such weights."""
    real = load.Checkpoint
    load.Checkpoint = lambda model_dir: RandomCheckpoint(model_dir, bench)  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        load.Checkpoint = real


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    """A folder that looks like a checkpoint's."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).write_text(json.dumps(config))
    return folder
