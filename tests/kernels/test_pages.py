"""Copying pages."""

import pytest
import torch

from intarsia.kernels.pages import copy_pages, put_pages, take_pages


def test_copies_are_those_of_one_after_another():
    generator = torch.Generator().manual_seed(seed := 5)
    print("seed", seed)
    for count in (0, 1, 2, 9):
        for _ in range(50):
            raw = torch.randint(0, 256, (12, 40), dtype=torch.uint8, generator=generator)
            pages = raw[:, 4:36]  # strided, as where layers share a page
            moves = [tuple(torch.randint(0, 12, (2,), generator=generator).tolist()) for _ in range(count)]
            expected = raw.clone()
            for source, target in moves:
                expected[target, 4:36] = expected[source, 4:36].clone()
            copy_pages(pages, moves)
            assert torch.equal(raw, expected)


@pytest.mark.parametrize("moves", [[(1, 5), (2, 6), (1, 7)], [(1, 5), (5, 6)], [(1, 5), (2, 5)]])
def test_a_page_may_be_copied_twice_read_again_or_written_again(moves: list[tuple[int, int]]):
    pages = torch.arange(8, dtype=torch.uint8)[:, None].repeat(1, 3)
    copy_pages(pages, moves)
    whole = list(range(8))
    for source, target in moves:
        whole[target] = whole[source]
    assert pages[:, 0].tolist() == whole


@pytest.mark.parametrize(("first", "stop"), [(4, 36), (8, 40)])  # eight bytes at a time, or one
def test_pages_that_wait_in_host_memory_come_back_wherever_they_are_put(first: int, stop: int):
    generator = torch.Generator().manual_seed(seed := 6)
    print("seed", seed)
    raw = torch.randint(0, 256, (9, 48), dtype=torch.uint8, generator=generator)
    pages = raw[:, first:stop]
    before = raw.clone()
    kept = take_pages(pages, [7, 2, 4]).read()
    assert torch.equal(kept, before[[7, 2, 4], first:stop])
    pages[[7, 2, 4]] = 0
    put_pages(pages, [1, 2, 8], list(kept))
    assert torch.equal(pages[[1, 2, 8]], before[[7, 2, 4], first:stop])
    outside = torch.cat((raw[:, :first], raw[:, stop:]), 1)
    assert torch.equal(outside, torch.cat((before[:, :first], before[:, stop:]), 1))
