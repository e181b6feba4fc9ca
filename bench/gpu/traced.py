"""Decode steps of models of real size, traced on a device without memory: which kernels they launch, on which shapes.

The pretended device of our tests takes what the product asks for. Here its numbers lie on torch's `meta` device: they
have shapes and no memory, and nothing is computed. So a model of 27 billion parameters fits anywhere. The engine, its
loader and its recorded steps are the product's own.
"""

import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from . import rehearsal
from .models import config_of

META = torch.device("meta")
MEMORY_BYTES = 1 << 40
"""What the device says that it has, so that any model fits."""
PAGES_BYTES = 1 << 37
MODEL_TOKENS = 66_000
"""The longest row that is traced, and some tokens more."""
MOST_ROWS, MOST_TOKENS = 64, 2048
"""Of a step, as in the battery's engines."""


class Launched(NamedTuple):
    """A kernel, as the device was asked for it."""

    name: str  # of torch's operator, or of a kernel of ours
    is_ours: bool
    given: dict[str, Any]  # by name; arguments of operators by number
    made: tuple[Tensor, ...]  # by operators of torch

    @property
    def tensors(self) -> list[Tensor]:
        """What it is given and makes, each once: in place of a tensor that it does not need, it is given another."""
        found = [value for value in (*self.given.values(), *self.made) if isinstance(value, Tensor)]
        return list({(t.untyped_storage()._cdata, t.storage_offset(), t.shape): t for t in found}.values())


class Trace:
    """What the device was asked for since the latest `take`."""

    def __init__(self) -> None:
        self.launched: list[Launched] = []
        self.recorded: list[Launched] = []
        self.uploads = 0

    def take(self) -> "Trace":
        taken = Trace()
        taken.launched, taken.recorded, taken.uploads = self.launched, self.recorded, self.uploads
        self.launched, self.recorded, self.uploads = [], [], 0
        return taken

    def add(self, kernel: Launched) -> None:
        from intarsia.tests.pretended_cuda.device import current_device

        is_recording = current_device().tape is not None
        (self.recorded if is_recording else self.launched).append(kernel)


trace = Trace()
"""Of this process."""


# -- the device --------------------------------------------------------------------------------------------------------


def install() -> None:
    """Before anything of ours that uses torch. It changes torch for good."""
    rehearsal.install()
    from triton.runtime.interpreter import InterpretedFunction

    from intarsia.tests.pretended_cuda import operators, runtime

    runtime.PROPERTIES.total_memory = MEMORY_BYTES
    replaced: Any = torch.cuda
    replaced.mem_get_info = lambda device=None: (MEMORY_BYTES, MEMORY_BYTES)
    interpreted: Any = InterpretedFunction
    interpreted.run = _launch
    operators._run_on_device = _run_on_device
    operators._SPECIAL[torch.ops.aten.copy_.default] = _copy
    operators._SPECIAL[torch.ops.aten._to_copy.default] = _to_copy


def _launch(kernel: Any, *args: Any, grid: Any, warmup: bool = False, **kwargs: Any) -> None:
    """Of Triton."""
    from intarsia.tests.pretended_cuda.tensors import on_host

    named = {**dict(zip(kernel.arg_names, args)), **kwargs, "grid": grid}
    trace.add(Launched(kernel.__name__, True, {name: on_host(value) for name, value in named.items()}, ()))


def _run_on_device(
    func: Any, args: tuple, kwargs: dict[str, Any], tensors: Sequence[Tensor], makes_device: bool
) -> Any:
    from intarsia.tests.pretended_cuda import operators

    given = tree_map(_on_meta, (args, operators._without_pinning(kwargs)))
    if given[1].get("device") is not None or not tensors:
        given[1]["device"] = META
    results = func(*given[0], **given[1])
    made = tuple(leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor))
    is_kernel = not (func in operators.ALLOCATIONS or operators._nature(func).is_view)
    if is_kernel and any(leaf.numel() for leaf in made):
        named = {str(n): leaf for n, leaf in enumerate(tree_leaves(given)) if isinstance(leaf, Tensor)}
        trace.add(Launched(func.overloadpacket.__name__, False, named, made))
    return operators._wrapped(results, tensors) if makes_device else results


