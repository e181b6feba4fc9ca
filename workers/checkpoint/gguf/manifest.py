"""Which tensors of a GGUF file make a parameter of the model, and what has to be done to them: kept in the folder that
a file gets in the cache, beside config and tokenizer (`deploy/checkpoints/gguf.py` makes it).

    "model.layers.0.self_attn.q_proj.weight": {"tensors": ["blk.0.attn_q.weight"], "rows": 0}
    "model.norm.weight":                      {"tensors": ["output_norm.weight"], "added": -1.0}

`rows` and `columns` are numbers of entries in `orders`, each of which says which row (column) of the file is the first,
the second, .. of the parameter.
"""

import hashlib
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import CorruptCheckpoint, ModelNotFound
from ..config_schema import is_number, is_whole
from ..json_file import MIB, corrupt, parse_object, quote, read_bytes, size_of
from .header import MAX_DIMS, MAX_PARTS, MAX_TENSORS

MANIFEST = "gguf.json"
VERSION = 1
MAX_MANIFEST_BYTES = 64 * MIB
MAX_MANIFEST_ITEMS = 2**22
MOST_JOINED = 16
PIECE_BYTES = 2**20

Order = tuple[int, ...]
"""Which row (or column) of the file is the first, the second, .. of a parameter."""


@dataclass(frozen=True, slots=True)
class Made:
    """How a parameter is made. Numbers are changed in float32, in the order of these fields."""

    tensors: tuple[str, ...]  # of the file; several lie side by side
    joined_dim: int = 0
    rows: Order | None = None  # None: as they are. Of one tensor
    columns: Order | None = None
    is_log: bool = False  # the logarithm of the negative is taken
    added: float = 0.0
    unit_dim: int | None = None  # where the parameter has a dimension of 1 that the file has not

    @property
    def is_only_moved(self) -> bool:
        """Whether each number of the file is one of the parameter, at some place."""
        return not self.is_log and not self.added


