"""Tokens drawn from logits: our kernels beside torch, compared token by token.

A draw uploads the rows' settings, which is not recorded; so there are two times: of the whole draw as a step has it,
Python included, and of its kernels alone, as the profiler saw them.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch

from intarsia.kernels.sampling import Changes, Draw, TorchSampling, TritonSampling

from .device import Bench
from .lines import WRONG, short
from .parts import Case, Row

WAYS = {
    "greedy": Draw(),
    "temperature": Draw(temperature=0.8),
    "top_p": Draw(temperature=0.8, top_p=0.9),
    "top_k": Draw(temperature=0.8, top_k=50),
    "everything": Draw(temperature=0.8, top_p=0.9, top_k=100, min_p=0.01, logprobs=5),
}
SIZES = ((1, 262_144), (16, 262_144), (64, 262_144), (64, 128_256))
TINY_SIZES = ((1, 100), (2, 100), (2, 100), (2, 80))

AT_BORDERS = 0.02
"""Share of tokens that may differ: those at the border of top_p to the last bits, where torch itself is no judge."""


class Scene(NamedTuple):
    way: str
    rows: int
    vocab: int


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    sizes = TINY_SIZES if is_rehearsed else SIZES
    scenes = [
        (f"{way}, {rows} x {vocab:,}", Scene(way, *size))
        for way in WAYS
        for (rows, vocab), size in zip(SIZES, sizes, strict=True)
    ]
    return [Case(title, partial(_measure, scene), partial(_touch, scene)) for title, scene in scenes]


def _work(scene: Scene, bench: Bench, seed: int = 0) -> tuple[Any, ...]:
    """Arguments of `draw`."""
    bench.seed(f"{scene} {seed}")
    logits = bench.random(scene.rows, scene.vocab, dtype=bench.dtype(torch.bfloat16)) * 3
    draws = [WAYS[scene.way]._replace(seed=row) for row in range(scene.rows)]
    changes = [Changes(biases=[(7, 1.5)])] * scene.rows if scene.way == "everything" else None
    return logits, draws, list(range(scene.rows)), changes


def _touch(scene: Scene, bench: Bench) -> None:
    TritonSampling().draw(*_work(scene, bench))


def _measure(scene: Scene, bench: Bench) -> Iterator[Row]:
    size = 2.0 * scene.rows * scene.vocab
    works = [_work(scene, bench, n) for n in range(bench.copies_of(size))]
    expected, _ = TorchSampling().draw(*works[0])
    for kind in (TritonSampling, TorchSampling):
        if lacks := kind.lacks():
            yield {"backend": kind.name, "skipped": lacks}
            continue

        backend = kind()

        def measured(backend: Any = backend) -> Row:
            tokens, _ = backend.draw(*works[0])
            differ = float((tokens != expected).double().mean())
            timing = bench.time([partial(backend.draw, *work) for work in works], may_record=False)
            kernels = bench.kernels(partial(backend.draw, *works[0]))
            us = sum(kernel.end - kernel.start for kernel in kernels)
            row = {
                "differ": round(differ, 4),
                "us": timing.us,
                "kernel_us": short(us),
                "kernels": len(kernels),
                **bench.rates(max(us, 1e-3), size),
            }
            # One token of a few rows would be more than the share.
            if differ > max(AT_BORDERS, 1.01 / scene.rows if scene.way != "greedy" else 0.0):
                row[WRONG] = f"{differ:.1%} of the tokens are not those of torch"
            return row

        yield bench.attempt({"backend": kind.name}, measured)
