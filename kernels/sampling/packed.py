"""What a step's rows are drawn with, as one array of int32 words that a GPU's kernels read.

Suffixes: J jobs    C changed rows    P parts
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .cpu import race_keys
from .protocol import HIGHEST_LOGIT, TEMPERATURES, Changes, Draw

GREEDY, RACE, CUT, ABOUT = range(4)
"""Kinds of jobs."""
PENALTY, PUT, ADD = range(3)
"""Kinds of edits."""

JOB = np.dtype(
    [
        ("place", np.int32),  # of its logits: a row, or from -1 downwards a changed row
        ("kind", np.int32),
        ("temperature", np.float32),
        ("count", np.int32),  # top_k, or how many of the most probable tokens are told
        ("top_p", np.float32),
        ("min_p", np.float32),
        ("keys", np.int32, 2),
        ("list", np.int32),  # its candidates'; -1: none
        ("unused", np.int32, 3),
    ]
)
CHANGE = np.dtype(
    [
        ("row", np.int32),
        ("mask", np.int32),  # -1: none
        ("first_wave", np.int32),
        ("last_wave", np.int32),
        ("repetition", np.float32),
        ("unused", np.int32, 3),
    ]
)
NO_KEYS, UNUSED = (0, 0), (0, 0, 0)

ALIGNED_WORDS = 4
"""Sections begin at multiples of 16 bytes: a kernel is compiled for addresses that do, or for any."""


class Edits(NamedTuple):
    """Of logits of all changed rows."""

    rows: list[tuple]  # [C] of CHANGE
    waves: list[np.ndarray]  # [2 + P]: the kind, and where each part's edits begin
    tokens: list[np.ndarray]
    values: list[np.ndarray]
    masks: list[bytes]

    @classmethod
    def of(cls, changes: Sequence[Changes | None], borders: np.ndarray) -> "Edits":
        """borders [P+1]: the parts' first tokens, and the vocabulary's size. Tokens outside are passed over."""
        edits, found = cls([], [], [], [], []), 0
        for row, change in enumerate(changes):
            if change is None:
                continue
            first_wave = len(edits.waves)
            for kind, tokens, values in _waves(change):
                starts = np.searchsorted(tokens, borders)
                edits.waves.append(np.concatenate([[kind], starts + found]).astype(np.int32))
                edits.tokens.append(tokens.astype(np.int32))
                edits.values.append(values)
                found += len(tokens)
            mask = -1
            if change.allowed is not None:
                mask = len(edits.masks)
                edits.masks.append(change.allowed)
            repetition = 1.0 if change.penalties is None else change.penalties.repetition
            edits.rows.append((row, mask, first_wave, len(edits.waves), repetition, UNUSED))
        return edits

    def sections(self, vocab: int) -> list[np.ndarray]:
        """Rows, waves, tokens, values and masks [masks, mask_words]."""
        nothing = np.zeros(0, dtype=np.int32)
        masks = np.zeros((len(self.masks), mask_words(vocab)), dtype=np.int32)
        for words, bits in zip(masks.view(np.uint8), self.masks, strict=True):
            known = np.frombuffer(bits, dtype=np.uint8)[: len(words)]
            words[: len(known)] = known
        return [
            np.array(self.rows, dtype=CHANGE).view(np.int32),
            np.concatenate([nothing, *self.waves]),
            np.concatenate([nothing, *self.tokens]),
            np.concatenate([nothing, *(values.astype(np.float32).view(np.int32) for values in self.values)]),
            masks.ravel(),
        ]


def mask_words(vocab: int) -> int:
    return -(-vocab // 32)


def jobs_of(draws: Sequence[Draw], positions: Sequence[int], changed: Sequence[int], vocab: int) -> list[tuple]:
    """Of the rows that are drawn from. changed: the rows that have changes, in their order"""
    place_of = {row: -1 - place for place, row in enumerate(changed)}
    keys, lists, jobs = race_keys(draws, positions).tolist(), 0, []
    for row, draw in enumerate(draws):
        place = place_of.get(row, row)
        temperature = min(max(draw.temperature, TEMPERATURES[0]), TEMPERATURES[1])
        if draw.temperature <= 0:
            jobs.append((place, GREEDY, 1.0, 0, 1.0, 0.0, NO_KEYS, -1, UNUSED))
        elif 0 < draw.top_k < vocab or np.float32(draw.top_p) < 1:
            top_k = min(draw.top_k or vocab, vocab)
            settings = (temperature, top_k, draw.top_p, draw.min_p, tuple(keys[row]), lists, UNUSED)
            jobs.append((place, CUT, *settings))
            lists += 1
        else:
            jobs.append((place, RACE, temperature, 0, 1.0, draw.min_p, tuple(keys[row]), -1, UNUSED))
    return jobs


def about_jobs(asked: Sequence[tuple[int, int]], lists: int) -> list[tuple]:
    """Of (row, how many tokens are told): they take the lists from `lists` on."""
    jobs = []
    for row, count in asked:
        jobs.append((row, ABOUT, 1.0, count, 1.0, 0.0, NO_KEYS, lists if count else -1, UNUSED))
        lists += count > 0
    return jobs


def list_count(jobs: Sequence[tuple]) -> int:
    """How many lists the jobs need."""
    at = list(JOB.fields or ()).index("list")
    return max((job[at] for job in jobs), default=-1) + 1


def pack(sections: Sequence[np.ndarray]) -> tuple[np.ndarray, list[slice]]:
    """All in one array, and where each is."""
    slices, size = [], 0
    for section in sections:
        slices.append(slice(size, size + len(section)))
        size += -(-len(section) // ALIGNED_WORDS) * ALIGNED_WORDS
    packed = np.zeros(max(size, 1), dtype=np.int32)
    for section, place in zip(sections, slices, strict=True):
        packed[place] = section
    return packed, slices


def _waves(change: Changes) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """Kind, tokens and values of edits, in their order. Tokens of a wave ascend, and none is in it twice."""
    waves = []
    penalties, forbidden, biases, excluded, _ = change
    if penalties is not None:
        counts = penalties.counts.astype(np.float32)
        weighs = np.float32(penalties.presence) + np.float32(penalties.frequency) * counts
        waves.append((PENALTY, penalties.tokens, np.where(counts > 0, weighs, np.float32(0))))
    waves += [_put(forbidden, -HIGHEST_LOGIT), *_additions(biases), _put(excluded, float("-inf"))]
    return [wave for wave in waves if len(wave[1])]


def _put(tokens: Sequence[int], value: float) -> tuple[int, np.ndarray, np.ndarray]:
    tokens_N = np.unique(np.array(tokens, dtype=np.int64))
    return PUT, tokens_N, np.full(len(tokens_N), value, dtype=np.float32)


def _additions(biases: Sequence[tuple[int, float]]) -> list[tuple[int, np.ndarray, np.ndarray]]:
    """A token's first bias is in the first wave, its second one in the second: floats are added in the order given."""
    rounds: list[dict[int, float]] = []
    for token, bias in biases:
        of_first = next((biases_of for biases_of in rounds if token not in biases_of), None)
        if of_first is None:
            rounds.append(of_first := {})
        of_first[token] = bias
    return [(ADD, *_sorted(biases_of)) for biases_of in rounds]


def _sorted(values: dict[int, float]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.array(list(values), dtype=np.int64)
    order = tokens.argsort()
    return tokens[order], np.array(list(values.values()), dtype=np.float32)[order]