def _on_meta(value: Any) -> Any:
    from intarsia.tests.pretended_cuda.tensors import on_host

    value = on_host(value)
    return value.to(META) if isinstance(value, Tensor) and value.device != META else value


def _copy(target: Tensor, source: Tensor, non_blocking: bool = False) -> Any:
    """Between host and device. What the host reads are zeros."""
    from intarsia.tests.pretended_cuda.tensors import DeviceTensor

    if isinstance(target, DeviceTensor) == isinstance(source, DeviceTensor):
        return NotImplemented
    if isinstance(target, DeviceTensor):
        trace.uploads += 1
        return target
    return target.zero_()


def _to_copy(source: Tensor, **wanted: Any) -> Any:
    """Likewise, into a new tensor."""
    from intarsia.tests.pretended_cuda.tensors import DeviceTensor

    is_from_device, asked = isinstance(source, DeviceTensor), wanted.get("device")
    is_to_device = is_from_device if asked is None else torch.device(asked).type == "cuda"
    if is_to_device == is_from_device:
        return NotImplemented
    dtype = wanted.get("dtype") or source.dtype
    if not is_to_device:
        return torch.zeros(source.shape, dtype=dtype)
    trace.uploads += 1
    return DeviceTensor(torch.empty(source.shape, dtype=dtype, device=META))


# -- steps -------------------------------------------------------------------------------------------------------------


class StepTrace(NamedTuple):
    """One decode step."""

    recorded: list[Launched]  # in its graph
    around: list[Launched]  # launched beside the graph: what fills it, and what draws its tokens
    uploads: int  # beside the graph
    unrecorded: int  # kernels that the host launches where no steps are recorded


class TracedEngine:
    """A model of `models.py`, loaded as the battery loads it. It has what `floors.py` asks a session for."""

    def __init__(self, model: str):
        from intarsia.workers import warm_up

        from .device import Bench
        from .session import Workers
        from .weights import random_weights, write_config

        self.config = config_of(model, False)
        self.workers = Workers()
        warm_up.record_all = lambda runner: None  # a step is recorded when it first comes
        with tempfile.TemporaryDirectory() as folder, random_weights(Bench(False, 1, [], {})):
            asyncio.run(self._build(write_config(Path(folder), self.config)))

    async def _build(self, folder: Path) -> None:
        from intarsia.controller.scheduling.settings import SchedulerSettings
        from intarsia.controller.startup import EngineSettings, build_engine
        from intarsia.kvcache.plan import PlanSettings
        from intarsia.proto.worker import ModelSettings

        settings = EngineSettings(
            model=ModelSettings(str(folder), dtype=self.config["dtype"]),
            plan=PlanSettings(memory_bytes=PAGES_BYTES),
            scheduler=SchedulerSettings(max_num_seqs=MOST_ROWS, max_num_batched_tokens=MOST_TOKENS),
            max_model_len=MODEL_TOKENS,
            prefix_caching=False,
        )
        await build_engine(settings, self.workers)

    @property
    def module(self) -> Any:
        return self.workers.runner.model.module

    def step(self, lengths: Sequence[int]) -> StepTrace:
        """Of rows of one query, which see so many tokens each."""
        runner = self.workers.runner
        graphs, runner.graphs = runner.graphs, None
        trace.take()
        self._run(lengths)
        unrecorded = trace.take()
        runner.graphs = graphs
        graphs.forget()
        self._run(lengths)
        recorded = trace.take().recorded
        self._run(lengths)
        around = trace.take()
        refusals = {graphs.refusal, *graphs.refusals.values()} - {None}
        assert recorded and not refusals, f"the step is not recorded: {refusals}"
        return StepTrace(recorded, around.launched, around.uploads, len(unrecorded.launched))

    @torch.no_grad()
    def _run(self, lengths: Sequence[int]) -> None:
        from intarsia.kernels.sampling import Draw
        from intarsia.workers import warm_up

        runner, count = self.workers.runner, len(lengths)
        warm_up._take_slot(runner, MODEL_TOKENS)
        rows = warm_up._rows(rows=count, tokens=1)._replace(computed=np.array(lengths, dtype=np.int32) - 1)
        logits = runner.forward(rows)
        runner.sampling.draw(logits, [Draw(temperature=0)] * count, [0] * count)
        runner.tables.retire(0)
