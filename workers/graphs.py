"""Decode steps that are recorded once per shape, then replayed: a GPU need not wait for Python between its kernels.

Steps in which every request computes one token differ in numbers alone, once they are filled up to one of a few shapes:
rows to 1, 2, 4, 8, 16, 24, 32, .., pages of a row to a power of two. For each shape there is a frame, whose tensors
stay where they are. A step is put into its frame; the first one is computed as usual and then recorded, all later ones
are replayed. Rows that fill up read and write the null page, or the spare one of a state.

    step of 5 rows     a b c d e           tokens 17 4 9 9 2 0 0 0
    frame of 8         a b c d e . . .     tables [a's blocks] .. [0 0 0]    lengths 40 7 12 3 88 1 1 1

Everything else a step may hold (prompts, states to save, log-probabilities of prompts) goes the usual way.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import GroupBatch, GroupMeta
from ..kernels.state import StateBatch
from .models.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

MOST_FRAMES = 256
"""Each keeps its logits and what lies between layers, in memory that all share; further shapes are not recorded."""

Replay = Callable[[], Tensor]
Recorder = Callable[[Callable[[], Tensor]], Replay]
"""Takes a forward pass over a frame that has just been run; gives what runs it again."""


def recorder(device: torch.device) -> Recorder | None:
    """None where nothing is gained."""
    return CudaRecorder() if device.type == "cuda" else None


class CudaRecorder:
    """CUDA graphs that share one pool of memory."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, forward: Callable[[], Tensor]) -> Replay:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = forward()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


def padded_rows(rows: int) -> int:
    """1, 2, 4, 8, and from there in steps of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def padded_pages(pages: int) -> int:
    return 1 << (pages - 1).bit_length()


class DecodeStep(NamedTuple):
    """One token of each row. R rows."""

    tokens: np.ndarray  # [R] int64
    positions: np.ndarray  # [R] int64
    batches: Sequence[GroupBatch]  # one for each of `step_masks`
    states: Mapping[int, StateBatch]  # by group


@dataclass(slots=True)
class _Frame:
    rows: int
    tokens_T: Tensor
    positions_T: Tensor
    metas: list[GroupMeta]
    states: dict[int, Any]
    replay: Replay | None = None


class DecodeGraphs:
    """The frames of one model over its pages."""

    def __init__(self, model: LoadedModel, logits: Callable[[Tensor, Tensor], Tensor], record: Recorder):
        """logits: of tokens at their positions, over what the layers of `model` were told of the step"""
        self._model = model
        self._logits = logits
        self._record = record
        self._frames: dict[tuple[int, ...], _Frame] = {}
        self.refusal: str | None = None  # why nothing is recorded

    def run(self, step: DecodeStep) -> Tensor | None:
        """Logits [R, vocabulary], in a buffer that the next run overwrites. None: the step must go the usual way."""
        if self.refusal is not None:
            return None
        rows = len(step.tokens)
        padded = [_padded(batch, padded_rows(rows)) for batch in step.batches]
        shape = (padded_rows(rows), *(batch.block_table.shape[1] for batch in padded))
        frame = self._frames.get(shape)
        if frame is None:
            if len(self._frames) >= MOST_FRAMES:
                return None
            frame = self._make(shape[0], padded, step)
            if frame is None:
                return None
            self._frames[shape] = frame
        self._fill(frame, step, padded)
        if frame.replay is not None:
            return frame.replay()[:rows]
        logits = self._forward(frame)
        try:
            frame.replay = self._record(lambda: self._forward(frame))
        except RuntimeError as error:
            self._refuse(f"a step of {frame.rows} rows could not be recorded: {error}")
        return logits[:rows]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._frames.clear()
        logger.warning("decode steps are not recorded, so Python is waited for: %s", reason)

    def _make(self, rows: int, padded: Sequence[GroupBatch], step: DecodeStep) -> _Frame | None:
        device, backend = self._model.device, self._model.attention.backend
        metas = []
        for batch in padded:
            meta = backend.frame(batch, device)
            if meta is None:
                self._refuse(f"attention backend '{backend.name}' has no fixed shapes")
                return None
            metas.append(meta)
        zeros = torch.zeros(rows, dtype=torch.int64, device=device)
        states = {g: self._model.states.frame(rows) for g in step.states}
        if any(meta is None for meta in states.values()):
            self._refuse(f"state backend '{self._model.states.backend_name}' has no fixed shapes")
            return None
        return _Frame(rows, zeros, zeros.clone(), metas, states)

    def _fill(self, frame: _Frame, step: DecodeStep, padded: Sequence[GroupBatch]) -> None:
        count = len(step.tokens)
        for buffer, values in ((frame.tokens_T, step.tokens), (frame.positions_T, step.positions)):
            buffer[:count].copy_(torch.from_numpy(values), non_blocking=True)
            buffer[count:] = 0
        for meta, batch in zip(frame.metas, padded, strict=True):
            self._model.attention.backend.refill(meta, batch)
        for g, meta in frame.states.items():
            self._model.states.refill(meta, step.states[g], frame.rows)

    def _forward(self, frame: _Frame) -> Tensor:
        self._model.attention.resume(frame.metas, frame.positions_T)
        self._model.states.resume(frame.states)
        return self._logits(frame.tokens_T, frame.positions_T)


def _padded(batch: GroupBatch, rows: int) -> GroupBatch:
    """The same with more rows, of one token in the null block each, and more columns."""
    count, pages = batch.block_table.shape
    table = np.zeros((rows, padded_pages(pages)), dtype=np.int32)
    table[:count, :pages] = batch.block_table
    kv_lens = np.ones(rows, dtype=np.int32)
    kv_lens[:count] = batch.kv_lens
    return replace(batch, block_table=table, query_lens=np.ones(rows, dtype=np.int32), kv_lens=kv_lens)
