"""The numbers of packed weights: any slice of one, from the slices of its tensors that are needed for it.

`checkpoint/packed/formats.py` says which tensors make a weight and how they lie along it. A slice that begins or ends
within a group is read from the group's beginning to its end, and cut when its numbers are there.

Sources: OCP Microscaling Formats (MX) 1.0; OCP 8-bit Floating Point (OFP8) 1.0; compressed-tensors; AutoGPTQ, AutoAWQ.

Suffixes: N rows (outputs)    K columns (inputs)    G groups of columns
"""

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ...errors import CorruptCheckpoint
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed.formats import WORDS, Along, Packed, Part

FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Of e2m1, by its lowest three bits. The fourth is the sign."""

NUMBERS_AT_ONCE = 2**21
"""Of a weight, while they are float32: what a tensor takes beside the numbers that are kept."""

LEAST_RMS, MOST_RMS = 1e-7, 32.0
"""Root mean square of a weight's numbers. Real ones are between 0.002 and 2; a scale that was inverted is far away."""

MOST_MEAN_CODE = 0.6
"""Of codes of 4 bits less their zero points. A zero point that is misread by one makes it 1. Codes of 8 bits spread
so far that their mean says nothing."""

FEWEST_WORDS = 4
"""Of zero points, so that it is no chance that all are the same."""

CHECKED_NUMBERS = 4096
"""From so many on a mean says something."""


@dataclass(frozen=True, slots=True)
class Unpacked:
    """A packed weight as a `Source`: its numbers are computed in float32, and rounded once."""

    checkpoint: Checkpoint
    packed: Packed
    dtype: torch.dtype
    expert: int | None = None
    """Of a weight with several, the one that is meant."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.packed.shape

    @property
    def origin(self) -> str:
        names = ", ".join(part.name for part in self.packed.parts.values())
        file = self.checkpoint.file_of(self.packed.parts["codes"].name)
        expert = "" if self.expert is None else f", expert {self.expert}"
        return f"{file}: weight {self.packed.name}{expert} ({self.packed.format}, made of {names})"

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        length = self.shape[dim]
        stop = length if stop is None else stop
        if start >= stop:
            shape = list(self.shape)
            shape[dim] = 0
            return torch.empty(shape, dtype=self.dtype)
        # Rounded outward to whole groups, words and blocks.
        step = _entries_meet(self.packed, dim)
        first, last = start // step * step, min(-(-stop // step) * step, length)
        parts = {role: self._read(role, part, dim, first, last) for role, part in self.packed.parts.items()}
        self._check_groups(parts)
        self._check_zero_points(parts)
        rows, columns = (last - first, self.shape[1]) if dim == 0 else (self.shape[0], last - first)
        out = torch.empty(rows, columns, dtype=self.dtype)
        seen = _Seen(self)
        for top, bottom in _row_runs(self.packed, rows, columns):
            numbers, codes = _numbers(self.packed, parts, top, bottom, columns)
            seen.add(numbers, codes)
            out[top:bottom] = numbers
        seen.check()
        return out.narrow(dim, start - first, stop - start)

    def _read(self, role: str, part: Part, dim: int, first: int, last: int) -> Tensor:
        """[rows, columns] of a part, 1 where it has none of them."""
        along = _along(self.packed, role, dim)
        expert = self.expert if part.name in self.packed.stacked else None
        if along is None:
            found = self.checkpoint.read(part.name, expert=expert)
        else:
            found = self.checkpoint.read(part.name, along.dim, first // along.per, -(-last // along.per), expert)
        if part.rows is not None and part.columns is not None and part.columns.dim < part.rows.dim:
            found = found.transpose(part.rows.dim, part.columns.dim)
        rows = 1 if part.rows is None else found.shape[part.rows.dim if found.dim() != 2 else 0]
        return found.reshape(rows, -1)

    def _check_groups(self, parts: Mapping[str, Tensor]) -> None:
        """Raises `CorruptCheckpoint`."""
        if "group_of" not in parts or not parts["group_of"].numel():
            return
        group_of, groups = parts["group_of"], parts["scale"].shape[1]
        if int(group_of.min()) < 0 or int(group_of.max()) >= groups:
            raise self.corrupt(f"{self.packed.parts['group_of'].name} names groups that are not among its {groups}")

    def _check_zero_points(self, parts: Mapping[str, Tensor]) -> None:
        """Where all zero points are the same, they are the middle of the range: one beside it was misread.

        Raises `CorruptCheckpoint`.
        """
        if self.packed.format not in WORDS or "zero" not in parts or parts["zero"].numel() < FEWEST_WORDS:
            return
        words = parts["zero"]
        if bool((words != words.flatten()[0]).any()):
            return
        meant = _words(words[:1, :1], 0, self.packed.bits, self.packed.order) + self.packed.zero
        middle = 1 << (self.packed.bits - 1)
        if bool((meant == meant[0]).all()) and abs(int(meant[0]) - middle) == 1:
            raise self.corrupt(
                f"all its zero points would be {int(meant[0])}, beside the middle of the range, {middle}: they are "
                "stored in another way than the config says (checkpoint_format)"
            )

    def corrupt(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.origin}: {what}", field="model")


def _along(packed: Packed, role: str, dim: int) -> Along | None:
    """Where columns say which group they are of, all groups are needed for any of them."""
    part = packed.parts[role]
    if dim == 1 and role in ("scale", "zero") and "group_of" in packed.parts:
        return None
    return part.rows if dim == 0 else part.columns


def _entries_meet(packed: Packed, dim: int) -> int:
    """The smallest number of rows or columns at whose multiples an entry of every part begins."""
    steps = (along.per for role in packed.parts if (along := _along(packed, role, dim)) is not None)
    return min(math.lcm(*steps), max(1, packed.shape[dim]))


def _row_runs(packed: Packed, rows: int, columns: int) -> Iterator[tuple[int, int]]:
    step = _entries_meet(packed, 0)
    run = max(1, NUMBERS_AT_ONCE // max(1, columns) // step) * step
    return ((top, min(top + run, rows)) for top in range(0, rows, run))


# -- numbers -----------------------------------------------------------------------------------------------------------


def _numbers(
    packed: Packed, parts: Mapping[str, Tensor], top: int, bottom: int, columns: int
) -> tuple[Tensor, Tensor | None]:
    """Rows [top, bottom) of what was read, [rows, columns] float32; and, if zero points were subtracted, the codes."""
    here = {role: _rows_of(packed.parts[role], part, top, bottom) for role, part in parts.items()}
    group_of = here.get("group_of")
    rows = bottom - top

    def spread(role: str, values: Tensor) -> Tensor:
        """One number for each of the weight, or one where that does for all."""
        if group_of is not None and values.shape[1] > 1:
            return values[:, group_of[0].long()]
        per_rows, per_columns = (
            1 if each is None else each.per for each in (packed.parts[role].rows, packed.parts[role].columns)
        )
        if role == "zero":
            per_rows = 1  # its words are open already
        if per_rows > 1:
            values = values.repeat_interleave(per_rows, dim=0)[:rows]
        if per_columns > 1 and values.shape[1] > 1:
            values = values.repeat_interleave(per_columns, dim=1)[:, :columns]
        return values

    codes = _codes(packed, here["codes"], packed.parts["codes"])[:rows, :columns]
    scale = _floats(here["scale"])
    if "divisor" in here:
        scale = scale / here["divisor"].float()
    if "factor" in here:
        scale = scale * here["factor"].float()
    is_centred = "zero" in here
    if is_centred:
        zero = here["zero"]
        if packed.format in WORDS:
            zero = _words(zero, 0, packed.bits, packed.order)[:rows]
        codes = codes - spread("zero", zero.float())
    if packed.zero:
        codes = codes - packed.zero
    return codes * spread("scale", scale), codes if is_centred else None


def _rows_of(part: Part, values: Tensor, top: int, bottom: int) -> Tensor:
    if part.rows is None:
        return values
    return values[top // part.rows.per : -(-bottom // part.rows.per)]


def _codes(packed: Packed, stored: Tensor, part: Part) -> Tensor:
    """float32 [rows, columns]"""
    if packed.format in ("fp8", "mxfp8"):
        return _floats(stored)
    if packed.format in ("nvfp4", "mxfp4"):
        return table_of_pairs()[stored.view(torch.uint8).int()].flatten(1)
    if packed.format not in WORDS:
        return stored.float()
    assert part.rows is not None and part.columns is not None
    return _words(stored, 0 if part.rows.per > 1 else 1, packed.bits, packed.order).float()


def _words(words: Tensor, dim: int, bits: int, order: tuple[int, ...]) -> Tensor:
    """The integers in words, side by side along `dim`. order: which of a word's is the first; empty: the lowest."""
    each = 32 // bits
    shifts = torch.tensor(order or range(each), dtype=torch.int32) * bits
    shape = (1, each, 1) if dim == 0 else (1, 1, each)
    return ((words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)).flatten(dim, dim + 1)


