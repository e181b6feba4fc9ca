"""A checkpoint directory: is it one, and where in its files does a tensor lie? Free of torch until a tensor is read.

Weights are in the folder's safetensors files. A folder that was made for a GGUF file says so, and where that file is.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...errors import ModelNotFound
from .config_schema import check_config, check_tensors
from .gguf.tensors import gguf_of
from .json_file import MIB, clipped, corrupt, parse_object, quote, read_bytes, read_object, size_of
from .packed.description import read_description
from .packed.formats import Packed, PackedTensors, find_packed
from .packed.notes import find_notes
from .safetensors_header import StoredTensor, read_headers
from .side_files import check_side_files
from .spellings import in_usual_words

if TYPE_CHECKING:
    from torch import Tensor

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

MAX_INDEX_BYTES = 24 * MIB
MAX_FILES = 4096
MAX_FILE_NAME_CHARS = 255


class Checkpoint:
    """The safetensors files of one directory, or the GGUF file that it was made for. Reading a slice reads only that
    slice."""

    def __init__(self, model_dir: str | Path):
        """Faults of config, index and headers are found here, within bounds of time and memory.

        Raises `ModelNotFound`, `CorruptCheckpoint` or `UnsupportedModel`; touches headers only, no weights.
        """
        self.path = Path(model_dir)
        _check_folder(self.path)
        self.config = read_config(self.path / CONFIG)
        self.description = read_description(self.path, self.config)
        check_side_files(self.path)
        self.gguf = gguf_of(self.path)
        """Where the weights are; None: in safetensors files. Its tensors have the names of the model's parameters."""
        if self.gguf is None:
            self._tensors = _find_tensors(self.path)
            self.packed = find_packed(self._tensors, self.description, self.path)
        else:
            self._tensors = {name: self.gguf.stored(name) for name in self.gguf.manifest.made}
            self.packed = PackedTensors({}, frozenset())
        shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        whole = {name: weight.shape for name, weight in self.packed.weights.items() if isinstance(weight, Packed)}
        check_tensors(self.config, shapes | whole, self.path)
        said = () if self.gguf is None else self.gguf.notes()
        self.notes = (*find_notes(self._tensors, self.description, self.packed), *said)
        self._open_files: dict[str, Any] = {}

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def stored(self, name: str) -> StoredTensor:
        return self._tensors[name]

    def file_of(self, name: str) -> Path:
        return self.path / self._tensors[name].file if self.gguf is None else self.gguf.path

    def shape(self, name: str) -> tuple[int, ...]:
        return self._tensors[name].shape

    def read(
        self, name: str, dim: int = 0, start: int = 0, stop: int | None = None, expert: int | None = None
    ) -> "Tensor":
        """Elements [start, stop) of the tensor along `dim`; the whole of it by default.

        expert: of a tensor whose first dimension is experts, the one that is meant; its dimensions are counted without
        """
        index: tuple[Any, ...] = (slice(None),) * dim + (slice(start, stop),)
        part = self._slice(name)
        if expert is not None:
            index = (expert, *index) if len(self.shape(name)) > 1 else (expert,)
        return part[index] if self.shape(name) else part[...]

    def _slice(self, name: str) -> Any:
        file = self._tensors[name].file
        if file not in self._open_files:  # opening reads the whole header
            self._open_files[file] = _open(self.path / file)
        return self._open_files[file].get_slice(name)


def read_config(file: Path) -> dict[str, Any]:
    """A config.json within its bounds (`config_schema.py`), in transformers' words (`spellings.py`).

    Raises `CorruptCheckpoint` or `ModelNotFound`."""
    config = read_object(file)
    check_config(config, str(file))
    return in_usual_words(config)


def _check_folder(path: Path) -> None:
    try:
        is_folder, holds_config = path.is_dir(), os.path.lexists(path / CONFIG)
    except (OSError, ValueError) as error:  # a name that is too long, or a folder that may not be read
        raise ModelNotFound(f"{clipped(str(path))} cannot be read: {clipped(str(error))}", field="model") from None
    if not is_folder:
        raise ModelNotFound(
            f"there is no model directory at {path}. Give the path of a local Hugging Face checkpoint: a folder with "
            "config.json and safetensors files.",
            field="model",
        )
    if not holds_config:
        raise ModelNotFound(f"{path} has no config.json, so it is no Hugging Face checkpoint", field="model")


def _find_tensors(path: Path) -> dict[str, StoredTensor]:
    """Name -> where it lies. Of a name that two files hold, the index says which is meant."""
    file_of = _read_index(path / INDEX) if size_of(path / INDEX) is not None else {}
    files = sorted(set(file_of.values())) or [SINGLE]
    _check_present(path, files)
    tensors: dict[str, StoredTensor] = {}
    for tensor in read_headers(path, files):
        if tensor.name not in tensors or file_of.get(tensor.name) == tensor.file:
            tensors[tensor.name] = tensor
    lacking = [name for name, file in file_of.items() if name not in tensors or tensors[name].file != file]
    if lacking:
        raise corrupt(
            f"{path / INDEX} names {len(lacking)} tensors that its files do not hold, the first of them "
            f"{quote(lacking[0])}. The files are incomplete, or of another model."
        )
    return tensors


def _read_index(index: Path) -> dict[str, str]:
    """Tensor -> its file, by a name within the folder. Where a link of that name leads is the owner's business:
    download caches are made of them."""
    weight_map = parse_object(read_bytes(index, MAX_INDEX_BYTES), str(index)).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise corrupt(f"{index}: weight_map must be an object of tensors and their files, not {quote(weight_map)}")
    files = weight_map.values()
    if odd := [file for file in files if not isinstance(file, str)]:
        raise corrupt(f"{index}: weight_map must name files, not {quote(odd[0])}")
    names = set(files)
    if len(names) > MAX_FILES:
        raise corrupt(f"{index}: weight_map names {len(names)} files; the limit is {MAX_FILES}")
    for name in names:
        _check_file_name(index, name)
    return weight_map


def _check_file_name(index: Path, name: str) -> None:
    if not name or len(name) > MAX_FILE_NAME_CHARS or not name.isprintable():
        raise corrupt(f"{index}: weight_map must name files, not {quote(name)}")
    if Path(name).is_absolute() or ".." in Path(name).parts or "\\" in name:
        raise corrupt(f"{index}: weight_map names a file outside of the folder, {quote(name)}")


def _check_present(path: Path, files: Sequence[str]) -> None:
    missing = [file for file in files if size_of(path / file) is None]
    if not missing:
        return
    present = sorted(p.name for p in path.iterdir() if p.suffix in (".safetensors", ".bin", ".pt", ".gguf"))
    raise ModelNotFound(
        f"{path} lacks the weights {_some(missing)}; it holds {_some(present) or 'no weight files'}. Only "
        "safetensors are read.",
        field="model",
    )


def _some(names: Sequence[str], most: int = 4) -> str:
    shown = ", ".join(clipped(name) for name in names[:most])
    return shown if len(names) <= most else f"{shown} and {len(names) - most} more"


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise corrupt(f"{file} is not a readable safetensors file: {error}. Copy or download it again.") from error
