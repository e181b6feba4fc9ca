"""A decoder layer on a CPU: see `fused_modules.FusedLayer`.

Of few rows, all but attention is in two lists of C++ calls. In a decode step of few requests the products of a layer
take a millisecond; the Python between them, whose code and data the weights push out of the processor's caches, took a
third of that.
"""

import math
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.products import NativeLinear
from ...kernels.tokenwise import Norm
from ...kernels.tokenwise import cpu as native
from ...kernels.toolchain.calls import Call, CallList
from .fused_modules import FusedAttention, FusedLayer, FusedMLP, LayerParts, tensor_of

MOST_FEW_ROWS = 64
"""Beyond, the time between calls is small beside the time in them."""

Step = Call | Callable[[], None]


class LayerOfCalls(FusedLayer):
    few_rows: "FewRows"

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        hidden_states = hidden_states.to(self.few_rows.x_dtype)  # what comes into the first layer
        if hidden_states.shape[1] > self.few_rows.most:
            return super().forward(hidden_states, **given)
        out = self.few_rows.run(hidden_states, given)
        return (out, None) if self.gives_weights else out


class Buffers:
    """What lies between the calls of a layer. Layers run one after another, so that all can use the same."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._tensors: dict[tuple[str, int, torch.dtype], Tensor] = {}

    def take(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[MOST_FEW_ROWS,width]"""
        dtype = dtype or self.dtype
        if (name, width, dtype) not in self._tensors:
            self._tensors[name, width, dtype] = torch.zeros(MOST_FEW_ROWS, width, dtype=dtype)
        return self._tensors[name, width, dtype]


