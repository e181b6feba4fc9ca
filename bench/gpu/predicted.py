"""Decode steps as the cost model has them: traced kernels, priced and added up, beside what was measured."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from intarsia.kernels.paged_attention.triton import PROGRAMS_PER_PROCESSOR, shape_for

from .costs import Cost, Heads, Kind, attention_costs, step_us
from .device import Bench
from .floors import expert_share, step_floor_us
from .measured import ATTENTION_US, COPY_GB_PER_S, PROCESSORS, READ_GB_PER_S, STEPS
from .shapes import ATTENTION, Attention
from .traced import Launched, StepTrace, TracedEngine

ASKED = {"64 x 4k": ((4096,) * 64, 1.2), "63 x 1k, 1 x 64k": ((1024,) * 63 + (65_536,), 1.3)}
"""Steps that are to be predicted: lengths of their rows, and how many times the floor they may take."""
BYTES_PER_NUMBER = 2


class Prediction(NamedTuple):
    model: str
    step: str
    ms: float
    floor_ms: float
    kernels: int
    unrecorded: int  # launches of the host, where steps are not recorded
    gigabytes: dict[str, float]  # by what is moved
    ms_of: dict[str, float]  # by kind of kernel
    measured_ms: float | None = None

    @property
    def times_floor(self) -> float:
        return self.ms / self.floor_ms

    @property
    def error(self) -> float | None:
        return self.ms / self.measured_ms - 1 if self.measured_ms else None


# -- from kernels to costs ---------------------------------------------------------------------------------------------

TORCH_PRODUCTS = {"mm": "1", "addmm": "2"}
"""And the argument that is the weight."""
GATHERS = {"embedding", "index_select"}
"""They read as much as they write."""
SEVERAL_LAUNCHES = {"topk": 2}
"""Operators of torch that launch more than one kernel on a GPU: here one that gathers, and one that sorts."""
STATE_TIMES = {"heads_step": 2, "convolve": 1, "shift": 2}
"""How often a kernel goes over the state of a row: to read it, to write it."""
IN_PLACE = {"prepare_heads": "tokens_ptr"}
"""Kernels that write what they have read, changed or into pages, and the argument that this is."""
LARGER = {"pages_ptr", "partial_ptr", "items_ptr", "merges_ptr", "table_ptr"}
"""Arguments that are larger than what is read of them."""


def costs_of(kernels: Sequence[Launched], lengths: Sequence[int], config: dict[str, Any]) -> Iterator[Cost]:
    """One for each kernel. config: of the model"""
    merge: Cost | None = None
    for kernel in kernels:
        if not kernel.is_ours:
            yield _cost_of_torch(kernel)
        elif kernel.name == "attend":
            seen, merge = attention_costs(_heads_of(kernel.given), tuple(lengths))
            yield seen
        elif kernel.name == "merge":
            # A frame launches it for its longest request: where no row is cut, it returns.
            yield merge or Cost(Kind.SMALL)
        else:
            yield _cost_of_ours(kernel, len(lengths), config)


def _cost_of_torch(kernel: Launched) -> Cost:
    moved = sum(map(_bytes, kernel.tensors))
    if kernel.name in TORCH_PRODUCTS:
        weight = _bytes(kernel.given[TORCH_PRODUCTS[kernel.name]])
        return Cost(Kind.PRODUCT, weight, other_bytes=moved - weight)
    if kernel.name in GATHERS:
        moved = 2 * sum(map(_bytes, kernel.made))
    return Cost(Kind.SMALL, other_bytes=moved, launches=SEVERAL_LAUNCHES.get(kernel.name, 1))


def _cost_of_ours(kernel: Launched, rows: int, config: dict[str, Any]) -> Cost:
    given = kernel.given
    moved = sum(map(_bytes, kernel.tensors)) - sum(_bytes(given[name]) for name in LARGER & given.keys())
    if kernel.name in IN_PLACE:
        moved += _bytes(given[IN_PLACE[kernel.name]])
    if kernel.name == "product":  # of experts
        weight = _bytes(given["weight_ptr"])
        return Cost(Kind.PRODUCT, weight * expert_share(config, rows), other_bytes=moved - weight)
    if kernel.name in STATE_TIMES:
        pages = given["pages_ptr"]
        return Cost(
            Kind.STATE, state_bytes=_bytes(pages) / len(pages) * rows * STATE_TIMES[kernel.name], other_bytes=moved
        )
    return Cost(Kind.SMALL, other_bytes=moved)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _heads_of(given: dict[str, Any]) -> Heads:
    """Of a launch of attention."""
    kv_heads, programs = given["grid"]
    window, chunk = ((None, None), (given["span"], None), (None, given["span"]))[given["RULE"]]
    dims = given["KEY_DIM"], given["VALUE_DIM"], given["pages_ptr"].element_size()
    return Heads(kv_heads, given["GROUP"], *dims, given["ROWS"], programs, window, chunk)


# -- steps -------------------------------------------------------------------------------------------------------------


def predict(engine: TracedEngine, model: str, step: str, lengths: Sequence[int]) -> Prediction:
    ceilings = {"copy_gb_per_s": COPY_GB_PER_S, "read_gb_per_s": READ_GB_PER_S}
    floor_us = step_floor_us(engine, lengths, Bench(False, 1, [], ceilings))
    assert floor_us is not None
    return summed(model, step, engine.step(lengths), lengths, engine.config)._replace(floor_ms=floor_us / 1e3)


def summed(model: str, step: str, found: StepTrace, lengths: Sequence[int], config: dict[str, Any]) -> Prediction:
    """Without its floor."""
    costs = list(costs_of([*found.recorded, *found.around], lengths, config))
    us_of = dict.fromkeys(Kind, 0.0)
    for cost in costs:
        us_of[cost.kind] += cost.us
    gigabytes = {
        what: sum(getattr(cost, f"{what}_bytes") for cost in costs) / 1e9 for what in ("weight", "kv", "state", "other")
    }
    kernels = sum(cost.launches for cost in costs)
    ms_of = {kind.value: us_of[kind] / 1e3 for kind in Kind}
    return Prediction(model, step, step_us(costs) / 1e3, 0.0, kernels, found.unrecorded, gigabytes, ms_of)


def predictions(model: str) -> Iterator[Prediction]:
    """Of the steps that are asked for, and of those that were measured."""
    engine = TracedEngine(model)
    for step, (lengths, _) in ASKED.items():
        yield predict(engine, model, step, lengths)
    for step in STEPS:
        if step.model == model:
            yield predict(engine, model, step.rows, step.lengths)._replace(measured_ms=step.ms)


# -- attention alone ---------------------------------------------------------------------------------------------------


def attention_us(scene: Attention) -> float:
    """Of rows of one query through a layer of `shapes.py`, the merge included."""
    group = scene.heads // scene.kv_heads
    rows = shape_for(scene.key_dim, scene.value_dim, group, BYTES_PER_NUMBER, one_query=True).rows
    programs = max(1, PROGRAMS_PER_PROCESSOR * PROCESSORS // scene.kv_heads)
    dims = scene.key_dim, scene.value_dim, BYTES_PER_NUMBER
    heads = Heads(scene.kv_heads, group, *dims, rows, programs, scene.window, scene.chunk)
    seen, merge = attention_costs(heads, tuple(end for _, end in scene.rows))
    return seen.us + (merge.us if merge else 0.0)


def attention() -> dict[str, tuple[float, float]]:
    """By case: predicted and measured, in us."""
    scenes = [scene for scene in ATTENTION if scene.name in ATTENTION_US]
    return {scene.name: (attention_us(scene), ATTENTION_US[scene.name]) for scene in scenes}
