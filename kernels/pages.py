"""Whole pages, copied without reading what is in them."""

from collections.abc import Sequence

import torch
from torch import Tensor


def copy_pages(pages: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy pages, (source, target) each, with the result of copying them one after another.

    Shapes  pages [blocks, bytes], uint8, a page's bytes side by side; may be strided
    One launch of a kernel for all, unless a page that was written is read again.
    """
    sources, targets = (list(side) for side in zip(*moves, strict=True)) if moves else ([], [])
    if len(moves) < 2 or set(sources) & set(targets) or len(set(targets)) < len(targets):
        for source, target in moves:
            pages[target].copy_(pages[source])
        return
    source, target = (torch.tensor(side).to(pages.device, non_blocking=True) for side in (sources, targets))
    pages.index_copy_(0, target, pages.index_select(0, source))
