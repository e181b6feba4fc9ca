"""Which tokens a query attends to, by an index over the tokens of its row.

    chosen = choose(Asked(queries, weights), keys, batch, most)     # once per layer that has an index
    chosen = choose_blocks(queries, keys, batch, rule)              # where tokens are chosen in blocks
    entries = gather(pages, chosen, batch)                          # once per layer that goes by a choice
    entries = gather_sight(window, entries, .., chosen, sight)      # likewise in recorded steps, beside a window

`protocol.py` says what these words mean, and `reference.py` shows the arithmetic. Tokens are chosen in C++ on a CPU
(`cpu.py`), blocks in plain torch; both by kernels of our own on a GPU (`triton.py`).
"""

import torch
from torch import Tensor

from . import cpu, plain_torch, triton
from .protocol import Asked, BlockRule, ChoiceBatch, Sight
from .triton import gather_sight

__all__ = [
    "Asked",
    "BlockRule",
    "ChoiceBatch",
    "Sight",
    "choose",
    "choose_blocks",
    "gather",
    "gather_sight",
    "has_frames",
]


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Positions [N,most] of the chosen tokens, in order; zeros behind those of a query that sees fewer than `most`."""
    if has_frames(keys_PBE.device):
        kind = triton
    else:
        kind = cpu if keys_PBE.device.type == "cpu" and cpu.is_available() else plain_torch
    return kind.choose(asked, keys_PBE, batch, most)


def choose_blocks(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch, rule: BlockRule) -> Tensor:
    """Positions [N,I,rule.most * rule.size] of the tokens of the blocks that each index head chooses, in order, and
    zeros behind them."""
    kind = triton if has_frames(keys_PBE.device, rule.size) else plain_torch
    return kind.choose_blocks(q_NIE, keys_PBE, batch, rule)


def gather(entries_PBJC: Tensor, chosen_NJK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N,J,K,C]: of each choice of a query the entries [pages,tokens of a page,J,C] of the tokens. Behind those of a
    query that chose fewer than K there may be anything."""
    kind = triton if has_frames(entries_PBJC.device) else plain_torch
    return kind.gather(entries_PBJC, chosen_NJK, batch)


def has_frames(device: torch.device, block_tokens: int = 1) -> bool:
    """Whether queries choose by what lies on the device alone, so that a recorded step can be replayed. block_tokens:
    that are chosen together"""
    return device.type != "cpu" and triton.takes_blocks(block_tokens)
