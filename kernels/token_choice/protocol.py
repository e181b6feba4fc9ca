"""Which tokens a query attends to: those whose index keys score highest, each by itself or in blocks.

    tokens    (DeepSeek-V3.2)   score of a token = sum over index heads of  weight * max(0, query · key)
    blocks    (MiniMax-M3)      score of a block = the highest  query · key  of its tokens that the query sees; each
                                index head chooses for one head of keys; the query's own block is always chosen

Tokens that are scored may be pools of tokens with one key each (GLM-5.3, Qwen4-Exp).

Suffixes: N queries    R rows of the block table, with N / R queries each    P pages of a row    I index heads
          E size of an index key    K chosen tokens of a query    L tokens of a row    B blocks of tokens
"""

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor


class Asked(NamedTuple):
    """What is asked of an index."""

    q_NIE: Tensor
    weights_NI: Tensor  # float32


class BlockRule(NamedTuple):
    """How blocks of tokens are chosen."""

    size: int  # tokens of a block
    most: int  # blocks that a query attends to
    near: int  # of them, so many are its own and those just before it, whatever their scores: one at least


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceBatch:
    """Queries that choose, and where the index keys of their rows lie. Rows have as many queries each.

    Shapes  table [R,P] int64, dense  positions [N] int64, row by row
    Units   positions in tokens: a query sees those up to its own. `longest` is the most that any of them sees.
            Blocks that no query of a row sees may be 0.
    """

    table_RP: Tensor
    positions_N: Tensor
    longest: int
    block_tokens: int
