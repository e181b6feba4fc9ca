"""Recurrences on a GPU by our own kernels: `kernels/state/triton_kernels.py`, and what they are launched with."""

from collections.abc import Sequence
from typing import Any, ClassVar

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
    of_each_head,
)
from .worklist import TILE_TOKENS, Work, frame_of, refill, sent, work_of

CHUNKS = {LINEAR_ATTENTION.name: (32, 8), GATED_DELTA.name: (16, 4)}
"""Tokens of a chunk, and warps: the most that spills no registers (`bench/ahead.py`). Of a delta net every token
of a chunk waits for the one before it, so its chunks are short anyway."""


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
        if recurrence is LINEAR_ATTENTION or recurrence is GATED_DELTA:
            q, k, v, *others = inputs
            inputs = (of_each_head(q, v), of_each_head(k, v), v, *others)
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
        block = heads_block(keys, values, rows is meta.singles)
        grid = (len(rows), heads, -(-values // block))
        strides = [stride for x in (q, k, v, g, b, out) for stride in x.stride()[:2]]
        common = {
            "KEYS": keys,
            "KEYS_PADDED": max(LEAST_DOT, power_of_two(keys)),
            "VALUES": values,
            "VALUES_BLOCK": block,
            "DELTA": bool(beta),
        }
        # One token needs no products of matrices; several go in chunks.
        if rows is meta.singles:
            self._kernels.heads_step[grid](
                q, k, v, g, b, out, pages, rows, meta.pieces,
                *strides, pages.stride(0), pages.stride(1), slots, **common,
            )  # fmt: skip
        else:
            chunk, warps = CHUNKS[recurrence.name]
            self._kernels.heads[grid](
                q, k, v, g, b, out, pages, rows, meta.pieces,
                *strides, pages.stride(0), pages.stride(1), slots, **common,
                CHUNK=chunk, PRECISION=PRECISION, num_warps=warps, num_stages=1,
            )  # fmt: skip

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

PRECISION = "tf32"
"""Of the matrix products of a prompt: 11 bits of each number, which are all that there are where a model computes in
bfloat16. What is summed, and what is kept, is float32."""


def heads_block(keys: int, values: int, one_token: bool) -> int:
    """Values of a head that one program keeps: few, so that there are many programs and no registers are spilled."""
    most = 16 if keys > 128 else 32 if one_token or keys > 64 else 64
    return min(max(LEAST_DOT, power_of_two(values)), most)
