"""Recurrences on a GPU by our own kernels: `kernels/state/triton_kernels.py`, and what they are launched with."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two
from ..transfer import Transfer
from .protocol import Recurrence, StateBatch
from .reference import (
    CONVOLUTION,
    GATED_CONVOLUTION,
    GATED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SILU_CONVOLUTION,
)
from .worklist import TILE_TOKENS, Work, frame_of, refill, sent, work_of


class Launch(NamedTuple):
    """How prompts go through heads."""

    chunk_tokens: int
    values: int  # of a head, at most, in one program
    warps: int
    stages: int  # of loads, beside the products

    def block(self, values: int) -> int:
        return min(max(LEAST_DOT, power_of_two(values)), self.values)


LAUNCHES = {
    (LINEAR_ATTENTION.name, 2): Launch(64, 64, 4, 2),
    (LINEAR_ATTENTION.name, 4): Launch(32, 64, 4, 2),
    (GATED_DELTA.name, 2): Launch(64, 32, 4, 2),
    (GATED_DELTA.name, 4): Launch(32, 32, 4, 2),
}
"""By the recurrence and the bytes of a number of q and k. None spills registers (`bench/ahead.py`)."""

MOST_KEYS = 128
"""Of a head. One with more keeps fewer values in a program, in shorter chunks."""


class TritonStates:
    """Every recurrence, in place."""

    name: ClassVar[str] = "triton"
    devices: ClassVar[frozenset[str]] = frozenset({"cuda"})
    mixed_frames: ClassVar[bool] = True

    @classmethod
    def lacks(cls) -> str | None:
        return gpu.missing()

    def __init__(self) -> None:
        from . import triton_kernels as states  # here and not above: triton may be missing

        self._kernels: Any = states
        self._run = {
            CONVOLUTION.name: self._convolve,
            LINEAR_ATTENTION.name: self._heads,
            GATED_DELTA.name: self._heads,
            SELECTIVE_SCAN.name: self._channels,
        }

    def prepare(self, batch: StateBatch, device: torch.device) -> Work[Tensor]:
        return sent(work_of(batch), device)

    def frame(self, rows: int, tokens: int, device: torch.device) -> Work[Tensor]:
        return frame_of(rows, tokens, device)

    def refill(self, frame: Work[Tensor], batch: StateBatch, transfer: Transfer) -> bool:
        return refill(frame, work_of(batch), transfer)

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: Work[Tensor],
    ) -> Tensor:  # fmt: skip
        # What goes on around a recurrence is torch's.
        if recurrence is SILU_CONVOLUTION:
            return F.silu(self.scan(CONVOLUTION, pages, constants, inputs, meta))
        if recurrence is GATED_CONVOLUTION:
            before, x, after = inputs
            return after * self.scan(CONVOLUTION, pages, constants, (before * x,), meta)
        run = self._run[recurrence.name]
        inputs = [dense(values) for values in inputs]
        out = torch.empty_like(inputs[_OUT_LIKE[recurrence.name]], memory_format=torch.contiguous_format)
        for rows in (meta.singles, meta.longer):
            if len(rows):
                run(recurrence, pages, constants, inputs, rows, meta, out)
        return out

    def _heads(
        self, recurrence: Recurrence, pages: Tensor, _: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        q, k, v, g, *beta = inputs
        b = beta[0] if beta else g
        slots, heads, keys, values = pages.shape
        if is_prompt := rows is not meta.singles:
            # Of bfloat16 alone kernels make products as they are: what float16 has no room for may be in a state.
            q, k = (x if x.dtype is torch.bfloat16 else x.float() for x in (q, k))
        launch = launch_of(recurrence, keys, q.element_size())
        block = launch.block(values) if is_prompt else step_block(keys, values)
        grid = (len(rows), heads, -(-values // block))
        strides = [stride for x in (q, k, v, g, b, out) for stride in x.stride()[:2]]
        arguments = (
            q, k, v, g, b, out, pages, rows, meta.pieces, *strides, pages.stride(0), pages.stride(1), slots
        )  # fmt: skip
        common = {
            "KEYS": keys,
            "KEYS_PADDED": max(LEAST_DOT, power_of_two(keys)),
            "VALUES": values,
            "VALUES_BLOCK": block,
            "GROUP": heads // q.shape[1],
            "DELTA": bool(beta),
        }
        # One token needs no products of matrices; several go in chunks.
        if is_prompt:
            self._kernels.heads[grid](
                *arguments, **common, CHUNK=launch.chunk_tokens, PRECISION=PRECISION,
                num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        else:
            self._kernels.heads_step[grid](*arguments, **common)

    def _channels(
        self, _: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        (A,) = constants
        slots, count, states = pages.shape
        block = 32
        self._kernels.channels[len(rows), -(-count // block)](
            A.contiguous(), *inputs, out, pages, rows, meta.pieces,
            *(x.stride(0) for x in (*inputs, out)), pages.stride(0), slots, count,
            STATES=states, STATES_PADDED=power_of_two(states), BLOCK=block,
        )  # fmt: skip

    def _convolve(
        self, _: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        weight, bias = constants
        (x,) = inputs
        slots, count, window = pages.shape
        block = 128
        is_single = rows is meta.singles
        parts, blocks = len(rows if is_single else meta.tiles), -(-count // block)
        self._kernels.convolve[parts, blocks](
            weight.contiguous(), bias, x, out, pages, rows, meta.tiles,
            x.stride(0), out.stride(0), pages.stride(0), slots, count,
            WINDOW=window, TOKENS=1 if is_single else TILE_TOKENS, BLOCK=block,
        )  # fmt: skip
        self._kernels.shift[len(rows), blocks](
            x, pages, rows, meta.pieces, x.stride(0), pages.stride(0), slots, count, WINDOW=window, BLOCK=block
        )


_OUT_LIKE = {CONVOLUTION.name: 0, LINEAR_ATTENTION.name: 2, GATED_DELTA.name: 2, SELECTIVE_SCAN.name: 0}
"""The input that has the output's shape."""

PRECISION = "tf32" if gpu.is_interpreted() else "bf16x3"
"""Of the products of float32 in a prompt. Each number is a sum of two of bfloat16, which has 16 bits; a product of
those takes operands that lie either way, one of tf32 does not. What is summed, and what is kept, is float32. The
interpreter does not know it, and computes in float32 whatever it is told."""


def launch_of(recurrence: Recurrence, keys: int, key_bytes: int) -> Launch:
    """key_bytes: of a number of q and k"""
    launch = LAUNCHES[recurrence.name, key_bytes]
    return launch if keys <= MOST_KEYS else Launch(16, 16, 4, 1)


def step_block(keys: int, values: int) -> int:
    """Values of a head in one program, for one token: few, so that there are many programs."""
    return min(max(LEAST_DOT, power_of_two(values)), 16 if keys > 128 else 32)
