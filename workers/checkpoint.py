"""A checkpoint directory: is it one, and where in its files does a tensor lie? Free of torch until a tensor is read."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

UNPACKED_METHODS = ("mxfp4",)
"""Quantised weights that are unpacked on loading."""


class Checkpoint:
    """The safetensors files of one directory. Reading a slice reads only that slice."""

    def __init__(self, model_dir: str | Path):
        """Raises `ModelNotFound`, `CorruptCheckpoint` or `UnsupportedModel`; touches headers only, no weights."""
        self.path = Path(model_dir)
        self.config = _read_config(self.path)
        self._file_of = dict(self._locate())
        self._open_files: dict[Path, Any] = {}

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._slice(name).get_shape())

    def read(self, name: str, dim: int = 0, start: int = 0, stop: int | None = None) -> "Tensor":
        """Elements [start, stop) of the tensor along `dim`; the whole of it by default."""
        index = (slice(None),) * dim + (slice(start, stop),)
        part = self._slice(name)
        return part[index] if part.get_shape() else part[...]

    def _slice(self, name: str) -> Any:
        file = self._file_of[name]
        if file not in self._open_files:  # opening reads the whole header
            self._open_files[file] = self._open(file, "pt")
        return self._open_files[file].get_slice(name)

    def _locate(self) -> Iterator[tuple[str, Path]]:
        for file in self._files():
            handle = self._open(file, "np")
            for name in handle.keys():  # noqa: SIM118  a handle is no dict
                yield name, file

    def _files(self) -> list[Path]:
        index = self.path / INDEX
        if index.is_file():
            names = sorted(set(_read_json(index).get("weight_map", {}).values()))
            files = [self.path / name for name in names]
        else:
            files = [self.path / SINGLE]
        missing = [file.name for file in files if not file.is_file()]
        if missing or not files:
            present = sorted(
                p.name for p in self.path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf")
            )
            raise ModelNotFound(
                f"{self.path} lacks the weights {', '.join(missing) or SINGLE}; it holds "
                f"{', '.join(present) or 'no weight files'}. Only safetensors are read.",
                field="model",
            )
        return files

    def _open(self, file: Path, framework: str) -> Any:
        from safetensors import SafetensorError, safe_open

        try:
            return safe_open(file, framework=framework)
        except (SafetensorError, OSError) as error:
            raise CorruptCheckpoint(
                f"{file} ({file.stat().st_size} bytes) is not a readable safetensors file: {error}. "
                "Copy or download it again.",
                field="model",
            ) from error


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ModelNotFound(
            f"there is no model directory at {path}. Give the path of a local Hugging Face checkpoint: a folder with "
            "config.json and safetensors files.",
            field="model",
        )
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} has no config.json, so it is no Hugging Face checkpoint", field="model")
    config = _read_json(path / "config.json")
    quantization = config.get("quantization_config")
    method = quantization.get("quant_method", "unknown") if isinstance(quantization, dict) else None
    if quantization is not None and method not in UNPACKED_METHODS:
        raise UnsupportedModel(
            f"{path} holds quantised weights ({method}); only {', '.join(UNPACKED_METHODS)} can be read. Use a "
            "float32, bfloat16 or float16 checkpoint of the model.",
            field="model",
        )
    return config


def _read_json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise CorruptCheckpoint(f"{file} is not readable JSON: {error}", field="model") from error
    if not isinstance(value, dict):
        raise CorruptCheckpoint(f"{file} holds no JSON object", field="model")
    return value
