"""Weights in fewer bits as values: codes, scales and zero points, as files have them but for how they lie.

Every format comes to this. A number is (code - zero) * scale - least, computed in float32 and rounded once; a scale is
for a row and a run of columns. `cpu.py` multiplies with codes as they are; anything else expands them first, by
`Codes.numbers`.

Suffixes: E experts, or none    N rows (outputs)    K columns (inputs)    G groups of columns
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor
from torch.nn import functional as F


class CodeKind(IntEnum):
    """What a code stands for. `decode.h` counts them alike."""

    INT4 = 0  # from 0 to 15
    E2M1 = 1
    INT8 = 2
    E4M3 = 3
    UINT8 = 4
    INT5 = 5  # from 0 to 31: four bits as INT4 has them, and one in a plane of its own
    INT6 = 6  # from 0 to 63
    INT2 = 7  # from 0 to 3
    INT3 = 8  # from 0 to 7: two bits as INT2 has them, and one in a plane of its own
    IQ4 = 9  # one of `IQ4_VALUES`

    @property
    def low_bits(self) -> int:
        """As many of each code are in `Codes.codes`."""
        if self in (CodeKind.INT2, CodeKind.INT3):
            return 2
        return 8 if self in (CodeKind.INT8, CodeKind.E4M3, CodeKind.UINT8) else 4

    @property
    def high_bits(self) -> int:
        """And as many in `Codes.high`."""
        return {CodeKind.INT3: 1, CodeKind.INT5: 1, CodeKind.INT6: 2}.get(self, 0)

    @property
    def bits(self) -> int:
        return self.low_bits + self.high_bits


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its lowest three bits. The fourth is the sign."""

