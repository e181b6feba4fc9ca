"""Bugs that were planted, and that the world finds: the list of what the random tests are good for.

Each is one small change to the cache, as easily made by mistake. With it, some of the seeds must fail; without, none.
"""

from collections.abc import Callable
from typing import Any

import pytest

from intarsia.kvcache import token_table
from intarsia.kvcache.group_blocks import GroupBlocks
from intarsia.kvcache.group_table import GroupTable, Save
from intarsia.kvcache.hints import Hints
from intarsia.kvcache.lookup import Lookup
from intarsia.kvcache.manager import CacheManager
from intarsia.kvcache.packed_blocks import PackedBlocks
from intarsia.kvcache.page_blocks import PageBlocks
from intarsia.kvcache.pool import BlockPool
from intarsia.kvcache.prefix import TokenChain
from intarsia.kvcache.reach import Chunked, Sliding
from intarsia.kvcache.state_table import StateTable
from intarsia.kvcache.token_table import TokenTable
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
    for blocks in (PageBlocks, PackedBlocks):
        around(m, blocks, "share", lambda original, self, shared, **k: original(self, list(shared)[1:], **k))


@bug
def a_window_is_one_token_short(m):
    m.setattr(Sliding, "oldest_needed", lambda self, length: max(0, length - self.window_tokens + 2))


@bug
def a_chunk_begins_one_token_late(m):
    m.setattr(Chunked, "oldest_needed", lambda self, length: min(length, length - length % self.chunk_tokens + 1))


@bug
def passed_blocks_are_given_back_one_too_early(m):
    around(m, TokenTable, "_pass", lambda original, self, row, own, stop: original(
        self, row, own, min(stop + 1, len(own.blocks))))  # fmt: skip


@bug
def blocks_are_named_before_they_are_full(m):
    def settle(original, self, row):
        row.extent += 1
        original(self, row)
        row.extent -= 1

    around(m, TokenTable, "settle", settle)


@bug
def an_evicted_block_keeps_its_name(m):
    def drop_name(original, self, block):
        name = self.name_of(block)
        original(self, block)
        self.index[name] = block

    around(m, GroupBlocks, "_drop_name", drop_name)


@bug
def the_copy_of_a_tail_is_forgotten(m):
    around(m, CacheManager, "_copies", lambda original, *args: original(*args) and ())


@bug
def the_source_of_a_copy_is_not_held(m):
    def await_copy(original, self, own, source, **kwargs):
        original(self, own, source, **kwargs)
        self._blocks.give_back([source])

    around(m, GroupTable, "_await_copy", await_copy)


@bug
def salts_are_ignored(m):
    around(m, CacheManager, "chain", lambda original, self, tokens, salt=b"", encoder=None: original(self, tokens))


@bug
def a_hit_may_be_the_whole_prompt(m):
    around(m, Lookup, "_search", lambda original, self, chain, limit, *rest: original(
        self, chain, limit + 1, *rest))  # fmt: skip


@bug
def a_hole_in_the_front_is_overlooked(m):
    m.setattr(token_table, "count_leading", lambda names, index: sum(name in index for name in names))


@bug
def a_snapshot_is_named_one_block_late(m):
    def take_saves(original, self, row, length):
        made = original(self, row, length)
        own = self._rows[row.request]
        own.saves = [Save(save.group, save.length + self._size * (save in made), save.block) for save in own.saves]
        return made

    around(m, StateTable, "take_saves", take_saves)


@bug
def a_state_is_taken_over_instead_of_copied(m):
    def open_row(original, self, row, length):
        original(self, row, length)
        own = self._rows[row.request]
        if own.source is not None:
            own.blocks, own.source, own.awaits_copy = [own.source], None, False

    around(m, StateTable, "open", open_row)


@bug
def a_fork_shares_the_block_both_write_to(m):
    def fork(original, self, row, child, new):
        own, other = self._rows[row.request], self._begin(child.request, token_table.TokenRow())
        other.blocks, other.first, other.named = list(own.blocks), own.first, own.named
        self._blocks.share(own.blocks[own.first :])

    m.setattr(TokenTable, "copies_at_fork", lambda self, row: 0)
    around(m, TokenTable, "fork", fork)


@bug
def reserved_blocks_of_an_ended_request_are_lost(m):
    m.setattr(PackedBlocks, "free_reserved", lambda self, request: self._reserved.pop(request, None))


@bug
def a_large_page_is_freed_while_one_block_is_held(m):
    def release(original, self, block, tier):
        original(self, block, tier)
        page = block // self.per_page
        if self._used[page] == 1 and self._cached.in_page[page] == 0 and page:
            self._num_free -= len(self._free.pop(page, ()))
            self._pages.give_back(page)

    around(m, PackedBlocks, "_release", release)


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

    around(m, Hints, "_unpin", unpin)


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
