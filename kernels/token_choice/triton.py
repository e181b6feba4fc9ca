"""The choice on a GPU by our own kernels, `triton_kernels.py`: what they are launched with."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two, precision_of
from .protocol import Asked, BlockRule, ChoiceBatch, Sight

MOST_SCORE_BYTES = 128 << 20
"""Of queries that are scored in one launch."""

SCORED_TOKENS, SCORING_WARPS = {2: 64, 4: 32}, {2: 4, 4: 8}
"""Tokens at once, by one program; by the bytes of a number. float32 takes three products for one: else it would
spill."""

SELECTED, SELECTING_WARPS = 4096, 8
"""Scores likewise. A long row goes by in few turns, because each turn waits for the one before it."""

MOST_BLOCK_TOKENS = 128
"""Of a block whose highest score is found at once."""

SPREAD_TOKENS = 1024

GATHERED_BYTES = 1 << 14
"""Of entries with their padding, likewise: more would be spilled."""

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


def takes_blocks(size: int) -> bool:
    """Whether blocks of so many tokens can be chosen here."""
    return size == power_of_two(size) <= MOST_BLOCK_TOKENS and is_available()


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


def choose_blocks(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch, rule: BlockRule) -> Tensor:
    """Arguments and result as in `reference.py`, of blocks that `takes_blocks`."""
    queries, heads, device = *q_NIE.shape[:2], keys_PBE.device
    blocks = -(-batch.longest // rule.size)
    scores_NIB = torch.empty(queries, heads, blocks, dtype=torch.float32, device=device)
    blocks_NIM = torch.empty(queries, heads, rule.most, dtype=torch.int64, device=device)
    chosen_NIK = torch.empty(queries, heads, rule.most * rule.size, dtype=torch.int64, device=device)
    if blocks > rule.most:
        scoring_blocks(q_NIE.contiguous(), keys_PBE, batch, scores_NIB, rule).run()
    selecting(scores_NIB, batch, blocks_NIM, rule.size).run()
    spreading(blocks_NIM, batch, chosen_NIK, rule.size).run()
    return chosen_NIK


def gather(entries_PBJC: Tensor, chosen_NJK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N,J,K,C]: entries of chosen tokens. Behind those of a query that sees fewer than K there may be anything."""
    gathered_NJKC = entries_PBJC.new_empty(*chosen_NJK.shape, entries_PBJC.shape[3])
    gathering(entries_PBJC, chosen_NJK, batch, gathered_NJKC).run()
    return gathered_NJKC


def gather_sight(
    window_PBC: Tensor, entries_PEC: Tensor, of_window: ChoiceBatch, of_entries: ChoiceBatch, chosen_NK: Tensor | None,
    sight: Sight,
) -> Tensor:  # fmt: skip
    """[N,sight.width,C]: of each query the tokens of its window, and behind them entries: those of the numbers
    `chosen`, or all that it sees. Behind these there may be anything."""
    gathered_NLC = window_PBC.new_empty(len(of_window.positions_N), sight.width, window_PBC.shape[2])
    gathering_sight(window_PBC, entries_PEC, of_window, of_entries, chosen_NK, sight, gathered_NLC).run()
    return gathered_NLC


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
            **_sizes(heads, size), **_pages(batch), "KEYS": together, "MOST": most,
            "PRECISION": precision_of(asked.q_NIE.dtype),
        },
        SCORING_WARPS[keys_PBE.itemsize],
    )  # fmt: skip


