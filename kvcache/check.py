"""Recounts every block from the tables: the second opinion on the pool's own bookkeeping.

The engine runs it when it idles, tests after every operation.
"""

from typing import NamedTuple

from .manager import CacheManager


class Recount(NamedTuple):
    """Where all large pages of a pool are. `held + kept + blank == usable`."""

    usable: int
    held: int
    kept: int  # free, and still good for a prefix hit
    blank: int
    open_requests: int
    held_blocks: tuple[int, ...] = ()  # of each group, as the tables name them
    known_blocks: tuple[int, ...] = ()  # of each group, that carry a name, held or not

    @property
    def all_free(self) -> bool:
        return self.held == 0 and self.open_requests == 0


def recount(manager: CacheManager) -> Recount:
    """Count all blocks anew. Raises `AssertionError` with every contradiction found."""
    held = manager.held()
    faults = manager.pool.faults(held)
    assert not faults, "the block pool contradicts the block tables:\n  " + "\n  ".join(faults)
    pool = manager.pool
    return Recount(
        usable=manager.plan.usable_blocks,
        held=manager.plan.usable_blocks - pool.num_free,
        kept=pool.num_kept,
        blank=pool.num_blank,
        open_requests=manager.num_open,
        held_blocks=tuple(len({block for g, block in held if g == group}) for group in range(len(manager.plan.groups))),
        known_blocks=tuple(len(pool.index(group)) for group in range(len(manager.plan.groups))),
    )
