"""Which tokens a query attends to, by an index over the tokens of its row.

    chosen = choose(Asked(queries, weights), keys, batch, most)     # once per layer that has an index
    chosen = choose_blocks(queries, keys, batch, rule)              # where tokens are chosen in blocks
    entries = gather(pages, chosen, batch)                          # once per layer that goes by a choice

`protocol.py` says what these words mean, and `reference.py` shows the arithmetic. Tokens are chosen in C++ on a CPU
(`cpu.py`), by kernels of our own on a GPU (`triton.py`), and else in plain torch, as blocks are everywhere.
"""

from torch import Tensor

from . import cpu, plain_torch, triton
from .plain_torch import choose_blocks
from .protocol import Asked, BlockRule, ChoiceBatch

__all__ = ["Asked", "BlockRule", "ChoiceBatch", "choose", "choose_blocks", "gather"]


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Positions [N,most] of the chosen tokens, in order; zeros behind those of a query that sees fewer than `most`."""
    if keys_PBE.device.type == "cpu":
        kind = cpu if cpu.is_available() else plain_torch
    else:
        kind = triton if triton.is_available() else plain_torch
    return kind.choose(asked, keys_PBE, batch, most)


def gather(entries_PBC: Tensor, chosen_NK: Tensor, batch: ChoiceBatch) -> Tensor:
    """[N,K,C]: of each query the entries [pages,tokens of a page,C] of the tokens that it chose. Behind those of a
    query that chose fewer than K there may be anything."""
    if entries_PBC.device.type != "cpu" and triton.is_available():
        return triton.gather(entries_PBC, chosen_NK, batch)
    return plain_torch.gather(entries_PBC, chosen_NK, batch)
