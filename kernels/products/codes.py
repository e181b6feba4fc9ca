"""Weights in fewer bits as values: codes, scales and zero points, as files have them but for how they lie.

Every format comes to this. A number is (code - zero) * scale, computed in float32 and rounded once; a scale is for a
row and a run of columns. `cpu.py` multiplies with codes as they are; anything else expands them first, by
`Codes.numbers`.

Suffixes: E experts, or none    N rows (outputs)    K columns (inputs)    G groups of columns
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor


class CodeKind(IntEnum):
    """What a code stands for. `decode.h` counts them alike."""

    INT4 = 0  # from 0 to 15
    E2M1 = 1
    INT8 = 2
    E4M3 = 3
    UINT8 = 4

    @property
    def bits(self) -> int:
        return 4 if self in (CodeKind.INT4, CodeKind.E2M1) else 8


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its lowest three bits. The fourth is the sign."""


@dataclass(frozen=True, slots=True, eq=False)
class Codes:
    """A weight [N,K], or [E,N,K] of several experts."""

    kind: CodeKind
    codes: Tensor  # uint8 [..,N,K], or [..,N,K/2] with the even column's four bits below
    scale: Tensor  # [..,N,G], in the kind of numbers of the file; uint8 is a power of two
    columns: int  # that share a scale; even
    zero: Tensor | None = None  # uint8 [..,N,G]
    middle: int = 0  # is subtracted from all codes, too
    factor: Tensor | None = None  # float32 [..,N]: what scales are multiplied with
    divides: bool = False  # or divided by
    offset: int = 0  # columns of the first group that lie before the first; even
    order: Tensor | None = None  # int64 [K]: which of the weight's columns the first, second, .. one here is

    @property
    def shape(self) -> tuple[int, ...]:
        *before, columns = self.codes.shape
        return *before, columns * 8 // self.kind.bits

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in (self.codes, self.scale, self.zero, self.factor, self.order) if t is not None)

    def numbers(self, dtype: torch.dtype) -> Tensor:
        """[..,N,K]: of its columns as the weight has them."""
        numbers = (self.centred() * self.whole_scale()[..., self._groups()]).to(dtype)
        if self.order is None:
            return numbers
        return torch.empty_like(numbers).index_copy_(-1, self.order, numbers)

    def whole_scale(self) -> Tensor:
        """With its factor, float32 [..,N,G]."""
        scale = floats(self.scale)
        if self.factor is None:
            return scale
        factor = self.factor.unsqueeze(-1)
        return scale / factor if self.divides else scale * factor

    def centred(self) -> Tensor:
        """Codes less their zero points, float32 [..,N,K], in the order in which they lie."""
        codes = self._opened()
        if self.zero is not None:
            codes = codes - self.zero.float()[..., self._groups()]
        return codes - self.middle if self.middle else codes

    def _groups(self) -> Tensor:
        """Of each column, int64 [K]."""
        return (torch.arange(self.shape[-1], device=self.codes.device) + self.offset) // self.columns

    def _opened(self) -> Tensor:
        """float32 [..,N,K]"""
        if self.kind is CodeKind.E2M1:
            return table_of_pairs().to(self.codes.device)[self.codes.int()].flatten(-2)
        if self.kind is CodeKind.INT4:
            return torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2).float()
        if self.kind is CodeKind.INT8:
            return self.codes.view(torch.int8).float()
        return floats(self.codes.view(torch.float8_e4m3fn)) if self.kind is CodeKind.E4M3 else self.codes.float()

    def cut(self, dim: int, start: int, stop: int) -> "Codes | None":
        """Rows (0) or columns (1) from `start` to `stop`. None: two columns that lie in one byte would be parted."""
        if dim == 0:
            return self.some_rows(start, stop)
        if (start, stop) == (0, self.shape[-1]):
            return self
        place = self.offset + start
        if self.order is not None or start % 2 or stop % 2 or self.columns % 2:
            return None
        first, last = place // self.columns, -(-(self.offset + stop) // self.columns)
        each = 8 // self.kind.bits
        return replace(
            self,
            codes=self.codes[..., start // each : stop // each].contiguous(),
            scale=_as_bytes(self.scale)[..., first:last].contiguous().view(self.scale.dtype),
            zero=None if self.zero is None else self.zero[..., first:last].contiguous(),
            offset=place - first * self.columns,
        )

    def runs(self, numbers: int) -> Iterator["Codes"]:
        """Some rows after the other, of at most so many numbers each, but of one row at least."""
        rows = self.shape[-2]
        step = max(1, numbers // max(1, self.shape[-1]))
        return (self.some_rows(start, min(start + step, rows)) for start in range(0, rows, step))

    def some_rows(self, start: int, stop: int) -> "Codes":
        return replace(
            self,
            codes=self.codes[..., start:stop, :],
            scale=self.scale[..., start:stop, :],
            zero=None if self.zero is None else self.zero[..., start:stop, :],
            factor=None if self.factor is None else self.factor[..., start:stop],
        )

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
        if self.kind.bits == 8:
            return replace(self, codes=self.codes[:, order], order=order)
        opened = torch.stack((self.codes & 15, self.codes >> 4), dim=-1).flatten(-2)[:, order]
        return replace(self, codes=opened[:, 0::2] | (opened[:, 1::2] << 4), order=order)

    def _with_each(self, change: Callable[[Tensor], Tensor]) -> "Codes":
        """With every tensor that has rows changed."""
        return replace(
            self,
            codes=change(self.codes),
            scale=change(self.scale),
            zero=None if self.zero is None else change(self.zero),
            factor=None if self.factor is None else change(self.factor),
        )


def side_by_side(parts: Sequence[Codes]) -> Codes | None:
    """One below the other, along the rows. None: they are not packed alike."""
    first = parts[0]
    if len(parts) == 1:
        return first
    alike = {(p.kind, p.columns, p.middle, p.offset, p.scale.shape[-1], p.zero is None) for p in parts}
    if len(alike) > 1 or any(part.order is not None for part in parts):
        return None
    same_scales = len({(part.scale.dtype, part.factor is None, part.divides) for part in parts}) == 1
    if not same_scales:
        parts = [replace(part, scale=part.whole_scale(), factor=None, divides=False) for part in parts]
        first = parts[0]
    joined = replace(first, codes=torch.cat([p.codes for p in parts], -2), scale=_cat([p.scale for p in parts], -2))
    if first.zero is not None:
        joined = replace(joined, zero=torch.cat([p.zero for p in parts if p.zero is not None], -2))
    if first.factor is not None:
        joined = replace(joined, factor=torch.cat([p.factor for p in parts if p.factor is not None], -1))
    return joined


def stacked(parts: Sequence[Codes]) -> Codes | None:
    """One for each expert. None: they are not packed alike."""
    alike = {
        (
            p.kind,
            p.columns,
            p.middle,
            p.offset,
            p.scale.shape,
            p.scale.dtype,
            p.zero is None,
            p.factor is None,
            p.divides,
        )
        for p in parts
    }
    if len(alike) != 1 or any(part.order is not None for part in parts):
        return None
    first = parts[0]
    whole = replace(first, codes=torch.stack([p.codes for p in parts]), scale=_stack([p.scale for p in parts]))
    if first.zero is not None:
        whole = replace(whole, zero=torch.stack([p.zero for p in parts if p.zero is not None]))
    if first.factor is not None:
        whole = replace(whole, factor=torch.stack([p.factor for p in parts if p.factor is not None]))
    return whole


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    """torch joins no numbers of 8 bits."""
    return torch.cat([_as_bytes(t) for t in tensors], dim).view(tensors[0].dtype)


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    return torch.stack([_as_bytes(t) for t in tensors]).view(tensors[0].dtype)


def _as_bytes(tensor: Tensor) -> Tensor:
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
def table_of_pairs() -> Tensor:
    """Byte -> its two numbers of e2m1, the low one first. [256, 2]"""
    values = torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)])
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
