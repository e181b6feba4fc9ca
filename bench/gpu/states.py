"""The recurrences in place, beside plain torch: checked against it, then timed."""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from intarsia.kernels.state import (
    CONVOLUTION,
    GATED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    ChunkedStates,
    StateBatch,
    TritonStates,
)
from intarsia.kernels.transfer import Transfer

from .device import Bench, rotating
from .lines import WRONG
from .parts import Case, Row


class Scene(NamedTuple):
    """Rows of so many tokens each, through states of a shape."""

    name: str
    shape: tuple[int, ...]
    rows: int
    length: int

    @property
    def title(self) -> str:
        return f"{self.name} {self.rows} x {self.length}"


RECURRENCES = {
    "mamba-2": LINEAR_ATTENTION,
    "gated delta": GATED_DELTA,
    "mamba-1": SELECTIVE_SCAN,
    "convolution": CONVOLUTION,
}
SHAPES = {  # heads, keys, values; or channels and numbers of each. Mamba-2 as Bamba 9B has it, the delta as Qwen3-Next
    "mamba-2": (128, 128, 64),
    "gated delta": (32, 128, 128),
    "mamba-1": (8192, 16),
    "convolution": (8192, 3),
}
HEADS_OF_GROUP = {"mamba-2": 128, "gated delta": 2}
"""That share queries and keys, as those models have it."""
TINY = {"mamba-2": (2, 16, 16), "gated delta": (2, 16, 16), "mamba-1": (32, 4), "convolution": (32, 3)}
SIZES = ((1, 1), (64, 1), (1, 8192), (4, 2048))
TINY_SIZES = ((1, 1), (3, 1), (1, 9), (2, 5))
ALLOWED = {torch.float32: 1e-3, torch.bfloat16: 3e-2}
"""Of the largest number, between two ways to sum up thousands of tokens."""


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    shapes, sizes = (TINY, TINY_SIZES) if is_rehearsed else (SHAPES, SIZES)
    scenes = [
        (f"{of} {' x '.join(map(str, told))}", Scene(of, shapes[of], *size))
        for of in RECURRENCES
        for told, size in zip(SIZES, sizes, strict=True)
    ]
    return [Case(title, partial(_measure, scene), partial(_touch, scene)) for title, scene in scenes]


class World:
    """States in pages, and tokens for each row."""

    def __init__(self, scene: Scene, bench: Bench, seed: int):
        bench.seed(f"{scene.title} {seed}")
        self.recurrence, self.scene = RECURRENCES[scene.name], scene
        dtype = bench.dtype(torch.bfloat16) if scene.name == "convolution" else torch.float32
        self.constants, self.inputs = _numbers(scene, dtype, bench)
        self.pages = bench.random(scene.rows + 1, *scene.shape, dtype=dtype)
        pages = np.arange(1, scene.rows + 1)
        self.batch = StateBatch(pages, np.full(scene.rows, scene.length), np.zeros(scene.rows, dtype=bool))

    @property
    def bytes(self) -> float:
        """The states are read and written, and so are the tokens."""
        states = 2 * self.scene.rows * self.pages[0].numel() * self.pages.element_size()
        tokens = sum(each.numel() * each.element_size() for each in self.inputs)
        out = self.inputs[2 if len(self.scene.shape) == 3 else 0]
        return float(states + tokens + out.numel() * out.element_size())

    def meta(self, backend: Any, bench: Bench) -> Any:
        """As recorded steps have it, where each row has one token."""
        rows = self.scene.rows
        if self.scene.length > 1 or (frame := backend.frame(rows, rows, bench.device)) is None:
            return backend.prepare(self.batch, bench.device)
        transfer = Transfer(bench.device)
        backend.refill(frame, self.batch, transfer)
        transfer.run()
        return frame

    def scan(self, backend: Any, meta: Any, pages: Tensor | None = None) -> Tensor:
        own = self.pages if pages is None else pages
        return backend.scan(self.recurrence, own, self.constants, self.inputs, meta)


def _numbers(scene: Scene, dtype: torch.dtype, bench: Bench) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Constants and inputs. Decays are between 0 and 1, so that no state grows without bound."""
    tokens, draw = scene.rows * scene.length, partial(bench.random, dtype=dtype)
    if scene.name == "convolution":
        channels, window = scene.shape
        return (draw(channels, window + 1), draw(channels)), (draw(tokens, channels),)
    if scene.name == "mamba-1":
        channels, numbers = scene.shape
        inputs = draw(tokens, channels), draw(tokens, channels).abs(), draw(tokens, numbers), draw(tokens, numbers)
        return (-draw(channels, numbers).abs(),), inputs
    heads, keys, values = scene.shape
    groups = max(1, heads // HEADS_OF_GROUP[scene.name])
    q, k = (F.normalize(draw(tokens, groups, keys), dim=-1) for _ in range(2))
    if scene.name == "mamba-2":
        q, k = (x.to(bench.dtype(torch.bfloat16)) for x in (q, k))
    inputs = q, k, draw(tokens, heads, values), -draw(tokens, heads).abs()
    return (), (*inputs, draw(tokens, heads).sigmoid()) if scene.name == "gated delta" else inputs


def _touch(scene: Scene, bench: Bench) -> None:
    world, backend = World(scene, bench, 0), TritonStates()
    world.scan(backend, world.meta(backend, bench))


def _measure(scene: Scene, bench: Bench) -> Iterator[Row]:
    first = World(scene, bench, 0)
    size = first.bytes
    worlds = [first, *list(rotating(bench, size, lambda n: World(scene, bench, n)))[1:]]
    before, pages = first.pages.clone(), first.pages.clone()
    torch_states = ChunkedStates()
    expected = first.scan(torch_states, first.meta(torch_states, bench), pages)
    took = {}
    for kind in (TritonStates, ChunkedStates):
        if lacks := kind.lacks():
            yield {"backend": kind.name, "skipped": lacks}
            continue
        row = bench.attempt({"backend": kind.name}, partial(_timed, kind(), worlds, before, expected, pages, bench))
        yield row
        took[kind.name] = row.get("us")
    if took.get("triton") and took.get("torch"):
        yield {"torch_to_triton": round(took["torch"] / took["triton"], 3)}


def _timed(
    backend: Any, worlds: list[World], before: Tensor, expected: Tensor, expected_pages: Tensor, bench: Bench
) -> Row:
    """before: the states that `expected` and `expected_pages` came of"""
    first, kept = worlds[0], before.clone()
    out = first.scan(backend, first.meta(backend, bench), kept)
    row: Row = {}
    for what, found, wanted in (("outputs", out, expected), ("states", kept, expected_pages)):
        off = float((found.double() - wanted.double()).abs().max()) / max(1e-30, float(wanted.abs().max()))
        row[f"{what}_off"] = f"{off:.1e}"
        if not off <= ALLOWED[first.pages.dtype]:
            row[WRONG] = f"{what} are off by {off:.1e} of the largest number"
    calls = [partial(world.scan, backend, world.meta(backend, bench)) for world in worlds]
    timing = bench.time(calls)
    return {**row, **timing.row(), **bench.rates(timing.us, first.bytes), **bench.kernel_row(calls[0])}
