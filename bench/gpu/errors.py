"""Every backend against float64, over pages that are NaN wherever a row has no live token.

Allowed is what flash-attention allows: twice the error of plain torch in the same dtype. In float32, whose products our
kernels make of three of TF32, it is at least 1e-5 of the largest number.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from intarsia.kernels.paged_attention import ReferenceBackend

from .device import Bench
from .lines import WRONG
from .parts import Case, Row
from .shapes import ERRORS, Attention
from .worlds import World, backends, is_judged, refusal

LEAST_ALLOWED = {torch.float32: 1e-5, torch.bfloat16: 1e-6, torch.float16: 1e-6}
"""Of the largest number."""


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    """name: of a dtype"""
    dtype = getattr(torch, name)
    scenes = [(each.name, each.tiny() if is_rehearsed else each) for each in ERRORS]
    return [Case(f"{of}, {name}", partial(_judge, scene, dtype), partial(_touch, scene, dtype)) for of, scene in scenes]


def _touch(scene: Attention, dtype: torch.dtype, bench: Bench) -> None:
    from intarsia.kernels.paged_attention import TritonBackend

    world, backend = World(scene, bench.dtype(dtype), bench), TritonBackend()
    world.run(backend, backend.prepare(world.batch, bench.device))


def _judge(scene: Attention, wanted: torch.dtype, bench: Bench) -> Iterator[Row]:
    dtype = bench.dtype(wanted)
    world = World(scene, dtype, bench, poison=True)
    truth = _truth(world)
    plain = _answers(ReferenceBackend(), world)
    largest = float(truth.abs().max())
    allowed = max(2 * float((plain.double() - truth).abs().max()), LEAST_ALLOWED[wanted] * largest)
    for name, backend in backends(bench):
        if reason := refusal(backend, scene, dtype, bench):
            yield {"backend": name, "skipped": reason}
        elif is_judged(name, bench):
            yield bench.attempt({"backend": name}, partial(_judged, backend, world, truth, allowed))
        else:
            yield {"backend": name, "played": bool(_answers(backend, world).isfinite().all())}


def _truth(world: World) -> Tensor:
    """Every query in float64, by plain torch."""
    lens = world.batch.query_lens.tolist()
    return torch.stack([world.exact(row, query) for row, queries in enumerate(lens) for query in range(queries)])


def _answers(backend: Any, world: World, pages: Tensor | None = None) -> Tensor:
    world.out.fill_(torch.nan)
    pages = world.pages if pages is None else pages
    backend.attend(world.q, pages, world.params, backend.prepare(world.batch, world.device), world.out)
    return world.out


def _judged(backend: Any, world: World, truth: Tensor, allowed: float) -> Row:
    """Backends that load whole tiles and mask afterwards are judged over pages without NaN, and it is said."""
    row: Row = {}
    pages = world.pages
    if not backend.capabilities.any_bytes:
        row["over_nan_pages"] = bool(_answers(backend, world).isfinite().all())
        pages = world.pages.nan_to_num()
    error = float((_answers(backend, world, pages).double() - truth).abs().max())
    row |= {"error": f"{error:.2e}", "allowed": f"{allowed:.2e}"}
    if not error <= allowed:  # NaN is not
        row[WRONG] = f"off by {error:.2e}, allowed are {allowed:.2e}"
    return row
