"""Predicts decode steps on an H100 without one, and holds the predictions against what one showed.

    python -m intarsia.bench.gpu.cost_model              tables for people
    python -m intarsia.bench.gpu.cost_model --json       all numbers
    python -m intarsia.bench.gpu.cost_model --models llama-3.1-8b

Steps of the real shapes are traced on a device without memory (`traced.py`). Each kernel is priced (`costs.py`), and a
step takes as long as its kernels one after another. Floors are the battery's own (`floors.py`).
"""

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

from . import traced
from .measured import ATTENTION_US, BAMBA_KERNELS, COPY_GB_PER_S, READ_GB_PER_S, STEPS
from .models import MODELS

ASKED = {"64 x 4k": (4096,) * 64, "63 x 1k, 1 x 64k": (1024,) * 63 + (65_536,)}
"""Lengths of rows of the two steps that are to be predicted."""
ALLOWED = {"64 x 4k": 1.2, "63 x 1k, 1 x 64k": 1.3}
"""Times the floor."""


class Prediction(NamedTuple):
    model: str
    step: str
    ms: float
    floor_ms: float
    kernels: int
    unrecorded: int  # kernels that the host launches, where no steps are recorded
    gigabytes: dict[str, float]  # by what is moved
    ms_of: dict[str, float]  # by kind of kernel

    @property
    def times_floor(self) -> float:
        return self.ms / self.floor_ms


# -- from kernels to costs ---------------------------------------------------------------------------------------------

TORCH_PRODUCTS = {"mm": "1", "addmm": "2"}
"""And the argument that is the weight."""
GATHERS = {"embedding", "index_select"}
"""They read as much as they write."""
SEVERAL_LAUNCHES = {"topk": 2}
"""Operators of torch that launch more than one kernel on a GPU: here one that gathers, and one that sorts."""
STATE_TIMES = {"heads_step": 2, "convolve": 1, "shift": 2}
"""How often kernels go over a row's state: to read it, to write it."""
LISTS = {"pages_ptr", "partial_ptr", "items_ptr", "merges_ptr", "table_ptr"}
"""Arguments that are larger than what is read of them."""


def costs_of(kernels: Sequence[traced.Launched], lengths: Sequence[int], config: dict[str, Any]) -> Iterator[Any]:
    """A `Cost` for each kernel."""
    from .costs import Cost, Kind
    from .floors import expert_share

    merge = None
    for kernel in kernels:
        name, given = kernel.name, kernel.given
        moved = sum(_bytes(tensor) for tensor in kernel.tensors)
        if not kernel.is_ours and name in TORCH_PRODUCTS:
            weight = _bytes(given[TORCH_PRODUCTS[name]])
            yield Cost(Kind.PRODUCT, weight, other_bytes=moved - weight)
        elif not kernel.is_ours:
            moved = 2 * sum(map(_bytes, kernel.made)) if name in GATHERS else moved
            yield Cost(Kind.SMALL, other_bytes=moved, launches=SEVERAL_LAUNCHES.get(name, 1))
        elif name == "product":
            whole = _bytes(given["weight_ptr"])
            yield Cost(Kind.PRODUCT, whole * expert_share(config, len(lengths)), other_bytes=moved - whole)
        elif name == "attend":
            seen, merge = _attention(given, lengths)
            yield seen
        elif name == "merge":
            assert merge is not None, "rows that are merged have been cut"
            yield merge
        else:
            moved -= sum(_bytes(given[each]) for each in LISTS & given.keys())
            if name in STATE_TIMES:
                own = _bytes(given["pages_ptr"]) / len(given["pages_ptr"]) * len(lengths)
                yield Cost(Kind.STATE, state_bytes=own * STATE_TIMES[name], other_bytes=moved)
            else:
                yield Cost(Kind.SMALL, other_bytes=moved)


def _bytes(tensor: Any) -> int:
    return tensor.numel() * tensor.element_size()


def _attention(given: dict[str, Any], lengths: Sequence[int]) -> tuple[Any, Any]:
    from .costs import Heads, attention_costs

    kv_heads, programs = given["grid"]
    span = given["span"]
    heads = Heads(
        kv_heads, given["GROUP"], given["KEY_DIM"], given["VALUE_DIM"], given["pages_ptr"].element_size(),
        given["ROWS"], programs, *((None, None), (span, None), (None, span))[given["RULE"]],
    )  # fmt: skip
    return attention_costs(heads, lengths)


# -- predictions -------------------------------------------------------------------------------------------------------


def predict(engine: Any, model: str, step: str, lengths: Sequence[int]) -> Prediction:
    from .costs import Kind
    from .device import Bench
    from .floors import step_floor_us

    ceilings = {"copy_gb_per_s": COPY_GB_PER_S, "read_gb_per_s": READ_GB_PER_S}
    floor_us = step_floor_us(engine, lengths, Bench(False, 1, [], ceilings))
    assert floor_us is not None
    found = engine.step(lengths)
    costs = list(costs_of([*found.recorded, *found.around], lengths, engine.config))
    us_of: Counter[str] = Counter()
    for cost in costs:
        us_of[cost.kind] += cost.us
    sizes = {
        what: round(sum(getattr(cost, f"{what}_bytes") for cost in costs) / 1e9, 4)
        for what in ("weight", "kv", "state", "other")
    }
    ms_of = {kind: round(us_of[kind] / 1e3, 3) for kind in Kind}
    kernels = sum(cost.launches for cost in costs)
    return Prediction(model, step, sum(us_of.values()) / 1e3, floor_us / 1e3, kernels, found.unrecorded, sizes, ms_of)


def predictions(models: Sequence[str]) -> Iterator[tuple[Prediction, float | None]]:
    """Of the steps that are asked for and of those that were measured, and what these took, in ms."""
    for model in models:
        engine = traced.TracedEngine(model)
        for step, lengths in ASKED.items():
            yield predict(engine, model, step, lengths), None
        for step in STEPS:
            if step.model == model:
                told = f"{step.rows} x {step.tokens // 1024}k"
                yield predict(engine, model, told, (step.tokens,) * step.rows), step.ms


def with_kernels(found: Prediction, kernels: int) -> Prediction:
    """The same step with more kernels that do next to nothing."""
    from .costs import OWN_US, Kind

    more_ms = (kernels - found.kernels) * OWN_US[Kind.SMALL] / 1e3
    return found._replace(step=f"{found.step}, {kernels:,} kernels", ms=found.ms + more_ms, kernels=kernels)
