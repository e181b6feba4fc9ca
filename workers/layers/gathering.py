"""Queries whose keys are gathered, in parts of a size that memory has room for.

Suffixes: R rows of a step    N queries of a part
"""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...kernels.paged_attention import GroupBatch, upload

GATHERED_TOKENS = 1 << 16
"""Of all queries of a part: 72 MiB of DeepSeek's latents in 16 bits."""


class Queries(NamedTuple):
    """Of one row, or one each of several rows."""

    rows: np.ndarray  # of the step: one for each query, or one for all
    tokens: np.ndarray  # [N] which packed tokens they are
    positions: np.ndarray  # [N]


def queries_of_parts(batch: GroupBatch, gathers_R: np.ndarray, widths_R: np.ndarray) -> Iterator[Queries]:
    """The queries of the rows that gather. widths: tokens that are gathered for a query of a row, at most"""
    firsts, kv_lens = batch.first_token(), batch.kv_lens.astype(np.int64)
    # One query each of several rows.
    single = np.flatnonzero(gathers_R & (batch.query_lens == 1))
    together = max(1, GATHERED_TOKENS // int(widths_R[single].max(initial=1)))
    for start in range(0, len(single), together):
        rows = single[start : start + together]
        yield Queries(rows, firsts[rows], kv_lens[rows] - 1)
    # Several queries of one row.
    for row in np.flatnonzero(gathers_R & (batch.query_lens > 1)):
        count, end = int(batch.query_lens[row]), int(kv_lens[row])
        together = max(1, GATHERED_TOKENS // int(widths_R[row]))
        for start in range(0, count, together):
            tokens = np.arange(start, min(start + together, count))
            yield Queries(np.array([row]), firsts[row] + tokens, end - count + tokens)


def ragged(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each of so many things by its place among them, and whose it is: [2, 0, 3] -> [0, 1, 0, 1, 2], [0, 0, 2, 2, 2]"""
    of = np.repeat(np.arange(len(counts)), counts)
    return np.arange(len(of)) - (np.cumsum(counts) - counts)[of], of


def places_of(tokens: np.ndarray, device: torch.device) -> Tensor | slice:
    """Of packed tokens, to read and write them by: a run needs no list."""
    run = slice(int(tokens[0]), int(tokens[-1]) + 1)
    return run if run.stop - run.start == len(tokens) else upload(tokens, device)


def gathered_batch(lengths: np.ndarray, width: int) -> GroupBatch:
    """Of single queries, each over a page of its own, which holds so many tokens, `width` at most. lengths: int32"""
    own_pages = np.arange(len(lengths), dtype=np.int32).reshape(-1, 1)
    return GroupBatch(own_pages, np.ones_like(lengths), lengths, width)
