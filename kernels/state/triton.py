"""Recurrences on a GPU by our own kernels: `kernels/state/triton_kernels.py`, and what they are launched with."""

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import triton as gpu
from ..toolchain.triton import LEAST_DOT, power_of_two
from ..transfer import Transfer
from .protocol import Recurrence, StateBatch
from .reference import (
    CONVOLUTION,
    DECAYING_SUM,
    GATED_CONVOLUTION,
    GATED_DELTA,
    KEYED_DELTA,
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


LAUNCHES = {LINEAR_ATTENTION.name: Launch(16, 32, 8, 1), GATED_DELTA.name: Launch(16, 32, 4, 1)}
"""Of q and k in float32: the most that spills few registers (`bench/ahead.py`). Of a delta net every token of a chunk
waits for the one before it, so its chunks are short anyway."""

BFLOAT16_LAUNCH = Launch(64, 32, 4, 2)
"""Of linear attention with q and k in bfloat16: the fastest of ten on an H100."""

MOST_BFLOAT16_KEYS = 128
"""Of a head. More would leave no registers for anything else."""


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
            SILU_CONVOLUTION.name: self._convolve,
            LINEAR_ATTENTION.name: self._heads,
            GATED_DELTA.name: self._heads,
            KEYED_DELTA.name: self._keyed_heads,
            SELECTIVE_SCAN.name: self._channels,
            DECAYING_SUM.name: self._sums,
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
        if recurrence is GATED_CONVOLUTION:
            before, x, after = inputs
            return after * self.scan(CONVOLUTION, pages, constants, (before * x,), meta)
        run = self._run[recurrence.name]
        inputs = [dense(values) for values in inputs]
        out = torch.empty_like(inputs[_OUT_LIKE.get(recurrence.name, 0)], memory_format=torch.contiguous_format)
        for rows in (meta.singles, meta.longer):
            if len(rows):
                run(recurrence, pages, constants, inputs, rows, meta, out)
        return out

    def _heads(
        self, recurrence: Recurrence, pages: Tensor, _: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        q, k, v, g, *beta = inputs
        slots, heads, keys, values = pages.shape
        is_prompt = rows is not meta.singles
        in_bfloat16 = is_prompt and launches_bfloat16(recurrence, keys, q, k)
        launch = BFLOAT16_LAUNCH if in_bfloat16 else LAUNCHES[recurrence.name]
        if is_prompt and not in_bfloat16:
            q, k = q.float(), k.float()
        block = prompt_block(launch, keys, values) if is_prompt else step_block(keys, values)
        grid = (len(rows), heads, -(-values // block))
        common = {
            "KEYS": keys,
            "KEYS_PADDED": max(LEAST_DOT, power_of_two(keys)),
            "VALUES": values,
            "VALUES_BLOCK": block,
            "GROUP": heads // q.shape[1],
        }
        if in_bfloat16:
            strides = (q.stride(1), k.stride(1), v.stride(1), *g.stride(), out.stride(1))
            self._kernels.shared_heads[grid](
                q, k, v, g, out, pages, rows, meta.pieces, *strides, pages.stride(0), pages.stride(1), slots, **common,
                CHUNK=launch.chunk_tokens, **token_strides(q, k, v, out),
                num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
            return
        b = beta[0] if beta else g
        strides = [stride for x in (q, k, v, g, b, out) for stride in x.stride()[:2]]
        arguments = q, k, v, g, b, out, pages, rows, meta.pieces, *strides, pages.stride(0), pages.stride(1), slots
        # One token needs no products of matrices; several go in chunks.
        if is_prompt:
            self._kernels.heads[grid](
                *arguments, **common, CHUNK=launch.chunk_tokens, DELTA=bool(beta),
                PRECISION=PRECISIONS[recurrence.name], num_warps=launch.warps, num_stages=launch.stages,
            )  # fmt: skip
        else:
            self._kernels.heads_step[grid](*arguments, **common, DELTA=bool(beta))

    def _keyed_heads(
        self, _: Recurrence, pages: Tensor, __: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        slots, heads, keys, values = pages.shape
        block = step_block(keys, values)
        strides = [stride for x in (*inputs, out) for stride in x.stride()[:2]]
        self._kernels.keyed_heads[len(rows), heads, -(-values // block)](
            *inputs, out, pages, rows, meta.pieces, *strides, pages.stride(0), pages.stride(1), slots,
            KEYS=keys, KEYS_PADDED=power_of_two(keys), VALUES=values, VALUES_BLOCK=block,
            GROUP=heads // inputs[0].shape[1], num_warps=keyed_warps(),
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

    def _sums(
        self, _: Recurrence, pages: Tensor, __: Sequence[Tensor], inputs: Sequence[Tensor], rows: Tensor,
        meta: Work[Tensor], out: Tensor,
    ) -> None:  # fmt: skip
        slots, count = pages.shape
        block = 64
        self._kernels.decaying_sums[len(rows), -(-count // block)](
            *inputs, out, pages, rows, meta.pieces,
            *(x.stride(0) for x in (*inputs, out)), pages.stride(0), slots, count, BLOCK=block, num_warps=2,
        )  # fmt: skip

    def _convolve(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        rows: Tensor, meta: Work[Tensor], out: Tensor,
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
            WINDOW=window, TOKENS=1 if is_single else TILE_TOKENS, BLOCK=block, SILU=recurrence is SILU_CONVOLUTION,
        )  # fmt: skip
        self._kernels.shift[len(rows), blocks](
            x, pages, rows, meta.pieces, x.stride(0), pages.stride(0), slots, count, WINDOW=window, BLOCK=block
        )


_OUT_LIKE = {LINEAR_ATTENTION.name: 2, GATED_DELTA.name: 2, KEYED_DELTA.name: 2}
"""The input that has the output's shape, where it is not the first."""

PRECISIONS = {LINEAR_ATTENTION.name: "tf32x3", GATED_DELTA.name: "tf32"}
"""Of the matrix products of prompts in float32. Linear attention comes here where a model computes in float32, which
takes three products of TF32; one has 11 bits of each number, which are all that there are in bfloat16. What is summed,
and what is kept, is float32."""


def launches_bfloat16(recurrence: Recurrence, keys: int, q: Tensor, k: Tensor) -> bool:
    """Whether prompts go through `shared_heads`. The interpreter multiplies bfloat16 wrongly."""
    is_bfloat16 = q.dtype is torch.bfloat16 and k.dtype is torch.bfloat16
    fits = recurrence is LINEAR_ATTENTION and keys <= MOST_BFLOAT16_KEYS
    return is_bfloat16 and fits and not gpu.is_interpreted()


def token_strides(q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> dict[str, int]:
    """As constants of a kernel: a model has the same in each step."""
    named = {"Q": q, "K": k, "V": v, "OUT": out}
    return {f"{name}_TOKEN": tensor.stride(0) for name, tensor in named.items()}


def prompt_block(launch: Launch, keys: int, values: int) -> int:
    """Values of a head in one program: few, so that there are many programs and no registers are spilled."""
    most = 16 if keys > 128 else launch.values if keys > 64 else 64
    return min(max(LEAST_DOT, power_of_two(values)), most)


def step_block(keys: int, values: int) -> int:
    """The same for one token."""
    return min(max(LEAST_DOT, power_of_two(values)), 16 if keys > 128 else 32)


def keyed_warps(capability: int | None = None) -> int:
    """Of a program of `keyed_heads`: its numbers fit their registers. capability: of the GPU; None: the one at hand"""
    return 8 if gpu.is_blackwell(capability) else 4
