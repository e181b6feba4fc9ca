"""The choice in plain torch, on any device: keys are scored in tiles, so that what lies between stays small.

It waits for no device. Of tokens that score alike torch takes any.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import Asked, ChoiceBatch

MOST_PRODUCTS = 1 << 23
"""Products of index heads with keys that are in memory at once: 32 MiB."""


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Arguments and result as in `reference.py`."""
    queries, heads, _ = asked.q_NIE.shape
    tile = max(batch.block_tokens, MOST_PRODUCTS // (queries * heads))
    scores_NL = torch.empty(queries, batch.longest, device=keys_PBE.device)
    for start in range(0, batch.longest, tile):
        end = min(start + tile, batch.longest)
        scores_NL[:, start:end] = _scores(asked, keys_PBE, batch, start, end)
    # What a query does not see comes last, whatever its bytes are.
    seen_N1 = batch.positions_N[:, None]
    unseen_NL = torch.arange(batch.longest, device=keys_PBE.device) > seen_N1
    best_NK = scores_NL.masked_fill_(unseen_NL, float("-inf")).topk(min(most, batch.longest)).indices
    chosen_NK = best_NK.masked_fill_(best_NK > seen_N1, batch.longest).sort().values
    return F.pad(chosen_NK.masked_fill_(chosen_NK == batch.longest, 0), (0, most - chosen_NK.shape[1]))


def _scores(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, start: int, end: int) -> Tensor:
    """[N,end-start]: of tokens from `start` on."""
    positions_L = torch.arange(start, end, device=keys_PBE.device)
    pages_RL = batch.table_RP[:, positions_L // batch.block_tokens]
    keys_RLE = keys_PBE[pages_RL, positions_L % batch.block_tokens].float()
    rows = len(batch.table_RP)
    q_RME = asked.q_NIE.float().reshape(rows, -1, asked.q_NIE.shape[-1])
    products_NIL = (q_RME @ keys_RLE.mT).relu_().view(*asked.q_NIE.shape[:2], -1)
    return (asked.weights_NI[:, None] @ products_NIL)[:, 0]
