"""Which way products of many rows go on this machine: ours, or torch's over the weight as it was.

Ours sums in one order for any number of rows. torch's may be faster for many; the weight is unpacked for each of them
then. Which is faster is measured once and kept beside the compiled kernels. Products in matrix units are always ours:
they are as fast, and an order of sums that is there should not hang on how busy a machine was when it was asked.
"""

import functools
import json
import logging
import time
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from typing import NamedTuple

import torch

from ..toolchain import cpp
from .codes import CodeKind, Codes
from .cpu import PackedWeights, has_matrix_units
from .integers import IntegerCodes

logger = logging.getLogger(__name__)

ROWS = 64, 256, 1024
SIZE = 1024
"""Inputs and outputs of the weight that is measured."""

REPEATS = 7
"""The quickest counts."""

WORTH = 1.1
"""So much faster torch must be: the products of prompts are half of a busy step, so that ours then cost 5 % of it."""


class Way(NamedTuple):
    """Of products of one dtype."""

    torch_from_rows: int | None  # None: ours is as fast, or nearly, for any number
    torch_gain: float | None  # how many times faster torch's is for the most rows; None: it was not asked

    @property
    def told(self) -> str:
        if self.torch_gain is None:
            return "products in C++ for any number of rows, in matrix units"
        if self.torch_from_rows is None:
            return f"products in C++ for any number of rows, {1 / self.torch_gain:.2f} times as fast as torch's"
        return (
            f"products in C++ for fewer than {self.torch_from_rows} rows; for more torch's, "
            f"{self.torch_gain:.2f} times as fast"
        )


@functools.cache
def way_of(dtype: torch.dtype, in_integers: bool = False) -> Way:
    """Measured at the first use on a machine, in less than a second."""
    if dtype == torch.bfloat16 and not in_integers and has_matrix_units():
        return Way(None, None)
    kept = cpp.cache_folder() / f"products-{_identity(dtype, in_integers)}.json"
    try:
        return Way(*json.loads(kept.read_text()))
    except (OSError, ValueError, TypeError):
        way = _measured(_coded(dtype) if in_integers else _plain(dtype))
    what = str(dtype).removeprefix("torch.") + (" with weights in integers" if in_integers else "")
    logger.info("%s: %s", what, way.told)
    try:
        kept.write_text(json.dumps(way))
    except OSError:
        logger.debug("%s cannot be written; it is measured again at the next start", kept)
    return way


def _identity(dtype: torch.dtype, in_integers: bool) -> str:
    name = "products/integer_products" if in_integers else "products/cpu_products"
    return sha256("\n".join((cpp.identity(name), torch.__version__, str(dtype))).encode()).hexdigest()[:20]


def _plain(dtype: torch.dtype) -> PackedWeights:
    return PackedWeights(torch.randn(1, SIZE, SIZE).to(dtype))


def _coded(dtype: torch.dtype) -> PackedWeights:
    """Four bits, and a scale for each 32 columns: others take about as long."""
    codes = torch.randint(0, 256, (SIZE, SIZE // 2), dtype=torch.uint8)
    return IntegerCodes(Codes(CodeKind.INT4, codes, torch.rand(SIZE, SIZE // 32).half(), 32, middle=8), dtype)


@torch.inference_mode()
def _measured(packed: PackedWeights) -> Way:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    gains = {}
    for rows in ROWS:
        x = torch.randn(rows, SIZE).to(packed.dtype)
        ways = partial(packed.product, x), partial(packed.torch_product, x)
        ours_s, torch_s = zip(*([_took_s(way) for way in ways] for _ in range(REPEATS)), strict=True)  # in turns
        gains[rows] = min(ours_s) / min(torch_s)
    torch.set_num_threads(threads)
    slower = [rows for rows, gain in gains.items() if gain < WORTH]
    first = next((rows for rows in ROWS if rows > max(slower, default=0)), None)
    return Way(first, gains[ROWS[-1]])


def _took_s(run: Callable[[], object]) -> float:
    """Of this thread's own time: other processes may be busy while a worker starts."""
    start_s = time.thread_time()
    run()
    return time.thread_time() - start_s
