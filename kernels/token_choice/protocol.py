"""Which tokens a query attends to: those whose index keys score highest, each by itself or in blocks.

    tokens    (DeepSeek-V3.2)   score of a token = sum over index heads of  weight * max(0, query · key)
    blocks    (MiniMax-M3)      score of a block = the highest  query · key  of its tokens that the query sees; each
                                index head chooses for one head of keys; the query's own block is always chosen

Tokens that are scored may be pools of tokens with one key each (GLM-5.3, Qwen4-Exp).

Suffixes: N queries    R rows of the block table, with N / R queries each    P pages of a row    I index heads
          E size of an index key    K chosen tokens of a query    L tokens of a row    B blocks of tokens
"""

from dataclasses import dataclass, replace
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


class Sight(NamedTuple):
    """What a query attends to, where that is a window and entries of several tokens (DeepSeek-V4)."""

    window_tokens: int
    most_entries: int
    width: int  # of what is gathered for a query: no less than both together


@dataclass(frozen=True, slots=True, eq=False)
class ChoiceBatch:
    """Queries that choose, and where the index keys of their rows lie. Rows have as many queries each.

    Shapes  table [R,P] int64, dense  positions [N] int64, row by row
    Units   positions in tokens: a query sees those up to its own. `longest` is the most that any of them sees.
            Blocks that no query of a row sees may be 0.
    With `starts`, the table is the numbers of many tables in a row, int32, and `starts` says where those of each row
    begin, [R] int64; and what is chosen may be entries of several tokens, each of which lies in the block of its last
    one. Positions and `longest` count entries then. Only `triton.py` takes these.
    """

    table_RP: Tensor
    positions_N: Tensor
    longest: int
    block_tokens: int
    starts_R: Tensor | None = None
    entry_tokens: int = 1

    def of(self, queries: slice) -> "ChoiceBatch":
        """The same of some queries, whose rows have one each, or of some of the queries of one row."""
        if self.num_rows == 1:
            return replace(self, positions_N=self.positions_N[queries])
        assert self.num_rows == len(self.positions_N), "rows have one query each"
        if self.starts_R is not None:
            return replace(self, positions_N=self.positions_N[queries], starts_R=self.starts_R[queries])
        return replace(self, positions_N=self.positions_N[queries], table_RP=self.table_RP[queries])

    @property
    def num_rows(self) -> int:
        return len(self.table_RP if self.starts_R is None else self.starts_R)
