"""Memory plans for tests, by their groups: so many large pages, so many blocks of each group in one."""

import math
from collections.abc import Sequence

from intarsia.kvcache.plan import Arena, Group, MemoryPlan, Place
from intarsia.kvcache.reach import Reach


def plan_of(
    *reaches: Reach, blocks: int = 32, block_tokens: int = 4, per_large: Sequence[int] = (), draft: Sequence[int] = ()
) -> MemoryPlan:
    """One arena of `blocks` large pages, the null page included; one layer per group."""
    counts = list(per_large) or [1] * len(reaches)
    large_bytes = 64 * math.lcm(*counts)
    groups = tuple(
        Group(
            reach,
            (n,),
            block_tokens,
            page_bytes=large_bytes // count,
            pages_per_large=count,
            block_bytes=large_bytes // count,
            content_bytes=large_bytes // count,
            places=(Place(0, 0),),
            is_draft=n in draft,
        )
        for n, (reach, count) in enumerate(zip(reaches, counts, strict=True))
    )
    return MemoryPlan(
        "packed" if per_large else "layered", groups, (Arena(blocks, large_bytes),), (blocks * large_bytes,)
    )
