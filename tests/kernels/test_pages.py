"""Copying pages."""

import pytest
import torch

from intarsia.kernels.pages import copy_pages


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
