"""Recounts every block from the tables: the second opinion on the pool's own bookkeeping.

The engine runs it when it idles, tests after every operation.
"""

from typing import NamedTuple

from .manager import CacheManager


class Recount(NamedTuple):
    """Where all large pages of a pool are. `held + kept + blank == usable`."""

    usable: int
    held: int
    kept: int  # cached: no request uses them, and they are good for a prefix hit
    blank: int  # free
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
        held=manager.plan.usable_blocks - pool.num_available_pages,
        kept=pool.num_cached_pages,
        blank=pool.num_free_pages,
        open_requests=manager.num_open,
        held_blocks=tuple(map(len, held)),
        known_blocks=tuple(len(group.index) for group in pool.groups),
    )
