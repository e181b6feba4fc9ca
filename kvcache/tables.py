"""One block table for each group, by what its layers keep."""

from .draft_table import DraftTable
from .encoder_table import EncoderTable
from .group_table import GroupTable
from .plan import Group, MemoryPlan
from .pool import BlockPool
from .reach import Keeps
from .state_table import StateTable
from .token_table import TokenTable


def make_tables(plan: MemoryPlan, pool: BlockPool, *, caching: bool, snapshot_share: float) -> list[GroupTable]:
    """snapshot_share: of the memory, for saved states."""
    token_bytes = sum(
        group.content_bytes // group.block_tokens for group in plan.groups if group.reach.keeps is Keeps.TOKENS
    )

    def table(g: int, group: Group) -> GroupTable:
        match group.reach.keeps:
            case Keeps.TOKENS:
                return (DraftTable if group.is_draft else TokenTable)(g, group, pool, caching=caching)
            case Keeps.STATE:
                blocks = plan.arenas[group.arena].usable * group.pages_per_large
                most = max(1, int(blocks * snapshot_share))
                return StateTable(g, group, pool, caching=caching, token_bytes=token_bytes, most_saved=most)
            case Keeps.ENCODER:
                return EncoderTable(g, group, pool, caching=caching)

    return [table(g, group) for g, group in enumerate(plan.groups)]
