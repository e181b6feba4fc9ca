"""Whole pages: copied on the device, and swapped to host memory and back."""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch

from intarsia.kernels.pages import copy_pages, put_pages, take_pages

from .device import Bench
from .lines import WRONG, short
from .parts import Case, Row


class Scene(NamedTuple):
    blocks: int
    page_bytes: int


SIZES = (Scene(1, 65_536), Scene(64, 65_536), Scene(1024, 65_536), Scene(1024, 8_192), Scene(256, 4 << 20))
TINY = (Scene(1, 64), Scene(2, 64), Scene(3, 64), Scene(3, 16), Scene(2, 128))


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    scenes = TINY if is_rehearsed else SIZES
    of_size = [
        (f"{told.blocks} pages of {told.page_bytes >> 10} KiB", it) for told, it in zip(SIZES, scenes, strict=True)
    ]
    copies = [Case(f"copy {title}", partial(_copy, scene)) for title, scene in of_size]
    return copies + [Case(f"swap {title}", partial(_swap, scene)) for title, scene in of_size]


def _pages(scene: Scene, bench: Bench) -> torch.Tensor:
    return bench.random_bytes(2 * scene.blocks * scene.page_bytes).view(2 * scene.blocks, scene.page_bytes)


def _copy(scene: Scene, bench: Bench) -> Iterator[Row]:
    """From the even pages to the odd ones. Its indices are uploaded, so it is launched, not recorded."""
    pages = _pages(scene, bench)
    moves = [(2 * n, 2 * n + 1) for n in range(scene.blocks)]
    copy_pages(pages, moves)
    wrong = {} if torch.equal(pages[::2], pages[1::2]) else {WRONG: "the copies are no copies"}
    timing = bench.time([partial(copy_pages, pages, moves)], may_record=False)
    size = 2.0 * scene.blocks * scene.page_bytes
    row = bench.kernel_row(partial(copy_pages, pages, moves))
    yield {**timing.row(), **bench.rates(timing.us, size), **row, **wrong}


def _swap(scene: Scene, bench: Bench) -> Iterator[Row]:
    """Until all is there, as a step waits for it."""
    pages = _pages(scene, bench)
    blocks = [2 * n for n in range(scene.blocks)]
    size = scene.blocks * scene.page_bytes
    before = pages.clone()
    kept = take_pages(pages, blocks).read()
    pages[::2] = 0
    put_pages(pages, blocks, list(kept))
    wrong = {} if torch.equal(pages, before) else {WRONG: "what came back is not what went"}
    for name, call in (
        ("out", partial(take_pages, pages, blocks)), ("in", partial(put_pages, pages, blocks, list(kept)))
    ):  # fmt: skip
        us = bench.done_us(call)
        limit = bench.ceilings.get("download_gb_per_s" if name == "out" else "upload_gb_per_s")
        row: Row = {"swap": name, "us": us, "gb_per_s": short(size / us / 1e3), **wrong}
        yield row | ({"times_floor": short(us * limit * 1e3 / size)} if limit else {})
