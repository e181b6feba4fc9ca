"""The choice in plain torch, on any device: keys are scored in tiles, so that what lies between stays small.

It waits for no device. Of tokens that score alike torch takes any.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from .protocol import Asked, BlockRule, ChoiceBatch

MOST_PRODUCTS = 1 << 23
"""Products of index heads with keys that are in memory at once: 32 MiB."""


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Arguments and result as in `reference.py`."""
    scores_NL = keys_PBE.new_empty(len(asked.q_NIE), batch.longest, dtype=torch.float32)
    for start, products_NIL in _products(asked.q_NIE, keys_PBE, batch):
        tile = scores_NL[:, start : start + products_NIL.shape[2]]
        tile.copy_((asked.weights_NI[:, None] @ products_NIL.relu_())[:, 0])
    # What a query does not see comes last, whatever its bytes are.
    seen_N1 = batch.positions_N[:, None]
    unseen_NL = torch.arange(batch.longest, device=keys_PBE.device) > seen_N1
    best_NK = scores_NL.masked_fill_(unseen_NL, float("-inf")).topk(min(most, batch.longest)).indices
    chosen_NK = best_NK.masked_fill_(best_NK > seen_N1, batch.longest).sort().values
    return F.pad(chosen_NK.masked_fill_(chosen_NK == batch.longest, 0), (0, most - chosen_NK.shape[1]))


def gather(entries_PBJC: Tensor, chosen_NJK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N,J,K,C]: of each choice of a query the entries of the tokens."""
    choices, tokens = chosen_NJK.shape[1], batch.block_tokens
    pages_NJK = batch.table_RP.gather(1, (chosen_NJK // tokens).view(len(batch.table_RP), -1)).view(chosen_NJK.shape)
    if choices == 1:
        return entries_PBJC[pages_NJK, chosen_NJK % tokens, 0]
    return entries_PBJC[pages_NJK, chosen_NJK % tokens, torch.arange(choices, device=entries_PBJC.device)[:, None]]


def choose_blocks(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch, rule: BlockRule) -> Tensor:
    """Arguments and result as in `reference.py`."""
    blocks = -(-batch.longest // rule.size)
    scores_NIL = keys_PBE.new_empty(*q_NIE.shape[:2], blocks * rule.size, dtype=torch.float32)
    for start, products_NIL in _products(q_NIE, keys_PBE, batch):
        scores_NIL[..., start : start + products_NIL.shape[2]] = products_NIL
    seen_N11 = batch.positions_N[:, None, None]
    positions_L = torch.arange(blocks * rule.size, device=keys_PBE.device)
    scores_NIL.masked_fill_(positions_L > seen_N11, float("-inf"))
    scores_NIB = scores_NIL.unflatten(-1, (blocks, rule.size)).amax(-1)
    # Near blocks come first, and blocks of which nothing is seen last.
    near = seen_N11 // rule.size - torch.arange(rule.near, device=keys_PBE.device)
    scores_NIB.scatter_(-1, near.clamp_(min=0).expand(*scores_NIB.shape[:2], -1), float("inf"))
    return _tokens_of_best(scores_NIB, rule.most, rule.size, seen_N11)


def _tokens_of_best(scores: Tensor, most: int, size: int, seen: Tensor) -> Tensor:
    """[..,most * size]: positions of the tokens of the blocks that score highest, in order, and zeros behind them.

    scores: of blocks, [..,blocks]; -inf of those of which nothing is seen    seen: the last position, [..,1]"""
    blocks = scores.shape[-1]
    best = scores.topk(min(most, blocks))
    first = best.indices.masked_fill_(best.values == float("-inf"), blocks).sort().values * size
    chosen = (first[..., None] + torch.arange(size, device=scores.device)).flatten(-2)
    chosen = chosen.masked_fill_(chosen > seen, 0)
    return F.pad(chosen, (0, most * size - chosen.shape[-1]))


def _products(q_NIE: Tensor, keys_PBE: Tensor, batch: ChoiceBatch) -> Iterator[tuple[int, Tensor]]:
    """query · key [N,I,L] of tile after tile of the rows' tokens, and the first token of each tile."""
    rows, (queries, heads, size) = len(batch.table_RP), q_NIE.shape
    q_RME = q_NIE.float().reshape(rows, -1, size)
    tile = max(batch.block_tokens, MOST_PRODUCTS // (queries * heads))
    for start in range(0, batch.longest, tile):
        positions_L = torch.arange(start, min(start + tile, batch.longest), device=keys_PBE.device)
        pages_RL = batch.table_RP[:, positions_L // batch.block_tokens]
        keys_RLE = keys_PBE[pages_RL, positions_L % batch.block_tokens].float()
        yield start, (q_RME @ keys_RLE.mT).view(queries, heads, -1)
