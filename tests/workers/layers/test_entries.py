"""Entries of several tokens: where they lie, and what they are made of."""

import numpy as np
import pytest
import torch

from intarsia.kernels.paged_attention import GroupBatch
from intarsia.kernels.token_choice import Asked
from intarsia.kvcache.plan import PlanSettings
from intarsia.kvcache.strategies import plan_memory
from intarsia.workers.checkpoint.layer_specs import Compression
from intarsia.workers.layers.attention import step_masks
from intarsia.workers.layers.entries import EntryAttention, weighed
from intarsia.workers.layers.gathering import ragged
from intarsia.workers.pages import Pages

CPU = torch.device("cpu")
TOKENS, ENTRY = 4, 8


def test_ragged_counts_each_thing_among_its_own():
    places, of = ragged(np.array([2, 0, 3]))
    assert (places.tolist(), of.tolist()) == ([0, 1, 0, 1, 2], [0, 0, 2, 2, 2])


def test_an_entry_is_the_sum_of_values_by_their_weights():
    given, bias = torch.randn(3, TOKENS, 2 * ENTRY), torch.randn(TOKENS, ENTRY)
    values, weights = given.chunk(2, dim=-1)
    expected = (values * (weights + bias).softmax(dim=1)).sum(dim=1)
    torch.testing.assert_close(weighed(given, bias, torch.ones(3, dtype=torch.bool)), expected)


def test_where_entries_overlap_the_first_is_made_of_its_own_tokens_alone():
    given, bias = torch.randn(2, 2 * TOKENS, 4 * ENTRY), torch.randn(TOKENS, 2 * ENTRY)
    first, second = weighed(given, bias, torch.tensor([False, True]))
    own = (given[0, TOKENS:, 3 * ENTRY :] + bias[:, ENTRY:]).softmax(dim=0)
    torch.testing.assert_close(first, (given[0, TOKENS:, ENTRY : 2 * ENTRY] * own).sum(dim=0))
    before = given[1, :TOKENS, 2 * ENTRY : 3 * ENTRY] + bias[:, :ENTRY]
    now = given[1, TOKENS:, 3 * ENTRY :] + bias[:, ENTRY:]
    values = torch.cat((given[1, :TOKENS, :ENTRY], given[1, TOKENS:, ENTRY : 2 * ENTRY]))
    torch.testing.assert_close(second, (values * torch.cat((before, now)).softmax(dim=0)).sum(dim=0))


class World:
    """One layer that keeps entries, the pages of a few rows, and steps over them."""

    def __init__(self, block_tokens: int, lengths: list[int], *, overlaps: bool):
        self._compression = Compression(TOKENS, ENTRY, overlaps=overlaps, is_beside_window=True)
        self._layers = self._compression.layers(0, item_bytes=4)
        plan = plan_memory(self._layers, PlanSettings(4 << 20, block_tokens, "partitioned"))
        self.attention = EntryAttention(self._layers, torch.float32, CPU)
        self.attention.learnt = _Backend()  # type: ignore[assignment]
        pages = Pages(plan, self._layers, torch.float32, CPU)
        for buffer in pages._whole:
            for view in buffer:
                view.fill_(255)  # NaN, where nothing was written
        self.attention.use(pages, plan)
        self.attention.learnt = _Backend()  # type: ignore[assignment]
        self._masks = step_masks(plan)
        blocks = -(-max(lengths) // block_tokens)
        self._table = 1 + np.random.default_rng(0).permutation(len(lengths) * blocks).reshape(-1, blocks)
        self._block_tokens = block_tokens
        self.given = [torch.randn(length, self._compression.given) for length in lengths]

    def step(self, computed: list[int], upto: list[int]) -> None:
        lens = np.array(upto, np.int32)
        batches = [
            GroupBatch(
                self._table.astype(np.int32), lens - np.array(computed, np.int32), lens, self._block_tokens,
                window_tokens=mask.window_tokens, chunk_tokens=mask.chunk_tokens,
            )
            for _, mask in self._masks
        ]  # fmt: skip
        self.attention.begin_step(batches, torch.empty(0))
        new = [given[start:stop] for given, start, stop in zip(self.given, computed, upto, strict=True)]
        self.attention.give(0, torch.cat(new), self.made)

    def made(self, given_NSC: torch.Tensor, has_before_N: torch.Tensor, first_N: torch.Tensor) -> list[torch.Tensor]:
        """Which token each was made of, by its place, and from where on."""
        self.asked = given_NSC, has_before_N, first_N
        return [first_N[:, None].expand(-1, ENTRY).float()]


class _Backend:
    def prepare(self, batch: GroupBatch, device: torch.device) -> GroupBatch:
        page, offset = (torch.from_numpy(each) for each in batch.token_places())

        class Meta:
            token_page, token_offset = page, offset

        return Meta  # type: ignore[return-value]


@pytest.mark.parametrize("block_tokens", [1, 4, 5, 16])
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("chunk", [1, 3, 13, 100])
def test_every_entry_is_made_of_its_tokens_however_steps_are_cut(block_tokens: int, overlaps: bool, chunk: int):
    lengths = [33, 7, 16]
    world = World(block_tokens, lengths, overlaps=overlaps)
    computed = [0, 0, 0]
    while computed != lengths:
        upto = [min(length, done + chunk) for length, done in zip(lengths, computed, strict=True)]
        world.step(computed, upto)
        computed = upto
    batch_rows = np.arange(3)
    table = world.attention.entry_table(0, batch_rows, 8)
    for row, length in enumerate(lengths):
        numbers = torch.arange(length // TOKENS)
        page, place = world.attention.entry_places(0, table, torch.full_like(numbers, row), numbers)
        firsts = world.attention.entries(0)[page, place, 0, 0]
        assert firsts.tolist() == [TOKENS * number for number in numbers.tolist()]


@pytest.mark.parametrize("block_tokens", [4, 5, 16])
def test_a_choice_among_entries_finds_those_that_score_highest(block_tokens: int):
    world = World(block_tokens, [40], overlaps=False)
    world.step([0], [40])
    table = world.attention.entry_table(0, np.array([0]), 10)
    keys = world.attention.entries(0)[:, :, 0]  # each says where its first token stands: later ones score higher
    asked = Asked(torch.ones(2, 1, ENTRY), torch.ones(2, 1))
    seen = np.array([7, 10])
    batch = world.attention.choice_among(0, table, seen)
    chosen = world.attention.choose_entries(0, asked, keys, batch, 3)
    assert chosen.tolist() == [[4, 5, 6], [7, 8, 9]]
