"""How many kernels a decoder layer of a decode step is on a GPU: each is waited for, however little it does.

Counted on a CPU: operators of torch that compute or copy, and launches of Triton, which its interpreter runs. Attention
is one launch here; on a GPU, few long rows are a second one that merges splits.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from intarsia.kernels.mixers import triton as mixers
from intarsia.kernels.products import triton as products
from intarsia.kernels.routing import triton as routing
from intarsia.kernels.tokenwise import triton as tokenwise
from intarsia.kernels.toolchain import triton as gpu
from intarsia.tests.local import LocalWorkers, make_engine
from intarsia.tests.models import make_checkpoint
from intarsia.workers import warm_up
from intarsia.workers.runner import ModelRunner

pytestmark = [
    pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing())),
    pytest.mark.usefixtures("as_on_a_gpu"),
]

KERNELS: dict[str, dict[int, int]] = {
    "gemma3": {83: 10}, "gemma2": {63: 10}, "llama": {39: 10}, "qwen3": {55: 10}, "ministral": {39: 10},
    "smollm3": {29: 10, 39: 10}, "olmo3": {57: 9}, "exaone4": {45: 9, 55: 9}, "lfm2": {30: 13, 55: 10},
    "bamba": {32: 13, 41: 10}, "ministral3": {47: 10}, "cohere2": {25: 10, 39: 10}, "gpt_oss": {66: 14},
}  # fmt: skip
"""Of each kind of layer in bfloat16: as transformers 5.24 writes it, and as we compute it."""

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, "kv_cache_memory": "512KiB"}
"""So that what is tried before requests come is soon done."""

NO_KERNEL = {
    "alias", "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "new_empty", "permute",
    "select", "slice", "split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unsqueeze", "view",
    "_unsafe_view", "_reshape_alias", "lift_fresh",
}  # fmt: skip
"""Operators that look at a tensor in another way, or only take memory."""


class Count(TorchDispatchMode):
    """Kernels of each layer while a model runs."""

    def __init__(self, layers: list[nn.Module]):
        super().__init__()
        self.of_layer: list[list[str]] = []
        self._is_in_layer = False
        for layer in layers:
            layer.register_forward_pre_hook(self._enter)
            layer.register_forward_hook(self._leave)

    def _enter(self, *_: Any) -> None:
        self.of_layer.append([])
        self._is_in_layer = True

    def _leave(self, *_: Any) -> None:
        self._is_in_layer = False

    def note(self, name: str) -> None:
        if self._is_in_layer:
            self.of_layer[-1].append(name)

    @contextmanager
    def paused(self) -> Iterator[None]:
        was, self._is_in_layer = self._is_in_layer, False
        yield
        self._is_in_layer = was

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = operator.overloadpacket.__name__
        # What is made of other operators is not counted, but they are; a product with its bias is one.
        if name != "linear":
            with self:
                result = operator.decompose(*args, **(kwargs or {}))
            if result is not NotImplemented:
                return result
        if name not in NO_KERNEL:
            self.note(name)
        return operator(*args, **(kwargs or {}))


class Launches:
    """A module of Triton kernels, whose launches are counted."""

    def __init__(self, kernels: Any, count: Count):
        self._kernels, self._count = kernels, count

    def __getattr__(self, name: str) -> Any:
        return Kernel(name, getattr(self._kernels, name), self._count)


class Kernel:
    def __init__(self, name: str, kernel: Any, count: Count):
        self._name, self._kernel, self._count = name, kernel, count

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*args: Any, **constants: Any) -> None:
            self._count.note(f"triton {self._name}")
            with self._count.paused():
                self._kernel[grid](*args, **constants)

        return launch


def kernels_of_layers(path: Path, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> list[list[str]]:
    """Of a decode step of two rows."""
    workers = LocalWorkers()
    asyncio.run(make_engine(path, workers, dtype="bfloat16", attention_backend="triton", **SMALL, **settings))
    runner = workers.worker._runner
    assert runner is not None
    module = runner.model.module
    layers: Any = next(each for name, each in module.named_modules() if name.endswith("layers"))
    count = Count(list(layers))
    with monkeypatch.context() as patch:
        backends: list[Any] = [runner.model.attention.backend, runner.model.states._backend]
        for backend in backends:
            patch.setattr(backend, "_kernels", Launches(backend._kernels, count))
        for operations in (tokenwise, products, mixers, routing):
            kernels = Launches(operations._kernels(), count)
            patch.setattr(operations, "_kernels", lambda kernels=kernels: kernels)
        decode(runner, count)
    return count.of_layer


@torch.inference_mode()
def decode(runner: ModelRunner, count: Count) -> None:
    warm_up._take_slot(runner, warm_up.WARM_UP_TOKENS)
    rows = warm_up._rows(rows=2, tokens=1)._replace(computed=np.ones(2, dtype=np.int32))
    with count:
        runner.forward(rows)
    runner.tables.retire(0)


@pytest.mark.parametrize(
    "family", ["gemma3", *(pytest.param(family, marks=pytest.mark.slow) for family in KERNELS if family != "gemma3")]
)
def test_a_layer_is_so_many_kernels(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = make_checkpoint(family, tmp_path / family)
    as_written = kernels_of_layers(path, monkeypatch, enforce_eager=True)
    ours = kernels_of_layers(path, monkeypatch)
    found = {len(theirs): len(mine) for theirs, mine in zip(as_written, ours, strict=True)}
    print(f"{family}: {found}")
    # What transformers writes differs from version to version.
    assert sorted(found.values()) == sorted(KERNELS[family].values()), ours


def test_a_layer_of_gemma3_is_launched_in_this_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for layer in kernels_of_layers(make_checkpoint("gemma3", tmp_path / "gemma3"), monkeypatch):
        assert layer == [
            "triton add_norm", "linear", "triton prepare_heads", "triton attend", "linear",
            "triton add_norm", "linear", "triton gate", "linear", "triton add_norm",
        ]  # fmt: skip
