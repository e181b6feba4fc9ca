"""What a GGUF file says that it holds, read within bounds and checked against the file's length.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Lists of texts (vocabularies) are passed over.
A model may be split: each part is a GGUF file with some of the tensors, and the first says what the model is.
"""

import math
import mmap
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import CorruptCheckpoint
from ..json_file import clipped, quote

LETTERS = b"GGUF"
MAX_KEYS = 65_536
MAX_TENSORS = 262_144
MAX_ITEMS = 2**24  # of a list: the largest vocabularies have 2**18
MAX_NAME_BYTES = 65_535
MAX_DIMS = 8
MAX_PARTS = 1000
TEXT, LIST = 8, 9

SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
"""Type of a value -> how it is written."""


class BlockSize(NamedTuple):
    """A kind of numbers, and how many of them a block has in how many bytes."""

    name: str  # as the format has it
    numbers: int
    bytes: int


KINDS = {
    0: BlockSize("F32", 1, 4), 1: BlockSize("F16", 1, 2), 2: BlockSize("Q4_0", 32, 18), 3: BlockSize("Q4_1", 32, 20),
    6: BlockSize("Q5_0", 32, 22), 7: BlockSize("Q5_1", 32, 24), 8: BlockSize("Q8_0", 32, 34),
    9: BlockSize("Q8_1", 32, 36), 10: BlockSize("Q2_K", 256, 84), 11: BlockSize("Q3_K", 256, 110),
    12: BlockSize("Q4_K", 256, 144), 13: BlockSize("Q5_K", 256, 176), 14: BlockSize("Q6_K", 256, 210),
    15: BlockSize("Q8_K", 256, 292), 16: BlockSize("IQ2_XXS", 256, 66), 17: BlockSize("IQ2_XS", 256, 74),
    18: BlockSize("IQ3_XXS", 256, 98), 19: BlockSize("IQ1_S", 256, 50), 20: BlockSize("IQ4_NL", 32, 18),
    21: BlockSize("IQ3_S", 256, 110), 22: BlockSize("IQ2_S", 256, 82), 23: BlockSize("IQ4_XS", 256, 136),
    24: BlockSize("I8", 1, 1), 25: BlockSize("I16", 1, 2), 26: BlockSize("I32", 1, 4), 27: BlockSize("I64", 1, 8),
    28: BlockSize("F64", 1, 8), 29: BlockSize("IQ1_M", 256, 56), 30: BlockSize("BF16", 1, 2),
    34: BlockSize("TQ1_0", 256, 54), 35: BlockSize("TQ2_0", 256, 66), 39: BlockSize("MXFP4", 32, 17),
}  # fmt: skip
"""By the number that a tensor has for its kind."""


class GgufTensor(NamedTuple):
    """Where a tensor lies, in bytes from the beginning of the file."""

    name: str
    shape: tuple[int, ...]  # rows before columns, as torch has it
    kind: BlockSize
    start: int
    stop: int
    part: int = 0  # the number of the file, of a model that is split

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.kind.numbers * self.kind.bytes


class Split(NamedTuple):
    """Which part of a model a file is."""

    number: int  # from 0
    parts: int
    tensors: int  # of all parts


class GgufHeader(NamedTuple):
    """What is needed to find the weights. Tensors lie within the file, and no two of them at one place."""

    architecture: str
    tensors: Mapping[str, GgufTensor]
    split: Split | None = None  # None: it is whole


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


def begins_as_gguf(path: Path) -> bool:
    """Whether a file has the letters that every GGUF file begins with. A file that cannot be read has not."""
    try:
        with path.open("rb") as file:
            return file.read(len(LETTERS)) == LETTERS
    except OSError:
        return False


