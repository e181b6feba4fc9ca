"""The first layer whose output differs, for people who look for the reason."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ...controller.startup import build_engine
from ...proto.request import SamplingParams
from .engines import POOL, answers_of, settings_of
from .local_workers import LocalWorkers
from .trial import CASES

NEAR = 1e-3
"""Of a layer's outputs, as a share of their root mean square."""


DEEPEST = 2
"""Dots in the path of a model's layers: `encoder.layer` of `bert`."""


class LayerDifference(NamedTuple):
    layer: str  # its path in the model
    kind: str  # its class
    position: int


async def first_layer(folder: Path, oracle: Any, text: Sequence[int]) -> LayerDifference | None:
    """None: all layers agree when the text is computed as a whole, on one rank."""
    case = CASES[1]
    settings = settings_of(folder, case, 1, POOL, enforce_eager=True)
    workers = LocalWorkers()
    try:
        engine = await build_engine(settings, workers)
        ours = _watch(workers.module)
        await answers_of(engine, [text], SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True))
        theirs = _watch(oracle)
        with torch.inference_mode():
            await asyncio.to_thread(lambda: oracle(torch.tensor([list(text)]), use_cache=False))
    finally:
        workers.close()
    for path, (kind, output) in theirs.items():
        found = _differs(ours[path][1], output) if path in ours else None
        if found is not None:
            return LayerDifference(path, kind, found)
    return None


def _watch(model: nn.Module) -> dict[str, tuple[str, Tensor]]:
    """Path of a layer -> its class, and what it last gave out [tokens, width]. Filled when the model runs."""
    seen: dict[str, tuple[str, Tensor]] = {}
    for path, layers in model.named_modules():
        if isinstance(layers, nn.ModuleList) and path.count(".") <= DEEPEST and len(layers) > 1:
            for n, layer in enumerate(layers):
                layer.register_forward_hook(_noting(seen, f"{path}.{n}"))
    return seen


def _noting(seen: dict[str, tuple[str, Tensor]], path: str) -> Any:
    def note(module: nn.Module, _inputs: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if isinstance(hidden, Tensor) and path not in seen:
            seen[path] = type(module).__name__, hidden.detach().reshape(-1, hidden.shape[-1]).clone()

    return note


def _differs(ours: Tensor, theirs: Tensor) -> int | None:
    """The first token."""
    if ours.shape != theirs.shape:
        return 0
    off = (ours - theirs).abs().amax(-1)
    wrong = (~(off <= NEAR * theirs.square().mean().sqrt())).nonzero()
    return int(wrong[0]) if len(wrong) else None
