"""Whole pages, copied without reading what is in them."""

from collections.abc import Sequence

import torch
from torch import Tensor

from .transfer import Arrival


def copy_pages(pages: Tensor, moves: Sequence[tuple[int, int]]) -> None:
    """Copy pages, (source, target) each, with the result of copying them one after another.

    Shapes  pages [blocks, bytes], uint8, a page's bytes side by side; may be strided
    One launch of a kernel for all, unless a page that was written is read again.
    """
    pages = _in_words(pages)
    sources, targets = (list(side) for side in zip(*moves, strict=True)) if moves else ([], [])
    if len(moves) < 2 or set(sources) & set(targets) or len(set(targets)) < len(targets):
        for source, target in moves:
            pages[target].copy_(pages[source])
        return
    source, target = _indices(sources, pages.device), _indices(targets, pages.device)
    pages.index_copy_(0, target, pages.index_select(0, source))


def take_pages(pages: Tensor, blocks: Sequence[int], beside: torch.cuda.Stream | None = None) -> Arrival:
    """Copy pages to host memory, in one transfer. What arrives is [len(blocks), bytes].

    Shapes  pages [blocks, bytes], as in `copy_pages`
    beside: the stream that copies; pages may be written again at once, since they are gathered in that which computes
    """
    gathered = _in_words(pages).index_select(0, _indices(blocks, pages.device))
    return Arrival(gathered.view(torch.uint8), beside)


def put_pages(
    pages: Tensor, blocks: Sequence[int], kept: Sequence[Tensor], beside: torch.cuda.Stream | None = None
) -> None:
    """Copy pages [bytes] each from host memory into these blocks. Those that lie there side by side, as `take_pages`
    leaves them, are one transfer."""
    words = _in_words(pages)
    runs = [run.view(words.dtype) for run in _side_by_side(kept)]
    if pages.device.type != "cpu":
        current = torch.cuda.current_stream()
        with torch.cuda.stream(beside or current):
            runs = [run.to(pages.device, non_blocking=True) for run in runs]
        if beside is not None:
            current.wait_stream(beside)
            for run in runs:
                run.record_stream(current)
    words.index_copy_(0, _indices(blocks, pages.device), runs[0] if len(runs) == 1 else torch.cat(runs))


def _side_by_side(kept: Sequence[Tensor]) -> list[Tensor]:
    """Pages [bytes] each, in their order, as few tensors [pages,bytes]."""
    runs: list[Tensor] = []
    start = 0
    for n in range(1, len(kept) + 1):
        first, size = kept[start], kept[start].nbytes
        continues = n < len(kept) and kept[n].data_ptr() == first.data_ptr() + (n - start) * size
        if not continues or kept[n].untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            runs.append(first.as_strided((n - start, size), (size, 1)))
            start = n
    return runs


def _in_words(pages: Tensor) -> Tensor:
    """The same as int64, where pages begin and end at a multiple of eight bytes: copies take an eighth of the steps."""
    parts = pages.data_ptr(), pages.shape[1], pages.stride(0)
    return pages if any(part % 8 for part in parts) else pages.view(torch.int64)


def _indices(blocks: Sequence[int], device: torch.device) -> Tensor:
    indices = torch.tensor(blocks, dtype=torch.int64)
    return indices if device.type == "cpu" else indices.pin_memory().to(device, non_blocking=True)
