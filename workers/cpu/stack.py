"""Neighbouring layers of a model, mostly all of them, in one list of calls.

transformers' Python calls one layer after the other. Of few rows, a layer here only notes what it was called with, and
gives a `Pending` in place of what it will have computed; the last one runs the list. So there is no Python between
layers, each norms for the next one what it has summed, and what goes from layer to layer stays in one place.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from ...kernels.paged_attention import Backend, NativeBackend
from ..layers.attention import PagedAttention
from .attention_calls import AttentionCalls
from .decoder_layer import MOST_FEW_ROWS, Buffers, FewRows, LayerOfCalls, is_in_calls, segments
from .fused_modules import FusedAttention, FusedLayer, Heads, tensor_of

_TENSOR: Any = Tensor
_LOOKS_ONLY = {_TENSOR.size, _TENSOR.dim} | {
    each.__get__ for each in (_TENSOR.shape, _TENSOR.dtype, _TENSOR.device, _TENSOR.is_cuda, _TENSOR.requires_grad)
}
"""What torch calls to learn of a tensor what does not depend on its numbers."""


class Pending(Tensor):
    """What layers will have computed. An operation that reads it has them computed first."""

    settle: Callable[[], None]

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            if func not in _LOOKS_ONLY:
                for each in tree_leaves((args, kwargs)):
                    if isinstance(each, Pending):
                        each.settle()
            return func(*args, **(kwargs or {}))


def _is_settled() -> None:
    """It has its numbers."""


def _is_too_late() -> None:
    raise AssertionError("what lies between two layers is not kept once all have run")


class Layers(nn.ModuleList):
    """transformers asks for as many as its configuration names, in each pass: here no new list is made of all."""

    def __getitem__(self, idx: Any) -> Any:
        is_all = isinstance(idx, slice) and idx.indices(len(self)) == (0, len(self), 1)
        return self if is_all else super().__getitem__(idx)


class Stack:
    """Layers of a model, each of which is called with what the one before it has given.

    What was noted of the pass that is under way is forgotten when the next one begins.
    """

    def __init__(self, layers: Sequence[LayerOfCalls], buffers: Buffers, attention: PagedAttention, width: int):
        """width: of what goes from layer to layer"""
        self._layers = list(layers)
        self._buffers, self._attention = buffers, attention
        self._place_of = {layer: place for place, layer in enumerate(layers)}
        self._x = buffers.take("x", width, layers[0].x_dtype)
        # As long as all products are ours.
        modules = [module for layer in layers for module in (*layer.parts.mixer.modules(), *layer.parts.mlp.modules())]
        self.most = int(min(MOST_FEW_ROWS, *(getattr(module, "torch_from_rows", math.inf) - 1 for module in modules)))
        # The list, and over which pages and how its attention goes.
        self._views: dict[int, Tensor] | None = None
        self._backend: Backend | None = None
        self._written: list[FewRows] = []
        self.segments: list[Callable[[], None]] = []
        # Of the pass that is under way.
        self._rows = 0
        self._noted: list[dict[str, Any]] = []  # what each layer was called with
        self._pending: Pending | None = None

    def enter(self, layer: LayerOfCalls, x_BTC: Tensor, given: dict[str, Any]) -> Tensor | None:
        """What the layer makes of x, maybe later; None if it is to be computed now, by itself."""
        place = self._place_of[layer]
        if place == 0:
            self._begin(x_BTC)
        if self._pending is None or not (place == 0 or x_BTC is self._pending) or place != len(self._noted):
            return None
        self._noted.append(given)
        return self._run() if len(self._noted) == len(self._layers) else self._pending

    def _begin(self, x_BTC: Tensor) -> None:
        """A new pass, which goes by the list if it can."""
        self._end(_is_too_late)
        rows = self._rows = x_BTC.shape[1]
        if rows > self.most or self._attention.learnt is None:
            return
        if self._views is not self._attention.views or self._backend is not self._attention.learnt:
            self._write_down()
        self._x[:rows].copy_(x_BTC[0])
        self._pending = self._x[:rows].unsqueeze(0).as_subclass(Pending)
        self._pending.settle = self._settle

    def _write_down(self) -> None:
        """Make the list: anew where pages are others, or what attends over them is."""
        self._views, self._backend = self._attention.views, self._attention.learnt
        norms = [layer.parts.before_mixer for layer in self._layers]
        self._written = [
            FewRows(layer.parts, self._buffers, self._x, self._attention_of(layer), n == 0, norm)
            for n, (layer, norm) in enumerate(zip(self._layers, [*norms[1:], None], strict=True))
        ]
        self.segments = list(segments([step for layer in self._written for step in layer.steps]))

    def _attention_of(self, layer: LayerOfCalls) -> AttentionCalls | None:
        """None if it is not all in C++."""
        mixer, backend = layer.parts.mixer, self._backend
        if not (isinstance(backend, NativeBackend) and is_in_calls(mixer, FusedAttention, "qkv", "out")):
            return None
        heads: Heads = mixer.heads
        q_THD, k_TKD, v_TKD = heads.split(self._buffers.take("qkv", mixer.qkv.packed.outputs))
        out_THD = self._buffers.take("attended", mixer.out.packed.inputs).unflatten(1, (heads.heads, -1))
        return AttentionCalls(mixer.attend, backend, q_THD, k_TKD, v_TKD, out_THD)

    def _run(self) -> Tensor:
        """All layers. What they give is a tensor of its own, as of any layer."""
        self._buffers.begin_run()
        for layer, given in zip(self._written, self._noted, strict=True):
            layer.begin(self._rows, given)
        for run in self.segments:
            run()
        self._end(_is_too_late)
        return self._x[: self._rows].unsqueeze(0).clone()

    def _settle(self) -> None:
        """Something reads what lies between two layers: those that were noted run now, each by itself, and the rest
        when they are called."""
        assert self._pending is not None
        noted, pending = self._noted, self._pending
        self._end(_is_settled)
        x_BTC = pending.as_subclass(Tensor)
        for layer, given in zip(self._layers, noted, strict=False):
            x_BTC = tensor_of(FusedLayer.forward(layer, x_BTC, **given))
        pending.copy_(x_BTC)

    def _end(self, settle: Callable[[], None]) -> None:
        """settle: what is to happen if the pending tensor is read from now on"""
        if self._pending is not None:
            self._pending.settle = settle
        self._noted, self._pending = [], None
