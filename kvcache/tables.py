"""The block tables of all groups, one for each, by what its layers keep; and what follows from their kinds."""

from collections.abc import Sequence

from .draft_table import DraftTable
from .encoder_table import EncoderTable
from .group_table import GroupTable, Row
from .plan import Group, MemoryPlan
from .pool import BlockPool
from .prefix import Chain, TokenChain
from .reach import Keeps, moves_on
from .state_table import StateTable
from .token_table import TokenTable

NAMED_AT_ONCE = 4
"""Blocks of an answer that are named together: others find it in the cache so many blocks late, while it runs."""


class Tables:
    """Invariant: `each` has one table per group, in the order of the plan."""

    def __init__(self, plan: MemoryPlan, pool: BlockPool, *, caching: bool):
        reaches = [group.reach for group in plan.groups]
        token_bytes = sum(
            group.content_bytes // group.block_tokens for group in plan.groups if group.reach.keeps is Keeps.TOKENS
        )

        def table(g: int, group: Group) -> GroupTable:
            match group.reach.keeps:
                case Keeps.TOKENS:
                    return (DraftTable if group.is_draft else TokenTable)(g, group, pool, caching=caching)
                case Keeps.STATE:
                    return StateTable(g, group, pool, caching=caching, token_bytes=token_bytes)
                case Keeps.ENCODER:
                    return EncoderTable(g, group, pool, caching=caching)

        self.each = [table(g, group) for g, group in enumerate(plan.groups)]
        assert len(self.each) == len(plan.groups), "each group has one table"
        self.states = [each for each in self.each if isinstance(each, StateTable)]
        self.has_windows = any(map(moves_on, reaches))
        self.keep_front = any(reach.keeps is Keeps.TOKENS and not moves_on(reach) for reach in reaches)
        self._block_tokens = plan.block_tokens
        self._has_drafts = any(group.is_draft for group in plan.groups)
        self.are_states_alone = all(reach.keeps is Keeps.STATE for reach in reaches)
        # While a request grows by single tokens, the other ones have nothing to name, and never anything to give back.
        self.moving = [
            each
            for each, reach in zip(self.each, reaches, strict=True)
            if reach.keeps is not Keeps.TOKENS or moves_on(reach)
        ]
        # Groups of tokens need blocks at the same lengths. If there are no others, the first one answers for all.
        self._alike = self.each[0] if all(reach.keeps is Keeps.TOKENS for reach in reaches) else None

    def missing(self, row: Row, length: int) -> list[int]:
        """Blocks to add per group before `length` tokens are written."""
        if self._alike is not None:
            return [self._alike.missing(row, length)] * len(self.each)
        return [table.missing(row, length) for table in self.each]

    def borders(self, chain: Chain, told: Sequence[int]) -> Sequence[int]:
        """Where another request could go on, of the lengths that a client tells: where no prefix can end inside a
        block, at the block border before."""
        if isinstance(chain, TokenChain) and not self._has_drafts:
            return told
        return [length - length % self._block_tokens for length in told]

    def next_event(self, row: Row) -> int:
        """Shortest length beyond the present one at which something has to be done."""
        if self._alike is not None:
            return self._alike.next_event(row)
        return min([table.next_event(row) for table in self.each])


def name_every(plan: MemoryPlan) -> int:
    """Tokens after which the blocks of an answer get their names.

    Naming some at once is cheaper, but what a layer gives back must have its name by then.
    """
    reaches, size = [group.reach for group in plan.groups], plan.block_tokens
    far = all(r.window_tokens is None or r.window_tokens > (NAMED_AT_ONCE + 1) * size for r in reaches)
    plain = all(r.keeps is Keeps.TOKENS and r.chunk_tokens is None for r in reaches)
    return size * (NAMED_AT_ONCE if far and plain else 1)
