"""A decoder layer on a CPU: see `fused_modules.FusedLayer`.

Of few rows, what is ours of it is calls of C++ that were written down once, and `stack.py` runs those of neighbouring
layers in one list. In a decode step of few requests the products of a layer take half a millisecond; the Python between
them, whose code and data the weights push out of the processor's caches, took as long as half of that.
"""

from collections.abc import Callable, Iterator
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ...kernels.products import NativeLinear
from ...kernels.tokenwise import Norm
from ...kernels.tokenwise import cpu as native
from ...kernels.toolchain.calls import Call, CallList
from ...kernels.toolchain.huge_pages import LASTING
from .attention_calls import AttentionCalls
from .fused_modules import FusedLayer, FusedMLP, Heads, LayerParts, tensor_of

MOST_FEW_ROWS = 512
"""Beyond, what lies between the calls would take much memory. In one list they take a fifth less time for 128 rows, a
tenth for 512: threads that wait between two calls fall asleep, and results lie where memory was just in use."""

Step = Call | Callable[[], None]
Angles = tuple[Tensor, Tensor]


class LayersTogether(Protocol):
    """What runs neighbouring layers in one go."""

    def enter(self, layer: "LayerOfCalls", x_BTC: Tensor, given: dict[str, Any]) -> Tensor | None:
        """What the layer makes of x, maybe later; None if it is to be computed now, by itself."""


class LayerOfCalls(FusedLayer):
    stack: LayersTogether | None
    x_dtype: torch.dtype  # of what goes from layer to layer

    def forward(self, hidden_states: Tensor, **given: Any) -> Any:
        out = None if self.stack is None else self.stack.enter(self, hidden_states, given)
        if out is not None:
            return (out, None) if self.gives_weights else out
        return super().forward(hidden_states.to(self.x_dtype), **given)


