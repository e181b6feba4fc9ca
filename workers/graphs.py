"""Steps that are recorded once per shape, then replayed: a GPU need not wait for Python between its kernels.

Steps in which every request computes one token differ in numbers alone, once they are filled up to one of a few shapes:
rows to 1, 2, 4, 8, 16, 24, 32, .., pages of a row to those of the longest request. For each count of rows there is a
frame, whose tensors stay where they are. All are recorded before requests come, the largest first: the others lie in
its memory. A step is put into its frame and replayed. Rows that fill up read and write the null page, or the spare one
of a state. Where attention costs more over a wider table, pages are filled up to a power of two instead, and a shape is
recorded when it first comes.

    step of 5 rows     a b c d e           tokens 17 4 9 9 2 0 0 0
    frame of 8         a b c d e . . .     tables [a's blocks] .. [0 0 0]    lengths 40 7 12 3 88 1 1 1

Steps with prompts are filled up in their tokens: to 128, 256, 512 or 1,024, of as many rows as there may be. For that
attention and states must take rows of any lengths in a frame.

    step of 3 rows     a b c c c c         frame of 128 tokens     a b c c c c . . . ..    logits of tokens 0 1 5 0 0 ..

Where a model attends to images, steps in which some token sees one and steps in which none does have frames of their
own: the latter leave its cross layers out. An image itself is encoded before the step is replayed, unrecorded.

Steps that tell log-probabilities of prompts go the usual way.
"""

import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..kernels.paged_attention import GroupBatch, GroupMeta
from ..kernels.state import StateBatch
from ..kernels.transfer import Transfer
from .last_tokens import LastTokens
from .layers.sight import SeenInFrame, Sight
from .models.loaded_model import LoadedModel

logger = logging.getLogger(__name__)

MOST_FRAMES = 256
"""Each keeps what lies between layers, in memory that all share; further shapes are not recorded."""

MOST_ROWS = 512
"""A step of more rows keeps a GPU busy without being recorded."""

MIXED_TOKENS = 128, 256, 512, 1024
"""Of recorded steps with prompts. Longer ones keep a GPU busy without being recorded."""

MOST_GATHERING_TOKENS = 256
"""The same where each token gathers what it attends to: that keeps a GPU busy sooner. And in a recorded step those
gather, too, that see no more than they may choose."""

GRAPH_BYTES = 10 << 20
"""What a GPU keeps of one recorded step, about: its nodes, some thousands, and their arguments."""

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
        try:
            # What other threads of this process ask of the device, as of its memory, does not break it off.
            with _no_collector(), torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                logits = forward()
        except BaseException:
            # The allocator believes that a recording into this memory still goes on.
            self._pool = torch.cuda.graph_pool_handle()
            raise

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay


@contextlib.contextmanager
def _no_collector() -> Iterator[None]:
    """What the garbage collector finds may be graphs and events of an engine before this one: they must not be freed
    while a step is recorded."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def padded_rows(rows: int) -> int:
    """1, 2, 4, 8, and from there in steps of 8."""
    return 1 << (rows - 1).bit_length() if rows <= 8 else -(-rows // 8) * 8


def padded_pages(pages: int) -> int:
    return 1 << (pages - 1).bit_length()


def recorded_rows(most_rows: int) -> list[int]:
    """Counts of rows whose steps are recorded before requests come, the largest first."""
    return sorted({padded_rows(rows) for rows in range(1, min(most_rows, MOST_ROWS) + 1)}, reverse=True)


def mixed_tokens(model: LoadedModel, most_tokens: int) -> list[int]:
    """Counts of tokens to which recorded steps with prompts are filled up, the largest first. None where they are not
    recorded. most_tokens: of a step"""
    attention = model.attention
    has_frames = _is_wide(model) and (attention.backend.capabilities.mixed_frames or not attention.params)
    if not has_frames or (model.pages.state_groups and not model.states.has_mixed_frames) or most_tokens < 2:
        return []
    most_tokens = min(most_tokens, MOST_GATHERING_TOKENS if attention.gathers else MIXED_TOKENS[-1])
    return sorted({min(tokens, most_tokens) for tokens in MIXED_TOKENS}, reverse=True)


def _is_wide(model: LoadedModel) -> bool:
    """Whether a frame for the longest requests costs no more than others. Where no layer attends, all are alike."""
    return model.attention.backend.capabilities.wide_frames or not model.attention.params


class PackedStep(NamedTuple):
    """R rows of T tokens together, of which F rows finish: logits of their last tokens are wanted."""

    slots: np.ndarray  # [R]
    tokens: np.ndarray  # [T] int64, some in the device's memory alone: see `LastTokens`
    positions: np.ndarray  # [T] int64
    drawing: np.ndarray  # [F] slots of these rows
    keep: np.ndarray  # [F] these tokens
    batches: Sequence[GroupBatch]  # one for each of `step_masks`
    states: Mapping[int, StateBatch]  # by group
    sight: Sight | None = None  # of images; None: no token sees any

    @property
    def is_decode(self) -> bool:
        """One token of each row, and no row is new."""
        return len(self.tokens) == len(self.drawing) == len(self.slots) and bool(self.positions.all())


@dataclass(slots=True)
class _Frame:
    drawing_R: Tensor  # slots whose tokens are drawn
    picks_T: Tensor
    positions_T: Tensor
    keep_R: Tensor | None  # tokens whose logits are wanted; None: all
    metas: list[GroupMeta]
    beside_metas: Any  # of attention
    states: dict[int, Any]
    seen: SeenInFrame | None = None  # of images; None: no token sees any, and cross layers are left out
    replay: Replay | None = None


class StepGraphs:
    """The frames of one model over its pages."""

    def __init__(
        self,
        model: LoadedModel,
        logits: Callable[[Tensor, Tensor, Tensor | None], Tensor],
        last_tokens: LastTokens,
        record: Recorder,
        most_rows: int,
        most_tokens: int,
        widths: Sequence[int],
    ):
        """logits: of tokens at their positions, of some or all, over what the layers of `model` were told of the step
        most_tokens: of a step
        widths: pages of the longest request, one for each of `step_masks`"""
        self.refusal: str | None = None  # why nothing is recorded
        self.refusals: dict[tuple[int, ...], str] = {}  # shape -> why it is not
        self._model = model
        self._logits = logits
        self._last_tokens = last_tokens
        self._record = record
        self._rows = recorded_rows(most_rows)
        self._most_rows = self._rows[0]
        self._is_wide = _is_wide(model)
        self._mixed_tokens = mixed_tokens(model, most_tokens)
        self._widths = widths
        most_mixed = max(self._mixed_tokens, default=0)
        self._sights = model.cross.frames(self._most_rows, most_mixed) if model.cross is not None else None
        self._frames: dict[tuple[int, ...], _Frame] = {}
        self._largest: dict[bool, list[GroupMeta]] = {}  # whose memory frames share, where wide; by: of decode steps?
        self._logits_RV: Tensor | None = None  # likewise

    def to_record(self) -> list[int]:
        """Counts of rows of decode steps that are to be recorded before requests come, the largest first."""
        return self._rows if self._is_wide else []

    def mixed_to_record(self) -> list[int]:
        """Counts of tokens of steps with prompts, likewise, and before the others."""
        return self._mixed_tokens

    def forget(self) -> None:
        """What is recorded runs no more, as when the ranks meet anew: it calls into what connected them."""
        self._frames.clear()
        self.refusals.clear()

    def run(self, step: PackedStep) -> Tensor | None:
        """Logits [F, vocabulary], in a buffer that the next run overwrites. None: the step must go the usual way."""
        if self.refusal is not None or len(step.slots) > self._most_rows:
            return None
        if step.sight is not None and self._sights is None:
            return None
        if step.is_decode:
            rows = tokens = padded_rows(len(step.slots))
            padded = [_padded(batch, rows, is_wide=self._is_wide) for batch in step.batches]
        else:
            tokens = next((most for most in reversed(self._mixed_tokens) if most >= len(step.tokens)), 0)
            rows, padded = self._most_rows, list(step.batches)
        if not tokens:
            return None
        widths = (0 if self._is_wide else batch.block_table.shape[1] for batch in padded)
        shape = (step.is_decode, step.sight is not None, rows, tokens, *widths)
        if shape in self.refusals:
            return None
        frame = self._frames.get(shape)
        if frame is None:
            if len(self._frames) >= MOST_FRAMES:
                return None
            frame = self._make(rows, tokens, padded, step)
            if frame is None:
                return None
            self._frames[shape] = frame
        if not self._fill(frame, step, padded):
            return None
        self._last_tokens.resume(frame.drawing_R)
        if frame.replay is not None:
            return frame.replay()[: len(step.drawing)]
        logits = self._forward(frame)
        self._kept(logits)  # has memory before it is recorded
        try:
            frame.replay = self._record(lambda: self._kept(self._forward(frame)))
        except RuntimeError as error:
            # A device that is lost says so, too. Only what speaks of recording is about this shape alone.
            if "captur" not in str(error):
                raise
            reason = f"a step of {rows} rows and {tokens} tokens could not be recorded: {error}"
            if not self.refusals:
                logger.warning("%s. Python is waited for", reason)
            self.refusals[shape] = reason
            del self._frames[shape]
        return logits[: len(step.drawing)]

    def _refuse(self, reason: str) -> None:
        self.refusal = reason
        self._frames.clear()
        logger.warning("steps are not recorded, so Python is waited for: %s", reason)

    def _make(self, rows: int, tokens: int, padded: Sequence[GroupBatch], step: PackedStep) -> _Frame | None:
        metas = self._metas(rows, tokens, padded, is_decode=step.is_decode)
        if metas is None:
            self._refuse(f"attention backend '{self._model.attention.backend.name}' has no fixed shapes")
            return None
        of_rows, of_tokens = (torch.zeros(n, dtype=torch.int64, device=self._model.device) for n in (rows, tokens))
        states = {g: self._model.states.frame(rows, tokens) for g in step.states}
        if any(meta is None for meta in states.values()):
            self._refuse(f"state backend '{self._model.states.backend_name}' has no fixed shapes")
            return None
        keep_R = None if step.is_decode else of_rows.clone()
        beside_metas = self._model.attention.frame(rows, tokens)
        seen = None
        if step.sight is not None and self._sights is not None:
            seen = self._sights.frame(rows, tokens, is_decode=step.is_decode)
        return _Frame(of_rows, of_tokens, of_tokens.clone(), keep_R, metas, beside_metas, states, seen)

    def _metas(
        self, rows: int, tokens: int, padded: Sequence[GroupBatch], *, is_decode: bool
    ) -> list[GroupMeta] | None:
        """Of a frame. None: there are none of fixed shape."""
        backend, device = self._model.attention.backend, self._model.device
        if not self._is_wide:
            metas = [backend.frame(batch, device) for batch in padded]
            return [meta for meta in metas if meta is not None] if None not in metas else None
        largest = self._largest.get(is_decode)
        if largest is None:
            lens = np.ones(self._most_rows, dtype=np.int32)
            if not is_decode:
                lens[0] += max(1, self._mixed_tokens[0] - self._most_rows)
            made = [self._largest_meta(batch, width, lens) for batch, width in zip(padded, self._widths, strict=True)]
            if None in made:
                return None
            largest = self._largest[is_decode] = [meta for meta in made if meta is not None]
        return [backend.narrow(meta, rows, tokens) for meta in largest]

    def _largest_meta(self, batch: GroupBatch, width: int, lens: np.ndarray) -> GroupMeta | None:
        lengths = {"query_lens": lens, "kv_lens": lens}
        if batch.held is None:
            whole = replace(batch, block_table=np.zeros((self._most_rows, width), dtype=np.int32), **lengths)
        else:
            whole = replace(batch, held=batch.held.padded(self._most_rows), **lengths)
        return self._model.attention.backend.frame(whole, self._model.device)

    def _fill(self, frame: _Frame, step: PackedStep, padded: Sequence[GroupBatch]) -> bool:
        """False: it does not fit."""
        transfer = Transfer(self._model.device)
        tokens, spare = self._last_tokens, self._last_tokens.spare_slot
        transfer.put(tokens.known(len(step.tokens)), step.tokens)
        puts = [
            (frame.drawing_R, step.drawing, spare),
            (frame.picks_T, tokens.picks(step.tokens, step.slots), spare),
            (frame.positions_T, step.positions, 0),
        ]
        if frame.keep_R is not None:
            puts.append((frame.keep_R, step.keep, 0))
        for buffer, values, filling in puts:
            transfer.put(buffer, np.pad(values, (0, len(buffer) - len(values)), constant_values=filling))
        attention = self._model.attention
        refill = attention.backend.refill
        if not all(refill(meta, batch, transfer) for meta, batch in zip(frame.metas, padded, strict=True)):
            return False
        if not attention.refill(frame.beside_metas, padded, transfer):
            return False
        states = self._model.states
        if not all(states.refill(meta, step.states[g], transfer) for g, meta in frame.states.items()):
            return False
        if not self._refill_sight(frame, step, transfer):
            return False
        transfer.run()
        return True

    def _refill_sight(self, frame: _Frame, step: PackedStep, transfer: Transfer) -> bool:
        if frame.seen is None:
            return True
        assert step.sight is not None and self._sights is not None, "the frame is one of steps that see images"
        return self._sights.refill(frame.seen, step.sight, transfer)

    def _forward(self, frame: _Frame) -> Tensor:
        self._model.attention.resume(frame.metas, frame.positions_T)
        self._model.attention.go_by(frame.beside_metas)
        self._model.states.resume(frame.states)
        if self._model.cross is not None:
            self._model.cross.resume(frame.seen)
        return self._logits(self._last_tokens.tokens(frame.picks_T), frame.positions_T, frame.keep_R)

    def _kept(self, logits: Tensor) -> Tensor:
        """Logits in the one buffer that all frames write to: it is read before the next step runs."""
        if self._logits_RV is None:
            self._logits_RV = logits.new_empty(self._most_rows, logits.shape[1])  # it stays where it is
        return self._logits_RV[: len(logits)].copy_(logits)


def _padded(batch: GroupBatch, rows: int, *, is_wide: bool) -> GroupBatch:
    """The same with more rows, of one token in the null block each; and more columns, if what is recorded depends on
    them."""
    count = len(batch.kv_lens)
    lengths = {"query_lens": np.ones(rows, dtype=np.int32), "kv_lens": np.ones(rows, dtype=np.int32)}
    lengths["kv_lens"][:count] = batch.kv_lens
    if batch.held is not None:
        return replace(batch, held=batch.held.padded(rows), **lengths)
    pages = batch.block_table.shape[1]
    table = np.zeros((rows, pages if is_wide else padded_pages(pages)), dtype=np.int32)
    table[:count, :pages] = batch.block_table
    return replace(batch, block_table=table, **lengths)