class GgufFile(NamedTuple):
    """A file as it was when it was looked at."""

    path: Path
    size: int  # bytes
    mtime_ns: int

    @classmethod
    def at(cls, path: Path) -> "GgufFile":
        state = path.stat()
        return cls(path, state.st_size, state.st_mtime_ns)

    def is_as_it_was(self) -> bool:
        """Whether it is there, with its size and date. Nothing is read."""
        try:
            return GgufFile.at(self.path) == self
        except OSError:
            return False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What `gguf.json` holds."""

    files: tuple[GgufFile, ...]  # one, or the parts of a model that is split
    sha256: str  # of the files, one after another
    made: Mapping[str, Made]  # parameter -> how
    unused: tuple[str, ...] = ()  # tensors that no parameter needs

    @property
    def paths(self) -> tuple[Path, ...]:
        return tuple(file.path for file in self.files)

    def is_as_it_was(self) -> bool:
        """Whether the files are there, with their sizes and dates. Nothing is read."""
        return all(file.is_as_it_was() for file in self.files)

    def check_files(self) -> None:
        """Raises `ModelNotFound` or `CorruptCheckpoint` if a file is no longer what it was. Files of the same sizes and
        another time are read as a whole, to see by their sum whether they are."""
        for path, size, _ in self.files:
            try:
                found = os.stat(path)
            except OSError as error:
                raise ModelNotFound(
                    f"the weights are in {path}, which cannot be read: {error.strerror}. Give the GGUF file "
                    "again, where it is now.",
                    field="model",
                ) from None
            if found.st_size != size:
                raise self._changed(path)
        if not self.is_as_it_was() and sha256_of(*self.paths) != self.sha256:
            raise self._changed(self.paths[0])

    def _changed(self, path: Path) -> CorruptCheckpoint:
        sizes = " and ".join(str(file.size) for file in self.files)
        return CorruptCheckpoint(
            f"{path} has changed since it was looked at: it had {sizes} bytes with the SHA-256 {self.sha256}. Start "
            "again with the file as it is now.",
            field="model",
        )


def sha256_of(*files: Path) -> str:
    """Of several, one after another. Raises `CorruptCheckpoint` for a file that cannot be read."""
    digest = hashlib.sha256()
    try:
        for piece in pieces_of(*files):
            digest.update(piece)
    except OSError as error:
        raise CorruptCheckpoint(f"{files[0]} cannot be read: {error.strerror}", field="model") from None
    return digest.hexdigest()


def pieces_of(*files: Path) -> Iterator[bytes]:
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                yield piece


def read_manifest(folder: Path) -> Manifest | None:
    """None: it is no folder of a GGUF file. Raises `CorruptCheckpoint`."""
    path = folder / MANIFEST
    if size_of(path) is None:
        return None
    said = parse_object(read_bytes(path, MAX_MANIFEST_BYTES), str(path), MAX_MANIFEST_ITEMS)
    try:
        return _manifest(folder, said)
    except (KeyError, TypeError, ValueError) as error:
        raise corrupt(f"{path} cannot be used: {quote(str(error))}. Delete the folder, and it is made again.") from None


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """A reader never sees half of it."""
    orders: list[Order] = []

    def number_of(order: Order) -> int:
        if order not in orders:
            orders.append(order)
        return orders.index(order)

    said = {
        "version": VERSION,
        "files": [_said_of(folder, file) for file in manifest.files],
        "sha256": manifest.sha256,
        "unused": manifest.unused,
        "made": {name: dict(_fields(made, number_of)) for name, made in manifest.made.items()},
        "orders": orders,
    }
    making = folder / f".{MANIFEST}"
    making.write_text(json.dumps(said))
    making.replace(folder / MANIFEST)


def _said_of(folder: Path, file: GgufFile) -> dict[str, Any]:
    place = file.path.relative_to(folder) if file.path.is_relative_to(folder) else file.path
    return {"file": str(place), "size": file.size, "mtime_ns": file.mtime_ns}


def _fields(made: Made, number_of: Any) -> Iterator[tuple[str, Any]]:
    """Those that say something."""
    yield "tensors", made.tensors
    for name, value in (("rows", made.rows), ("columns", made.columns)):
        if value is not None:
            yield name, number_of(value)
    if made.unit_dim is not None:
        yield "unit_dim", made.unit_dim
    yield from ((name, value) for name in ("joined_dim", "is_log", "added") if (value := getattr(made, name)))


def _manifest(folder: Path, said: Mapping[str, Any]) -> Manifest:
    if said["version"] != VERSION:
        raise ValueError(f"it is of version {said['version']}, and {VERSION} is read")
    orders = [_order(each) for each in said["orders"]]
    made = {str(name): _made(each, orders) for name, each in said["made"].items()}
    files = tuple(_file(folder, each) for each in said.get("files") or [said])
    sum_ = said["sha256"]
    if not isinstance(sum_, str) or len(made) > MAX_TENSORS or len(files) > MAX_PARTS:
        raise ValueError("files, sha256 or made is of another kind")
    return Manifest(files, sum_, made, tuple(map(str, said["unused"])))


def _file(folder: Path, said: Mapping[str, Any]) -> GgufFile:
    size, mtime_ns = said["size"], said["mtime_ns"]
    if not (is_whole(size) and is_whole(mtime_ns)):
        raise ValueError("size or mtime_ns is of another kind")
    return GgufFile(folder / said["file"], size, mtime_ns)


def _order(said: Any) -> Order:
    order = tuple(said)
    if not all(map(is_whole, order)) or sorted(order) != list(range(len(order))):
        raise ValueError("an order must have each number once")
    return order


def _made(said: Mapping[str, Any], orders: list[Order]) -> Made:
    tensors = tuple(map(str, said["tensors"]))
    dims = said.get("joined_dim", 0), said.get("unit_dim") or 0
    added = said.get("added", 0.0)
    if not 1 <= len(tensors) <= MOST_JOINED or not all(is_whole(dim) and 0 <= dim < MAX_DIMS for dim in dims):
        raise ValueError(f"{tensors} cannot be joined")
    if not is_number(added):
        raise ValueError("added must be a number")
    places = (said.get("rows"), said.get("columns"))
    rows, columns = (None if place is None else orders[place] for place in places)
    return Made(tensors, dims[0], rows, columns, said.get("is_log") is True, float(added), said.get("unit_dim"))