def scoring_blocks(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch, scores_NIB: Tensor, rule: BlockRule) -> Launch:
    from . import triton_kernels as kernels

    queries, heads, size = q_NIE.shape
    assert keys_PBE.stride(2) == 1 and keys_PBE.dtype == q_NIE.dtype, "keys lie as the kernel reads them"
    together = max(1, SCORED_TOKENS[keys_PBE.itemsize] // rule.size)
    return Launch(
        kernels.score_blocks,
        (queries, _programs(queries, -(-scores_NIB.shape[2] // together))),
        (
            q_NIE, keys_PBE, *_tables(batch), batch.positions_N, scores_NIB, *_rows(batch), *keys_PBE.stride()[:2],
            scores_NIB.shape[2], rule.near,
        ),
        {
            **_sizes(heads, size), **_pages(batch), "BLOCKS": together, "BLOCK": rule.size, "MOST": rule.most,
            "PRECISION": precision_of(q_NIE.dtype),
        },
        SCORING_WARPS[keys_PBE.itemsize],
    )  # fmt: skip


def selecting(scores: Tensor, batch: ChoiceBatch, chosen: Tensor, block_tokens: int = 1) -> Launch:
    """scores: [N,L], or [N,I,B] of blocks of so many tokens; chosen: [N,K], or [N,I,blocks]"""
    from . import triton_kernels as kernels

    choices, most = chosen[..., 0].numel(), chosen.shape[-1]
    constants = {"CHOICES": choices // len(chosen), "BLOCK": block_tokens, "MOST": most, "TILE": SELECTED}
    arguments = (scores, batch.positions_N, chosen, scores.shape[-1])
    return Launch(kernels.select, (choices,), arguments, constants, SELECTING_WARPS)


def spreading(blocks_NIM: Tensor, batch: ChoiceBatch, chosen_NIK: Tensor, block_tokens: int) -> Launch:
    from . import triton_kernels as kernels

    queries, choices, most = blocks_NIM.shape
    return Launch(
        kernels.spread,
        (queries * choices, -(-chosen_NIK.shape[2] // SPREAD_TOKENS)),
        (blocks_NIM, batch.positions_N, chosen_NIK),
        {"CHOICES": choices, "BLOCK": block_tokens, "MOST": most, "TILE": SPREAD_TOKENS},
    )


def gathering(entries_PBJC: Tensor, chosen_NJK: Tensor, batch: ChoiceBatch, gathered_NJKC: Tensor) -> Launch:
    from . import triton_kernels as kernels

    queries, choices, most = chosen_NJK.shape
    size = entries_PBJC.shape[3]
    assert entries_PBJC.stride(3) == 1, "entries lie as the kernel reads them"
    padded, tokens = _gathered_at_once(entries_PBJC, most)
    return Launch(
        kernels.gather,
        (queries * choices, _programs(queries * choices, -(-most // tokens))),
        (
            entries_PBJC, chosen_NJK, *_tables(batch), batch.positions_N, gathered_NJKC,
            *_rows(batch), *entries_PBJC.stride()[:3],
        ),
        {
            "CHOICES": choices, "SIZE": size, "SIZE_PADDED": padded, "TOKENS": tokens, "MOST": most,
            **_pages(batch),
        },
    )  # fmt: skip


def gathering_sight(
    window: Tensor, entries: Tensor, of_window: ChoiceBatch, of_entries: ChoiceBatch, chosen_NK: Tensor | None,
    sight: Sight, gathered_NLC: Tensor,
) -> Launch:  # fmt: skip
    """Arguments as in `gather_sight`. window, entries: [pages,..,C]"""
    from . import triton_kernels as kernels

    queries, width, size = gathered_NLC.shape
    assert window.stride(-1) == entries.stride(-1) == 1, "entries lie as the kernel reads them"
    assert of_window.starts_R is not None and of_entries.starts_R is not None, "tables lie on the device"
    padded, tokens = _gathered_at_once(window, width)
    return Launch(
        kernels.gather_sight,
        (queries, _programs(queries, -(-width // tokens))),
        (
            window, entries, of_window.table_RP if chosen_NK is None else chosen_NK, of_window.table_RP,
            of_window.starts_R, of_entries.starts_R, of_window.positions_N, gathered_NLC,
            *window.stride()[:2], *entries.stride()[:2], sight.window_tokens,
        ),
        {
            "SIZE": size, "SIZE_PADDED": padded, "TOKENS": tokens, "WIDTH": width, "MOST": sight.most_entries,
            "WINDOW_PAGE": of_window.block_tokens, "ENTRY_PAGE": of_entries.block_tokens,
            "ENTRY": of_entries.entry_tokens, "IS_CHOSEN": chosen_NK is not None,
        },
    )  # fmt: skip


def _gathered_at_once(entries: Tensor, most: int) -> tuple[int, int]:
    """Numbers of an entry with their padding, and how many entries of at most so many a program gathers at a time."""
    padded = power_of_two(entries.shape[-1])
    return padded, min(max(1, GATHERED_BYTES // (padded * entries.itemsize)), power_of_two(most))


def _sizes(heads: int, size: int) -> dict[str, int]:
    """Of index heads, with their padding."""
    padded = (max(LEAST_DOT, power_of_two(each)) for each in (heads, size))
    return dict(zip(("HEADS_PADDED", "SIZE_PADDED"), padded, strict=True)) | {"HEADS": heads, "SIZE": size}


def _pages(batch: ChoiceBatch) -> dict[str, int]:
    return {"PAGE": batch.block_tokens, "ENTRY": batch.entry_tokens, "HAS_STARTS": batch.starts_R is not None}


def _tables(batch: ChoiceBatch) -> tuple[Tensor, Tensor]:
    """The table, and where its rows begin; without such places, something that is not read."""
    return batch.table_RP, batch.positions_N if batch.starts_R is None else batch.starts_R


def _rows(batch: ChoiceBatch) -> tuple[int, int]:
    """Queries of a row, and pages of one in a table without places."""
    return len(batch.positions_N) // batch.num_rows, batch.table_RP.shape[-1]


def _programs(queries: int, tiles: int) -> int:
    """For each query."""
    return max(1, min(tiles, MOST_PROGRAMS // queries))