class Buffers:
    """What lies between the calls of a layer. Layers run one after another, so that all can use the same."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype
        self._tensors: dict[tuple[str, int, torch.dtype], Tensor] = {}
        # That this run was given, and where C++ reads them: in the same places run after run. Windows have their own.
        self._angles: list[tuple[Angles, Angles]] = []

    def take(self, name: str, width: int, dtype: torch.dtype | None = None) -> Tensor:
        """[MOST_FEW_ROWS,width]. Rows that were never in use take hardly any memory."""
        dtype = dtype or self.dtype
        if (name, width, dtype) not in self._tensors:
            self._tensors[name, width, dtype] = LASTING.empty((MOST_FEW_ROWS, width), dtype)
        return self._tensors[name, width, dtype]

    def begin_run(self) -> None:
        self._angles.clear()

    def hold(self, angles: Angles) -> Angles:
        """The same cosines and sines [MOST_FEW_ROWS,R], until the next run. angles: [1,T,R] each"""
        for given, held in self._angles:
            if given is angles:
                return held
        names, width = (f"cosines {len(self._angles)}", f"sines {len(self._angles)}"), angles[0].shape[-1]
        cos, sin = (self.take(name, width, angle.dtype) for name, angle in zip(names, angles, strict=True))
        for angle, place in zip(angles, (cos, sin), strict=True):
            place[: angle.shape[1]].copy_(angle[0])
        self._angles.append((angles, (cos, sin)))
        return cos, sin


class FewRows:
    """What a layer computes, written down as calls of C++, and of Python where modules are not ours.

    What comes in and what comes out lies in the same place. Set before each run: the number of rows if it changes, the
    angles, the step that attention goes by.
    """

    def __init__(
        self,
        parts: LayerParts,
        buffers: Buffers,
        x_TC: Tensor,
        attention: AttentionCalls | None,
        is_first: bool,
        next_norm: Norm | None,
    ):
        """x_TC: [MOST_FEW_ROWS,C], what goes from layer to layer. attention: None: it is called from Python.
        is_first: else the layer before has normed what comes in. next_norm: of the layer behind it"""
        self._parts, self._buffers, self._x, self._attention = parts, buffers, x_TC, attention
        self._is_first = is_first
        self._width = x_TC.shape[1]
        self._normed, self._added = (buffers.take(name, self._width) for name in ("normed", "added"))
        self._total = buffers.take("total", self._width, x_TC.dtype)
        # Sums, which norm for what comes next.
        self._add_mixer = self._sum_of(parts.after_mixer, parts.before_mlp, x_TC, self._total)
        self._add_mlp = self._sum_of(parts.after_mlp, next_norm, self._total, x_TC)
        self._prepare: Any = None  # arguments of the call that prepares heads
        # In order.
        self.steps: list[Step] = [*self._into_mixer(), *self._mixer(), self._add_mixer, *self._mlp(), self._add_mlp]
        of_attention = attention.calls if attention else ()
        self._calls = [step.arguments for step in self.steps if isinstance(step, Call) and step not in of_attention]
        # Of the run that is under way.
        self._given: dict[str, Any] = {}
        self._cos: Tensor | None = None  # where C++ reads cosines
        self._rows = 0

    # -- what is written down ----------------------------------------------------------------------------------------

    def _into_mixer(self) -> Iterator[Step]:
        norm = self._parts.before_mixer
        if norm is not None and self._is_first:
            call = native.add_norm_call(self._width, self._buffers.dtype, before=norm, x_dtype=self._x.dtype)
            call.arguments.x, call.arguments.out = self._x.data_ptr(), self._normed.data_ptr()
            yield call

    def _mixer(self) -> Iterator[Step]:
        self._mixer_input = self._x if self._parts.before_mixer is None else self._normed
        if self._attention is None:
            yield self._call_mixer
            return
        mixer = self._parts.mixer
        qkv = self._buffers.take("qkv", mixer.qkv.packed.outputs)
        yield self._product(mixer.qkv, self._mixer_input, qkv)
        if mixer.heads.changes_anything:
            heads = native.prepare_heads_call(*mixer.heads[:5], dtype=self._buffers.dtype)
            heads.arguments.tokens, heads.arguments.token_stride = qkv.data_ptr(), qkv.shape[1]
            self._prepare = heads.arguments
            yield heads
        yield from self._attention.calls
        yield self._product(mixer.out, self._attention.out, self._added)

    def _mlp(self) -> Iterator[Step]:
        self._mlp_input = self._total if self._parts.before_mlp is None else self._normed
        mlp = self._parts.mlp
        if not is_in_calls(mlp, FusedMLP, "gate_up", "down"):
            yield self._call_mlp
            return
        gate_up = self._buffers.take("gate_up", mlp.gate_up.packed.outputs)
        gated = self._buffers.take("gated", mlp.down.packed.inputs)
        yield self._product(mlp.gate_up, self._mlp_input, gate_up)
        gate = native.gate_call(gated.shape[1], self._buffers.dtype, mlp.gating)
        gate.arguments.gate_up, gate.arguments.out = gate_up.data_ptr(), gated.data_ptr()
        yield gate
        yield self._product(mlp.down, gated, self._added)

    def _sum_of(self, after: Norm | None, before: Norm | None, x: Tensor, total: Tensor) -> Call:
        scale, dtype = self._parts.added_scale, self._buffers.dtype
        call = native.add_norm_call(self._width, dtype, after, before, scale, x.dtype)
        arguments = call.arguments
        arguments.x, arguments.added, arguments.sum = x.data_ptr(), self._added.data_ptr(), total.data_ptr()
        arguments.out = None if before is None else self._normed.data_ptr()
        return call

    def _product(self, linear: Any, x: Tensor, out: Tensor) -> Call:
        call = linear.packed.call()
        call.arguments.x, call.arguments.out = x.data_ptr(), out.data_ptr()
        call.arguments.x_stride = linear.packed.inputs
        return call

    # -- running it --------------------------------------------------------------------------------------------------

    def begin(self, rows: int, given: dict[str, Any]) -> None:
        """Set what a run depends on. given: what the layer is called with, beside x"""
        self._given = given
        if rows != self._rows:
            self._rows = rows
            for arguments in self._calls:
                arguments.rows = rows
        if self._attention is not None:
            self._attention.begin_step()
        if self._prepare is not None:
            self._set_angles(given.get("position_embeddings"))

    def _set_angles(self, angles: Angles | None) -> None:
        """What the call that prepares heads is to know of positions."""
        heads: Heads = self._parts.mixer.heads
        if heads.query_factor is not None:
            self._prepare.query_factor = heads.query_factor.of_pass(angles).data_ptr()
        if not heads.rotary or angles is None:
            return
        cos_TR, sin_TR = self._buffers.hold(angles)
        if cos_TR is self._cos:
            return
        self._cos, arguments, count = cos_TR, self._prepare, cos_TR.shape[-1]
        arguments.cos, arguments.sin = cos_TR.data_ptr(), sin_TR.data_ptr()
        arguments.angle_kind = native.angle_kind(cos_TR, self._buffers.dtype)
        arguments.angles, arguments.rotary_dim = count, count * heads.angles_per_head

    def _call_mixer(self) -> None:
        x_BTC = self._mixer_input[: self._rows].unsqueeze(0)
        self._mixed = tensor_of(self._parts.mixer(hidden_states=x_BTC, **self._given)).contiguous()
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


def is_in_calls(module: Any, kind: type[nn.Module], *linears: str) -> bool:
    """Whether all that a module does can be such calls: its products are packed by us, of whole words, and nothing is
    hooked to them."""
    return isinstance(module, kind) and all(
        isinstance(linear, NativeLinear)
        and not linear.packed.is_padded
        and not (linear._forward_hooks or linear._forward_pre_hooks)
        for linear in (getattr(module, name) for name in linears)
    )