class FewRows:
    """The same, written down once: calls of C++, and between them our attention and modules that are not ours.

    Set before each run: the number of rows if it changes, where the layer's input and output lie, the angles.
    """

    def __init__(self, parts: LayerParts, buffers: Buffers, x_dtype: torch.dtype):
        """x_dtype: of what goes from layer to layer"""
        self._parts, self._buffers, self.x_dtype = parts, buffers, x_dtype
        self._width = next(len(norm.scale) for norm in parts[:4] if norm is not None)
        self._normed, self._added = (buffers.take(name, self._width) for name in ("normed", "added"))
        self._total = buffers.take("total", self._width, x_dtype)
        # Calls with addresses that change from run to run.
        self._reads_x: list[Any] = []
        self._add_mixer = self._sum_of(parts.after_mixer, parts.before_mlp)
        self._add_mlp = self._sum_of(parts.after_mlp, None)
        self._heads: Any = None  # a call
        self._out: Any = None  # a call
        # In order, neighbouring calls together.
        steps = [*self._into_mixer(), *self._mixer(), *self._into_mlp(), *self._mlp(), self._add_mlp]
        self._calls = [step.arguments for step in steps if isinstance(step, Call)]
        self._segments = list(segments(steps))
        # Of the run that is under way.
        self._x = torch.empty(0)
        self._given: dict[str, Any] = {}
        self._rows = 0

        # As long as all products are ours.
        linears = (linear for part in (parts.mixer, parts.mlp) for linear in part.modules())
        self.most = min(MOST_FEW_ROWS, *(getattr(linear, "torch_from_rows", math.inf) - 1 for linear in linears))

    # -- what is written down ----------------------------------------------------------------------------------------

    def _into_mixer(self) -> Iterator[Step]:
        if self._parts.before_mixer is not None:
            norm = native.add_norm_call(
                self._width, self._buffers.dtype, before=self._parts.before_mixer, x_dtype=self.x_dtype
            )
            norm.arguments.out = self._normed.data_ptr()
            self._reads_x.append(norm.arguments)
            yield norm

    def _mixer(self) -> Iterator[Step]:
        mixer = self._parts.mixer
        if not _is_in_calls(mixer, FusedAttention, "qkv", "out"):
            yield self._call_mixer
            return
        self._qkv = self._buffers.take("qkv", mixer.qkv.packed.outputs)
        product = self._product(mixer.qkv, self._normed, self._qkv)
        if self._parts.before_mixer is None:
            self._reads_x.append(product.arguments)
        yield product
        if mixer.heads.changes_anything:
            self._heads = native.prepare_heads_call(*mixer.heads[:5], dtype=self._buffers.dtype)
            self._heads.arguments.tokens = self._qkv.data_ptr()
            self._heads.arguments.token_stride = self._qkv.shape[1]
            yield self._heads
        yield self._attend
        self._out = self._product(mixer.out, self._added, self._added)  # x is set by `_attend`
        yield self._out

    def _into_mlp(self) -> Iterator[Step]:
        self._reads_x.append(self._add_mixer.arguments)
        self._add_mixer.arguments.sum = self._total.data_ptr()
        self._mlp_input = self._total if self._parts.before_mlp is None else self._normed
        yield self._add_mixer

    def _mlp(self) -> Iterator[Step]:
        self._add_mlp.arguments.x = self._total.data_ptr()
        mlp = self._parts.mlp
        if not _is_in_calls(mlp, FusedMLP, "gate_up", "down"):
            yield self._call_mlp
            return
        gate_up = self._buffers.take("gate_up", mlp.gate_up.packed.outputs)
        gated = self._buffers.take("gated", mlp.down.packed.inputs)
        yield self._product(mlp.gate_up, self._mlp_input, gate_up)
        gate = native.gate_call(gated.shape[1], self._buffers.dtype, mlp.gating)
        gate.arguments.gate_up, gate.arguments.out = gate_up.data_ptr(), gated.data_ptr()
        yield gate
        yield self._product(mlp.down, gated, self._added)

    def _sum_of(self, after: Norm | None, before: Norm | None) -> Call:
        call = native.add_norm_call(
            self._width, self._buffers.dtype, after, before, self._parts.added_scale, self.x_dtype
        )
        call.arguments.added = self._added.data_ptr()
        call.arguments.out = None if before is None else self._normed.data_ptr()
        return call

    def _product(self, linear: Any, x: Tensor, out: Tensor) -> Call:
        call = linear.packed.call()
        call.arguments.x, call.arguments.out = x.data_ptr(), out.data_ptr()
        call.arguments.x_stride = linear.packed.inputs
        return call

    # -- running it --------------------------------------------------------------------------------------------------

    def run(self, x_BTC: Tensor, given: dict[str, Any]) -> Tensor:
        """x_BTC: [1,T,C], T at most `most`. given: what else the layer is called with. Returns x's shape."""
        self._x, self._given = x_BTC.contiguous(), given
        if x_BTC.shape[1] != self._rows:
            self._set_rows(x_BTC.shape[1])
        for arguments in self._reads_x:
            arguments.x = self._x.data_ptr()
        out_BTC = torch.empty_like(self._x)
        self._add_mlp.arguments.sum = out_BTC.data_ptr()
        angles = self._set_angles()
        for run in self._segments:
            run()
        del angles  # which were read until now
        return out_BTC

    def _set_rows(self, rows: int) -> None:
        self._rows = rows
        for arguments in self._calls:
            arguments.rows = rows
        if self._out is not None:
            self._split = self._parts.mixer.heads.split(self._qkv[:rows])

    def _set_angles(self) -> list[Tensor]:
        """Returns what C++ will read."""
        angles = self._given.get("position_embeddings")
        if self._heads is None or not self._parts.mixer.heads.rotary or angles is None:
            return []
        held = [angle[0].contiguous() for angle in angles]
        arguments, count = self._heads.arguments, held[0].shape[-1]
        arguments.cos, arguments.sin = held[0].data_ptr(), held[1].data_ptr()
        arguments.angle_kind = native.angle_kind(held[0], self._buffers.dtype)
        arguments.angles, arguments.rotary_dim = count, count * self._parts.mixer.heads.angles_per_head
        return held

    def _attend(self) -> None:
        self._attended = self._parts.mixer.attend(*self._split)
        self._out.arguments.x = self._attended.data_ptr()

    def _call_mixer(self) -> None:
        normed = self._x if self._parts.before_mixer is None else self._normed[: self._rows].unsqueeze(0)
        self._mixed = tensor_of(self._parts.mixer(hidden_states=normed, **self._given)).contiguous()
        self._add_mixer.arguments.added = self._mixed.data_ptr()

    def _call_mlp(self) -> None:
        self._mixed = tensor_of(self._parts.mlp(self._mlp_input[: self._rows].unsqueeze(0))).contiguous()
        self._add_mlp.arguments.added = self._mixed.data_ptr()


def segments(steps: list[Step]) -> Iterator[Callable[[], None]]:
    """The same steps in fewer parts: neighbouring calls are one."""
    for are_calls, some in groupby(steps, lambda step: isinstance(step, Call)):
        if are_calls:
            yield CallList([call for call in some if isinstance(call, Call)]).run
        else:
            yield from some  # type: ignore[misc]


def _is_in_calls(module: Any, kind: type[nn.Module], *linears: str) -> bool:
    """Whether all that a module does can be such calls: its products are packed by us, of whole words, and nothing is
    hooked to them."""
    return isinstance(module, kind) and all(
        isinstance(linear, NativeLinear)
        and not linear.packed.is_padded
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        for linear in (getattr(module, name) for name in linears)
    )
