"""Bugs that were planted, and that the world finds: the list of what the random tests are good for.

Each is one small change to the cache, as easily made by mistake. With it, some of the seeds must fail; without, none.
"""

from collections.abc import Callable
from typing import Any

import pytest

from intarsia.kvcache import tables
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.pool import BlockPool
from intarsia.kvcache.prefix import TokenChain
from intarsia.kvcache.reach import Chunked, Sliding
from intarsia.kvcache.tables import Save, StateTable, TokenTable
from intarsia.tests.kvcache.world import run_worlds

SEEDS = range(40)

OPERATIONS = 300

Plant = Callable[[pytest.MonkeyPatch], None]

BUGS: dict[str, Plant] = {}


def bug(plant: Plant) -> Plant:
    BUGS[plant.__name__.replace("_", " ")] = plant
    return plant


def around(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrap: Callable[..., Any]) -> None:
    """Replace `owner.name` by `wrap(original, ...)`."""
    original = getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args, **kwargs: wrap(original, *args, **kwargs))


@bug
def a_shared_block_is_not_counted(m):
    monkey = lambda original, self, group, blocks, **k: original(self, group, list(blocks)[1:], **k)  # noqa: E731
    around(m, BlockPool, "share", monkey)


@bug
def a_window_is_one_token_short(m):
    m.setattr(Sliding, "oldest_needed", lambda self, length: max(0, length - self.window_tokens + 2))


@bug
def a_chunk_begins_one_token_late(m):
    m.setattr(Chunked, "oldest_needed", lambda self, length: min(length, length - length % self.chunk_tokens + 1))


@bug
def passed_blocks_are_given_back_one_too_early(m):
    around(m, TokenTable, "_pass", lambda original, self, row, start, stop: original(
        self, row, start, min(stop + 1, len(row.blocks[self._g]))))  # fmt: skip


@bug
def blocks_are_named_before_they_are_full(m):
    def settle(original, self, row):
        row.extent += 1
        original(self, row)
        row.extent -= 1

    around(m, TokenTable, "settle", settle)


@bug
def an_evicted_block_keeps_its_name(m):
    def unname(original, self, group, block, **kwargs):
        name = self._groups[group].name_of[block]
        original(self, group, block, **kwargs)
        self._groups[group].index[name] = block

    around(m, BlockPool, "_unname", unname)


@bug
def the_copy_of_a_tail_is_forgotten(m):
    around(m, CacheManager, "_copies", lambda original, *args: original(*args) and ())


@bug
def the_source_of_a_copy_is_not_held(m):
    def adopt(original, self, row, length):
        original(self, row, length)
        for g, source in row.sources:
            self._pool.give_back(g, [source])

    around(m, TokenTable, "adopt", adopt)


@bug
def salts_are_ignored(m):
    around(m, CacheManager, "chain", lambda original, self, tokens, salt=b"", encoder=None: original(self, tokens))


@bug
def a_hit_may_be_the_whole_prompt(m):
    around(m, CacheManager, "_search", lambda original, self, chain, limit, *rest: original(
        self, chain, limit + 1, *rest))  # fmt: skip


@bug
def a_hole_in_the_front_is_overlooked(m):
    m.setattr(tables, "count_leading", lambda names, index: sum(name in index for name in names))


@bug
def a_snapshot_is_named_one_block_late(m):
    def settle(original, self, row):
        row.saves = [Save(save.group, save.length + self._size, save.block) for save in row.saves]
        original(self, row)

    around(m, StateTable, "settle", settle)


@bug
def a_state_is_taken_over_instead_of_copied(m):
    def adopt(original, self, row, length):
        original(self, row, length)
        g, source = row.sources.pop()
        row.blocks[g] = [source]

    around(m, StateTable, "adopt", adopt)


@bug
def a_fork_shares_the_block_both_write_to(m):
    around(m, TokenTable, "split", lambda original, self, row: (list(row.blocks[self._g]), None))


@bug
def spare_blocks_of_an_ended_request_are_lost(m):
    m.setattr(BlockPool, "end", lambda self, request: [mine.spare.pop(request, None) for mine in self._groups])


@bug
def a_large_page_is_freed_while_one_block_is_held(m):
    def settle(original, self, mine, arena, large):
        original(self, mine, arena, large)

    def free_block(original, self, mine, arena, block, tier, worth):
        original(self, mine, arena, block, tier, worth)
        large = block // mine.per_large
        if arena.busy[large] == 1 and arena.kept[large] == 0 and large:
            self._free_large(mine, arena, large)

    around(m, BlockPool, "_settle_large", settle)
    around(m, BlockPool, "_free_block", free_block)


@bug
def a_drafters_block_is_named_without_the_next_token(m):
    m.setattr(TokenChain, "draft_names", property(lambda self: self.names))


@bug
def null_blocks_are_dealt_out(m):
    from intarsia.kvcache.plan import BesideNull, MemoryPlan

    def beside_null(original, self, arena):
        found = original(self, arena)
        return found and BesideNull(found.group, 1, found.end)

    around(m, MemoryPlan, "beside_null", beside_null)


@bug
def pinned_blocks_are_given_back_twice(m):
    def unpin(original, self, pin):
        original(self, pin)
        original(self, pin)

    around(m, CacheManager, "_unpin", unpin)


@bug
def what_was_taken_before_a_refusal_is_kept(m):
    def take(original, self, wants, request):
        return [original(self, [n * (g == k) for k, n in enumerate(wants)], request)[g] for g in range(len(wants))]

    around(m, BlockPool, "take", take)


@bug
def an_image_is_not_part_of_the_name(m):
    around(
        m, CacheManager, "chain", lambda original, self, tokens, salt=b"", encoder=None: original(self, tokens, salt)
    )


def test_without_a_planted_bug_the_seeds_pass():
    run_worlds(SEEDS, OPERATIONS)


@pytest.mark.parametrize("name", BUGS)
def test_planted_bug_is_found(name: str, monkeypatch: pytest.MonkeyPatch):
    BUGS[name](monkeypatch)
    with pytest.raises((AssertionError, IndexError, KeyError, ValueError)):
        run_worlds(SEEDS, OPERATIONS)