IQ4_VALUES = -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113
"""Of GGUF's IQ4_NL and IQ4_XS, by four bits: closer together where weights are many."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight [N,K], or [E,N,K] of several experts."""

    kind: CodeKind
    codes: Tensor  # uint8 [..,N,K], or [..,N,K/2] or [..,N,K/4] with the first column's bits lowest
    scale: Tensor  # [..,N,G], in the kind of numbers of the file; uint8 is a power of two, int8 a whole number
    columns: int  # that share a scale; even
    zero: Tensor | None = None  # uint8 [..,N,G]
    middle: int = 0  # is subtracted from all codes, too
    factor: Tensor | None = None  # float32 [..,N]: what scales are multiplied with
    divides: bool = False  # or divided by
    offset: int = 0  # columns of the first group that lie before the first; even
    order: Tensor | None = None  # int64 [K]: which of the weight's columns the first, second, .. one here is
    high: Tensor | None = None  # uint8 [..,N,K/8] or [..,N,K/4]: bits above those in `codes`
    least: Tensor | None = None  # [..,N,G], as `scale`: is subtracted from (code - zero) * scale
    block_scale: Tensor | None = None  # float16 [..,N,B]: what the scales of a block of groups are multiplied with
    block_least: Tensor | None = None  # float16 [..,N,B]: and the leasts
    block_groups: int = 1  # groups of a block
    block_offset: int = 0  # groups of the first block that lie before the first
    rounds_inputs: bool = False  # whether those whose format it is multiply it with inputs rounded to 8 bits

    @property
    def shape(self) -> tuple[int, ...]:
        *before, columns = self.codes.shape
        return *before, columns * 8 // self.kind.low_bits

    @property
    def nbytes(self) -> int:
        tensors = [getattr(self, name) for name in TENSORS]
        return sum(t.nbytes for t in (*tensors, self.order) if t is not None)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[..,N,K]: of its columns as the weight has them."""
        numbers = self.centred() * self._for_columns(self.whole_scale())
        if self.least is not None:
            numbers = numbers - self._for_columns(self.whole_least())
        numbers = numbers.to(dtype)
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(-1, self.order, numbers)

    def whole_scale(self) -> Tensor:
        """With its factor, float32 [..,N,G]."""
        scale = self._times_blocks(floats(self.scale), self.block_scale)
        if self.factor is None:
            return scale
        factor = self.factor.unsqueeze(-1)
        return scale / factor if self.divides else scale * factor

    def whole_least(self) -> Tensor:
        """With its blocks' factor, float32 [..,N,G]."""
        assert self.least is not None, "its groups have no least number"
        return self._times_blocks(floats(self.least), self.block_least)

    def _times_blocks(self, values: Tensor, block: Tensor | None) -> Tensor:
        """values: float32 [..,N,G]"""
        if block is None:
            return values
        of_group = (torch.arange(values.shape[-1], device=values.device) + self.block_offset) // self.block_groups
        return values * block.float()[..., of_group]

    def centred(self) -> Tensor:
        """Codes less their zero points, float32 [..,N,K], in the order in which they lie."""
        codes = self._opened()
        if self.zero is not None:
            codes = codes - self._for_columns(self.zero.float())
        return codes - self.middle if self.middle else codes

    def _for_columns(self, values: Tensor) -> Tensor:
        """[..,N,G] -> [..,N,K], or with a last dimension of 1: that of its group for each column."""
        if values.shape[-1] == 1:
            return values
        repeated = values.unsqueeze(-1).expand(*values.shape, self.columns).flatten(-2)
        return repeated[..., self.offset : self.offset + self.shape[-1]]

    def _opened(self) -> Tensor:
        """float32 [..,N,K]"""
        if self.kind in (CodeKind.E2M1, CodeKind.IQ4):
            return _table_of_pairs(self.kind).to(self.codes.device)[self.codes.int()].flatten(-2)
        if self.kind.low_bits < 8:
            return self._whole_codes().float()
        if self.kind is CodeKind.INT8:
            return self.codes.view(torch.int8).float()
        return floats(self.codes.view(torch.float8_e4m3fn)) if self.kind is CodeKind.E4M3 else self.codes.float()

    def _whole_codes(self) -> Tensor:
        """uint8 [..,N,K], of whole numbers in fewer than 8 bits."""
        low = _out_of_bytes(self.codes, self.kind.low_bits)
        if self.high is None:
            return low
        high = _out_of_bytes(self.high, self.kind.high_bits)
        return low | (high[..., : low.shape[-1]] << self.kind.low_bits)

    def cut(self, dim: int, start: int, stop: int) -> "Codes | None":
        """Rows (0) or columns (1) from `start` to `stop`. None: columns that lie in one byte would be parted."""
        if dim == 0:
            return self.some_rows(start, stop)
        if (start, stop) == (0, self.shape[-1]):
            return self
        place = self.offset + start
        if self.order is not None or start % 2 or stop % 2 or self.columns % 2:
            return None
        each, high_each = 8 // self.kind.low_bits, 8 // (self.kind.high_bits or 8)
        most = max(each, high_each)
        if start % most or (stop % most and stop != self.shape[-1]):
            return None
        first, last = place // self.columns, -(-(self.offset + stop) // self.columns)
        before = self.block_offset + first
        first_block, last_block = before // self.block_groups, -(-(self.block_offset + last) // self.block_groups)
        along = {
            "codes": slice(start // each, stop // each),
            "high": slice(start // high_each, -(-stop // high_each)),
            **dict.fromkeys(("scale", "zero", "least"), slice(first, last)),
            **dict.fromkeys(("block_scale", "block_least"), slice(first_block, last_block)),
        }
        tensors = {name: _columns(getattr(self, name), where) for name, where in along.items()}
        offsets = {"offset": place - first * self.columns, "block_offset": before - first_block * self.block_groups}
        return replace(self, **tensors, **offsets)

    def runs(self, numbers: int) -> Iterator["Codes"]:
        """Some rows after the other, of at most so many numbers each, but of one row at least."""
        rows = self.shape[-2]
        step = max(1, numbers // max(1, self.shape[-1]))
        return (self.some_rows(start, min(start + step, rows)) for start in range(0, rows, step))

    def some_rows(self, start: int, stop: int) -> "Codes":
        rows = replace(self, factor=None)._with_each(lambda tensor: tensor[..., start:stop, :])
        return replace(rows, factor=None if self.factor is None else self.factor[..., start:stop])

    def rows_at(self, numbers: Tensor) -> "Codes":
        """Rows by their numbers, int64 [R], each as often as it is there."""
        rows = replace(self, factor=None)._with_each(lambda t: as_bytes(t)[..., numbers, :].view(t.dtype))
        return replace(rows, factor=None if self.factor is None else self.factor[..., numbers])

    def as_group(self) -> "Codes":
        """[1,N,K] of [N,K]"""
        return self._with_each(lambda tensor: tensor.unsqueeze(0))

    def moved(self, device: torch.device) -> "Codes":
        order = None if self.order is None else self.order.to(device)
        return replace(self._with_each(lambda tensor: tensor.to(device)), order=order)

    def of_expert(self, number: int) -> "Codes":
        return self._with_each(lambda tensor: tensor[number])

    def sorted_columns(self, order: Tensor) -> "Codes":
        """Codes of another order of columns than the weight's."""
        assert self.least is None and self.block_scale is None, "no format has these and an order"
        if self.kind.low_bits == 8:
            return replace(self, codes=self.codes[:, order], order=order)
        codes, high = in_fewer_bits(self.kind, self._whole_codes()[:, order])
        return replace(self, codes=codes, high=high, order=order)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """With every tensor that has rows changed."""
        found = {name: getattr(self, name) for name in TENSORS}
        return replace(self, **{name: change(tensor) for name, tensor in found.items() if tensor is not None})

    def without_numbers(self) -> "Codes":
        """What is left when they lie elsewhere: the same kinds of tensors, empty. None of their memory is held."""
        return replace(self._with_each(lambda tensor: tensor.new_empty(tensor.dim() * (0,))), factor=None)

    def likeness(self) -> tuple[object, ...]:
        """What must be the same of codes that are joined, but for scales of other kinds of numbers."""
        blocks = self.block_groups, self.block_offset
        there = tuple(getattr(self, name) is None for name in ("zero", "least", "block_least"))
        return self.kind, self.columns, self.middle, self.offset, self.scale.shape[-1], *blocks, *there


TENSORS = "codes", "high", "scale", "zero", "least", "block_scale", "block_least", "factor"
"""Of `Codes`, those that have rows."""


def in_fewer_bits(kind: CodeKind, codes: Tensor) -> tuple[Tensor, Tensor | None]:
    """Codes as `Codes` has them: `codes` and `high`.

    codes: uint8 [..,N,K], of a kind of fewer than 8 bits
    """
    low = _into_bytes(codes & ((1 << kind.low_bits) - 1), kind.low_bits)
    return low, _into_bytes(codes >> kind.low_bits, kind.high_bits) if kind.high_bits else None


def _into_bytes(codes: Tensor, bits: int) -> Tensor:
    """Those of neighbours share a byte, the first one's bits lowest. Zeros fill the last one up."""
    each = 8 // bits
    runs = F.pad(codes, (0, -codes.shape[-1] % each)).unflatten(-1, (-1, each))
    packed = runs[..., 0].clone()
    for number in range(1, each):
        packed |= runs[..., number] << (number * bits)
    return packed


def _out_of_bytes(packed: Tensor, bits: int) -> Tensor:
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(-1) >> shifts & ((1 << bits) - 1)).flatten(-2)


def side_by_side(parts: Sequence[Codes]) -> Codes | None:
    """One below the other, along the rows. None: they are not packed alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if len({part.likeness() for part in parts}) > 1 or any(part.order is not None for part in parts):
        return None
    if len({_kinds_of_scales(part) for part in parts}) > 1:
        if first.least is not None:
            return None
        whole = {"factor": None, "block_scale": None, "divides": False}
        parts = [replace(part, scale=part.whole_scale(), **whole) for part in parts]
    return _joined(parts, lambda tensors, name: _cat(tensors, -1 if name == "factor" else -2))


def every_other_row(codes: Codes, first: int) -> Codes | None:
    """Rows `first`, `first` + 2 and so on. None: rows share scales."""
    rows = codes.codes.shape[-2]
    tensors = {name: getattr(codes, name) for name in TENSORS}
    there = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    dims = {name: -1 if name == "factor" else -2 for name in there}
    if any(tensor.shape[dims[name]] != rows for name, tensor in there.items()):
        return None
    places = torch.arange(first, rows, 2, device=codes.codes.device)
    return replace(codes, **{name: _taken(tensor, dims[name], places) for name, tensor in there.items()})


def _taken(tensor: Tensor, dim: int, places: Tensor) -> Tensor:
    return as_bytes(tensor).index_select(dim, places).view(tensor.dtype)


def stacked(parts: Sequence[Codes]) -> Codes | None:
    """One for each expert. None: they are not packed alike."""
    alike = {(*part.likeness(), *_kinds_of_scales(part), part.scale.shape) for part in parts}
    if len(alike) != 1 or any(part.order is not None for part in parts):
        return None
    return _joined(parts, lambda tensors, name: _stack(tensors))


def _joined(parts: Sequence[Codes], join: Callable[[list[Tensor], str], Tensor]) -> Codes:
    """Every tensor that has rows, joined."""
    found = {name: [getattr(part, name) for part in parts] for name in TENSORS}
    return replace(parts[0], **{name: join(each, name) for name, each in found.items() if each[0] is not None})


def _kinds_of_scales(codes: Codes) -> tuple[object, ...]:
    least = None if codes.least is None else codes.least.dtype
    return codes.scale.dtype, least, codes.block_scale is None, codes.factor is None, codes.divides


def _columns(tensor: Tensor | None, where: slice) -> Tensor | None:
    """Some of its columns."""
    return None if tensor is None else as_bytes(tensor)[..., where].contiguous().view(tensor.dtype)


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch joins no numbers of 8 bits."""
    return torch.cat([as_bytes(t) for t in tensors], dim).view(tensors[0].dtype)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([as_bytes(t) for t in tensors]).view(tensors[0].dtype)


def as_bytes(tensor: Tensor) -> Tensor:
    """torch joins, pads and repeats no numbers of 8 bits, but their bytes."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


# -- numbers of few bits -------------------------------------------------------------------------------------------


def floats(stored: Tensor) -> Tensor:
    """float32, whatever kind of float is stored; bytes are powers of two (e8m0)."""
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _table_of_powers().to(stored.device)[stored.view(torch.uint8).int()]
    if stored.dtype == torch.float8_e4m3fn:
        return _table_of_e4m3().to(stored.device)[stored.view(torch.uint8).int()]
    return stored.float()


@functools.cache
def _table_of_pairs(kind: CodeKind) -> Tensor:
    """Byte -> its two numbers, the low one first. float32 [256, 2]"""
    signed = [*FP4_VALUES, *(-v for v in FP4_VALUES)]
    values = torch.tensor(signed if kind is CodeKind.E2M1 else IQ4_VALUES, dtype=torch.float32)
    byte = torch.arange(256)
    return torch.stack((values[byte & 15], values[byte >> 4]), dim=1)


@functools.cache
def _table_of_e4m3() -> Tensor:
    return torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()


@functools.cache
def _table_of_powers() -> Tensor:
    """2^(byte - 127); 255 is no number."""
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127).float()
    powers[255] = torch.nan
    return powers
