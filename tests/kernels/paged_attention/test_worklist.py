"""Items of equal work: which keys each has, that a row is cut the same in any company, what a frame has room for."""

from itertools import pairwise
from random import Random

import numpy as np
import pytest
import torch

from intarsia.kernels.paged_attention import GroupBatch, worklist
from intarsia.kernels.paged_attention.worklist import (
    FrameShape,
    FrameWork,
    StepWork,
    Tiling,
    cut_of_longer,
    cut_of_single,
    most_cuts,
    work_of,
)

CPU = torch.device("cpu")
TILING = Tiling(group=4, single_rows=16, longer_rows=128, record_bytes=4 * 8 * 130)  # heads of 128, 8 kv heads
MANY_HEADS = TILING._replace(group=40, single_rows=32, longer_rows=32)  # one query fills more than a tile


def batch_of(rows: list[tuple[int, int]], **limits: int | bool) -> GroupBatch:
    """rows: (queries, keys)"""
    query_lens, kv_lens = np.array(rows, np.int32).reshape(-1, 2).T
    table = np.zeros((len(rows), -(-int(kv_lens.max(initial=0)) // 16)), np.int32)
    return GroupBatch(table, query_lens, kv_lens, 16, **limits)  # pyright: ignore[reportArgumentType]


def items_of(batch: GroupBatch, tiling: Tiling = TILING) -> list[list[int]]:
    """Row, number, first key, end, first record."""
    work, _ = work_of(batch, tiling)
    return [entry[:5] for entries in work[:2] for entry in entries[1:].tolist()]


def random_rows(random: Random) -> list[tuple[int, int]]:
    return [(random.choice([0, 1, 1, random.randint(1, keys)]), keys) for keys in random.sample(range(1, 3000), 7)]


@pytest.mark.parametrize(
    "keys, cut",
    [(1, 256), (1024, 256), (1100, 512), (4096, 512), (8192, 512), (32_768, 1024), (65_536, 1024), (131_072, 2048)],
)
def test_cuts_of_a_single_query_grow_with_the_cube_root_of_its_keys(keys: int, cut: int):
    assert cut_of_single(np.array([keys])).tolist() == [cut]


@pytest.mark.parametrize("keys, tiles, cut", [(1, 1, 256), (8192, 4, 2048), (65_536, 4, 4096), (16_384, 512, 32_768)])
def test_cuts_of_other_rows_grow_with_the_square_root_of_their_work(keys: int, tiles: int, cut: int):
    assert cut_of_longer(np.array([keys]), np.array([tiles])).tolist() == [cut]


@pytest.mark.parametrize("is_single", [True, False])
def test_no_tile_of_so_many_keys_or_fewer_has_more_than_the_most_cuts(is_single: bool):
    keys = np.arange(1, 200_000)
    cut = cut_of_single(keys) if is_single else cut_of_longer(keys, np.ones_like(keys))
    most = np.maximum.accumulate(-(-keys // cut))
    assert all(most_cuts(n, is_single=is_single) >= most[n - 1] for n in range(1, 200_000, 131))


@pytest.mark.parametrize("tiling", [TILING, MANY_HEADS], ids=["tile of a query", "tiles of a query"])
def test_rows_without_keys_of_an_encoder_have_no_items(tiling: Tiling):
    rows = [(1, 0), (1, 900), (40, 0), (40, 9), (1, 0)]
    items = items_of(batch_of(rows, is_causal=False), tiling)
    assert {row for row, *_ in items} == {1, 3}
    alone = items_of(batch_of([rows[1], rows[3]], is_causal=False), tiling)
    assert [each[1:] for each in items] == [each[1:] for each in alone]


@pytest.mark.parametrize("tiling", [TILING, MANY_HEADS], ids=["tile of a query", "tiles of a query"])
@pytest.mark.parametrize("limits", [{}, {"window_tokens": 700}, {"chunk_tokens": 512}, {"is_causal": False}], ids=str)
@pytest.mark.parametrize("seed", range(4))
def test_every_key_that_a_tile_sees_is_in_one_item(tiling: Tiling, limits: dict, seed: int):
    batch = batch_of(random_rows(Random(seed)), **limits)
    seen: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for row, number, low, high, _ in items_of(batch, tiling):
        seen.setdefault((row, number), []).append((low, high))
    for row, (queries, keys) in enumerate(zip(batch.query_lens.tolist(), batch.kv_lens.tolist(), strict=True)):
        tile_rows = tiling.single_rows if queries == 1 else tiling.longer_rows
        for number in range(-(-queries * tiling.group // tile_rows)):
            first_query = number * tile_rows // tiling.group
            last_query = min((number * tile_rows + tile_rows - 1) // tiling.group, queries - 1)
            first, end = 0, keys
            if batch.is_causal:
                first = int(batch.oldest_visible(keys - queries + first_query))
                end = keys - queries + last_query + 1
            runs = sorted(seen.pop((row, number)))
            assert runs[0][0] == first and runs[-1][1] == end
            assert all(before[1] == after[0] for before, after in pairwise(runs))
    assert not seen


def test_no_item_is_longer_than_the_cut_of_its_row_and_the_longest_come_first():
    rows = [(1, 1000)] * 63 + [(1, 65_536)]
    items = items_of(batch_of(rows))
    sizes = [high - low for _, _, low, high, _ in items]
    assert max(size for size, item in zip(sizes, items, strict=True) if item[0] == 63) == 1024
    assert max(size for size, item in zip(sizes, items, strict=True) if item[0] < 63) == 256
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) < sum(sizes) / 60, "no program is busy for longer than the others together"


def test_a_row_is_cut_the_same_alone_and_in_any_company():
    random = Random(0)
    rows = random_rows(random)
    together = items_of(batch_of(rows))
    for row, each in enumerate(rows):
        alone = [(number, low, high) for _, number, low, high, _ in items_of(batch_of([each]))]
        assert alone == [(number, low, high) for which, number, low, high, _ in together if which == row]


def test_a_window_that_fits_into_one_cut_has_nothing_to_merge():
    _, sizes = work_of(batch_of([(1, 5000), (1, 9000)], window_tokens=256), TILING)
    assert sizes == (2, 0, 0, 0)


def test_records_of_cut_tiles_lie_side_by_side():
    work, sizes = work_of(batch_of([(1, 2000), (1, 100), (40, 9000)]), TILING)
    records: set[int] = set()
    for entries, tile_rows in ((work.singles, 16), (work.longer, 128)):
        for row, number, _, _, record in np.asarray(entries)[1:, :5].tolist():
            live = min(tile_rows, (1, 1, 40)[row] * 4 - number * tile_rows)
            records |= set(range(record, record + live)) if record >= 0 else set()
    merged = {
        first + cut * step + row
        for _, _, first, cuts, step, rows in np.asarray(work.merges)[1:, :6].tolist()
        for cut in range(cuts)
        for row in range(rows)
    }
    assert records == merged == set(range(sizes.records))


@pytest.mark.parametrize("tiling", [TILING, MANY_HEADS], ids=["tile of a query", "tiles of a query"])
@pytest.mark.parametrize("seed", range(8))
def test_a_frame_has_room_for_any_mixture_of_its_rows_and_tokens(tiling: Tiling, seed: int):
    random = Random(seed)
    rows, tokens, keys = random.randint(1, 12), random.randint(12, 600), random.choice([100, 1000, 9000])
    queries = [1] * rows
    for _ in range(random.choice([0, 1, tokens - rows])):
        queries[random.randrange(rows)] += 1
    batch = batch_of([(count, random.randint(min(count, keys), keys)) for count in queries if count <= keys])
    _, needed = work_of(batch, tiling)
    most = FrameShape(rows, tokens, keys, is_mixed=max(queries) > 1).sizes(tiling)
    assert all(size <= room for size, room in zip(needed, most, strict=True)), (needed, most)


def test_a_step_with_too_much_to_merge_is_done_in_parts(monkeypatch: pytest.MonkeyPatch):
    batch = batch_of([(1, 5000)] * 7)
    whole, sizes = work_of(batch, TILING)
    monkeypatch.setattr(worklist, "MOST_RECORD_BYTES", sizes.records * TILING.record_bytes // 3)
    parts = StepWork(batch).lists(TILING, CPU)
    assert len(parts) == 4
    entries = [entry for part in parts for entry in np.asarray(part.work.singles)[1:, :4].tolist()]
    assert sorted(entries) == sorted(np.asarray(whole.singles)[1:, :4].tolist())


def test_a_step_with_too_much_to_merge_does_not_fit_into_a_frame(monkeypatch: pytest.MonkeyPatch):
    small, large = batch_of([(1, 5000)] + [(1, 100)] * 7), batch_of([(1, 5000)] * 8)
    monkeypatch.setattr(worklist, "MOST_RECORD_BYTES", 0)
    shape = FrameShape(8, 8, 5000, is_mixed=False)
    frame = FrameWork(shape, shape)
    assert frame.refilled(small) == [], "what layers need is not known yet"
    (lists,) = frame.lists(TILING, CPU)
    assert lists.sizes.records == work_of(small, TILING)[1].records
    assert frame.refilled(large) is None
    assert frame.refilled(small)
