"""Which tokens a query attends to, by an index over the tokens of its row.

    chosen = choose(Asked(queries, weights), keys, batch, most)     # once per layer that has an index
    chosen = choose_blocks(queries, keys, batch, rule)              # where tokens are chosen in blocks

`protocol.py` says what these words mean, and `reference.py` shows the arithmetic. On a CPU tokens are chosen in C++
(`cpu.py`), else, and blocks everywhere, in plain torch.
"""

from torch import Tensor

from . import cpu, plain_torch
from .plain_torch import choose_blocks
from .protocol import Asked, BlockRule, ChoiceBatch

__all__ = ["Asked", "BlockRule", "ChoiceBatch", "choose", "choose_blocks"]


def choose(asked: Asked, keys_PBE: Tensor, batch: ChoiceBatch, most: int) -> Tensor:
    """Positions [N,most] of the chosen tokens, in order; zeros behind those of a query that sees fewer than `most`."""
    kind = cpu if keys_PBE.device.type == "cpu" and cpu.is_available() else plain_torch
    return kind.choose(asked, keys_PBE, batch, most)
