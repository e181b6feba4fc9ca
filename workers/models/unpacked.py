"""Packed weights as sources: any slice of one, as numbers or in as few bits as it is stored.

`checkpoint/packed/formats.py` says which tensors make a weight and how they lie along it; here they become `Codes`,
whatever the format. A slice that begins or ends within a group is read from the group's beginning to its end, and cut
afterwards.

Sources: OCP Microscaling Formats (MX) 1.0; OCP 8-bit Floating Point (OFP8) 1.0; compressed-tensors; AutoGPTQ, AutoAWQ.

Suffixes: N rows (outputs)    K columns (inputs)    G groups of columns
"""

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import CorruptCheckpoint
from ...kernels.products.codes import CodeKind, Codes, in_fewer_bits
from ..checkpoint.files import Checkpoint
from ..checkpoint.packed.formats import WORD_BITS, WORDS, Packed, Part

NUMBERS_AT_ONCE = 2**21
"""Of a weight, while they are float32: what a tensor takes beside the numbers that are kept."""

LEAST_RMS, MOST_RMS = 1e-7, 32.0
"""Root mean square of a weight's numbers. Real ones are between 0.002 and 2; a scale that was inverted is far away."""

RUN_WORDS = 64
"""Rows of words that are put in order at a time, so that little is held beside what comes of them."""

MOST_MEAN_CODE = 0.6
"""Of codes of 4 bits less their zero points. A zero point that is misread by one makes it 1. Codes of 8 bits spread
so far that their mean says nothing."""

FEWEST_ZEROS = 16
"""So many zero points are not all the same by chance."""

CHECKED_NUMBERS = 4096
"""From so many on a mean says something."""

LOOKED_AT_NUMBERS = 2**18
"""Of a weight that stays in its bits: more would say no more."""

KINDS = {
    "fp8": CodeKind.E4M3, "mxfp8": CodeKind.E4M3, "int8": CodeKind.INT8, "nvfp4": CodeKind.E2M1,
    "mxfp4": CodeKind.E2M1,
}  # fmt: skip
"""Of a format. Others hold integers."""