def read_gguf_headers(paths: Sequence[Path]) -> GgufHeader:
    """Of a model that lies in one file, or in these parts, which must be all, in their order. Raises
    `CorruptCheckpoint`."""
    headers = [read_gguf_header(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, (path, header) in enumerate(zip(paths, headers, strict=True)):
        split = header.split or Split(0, 1, len(header.tensors))
        if (split.number, split.parts) != (number, len(paths)):
            raise CorruptCheckpoint(
                f"{path} says that it is part {split.number + 1} of {split.parts}, and it is taken for part "
                f"{number + 1} of {len(paths)}. Give the first part, and have all of them beside it.",
                field="model",
            )
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise CorruptCheckpoint(
                    f"{path} and {paths[tensors[name].part]} both hold the tensor {quote(name)}", field="model"
                )
            tensors[name] = tensor._replace(part=number)
    said = headers[0].split
    if said is not None and said.tensors != len(tensors):
        raise CorruptCheckpoint(
            f"{paths[0]} says that its model has {said.tensors} tensors, and the {len(paths)} parts hold "
            f"{len(tensors)}: download them again",
            field="model",
        )
    return GgufHeader(headers[0].architecture, tensors, said)


class _Reader:
    """Goes through the header once, from the front."""

    def __init__(self, data: mmap.mmap, name: str):
        self._data, self._name, self._at = data, name, 0

    def header(self) -> GgufHeader:
        if self._data[:4] != LETTERS:
            raise self._fault("is no GGUF file: it does not begin with the letters GGUF")
        self._at = 4
        version = self._number("<I")
        if version not in (2, 3):
            raise self._fault(f"is of version {version} of the format; 2 and 3 can be read")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > MAX_TENSORS or num_keys > MAX_KEYS:
            raise self._fault(f"says that it holds {num_tensors} tensors and {num_keys} values; that cannot be")
        values = {self._text(): self._value(self._number("<I")) for _ in range(num_keys)}
        split = self._split(values)
        architecture = values.get("general.architecture", "" if split is not None and split.number else None)
        if not isinstance(architecture, str):
            raise self._fault("does not say of which architecture it is (general.architecture)")
        return GgufHeader(architecture, self._tensors(num_tensors, values), split)

    def _split(self, values: dict[str, Any]) -> Split | None:
        """None: the file is a whole model."""
        number, count, tensors = (values.get(f"split.{name}", 0) for name in ("no", "count", "tensors.count"))
        if not all(isinstance(each, int) for each in (number, count, tensors)) or count > MAX_PARTS:
            raise self._fault("says in a way that cannot be meant which part of a model it is (split.no, split.count)")
        if count < 2:
            return None
        if not 0 <= number < count:
            raise self._fault(f"says that it is part {number + 1} of {count}; that cannot be")
        return Split(number, count, tensors)

    def _tensors(self, count: int, values: dict[str, Any]) -> dict[str, GgufTensor]:
        """Raises `CorruptCheckpoint` if the file ends before they do, or if one lies upon another."""
        found = [self._tensor() for _ in range(count)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20:
            raise self._fault(f"aligns its tensors to {clipped(str(alignment))} bytes; that cannot be")
        start = -(-self._at // alignment) * alignment
        tensors = {each.name: each._replace(start=start + each.start, stop=start + each.stop) for each in found}
        if len(tensors) != count:
            raise self._fault("holds two tensors of one name")
        self._check_places(tensors)
        return tensors

    def _check_places(self, tensors: Mapping[str, GgufTensor]) -> None:
        needed = max((tensor.stop for tensor in tensors.values()), default=0)
        if needed > len(self._data):
            raise self._fault(
                f"has {len(self._data)} bytes and its tensors need {needed}; it was cut off: copy or download it again"
            )
        in_order = sorted(tensors.values(), key=lambda tensor: (tensor.start, tensor.stop))
        for before, after in pairwise(in_order):
            if after.start < before.stop:
                raise self._fault(
                    f"holds the tensor {quote(before.name)} of {before.kind.name} in bytes {before.start} to "
                    f"{before.stop}, and {quote(after.name)} begins at byte {after.start}: one of them is of another "
                    "kind or shape than it says"
                )

    def _tensor(self) -> GgufTensor:
        """Its place is counted from where the data begins, which is not known yet."""
        name, dims = self._text(), self._number("<I")
        if not 1 <= dims <= MAX_DIMS:
            raise self._fault(f"gives the tensor {quote(name)} {dims} dimensions; 1 to {MAX_DIMS} can be")
        if not name.isprintable():
            raise self._fault(f"holds a tensor whose name, {quote(name)}, cannot be printed")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        if kind not in KINDS:
            raise self._fault(f"holds the tensor {quote(name)} in a form of number {kind}, which is not known")
        block = KINDS[kind]
        if shape[-1] % block.numbers:
            raise self._fault(
                f"holds the tensor {quote(name)} of shape {clipped(str(list(shape)))} as {block.name}, whose blocks "
                f"have {block.numbers} columns"
            )
        size = math.prod(shape) // block.numbers * block.bytes
        return GgufTensor(name, shape, block, offset, offset + size)

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
