"""Block tables of a drafter's layers. A drafter makes its entry of a token together with the token after it.

    the model's entry   token 0    token 1    token 2
    the drafter's       0 and 1    1 and 2    (not yet: token 3 is not known)

So a block is named by one more token than it holds, a prefix cannot end inside a block, and a fork, whose next token is
another one, makes the last entry of its parent anew. Only `intarsia replay` has such layers.
"""

from collections.abc import Sequence

from .eviction import Tier
from .group_table import Copy, Row
from .ids import BlockId, RequestId
from .misses import ALIGNMENT
from .plan import Group
from .pool import BlockPool
from .prefix import Chain
from .token_table import TokenTable


class DraftTable(TokenTable):
    """Invariant: beside that of a `TokenTable`, the last block of a fork has no name before its last entry is made
    anew."""

    def __init__(self, g: int, group: Group, pool: BlockPool, *, caching: bool):
        super().__init__(g, group, pool, caching=caching)
        self._forked: set[RequestId] = set()  # requests whose last entry is still their parent's

    def names(self, chain: Chain) -> list[bytes]:
        return chain.draft_names

    def cause(self, chain: Chain, length: int) -> str:
        """At a border of blocks, another token may have come next."""
        lacking = self._first_lacking(chain, length)
        return self._why_gone(lacking, ALIGNMENT)

    def fork(self, row: Row, child: Row, new: Sequence[BlockId]) -> Copy | None:
        assert child.request not in self._forked, f"request {child.request} is forked twice"
        if row.extent:
            self._forked.add(child.request)
        return super().fork(row, child, new)

    def settle(self, row: Row) -> None:
        written = row.extent - (row.request in self._forked)
        assert written >= 0, f"request {row.request} was forked before it had a token"
        self._settle(row, self._rows[row.request], row.chain.draft_names, written)

    def append(self, row: Row, new: Sequence[BlockId]) -> None:
        self._forked.discard(row.request)  # the step that these blocks are for makes the entry
        super().append(row, new)

    def finish(self, row: Row, tier: Tier) -> None:
        self._forked.discard(row.request)
        super().finish(row, tier)

    def _fork_point(self, row: Row) -> tuple[int, bool]:
        return max(0, row.extent - 1) // self._size, True

    def _name_end(self, chain: Chain, length: int, block: BlockId) -> None:
        """A prefix cannot end inside a block."""
