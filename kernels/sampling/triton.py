"""Tokens drawn on a GPU by our own kernels: `triton_kernels.py`, and what they are launched with.

A step is at most one upload, two to five launches and, only where a row wants log-probabilities, one download. Greedy
rows alone need no upload. Where a row wants more log-probabilities than `MOST_TOLD`, torch finds those, row by row.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..paged_attention.protocol import upload
from ..toolchain import triton as gpu
from ..toolchain.triton import power_of_two
from ..transfer import Arrival
from .packed import GREEDY, JOB, Edits, about_jobs, jobs_of, list_count, mask_words, pack
from .plain_torch import TorchSampling
from .protocol import About, Changes, Draw, SamplingBackend, Tell

BLOCK_TOKENS, WARPS = 2048, 8
"""Of a row, that a program looks at in one go: the most with which two programs or more share a processor's registers
(`bench/ahead.py`)."""
LIST_TOKENS, LIST_WARPS = 2048, 16
"""The same of a list, whose entries take twice the registers."""
LEAST_BIN = 16
MOST_BINS, MOST_PARTS = 1024, 64
"""As in `triton_kernels.py`."""
PROGRAMS = 512
"""What keeps a GPU busy, more or less: rows are cut into so many parts. Results do not depend on it."""
MOST_TOLD = 32
"""More of the most probable tokens than these are found by torch, which sorts."""
LEAST_GREEDY_JOBS = 512
"""That stay on the device: a step of so many greedy rows uploads nothing to draw their tokens."""
LIST_BYTES = 128 << 20
"""Of lists at once, where log-probabilities of many tokens are told."""


JOB_WORDS = JOB.itemsize // 4


class Parts(NamedTuple):
    """How rows are cut."""

    block: int  # tokens
    bin: int  # tokens
    span: int  # tokens of a part
    number: int  # of parts
    vocab: int

    @property
    def bins(self) -> int:
        return -(-self.vocab // self.bin)

    @property
    def borders(self) -> np.ndarray:
        """The parts' first tokens, and the vocabulary's size."""
        return np.minimum(np.arange(self.number + 1) * self.span, self.vocab)


class Found(NamedTuple):
    """What kernels tell each other. Suffixes: J jobs, P parts, B bins, V vocabulary."""

    keys: Tensor  # [J,P] of the greatest logits
    tokens: Tensor  # [J,P]
    scores: Tensor  # [J,P] of the race
    winners: Tensor  # [J,P]
    masses: Tensor  # [J,P]
    bins: Tensor  # [J,B]
    fills: Tensor  # [J]: lengths of the lists
    lists: Tensor  # [lists,V]


class Source(NamedTuple):
    """What is read: logits as they are, and copies of the rows that have changes."""

    logits_RV: Tensor
    changed_CV: Tensor
    jobs: Tensor  # words
    parts: Parts

    @property
    def strides(self) -> tuple[int, int, int]:
        return self.logits_RV.stride(0), self.logits_RV.stride(1), self.parts.vocab


class TritonSampling(SamplingBackend):
    """The default on a GPU that Triton compiles for.

    Tokens are those of the other backends, whatever the rows beside them. Exponentials are of another make than torch's
    and sums are exact, so where a token's place is at top_p to the last bits of a float32, or two tokens' weights round
    to the same number in one of the two ways only, the other backends may keep one token more or less: there plain
    torch itself depends on the order in which it adds.
    """

    name: ClassVar[str] = "triton"
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    def __init__(self) -> None:
        from . import triton_kernels  # here and not above: triton may be missing

        self._kernels: Any = triton_kernels
        self._torch = TorchSampling()
        self.block_tokens, self.list_tokens = BLOCK_TOKENS, LIST_TOKENS
        self._greedy: dict[torch.device, Tensor] = {}  # words of greedy rows' jobs, of which a step takes the first

    def draw(
        self,
        logits_RV: Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        changes: Sequence[Changes | None] | None = None,
    ) -> tuple[Tensor, Tell]:
        rows, vocab = logits_RV.shape
        chosen_R = torch.empty(rows, dtype=torch.int64, device=logits_RV.device)
        if not rows:
            return chosen_R, list
        # What every row is drawn with, in one upload.
        asked = [(row, draw.logprobs) for row, draw in enumerate(draws) if draw.logprobs >= 0]
        told = [(row, min(count, vocab)) for row, count in asked if min(count, vocab) <= MOST_TOLD]
        parts = self.parts(rows + len(told), vocab)
        edits = Edits.of(changes or (), parts.borders)
        jobs = jobs_of(draws, positions, [change[0] for change in edits.rows], vocab)
        jobs += about_jobs(told, list_count(jobs))
        needs_weights = any(job[1] != GREEDY for job in jobs)
        if edits.rows or needs_weights:
            tables = _uploaded([_words(jobs), *(edits.sections(vocab) if edits.rows else ())], logits_RV.device)
        else:
            tables = [self._greedy_jobs(rows, logits_RV.device)]
        # Its launches.
        changed_CV = logits_RV.new_empty((len(edits.rows), vocab) if edits.rows else 1, dtype=torch.float32)
        source = Source(logits_RV, changed_CV, tables[0], parts)
        if edits.rows:
            self._change(source, tables, len(edits.rows))
        found = self._scan(source, jobs)
        if needs_weights:
            self._weigh(source, found, len(jobs))
        self._choose(source, found, chosen_R)
        described = self._describe(source, found, chosen_R, told, rows)
        others = {
            row: self._torch.logprobs(logits_RV[row : row + 1], chosen_R[row : row + 1], count)[0]
            for row, count in asked
            if min(count, vocab) > MOST_TOLD
        }
        rows_told = [row for row, _ in told]
        return chosen_R, lambda: sorted([*zip(rows_told, described(), strict=True), *others.items()])

    def logprobs(self, logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[About]:
        rows, vocab = logits_RV.shape
        count = min(count, vocab)
        if count > MOST_TOLD:
            return self._torch.logprobs(logits_RV, tokens_R, count)
        # As many rows at once as there is room for lists.
        found, at_once = [], max(1, LIST_BYTES // (8 * vocab))
        for first in range(0, rows, at_once):
            own = slice(first, min(first + at_once, rows))
            told = [(row, count) for row in range(own.stop - first)]
            jobs = about_jobs(told, 0)
            parts = self.parts(len(told), vocab)
            source = Source(
                logits_RV[own],
                logits_RV.new_empty(1, dtype=torch.float32),
                _uploaded([_words(jobs)], logits_RV.device)[0],
                parts,
            )
            work = self._scan(source, jobs)
            self._weigh(source, work, len(jobs))
            found += self._describe(source, work, tokens_R[own], told, 0)()
        return found

    def _greedy_jobs(self, rows: int, device: torch.device) -> Tensor:
        """They are the same in each step, so they stay on the device."""
        words = self._greedy.get(device)
        if words is None or len(words) < rows * JOB_WORDS:
            draws = [Draw(temperature=0)] * max(LEAST_GREEDY_JOBS, power_of_two(rows))
            words = upload(_words(jobs_of(draws, range(len(draws)), (), 1)), device)
            self._greedy[device] = words
        return words

    def parts(self, jobs: int, vocab: int) -> Parts:
        """Each a whole number of blocks, and none empty."""
        block = min(self.block_tokens, max(LEAST_BIN, power_of_two(vocab)))
        blocks = -(-vocab // block)
        of_each = -(-blocks // max(1, min(PROGRAMS // jobs, MOST_PARTS, blocks)))
        width = max(LEAST_BIN, power_of_two(-(-vocab // MOST_BINS)))
        return Parts(max(block, width), width, of_each * block, -(-blocks // of_each), vocab)

    def _change(self, source: Source, tables: list[Tensor], count: int) -> None:
        parts = source.parts
        self._kernels.change[count, parts.number](
            source.logits_RV, source.changed_CV, *tables[1:], *source.strides, mask_words(parts.vocab), parts.span,
            parts.number, BLOCK=parts.block, num_warps=WARPS,
        )  # fmt: skip

    def _scan(self, source: Source, jobs: Sequence[tuple]) -> Found:
        parts, device = source.parts, source.logits_RV.device
        lists = list_count(jobs)
        int32 = {"dtype": torch.int32, "device": device}
        by_part = (len(jobs), parts.number)
        found = Found(
            torch.empty(by_part, **int32),
            torch.empty(by_part, **int32),
            torch.empty(by_part, dtype=torch.float32, device=device),
            torch.empty(by_part, **int32),
            torch.empty(by_part, dtype=torch.int64, device=device),
            torch.empty((len(jobs), parts.bins), **int32),
            torch.empty(len(jobs), **int32),
            torch.empty((max(lists, 1), parts.vocab if lists else 1), dtype=torch.int64, device=device),
        )
        self._kernels.scan[len(jobs), parts.number](
            source.logits_RV, source.changed_CV, source.jobs, found.keys, found.tokens, found.bins, found.fills,
            *source.strides, parts.span, parts.number, parts.bins, BLOCK=parts.block, BIN=parts.bin, num_warps=WARPS,
        )  # fmt: skip
        return found

    def _weigh(self, source: Source, found: Found, jobs: int) -> None:
        parts = source.parts
        self._kernels.weigh[jobs, parts.number](
            source.logits_RV, source.changed_CV, source.jobs, found.keys, found.bins, found.scores, found.winners,
            found.masses, found.lists, found.fills, *source.strides, parts.span, parts.number, parts.bins,
            BLOCK=parts.block, SHIFT=shift_of(parts.vocab), num_warps=WARPS,
        )  # fmt: skip

    def _choose(self, source: Source, found: Found, chosen_R: Tensor) -> None:
        parts = source.parts
        self._kernels.choose[(len(chosen_R),)](
            source.jobs, found.keys, found.tokens, found.scores, found.winners, found.masses, found.lists, found.fills,
            chosen_R, parts.vocab, parts.number,
            BLOCK=min(self.list_tokens, parts.block), SHIFT=shift_of(parts.vocab), num_warps=LIST_WARPS,
        )  # fmt: skip

    def _describe(
        self, source: Source, found: Found, chosen_R: Tensor, told: Sequence[tuple[int, int]], first: int
    ) -> Callable[[], list[About]]:
        """Of the jobs from `first` on, in one download."""
        if not told:
            return list
        parts, most_told = source.parts, max(count for _, count in told)
        words = torch.empty(
            (len(told), 1 + parts.number + 2 * most_told), dtype=torch.int32, device=source.logits_RV.device
        )
        self._kernels.describe[len(told), parts.number](
            source.logits_RV, source.jobs, found.keys, found.masses, found.lists, found.fills, chosen_R, words,
            *source.strides, first, most_told, parts.span, parts.number,
            BLOCK=parts.block, SHIFT=shift_of(parts.vocab), num_warps=WARPS,
        )  # fmt: skip
        arrival, counts = Arrival(words), [count for _, count in told]
        return lambda: _about(arrival.read().numpy(), parts.number, counts)


def shift_of(vocab: int) -> int:
    """Of weights as whole numbers: with so many bits behind the point, the sum of a vocabulary fits an int64."""
    return 62 - power_of_two(vocab).bit_length()


def _words(jobs: Sequence[tuple]) -> np.ndarray:
    return np.array(jobs, dtype=JOB).view(np.int32)


def _uploaded(sections: Sequence[np.ndarray], device: torch.device) -> list[Tensor]:
    packed, places = pack(sections)
    words = upload(packed, device)
    return [words[place] for place in places]


def _about(words: np.ndarray, parts: int, counts: Sequence[int]) -> list[About]:
    """Of what `describe` wrote."""
    ranks = (words[:, 1 : 1 + parts].sum(axis=1) + 1).tolist()
    tokens, values = np.split(words[:, 1 + parts :], 2, axis=1)
    values, chosen = np.ascontiguousarray(values).view(np.float32), np.ascontiguousarray(words[:, 0]).view(np.float32)
    rows = zip(chosen.tolist(), tokens.tolist(), values.tolist(), ranks, counts, strict=True)
    return [
        About(value, tuple(zip(of_row[:count], of_top[:count], strict=True)), rank)
        for value, of_row, of_top, rank, count in rows
    ]
