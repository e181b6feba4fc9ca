"""One query at a time, in float32: the oracle of the others."""

import torch
from torch import Tensor

from .protocol import Asked, BlockRule, ChoiceBatch


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """[N,most] int64: positions of the chosen tokens, in order. Of tokens that score alike the older one is taken.

    Shapes  keys [pages, tokens of a page, E], strided; only those of tokens that a query sees are read
    A query that sees fewer than `most` chooses all; behind them are zeros.
    """
    each = len(batch.positions_N) // len(batch.table_RP)
    chosen = torch.zeros(len(batch.positions_N), most, dtype=torch.int64, device=keys_PBE.device)
    for n, position in enumerate(batch.positions_N.tolist()):
        keys_LE = _seen(keys_PBE, batch, n // each, position)
        scores_L = asked.weights_NI[n] @ (asked.q_NIE[n].float() @ keys_LE.T).relu()
        best = scores_L.sort(descending=True, stable=True).indices[:most]
        chosen[n, : len(best)] = best.sort().values
    return chosen


def choose_blocks(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch, rule: BlockRule) -> Tensor:
    """[N,I,rule.most * rule.size] int64: positions of the tokens of the chosen blocks, in order; zeros behind them."""
    each = len(batch.positions_N) // len(batch.table_RP)
    chosen = torch.zeros(*q_NIE.shape[:2], rule.most * rule.size, dtype=torch.int64, device=keys_PBE.device)
    for n, position in enumerate(batch.positions_N.tolist()):
        scores_IL = q_NIE[n].float() @ _seen(keys_PBE, batch, n // each, position).T
        scores = torch.stack([block.amax(-1) for block in scores_IL.split(rule.size, dim=-1)], dim=-1)
        scores[:, -rule.near :] = float("inf")
        for head, best in enumerate(scores.sort(descending=True, stable=True).indices[:, : rule.most]):
            tokens = (best.sort().values[:, None] * rule.size + torch.arange(rule.size)).flatten()
            tokens = tokens[tokens <= position]
            chosen[n, head, : len(tokens)] = tokens
    return chosen


def _seen(keys_PBE: Tensor, batch: ChoiceBatch, row: int, position: int) -> Tensor:
    """[L,E]: the keys that a query sees."""
    seen = torch.arange(position + 1, device=keys_PBE.device)
    pages = batch.table_RP[row][seen // batch.block_tokens]
    return keys_PBE[pages, seen % batch.block_tokens].float()
