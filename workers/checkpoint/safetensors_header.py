"""What a safetensors file says that it holds: checked against its length, before anything else reads it.

Format: 8 bytes, little endian, say how long the header is; then the header, JSON: a name -> dtype, shape, and where in
the rest of the file the bytes are. Source: https://github.com/huggingface/safetensors, and what that library refuses.
"""

import math
from collections.abc import Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CorruptCheckpoint
from .json_file import MIB, clipped, corrupt, parse_object, quote, size_of

MAX_HEADERS_BYTES = 24 * MIB
"""Of all files together: 190,000 tensors. The largest models that are around have 100,000."""

MAX_HEADER_ITEMS = 2**21

MAX_NAME_CHARS = 1024
MAX_DIMS = 8
METADATA = "__metadata__"

BITS_OF = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "C64": 64,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
    "F6_E2M3": 6, "F6_E3M2": 6, "F4": 4,
}  # fmt: skip


class StoredTensor(NamedTuple):
    """Where a tensor lies: in which file of the folder, and where in it, in bytes after the header."""

    name: str
    file: str
    shape: tuple[int, ...]
    start: int
    stop: int
    dtype: str  # as safetensors calls it


def read_headers(folder: Path, files: Iterable[str]) -> Iterator[StoredTensor]:
    """Every tensor of the files. Raises `CorruptCheckpoint` for a file that cannot be what its header says."""
    left = MAX_HEADERS_BYTES
    for name in files:
        file = folder / name
        size = size_of(file) or 0
        try:
            data = _header_bytes(file, size, left)
            yield from _tensors(name, data, size - 8 - len(data))
        except (CorruptCheckpoint, OSError) as error:
            why = error.message if isinstance(error, CorruptCheckpoint) else error.strerror
            raise corrupt(
                f"{file} ({size} bytes) is not a readable safetensors file: {why}. Copy or download it again."
            ) from None
        left -= len(data)


def _tensors(file: str, data: bytes, data_bytes: int) -> list[StoredTensor]:
    header = parse_object(data, "its header", MAX_HEADER_ITEMS)
    _check_metadata(header.pop(METADATA, {}))
    tensors = [_tensor(file, name, said) for name, said in header.items()]
    _check_layout(tensors, data_bytes)
    return tensors


def _header_bytes(file: Path, size: int, limit: int) -> bytes:
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 + length or length < 2:
            raise corrupt(f"its header is said to have {length} bytes")
        if length > limit:
            raise corrupt(f"its header has {length} bytes; the limit for all files is {MAX_HEADERS_BYTES}")
        return opened.read(length)


def _check_metadata(said: Any) -> None:
    if not isinstance(said, dict) or not all(isinstance(value, str) for value in said.values()):
        raise corrupt(f"{METADATA} must be an object of texts")


def _tensor(file: str, name: str, said: Any) -> StoredTensor:
    """Raises `CorruptCheckpoint` if its bytes are not as many as its shape takes."""
    if len(name) > MAX_NAME_CHARS:
        raise corrupt(f"the name of a tensor, {quote(name)}, has {len(name)} characters; the limit is {MAX_NAME_CHARS}")
    if not name.isprintable():
        raise corrupt(f"the name of a tensor, {quote(name)}, has characters that cannot be printed")
    try:
        dtype, shape, (start, stop) = said["dtype"], said["shape"], said["data_offsets"]
        bits = BITS_OF[dtype]
        told = type(shape) is list and len(shape) <= MAX_DIMS
        told = told and all([type(n) is int and n >= 0 for n in (*shape, start, stop)])
    except (KeyError, TypeError, ValueError):
        dtype, bits, shape, start, stop, told = "", 0, [], 0, 0, False
    if not told:
        raise corrupt(
            f"tensor {quote(name)} must have a dtype that is known, a shape of at most {MAX_DIMS} whole numbers, and "
            "two data_offsets"
        )
    if math.prod(shape) * bits != (stop - start) * 8:
        raise corrupt(f"tensor {quote(name)} of shape {clipped(str(shape))} cannot be bytes {start} to {stop}")
    return StoredTensor(name, file, tuple(shape), start, stop, dtype)


def _check_layout(tensors: list[StoredTensor], data_bytes: int) -> None:
    """One after the other, from the end of the header to the end of the file."""
    end = 0
    for tensor in sorted(tensors, key=attrgetter("start", "stop")):
        if tensor.start != end:
            raise corrupt(f"tensor {quote(tensor.name)} begins at byte {tensor.start}, the one before ends at {end}")
        end = tensor.stop
    if end != data_bytes:
        raise corrupt(f"its tensors end at byte {end}, its data at {data_bytes}")