INTEGER_KINDS = {
    2: CodeKind.INT2, 3: CodeKind.INT3, 4: CodeKind.INT4, 5: CodeKind.INT5, 6: CodeKind.INT6, 7: CodeKind.UINT8,
    8: CodeKind.UINT8,
}  # fmt: skip
"""By their bits."""


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
        packed, expert = self.packed, "" if self.expert is None else f", expert {self.expert}"
        file = self.checkpoint.file_of(packed.parts["codes"].name)
        return f"{file}: weight {packed.name}{expert} ({packed.format}, made of {', '.join(packed.stored)})"

    def read(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Tensor:
        stop = self.shape[dim] if stop is None else stop
        if start >= stop:
            shape = list(self.shape)
            shape[dim] = 0
            return torch.empty(shape, dtype=self.dtype)
        codes, first = self._outward(dim, start, stop)
        inputs = self._inputs(dim, first, codes.shape[1])
        runs = []
        for run in codes.runs(NUMBERS_AT_ONCE):
            numbers = run.numbers(torch.float32)
            numbers = numbers if inputs is None else numbers * inputs
            if not runs:
                _check(self, run, numbers)
            runs.append(numbers.to(self.dtype))
        return torch.cat(runs).narrow(dim, start - first, stop - start)

    def codes(self, dim: int = 0, start: int = 0, stop: int | None = None) -> Codes | None:
        """The same slice in as few bits as it is stored. None: it begins or ends where codes cannot be cut, or its
        inputs are to be multiplied, too."""
        stop = self.shape[dim] if stop is None else stop
        if start >= stop or "inputs" in self.packed.parts:
            return None
        codes, first = self._outward(dim, start, stop)
        some = next(codes.runs(LOOKED_AT_NUMBERS))
        _check(self, some, some.numbers(torch.float32))
        return codes.cut(dim, start - first, stop - first)

    def _outward(self, dim: int, start: int, stop: int) -> tuple[Codes, int]:
        """Of rows or columns from the last place before `start` to the first one after `stop` at which an entry of
        every part begins; and the first of them. Where columns say which group they are of, it is all of them."""
        length, parts = self.shape[dim], self.packed.parts
        if dim == 1 and "group_of" in parts:
            start, stop = 0, length
        along = (part.rows if dim == 0 else part.columns for part in parts.values())
        step = min(math.lcm(*(each.per for each in along if each is not None)), length)
        first, last = start // step * step, min(-(-stop // step) * step, length)
        stored = {role: self._read(part, dim, first, last) for role, part in parts.items() if role != "inputs"}
        shape = (last - first, self.shape[1]) if dim == 0 else (self.shape[0], last - first)
        return _Reading(self, stored, shape).codes(), first

    def _inputs(self, dim: int, first: int, columns: int) -> Tensor | None:
        """What inputs are multiplied with, float32 [1,K]. None: they are not."""
        if "inputs" not in self.packed.parts:
            return None
        first = first if dim == 1 else 0
        return self._read(self.packed.parts["inputs"], 1, first, first + columns).float()

    def _read(self, part: Part, dim: int, first: int, last: int) -> Tensor:
        """[rows, columns] of a part, 1 where it has none of them."""
        along = part.rows if dim == 0 else part.columns
        expert = self.expert if part.name in self.packed.stacked else None
        if along is None:
            found = self.checkpoint.read(part.name, expert=expert)
        else:
            found = self.checkpoint.read(part.name, along.dim, *along.around(first, last), expert)
        if part.rows is not None and part.columns is not None and part.columns.dim < part.rows.dim:
            found = found.transpose(part.rows.dim, part.columns.dim)
        rows = 1 if part.rows is None else found.shape[part.rows.dim if found.dim() != 2 else 0]
        return found.reshape(rows, -1)

    def corrupt(self, what: str) -> CorruptCheckpoint:
        return CorruptCheckpoint(f"{self.origin}: {what}", field="model")


class _Reading:
    """What was read of a weight, on its way to codes."""

    def __init__(self, source: Unpacked, stored: dict[str, Tensor], shape: tuple[int, int]):
        self._source = source
        self._packed = source.packed
        self._stored = stored
        self._rows, self._columns = shape

    def codes(self) -> Codes:
        packed, group = self._packed, self._along("scale").columns
        columns = self._columns + self._columns % 2 if group is None else group.per
        low, high = self._raw_codes()
        codes = Codes(
            self._kind,
            low,
            self._for_each_row("scale"),
            columns,
            middle=packed.zero,
            high=high,
            rounds_inputs=packed.rounds_inputs,
        )
        if "zero" in self._stored:
            codes = replace(codes, zero=self._zero())
        if packed.format == "int8" and codes.zero is not None:  # without their signs, as zero points have none
            codes = replace(codes, kind=CodeKind.UINT8, codes=codes.codes ^ 0x80)
        global_ = {role: self._stored[role].float() for role in ("factor", "divisor") if role in self._stored}
        if len(global_) == 2:
            global_ = {"factor": global_["factor"] / global_["divisor"]}
        for role, number in global_.items():
            factor = number.expand(self._rows, 1).flatten().contiguous()
            codes = replace(codes, factor=factor, divides=role == "divisor")
        return codes if "group_of" not in self._stored else self._in_order(codes)

    @property
    def _kind(self) -> CodeKind:
        packed = self._packed
        if packed.format in KINDS:
            return KINDS[packed.format]
        return INTEGER_KINDS[packed.bits]

    def _along(self, role: str) -> Part:
        return self._packed.parts[role]

    def _raw_codes(self) -> tuple[Tensor, Tensor | None]:
        """As `Codes` has them: `codes` and `high`."""
        packed, stored, part = self._packed, self._stored["codes"], self._along("codes")
        assert part.rows is not None and part.columns is not None
        dim = 0 if part.rows.per > 1 else 1
        # They may lie as they are wanted: bytes, and the bytes of a word from the lowest on.
        if stored.itemsize == 1 and dim == 1:
            return stored.contiguous().view(torch.uint8), None
        if dim == 1 and packed.bits == 4 and not packed.order:
            return stored.contiguous().view(torch.uint8)[: self._rows, : self._columns // 2], None
        if dim == 0 and stored.dtype == torch.int32 and packed.bits == 4 and self._columns % 2 == 0:
            return pairs_in_words(stored, packed.order)[: self._rows, : self._columns // 2], None
        if stored.itemsize == 1:
            opened = in_pairs_of_rows(stored)
        else:
            opened = in_words(stored, dim, packed.bits, packed.order)
        opened = opened[: self._rows, : self._columns]
        return (opened, None) if self._kind is CodeKind.UINT8 else in_fewer_bits(self._kind, opened)

    def _zero(self) -> Tensor:
        """uint8 [N,G]"""
        packed, stored = self._packed, self._stored["zero"]
        if stored.itemsize == 1:
            return self._for_each_row("zero").view(torch.uint8) ^ 0x80
        return in_words(stored, 0, packed.bits, packed.order)[: self._rows]

    def _for_each_row(self, role: str) -> Tensor:
        """[N,G]"""
        stored, along = self._stored[role], self._along(role).rows
        values = stored.view(torch.uint8) if stored.itemsize == 1 else stored  # torch repeats no numbers of 8 bits
        if along is None:
            values = values.expand(self._rows, -1)
        elif along.per > 1:
            values = values.repeat_interleave(along.per, dim=0)[: self._rows]
        return values.contiguous().view(stored.dtype)

    def _in_order(self, codes: Codes) -> Codes:
        """Columns of one group side by side, in the order of groups."""
        group_of = self._stored["group_of"].flatten().long()
        order = torch.argsort(group_of, stable=True)
        columns = torch.arange(len(order))
        if not torch.equal(group_of[order], columns // codes.columns):
            name = self._packed.parts["group_of"].name
            groups = self._stored["scale"].shape[1]
            raise self._source.corrupt(f"{name} does not put {codes.columns} columns into each of its {groups} groups")
        return codes if torch.equal(order, columns) else codes.sorted_columns(order)


def in_words(words: Tensor, dim: int, bits: int, order: tuple[int, ...]) -> Tensor:
    """The integers in words, uint8, side by side along `dim`: without gaps, from the lowest bits of the first word on.

    order: which of a word's is the first, the second, ..; empty: the lowest
    """
    if WORD_BITS % bits == 0:
        each = WORD_BITS // bits
        shifts = torch.tensor(order or range(each), dtype=torch.int32) * bits
        shape = (1, each, 1) if dim == 0 else (1, 1, each)
        opened = (words.unsqueeze(dim + 1) >> shifts.view(shape)) & ((1 << bits) - 1)
        return opened.to(torch.uint8).flatten(dim, dim + 1)
    # 32 of them fill so many words as each has bits; some begin in one word and end in the next.
    words = words.movedim(dim, -1)
    words = F.pad(words, (0, -words.shape[-1] % bits)).unflatten(-1, (-1, bits)).long() & (2**WORD_BITS - 1)
    opened = torch.empty(*words.shape[:-1], WORD_BITS, dtype=torch.uint8)
    for number in range(WORD_BITS):
        word, place = divmod(number * bits, WORD_BITS)
        integers = words[..., word] >> place
        if place + bits > WORD_BITS:
            integers |= words[..., word + 1] << (WORD_BITS - place)
        opened[..., number] = integers & ((1 << bits) - 1)
    return opened.flatten(-2).movedim(-1, dim)


def pairs_in_words(words: Tensor, order: tuple[int, ...]) -> Tensor:
    """The integers of 4 bits in words along rows, two columns in a byte as `Codes` has them: a byte at a time, which
    takes a fifth of the time of `in_words`.

    words: int32 [N/8,K], turned, as AWQ has them. order: as there. Returns uint8 [N,K/2]
    """
    pairs = torch.empty(len(words), 8, words.shape[1] // 2, dtype=torch.uint8)
    for first in range(0, len(words), RUN_WORDS):
        by_columns = words[first : first + RUN_WORDS].T.clone(memory_format=torch.contiguous_format)
        even, odd = by_columns.view(torch.uint8).unflatten(1, (-1, 4)).unflatten(0, (-1, 2)).unbind(1)
        both = torch.stack((even & 15 | odd << 4, even >> 4 | odd & 0xF0), dim=-1).flatten(2)  # [K/2,words,8]
        pairs[first : first + RUN_WORDS] = (both[..., list(order)] if order else both).permute(1, 2, 0)
    return pairs.flatten(0, 1)


def in_pairs_of_rows(pairs: Tensor) -> Tensor:
    """Integers of 4 bits with a sign, those of two rows in a byte, the first row's lowest. Returns uint8, 8 more."""
    pairs = pairs.view(torch.uint8)
    return torch.stack((pairs & 15, pairs >> 4), dim=1).flatten(0, 1) ^ 8


# -- what numbers cannot be --------------------------------------------------------------------------------------------


def _check(source: Unpacked, some: Codes, numbers: Tensor) -> None:
    """By some of its rows, whether a scale or a zero point can be meant as it was read. Raises `CorruptCheckpoint`.

    numbers: float32, of these rows
    """
    if numbers.numel() < CHECKED_NUMBERS:
        return
    if (why_not := cannot_be(numbers)) is not None:
        raise source.corrupt(why_not)
    if some.zero is None or source.packed.format not in WORDS:
        return
    _check_middle(source, some)
    if source.packed.bits != 4:
        return
    mean = float(some.centred().mean())
    if abs(mean) > MOST_MEAN_CODE:
        raise source.corrupt(
            f"its integers lie {mean:+.2f} from their zero points on average, where weights lie around 0: its zero "
            "points may be stored in another way than the config says (checkpoint_format)"
        )


def cannot_be(numbers: Tensor) -> str | None:
    """Why numbers, float32, can be no weight of a model. None: they may be."""
    rms = float(numbers.square().mean().sqrt())
    if not math.isfinite(rms):
        return "some of its numbers are no finite numbers"
    if rms and not LEAST_RMS < rms < MOST_RMS:
        return (
            f"the root mean square of its numbers would be {rms:.2g}, and no model has such weights: its scales may be "
            "inverted, or those of another tensor"
        )
    return None


def _check_middle(source: Unpacked, codes: Codes) -> None:
    """Where all zero points are the same, they are the middle of the range: one beside it was misread."""
    zero = codes.zero
    assert zero is not None
    if zero.numel() < FEWEST_ZEROS or bool((zero != zero.flatten()[0]).any()):
        return
    meant, middle = int(zero.flatten()[0]) + codes.middle, 1 << (source.packed.bits - 1)
    if abs(meant - middle) == 1:
        raise source.corrupt(
            f"all its zero points would be {meant}, beside the middle of the range, {middle}: they are stored in "
            "another way than the config says (checkpoint_format)"
        )
