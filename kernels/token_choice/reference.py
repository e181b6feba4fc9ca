"""One query at a time, in float32: the oracle of the others."""

import torch
from torch import Tensor

from .protocol import Asked, ChoiceBatch


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """[N,most] int64: positions of the chosen tokens, in order. Of tokens that score alike the older one is taken.

    Shapes  keys [pages, tokens of a page, E], strided; only those of tokens that a query sees are read
    A query that sees fewer than `most` chooses all; behind them are zeros.
    """
    each = len(batch.positions_N) // len(batch.table_RP)
    chosen = torch.zeros(len(batch.positions_N), most, dtype=torch.int64, device=keys_PBE.device)
    for n, position in enumerate(batch.positions_N.tolist()):
        seen = torch.arange(position + 1, device=keys_PBE.device)
        pages = batch.table_RP[n // each][seen // batch.block_tokens]
        keys_LE = keys_PBE[pages, seen % batch.block_tokens].float()
        scores_L = asked.weights_NI[n] @ (asked.q_NIE[n].float() @ keys_LE.T).relu()
        best = scores_L.sort(descending=True, stable=True).indices[:most]
        chosen[n, : len(best)] = best.sort().values
    return chosen