def _floats(stored: Tensor) -> Tensor:
    """float32, whatever kind of float is stored; bytes are powers of two (e8m0)."""
    if stored.dtype in (torch.uint8, torch.float8_e8m0fnu):
        return _table_of_powers()[stored.view(torch.uint8).int()]
    if stored.dtype == torch.float8_e4m3fn:
        return _table_of_e4m3()[stored.view(torch.uint8).int()]
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


# -- what numbers cannot be --------------------------------------------------------------------------------------------


class _Seen:
    """Sums over the numbers of a slice, which tell whether a scale or a zero point can be meant as it was read."""

    def __init__(self, source: Unpacked):
        self._source = source
        self._squares = self._codes = 0.0
        self._count = self._centred = 0

    def add(self, numbers: Tensor, codes: Tensor | None) -> None:
        self._squares += float(numbers.square().sum())
        self._count += numbers.numel()
        if codes is not None and self._source.packed.bits == 4:
            self._codes += float(codes.sum())
            self._centred += codes.numel()

    def check(self) -> None:
        """Raises `CorruptCheckpoint`."""
        rms = math.sqrt(self._squares / max(1, self._count))
        if not math.isfinite(rms):
            raise self._source.corrupt("some of its numbers are no finite numbers")
        if self._count >= CHECKED_NUMBERS and rms and not LEAST_RMS < rms < MOST_RMS:
            raise self._source.corrupt(
                f"the root mean square of its numbers would be {rms:.2g}, and no model has such weights: its scales "
                "may be inverted, or those of another tensor"
            )
        mean = self._codes / max(1, self._centred)
        if self._centred >= CHECKED_NUMBERS and abs(mean) > MOST_MEAN_CODE:
            raise self._source.corrupt(
                f"its integers lie {mean:+.2f} from their zero points on average, where weights lie around 0: its "
                "zero points may be stored in another way than the config says (checkpoint_format)"
            )
