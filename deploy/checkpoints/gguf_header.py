"""What a GGUF file says that it holds, read within bounds and checked against the file's length.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Lists of texts (vocabularies) are passed over.
"""

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import CorruptCheckpoint
from ...workers.checkpoint.json_file import clipped

MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_ITEMS = 2**24  # of a list: the largest vocabularies have 2**18
MAX_NAME_BYTES = 65_535
MAX_DIMS = 8
TEXT, LIST = 8, 9

SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Type of a value -> how it is written."""

BLOCKS = {
    0: (1, 4), 1: (1, 2), 2: (32, 18), 3: (32, 20), 6: (32, 22), 7: (32, 24), 8: (32, 34), 9: (32, 36),
    10: (256, 84), 11: (256, 110), 12: (256, 144), 13: (256, 176), 14: (256, 210), 15: (256, 292),
    16: (256, 66), 17: (256, 74), 18: (256, 98), 19: (256, 50), 20: (32, 18), 21: (256, 110), 22: (256, 82),
    23: (256, 136), 24: (1, 1), 25: (1, 2), 26: (1, 4), 27: (1, 8), 28: (1, 8), 29: (256, 56), 30: (1, 2),
    34: (256, 54), 35: (256, 66), 39: (32, 17),
}  # fmt: skip
"""Type of a tensor -> (numbers, bytes) of a block."""


class GgufHeader(NamedTuple):
    """The facts that decide whether a file can be converted."""

    architecture: str
    num_tensors: int
    num_parameters: int


def read_gguf_header(path: Path) -> GgufHeader:
    """Raises `CorruptCheckpoint` for what is no GGUF file, or not the whole of one."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data, str(path)).header()
    except (struct.error, IndexError):
        raise CorruptCheckpoint(
            f"{path} ends within its header, after {path.stat().st_size} bytes; copy or download it again",
            field="model",
        ) from None
    except (OSError, ValueError) as error:
        raise CorruptCheckpoint(f"{path} cannot be read: {clipped(str(error))}", field="model") from None


class _Reader:
    """Goes through the header once, from the front."""

    def __init__(self, data: mmap.mmap, name: str):
        self._data, self._name, self._at = data, name, 0

    def header(self) -> GgufHeader:
        if self._data[:4] != b"GGUF":
            raise self._fault("is no GGUF file: it does not begin with the letters GGUF")
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise self._fault(f"is of version {version} of the format; 2 and 3 can be read")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self._fault(f"says that it holds {num_tensors} tensors and {num_keys} values; that cannot be")
        values = {self._text(): self._value(self._number("<I")) for _ in range(num_keys)}
        architecture = values.get("general.architecture")
        if not isinstance(architecture, str):
            raise self._fault("does not say of which architecture it is (general.architecture)")
        return GgufHeader(architecture, num_tensors, self._check_tensors(num_tensors, values))

    def _check_tensors(self, count: int, values: dict[str, Any]) -> int:
        """How many numbers the tensors have. Raises `CorruptCheckpoint` if the file ends before they do."""
        sizes = [self._tensor() for _ in range(count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise self._fault(f"aligns its tensors to {clipped(str(alignment))} bytes; that cannot be")
        start = -(-self._at // alignment) * alignment
        needed = start + max((offset + size for _, offset, size in sizes), default=0)
        if needed > len(self._data):
            raise self._fault(
                f"has {len(self._data)} bytes and its tensors need {needed}; it was cut off: copy or download it again"
            )
        return sum(numbers for numbers, _, _ in sizes)

    def _tensor(self) -> tuple[int, int, int]:
        """(numbers, where its bytes begin, how many they are)"""
        name, dims = self._text(), self._number("<I")
        if dims > MAX_DIMS:
            raise self._fault(f"gives a tensor {dims} dimensions; at most {MAX_DIMS} can be")
        numbers = math.prod(self._number("<Q") for _ in range(dims))
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in BLOCKS:
            raise self._fault(f"holds the tensor {clipped(name)} in a form of number {kind}, which is not known")
        block_numbers, block_bytes = BLOCKS[kind]
        return numbers, offset, numbers // block_numbers * block_bytes

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == LIST:
            return self._list()
        if kind not in SCALARS:
            raise self._fault(f"holds a value of type {kind}, which is not known")
        return self._number(SCALARS[kind])

    def _list(self) -> None:
        kind, count = self._number("<I"), self._number("<Q")
        if count > MAX_ITEMS or kind not in (*SCALARS, TEXT):
            raise self._fault(f"holds a list of {count} values of type {kind}; that cannot be")
        if kind in SCALARS:
            self._skip(count * struct.calcsize(SCALARS[kind]))
            return
        for _ in range(count):
            self._skip(self._number("<Q"))

    def _text(self) -> str:
        length = self._number("<Q")
        start = self._at
        self._skip(length)
        return self._data[start : min(self._at, start + MAX_NAME_BYTES)].decode(errors="replace")

    def _skip(self, length: int) -> None:
        self._at += length
        if self._at > len(self._data):
            raise IndexError

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._data, self._at)
        self._at += struct.calcsize(form)
        return value

    def _fault(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self._name} {what}", field="model")
