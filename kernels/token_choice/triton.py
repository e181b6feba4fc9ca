"""The choice on a GPU by our own kernels, `triton_kernels.py`: what they are launched with."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two
from .protocol import Asked, ChoiceBatch

MOST_SCORE_BYTES = 128 << 20
"""Of queries that are scored in one launch."""

SCORED_TOKENS, SCORING_WARPS = {2: 64, 4: 32}, {2: 4, 4: 8}
"""Tokens at once, by one program; by the bytes of a number. float32 takes three products for one: else it would
spill."""

SELECTED_TOKENS, SELECTING_WARPS = 4096, 8
"""Likewise. A long row goes by in few turns, because each turn waits for the one before it."""

GATHERED_NUMBERS = 1 << 14
"""Likewise, with their padding."""

MOST_PROGRAMS = 1 << 12
"""Of a launch over tiles: a program that finds no tile returns at once, but it has to be begun."""


class Launch(NamedTuple):
    """One kernel, and how it is launched."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    warps: int = 4

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants, num_warps=self.warps)


def is_available() -> bool:
    return gpu.missing() is None


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Arguments and result as in `reference.py`. Of tokens that score alike the older one is taken."""
    queries = len(asked.q_NIE)
    chosen_NK = torch.empty(queries, most, dtype=torch.int64, device=keys_PBE.device)
    together = max(1, MOST_SCORE_BYTES // (4 * batch.longest))
    for start in range(0, queries, together):
        some = slice(start, min(start + together, queries))
        part = batch if together >= queries else batch.of(some)
        scores_NL = torch.empty(some.stop - start, batch.longest, dtype=torch.float32, device=keys_PBE.device)
        asking = Asked(asked.q_NIE[some].contiguous(), asked.weights_NI[some].contiguous())
        if batch.longest > most:
            scoring(asking, keys_PBE, part, scores_NL, most).run()
        selecting(scores_NL, part, chosen_NK[some]).run()
    return chosen_NK


def gather(entries_PBC: Tensor, chosen_NK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N,K,C]: entries of chosen tokens. Behind those of a query that sees fewer than K there may be anything."""
    gathered_NKC = entries_PBC.new_empty(*chosen_NK.shape, entries_PBC.shape[2])
    gathering(entries_PBC, chosen_NK, batch, gathered_NKC).run()
    return gathered_NKC


def scoring(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, scores_NL: Tensor, most: int) -> Launch:
    from . import triton_kernels as kernels  # here and not above: triton may be missing

    queries, heads, size = asked.q_NIE.shape
    assert keys_PBE.stride(2) == 1 and keys_PBE.dtype == asked.q_NIE.dtype, "keys lie as the kernel reads them"
    together = SCORED_TOKENS[keys_PBE.itemsize]
    return Launch(
        kernels.score,
        (queries, _programs(queries, -(-scores_NL.shape[1] // together))),
        (
            asked.q_NIE, keys_PBE, asked.weights_NI, *_tables(batch), batch.positions_N, scores_NL,
            *_rows(batch), *keys_PBE.stride()[:2], scores_NL.shape[1],
        ),
        {
            "HEADS": heads, "HEADS_PADDED": max(LEAST_DOT, power_of_two(heads)),
            "SIZE": size, "SIZE_PADDED": max(LEAST_DOT, power_of_two(size)),
            "KEYS": together, "PAGE": batch.block_tokens, "MOST": most, "HAS_STARTS": batch.starts_R is not None,
            "PRECISION": "tf32x3" if asked.q_NIE.dtype == torch.float32 else "tf32",
        },
        SCORING_WARPS[keys_PBE.itemsize],
    )  # fmt: skip


def selecting(scores_NL: Tensor, batch: ChoiceBatch, chosen_NK: Tensor) -> Launch:
    from . import triton_kernels as kernels

    arguments = (scores_NL, batch.positions_N, chosen_NK, scores_NL.shape[1])
    constants = {"MOST": chosen_NK.shape[1], "TILE": SELECTED_TOKENS}
    return Launch(kernels.select, (len(chosen_NK),), arguments, constants, SELECTING_WARPS)


def gathering(entries_PBC: Tensor, chosen_NK: Tensor, batch: ChoiceBatch, gathered_NKC: Tensor) -> Launch:
    from . import triton_kernels as kernels

    queries, most = chosen_NK.shape
    size = entries_PBC.shape[2]
    assert entries_PBC.stride(2) == 1, "entries lie as the kernel reads them"
    padded = power_of_two(size)
    tokens = min(max(1, GATHERED_NUMBERS // padded), power_of_two(most))
    return Launch(
        kernels.gather,
        (queries, _programs(queries, -(-most // tokens))),
        (
            entries_PBC, chosen_NK, *_tables(batch), batch.positions_N, gathered_NKC,
            *_rows(batch), *entries_PBC.stride()[:2],
        ),
        {
            "SIZE": size, "SIZE_PADDED": padded, "TOKENS": tokens, "PAGE": batch.block_tokens, "MOST": most,
            "HAS_STARTS": batch.starts_R is not None,
        },
    )  # fmt: skip


def _tables(batch: ChoiceBatch) -> tuple[Tensor, Tensor]:
    """The table, and where its rows begin; without such places, something that is not read."""
    return batch.table_RP, batch.positions_N if batch.starts_R is None else batch.starts_R


def _rows(batch: ChoiceBatch) -> tuple[int, int]:
    """Queries of a row, and pages of one in a table without places."""
    return len(batch.positions_N) // batch.num_rows, batch.table_RP.shape[-1]


def _programs(queries: int, tiles: int) -> int:
    """For each query."""
    return max(1, min(tiles, MOST_PROGRAMS // queries))
