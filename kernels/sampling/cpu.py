"""Tokens drawn in C++ on a CPU: logits are read where they lie, in their dtype, once or twice (`cpu_sampling.cpp`)."""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_float, c_int32, c_int64, c_void_p
from hashlib import blake2b
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..toolchain import cpp
from .protocol import HIGHEST_LOGIT, About, Changes, Draw, SamplingBackend, Tell


class _Changes(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("said", "counts", "edits", "allowed")),
        *((name, c_int64) for name in ("said_count", "edit_count", "allowed_bytes")),
        *((name, c_float) for name in ("repetition", "presence", "frequency")),
    ]


_EDIT = np.dtype([("token", np.int64), ("value", np.float32), ("is_added", np.int32)])


class _Draws(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "settings", "keys", "changes", "tokens")),
        *((name, c_int64) for name in ("row_stride", "rows", "vocab")),
        ("kind", c_int32),
    ]


class _Logprobs(ctypes.Structure):
    _fields_ = [
        *((name, c_void_p) for name in ("logits", "tokens", "of_tokens", "ranks", "top", "of_top")),
        *((name, c_int64) for name in ("row_stride", "rows", "vocab", "count")),
        ("kind", c_int32),
    ]


@functools.cache
def _library() -> Any:
    return cpp.library("sampling/cpu_sampling")


class NativeSampling(SamplingBackend):
    """The default on a CPU with a C++ compiler."""

    name: ClassVar[str] = "native"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @classmethod
    def lacks(cls) -> str | None:
        library = _library()
        return f"could not be compiled: {library}" if isinstance(library, str) else None

    def draw(
        self,
        logits_RV: Tensor,
        draws: Sequence[Draw],
        positions: Sequence[int],
        changes: Sequence[Changes | None] | None = None,
    ) -> tuple[Tensor, Tell]:
        logits_RV = _readable(logits_RV)
        tokens_R = torch.empty(len(draws), dtype=torch.int64)
        call = _Draws(tokens=tokens_R.data_ptr(), **_place(logits_RV))
        kept: list[Any] = []  # what the call points to
        if any(draw.temperature > 0 for draw in draws):
            kept += [np.array([draw[:4] for draw in draws], dtype=np.float64), race_keys(draws, positions)]
            call.settings, call.keys = (array.ctypes.data for array in kept)
        if changes is not None and any(changes):
            pointers = (c_void_p * len(draws))()
            for row, change in enumerate(changes):
                if change is not None:
                    kept.append(_changes(change))
                    pointers[row] = ctypes.addressof(kept[-1][0])
            kept.append(pointers)
            call.changes = ctypes.addressof(pointers)
        _library().intarsia_draw(ctypes.byref(call))
        return tokens_R, about_drawn(self, logits_RV, tokens_R, draws)

    def logprobs(self, logits_RV: Tensor, tokens_R: Tensor, count: int) -> list[About]:
        logits_RV, tokens_R = _readable(logits_RV), tokens_R.contiguous()
        rows, vocab = logits_RV.shape
        count = min(count, vocab)
        of_tokens, of_top = np.empty(rows, dtype=np.float32), np.empty((rows, count), dtype=np.float32)
        ranks, top = np.empty(rows, dtype=np.int64), np.empty((rows, count), dtype=np.int64)
        results = {"of_tokens": of_tokens, "ranks": ranks, "top": top, "of_top": of_top}
        pointers = {name: array.ctypes.data for name, array in results.items()}
        call = _Logprobs(tokens=tokens_R.data_ptr(), count=count, **pointers, **_place(logits_RV))
        _library().intarsia_logprobs(ctypes.byref(call))
        found = zip(of_tokens.tolist(), top.tolist(), of_top.tolist(), ranks.tolist(), strict=True)
        return [About(value, tuple(zip(tokens, values, strict=True)), rank) for value, tokens, values, rank in found]


def about_drawn(backend: SamplingBackend, logits_RV: Tensor, tokens_R: Tensor, draws: Sequence[Draw]) -> Tell:
    """About the tokens of the rows that ask, by row: found out now, since the logits will be overwritten."""
    asked = [(row, draw.logprobs) for row, draw in enumerate(draws) if draw.logprobs >= 0]
    about = [
        (row, backend.logprobs(logits_RV[row : row + 1], tokens_R[row : row + 1], count)[0]) for row, count in asked
    ]
    return lambda: about


def race_keys(draws: Sequence[Draw], positions: Sequence[int]) -> np.ndarray:
    """[R,2] int32 that depend on nothing but each row's seed and position; of greedy rows, nothing."""
    return np.array(
        [
            np.frombuffer(blake2b(draw.seed.to_bytes(8) + position.to_bytes(8), digest_size=8).digest(), ">i4")
            if draw.temperature > 0
            else (0, 0)
            for draw, position in zip(draws, positions, strict=True)
        ],
        dtype=np.int32,
    )


def _changes(changes: Changes) -> tuple[Any, ...]:
    """As C++ reads them, and what this points to."""
    penalties, forbidden, biases, excluded, allowed = changes
    edits = np.array(
        [
            *((token, -HIGHEST_LOGIT, 0) for token in forbidden),
            *((token, bias, 1) for token, bias in biases),
            *((token, float("-inf"), 0) for token in excluded),
        ],
        dtype=_EDIT,
    )
    call = _Changes(edits=edits.ctypes.data, edit_count=len(edits), repetition=1.0)
    if penalties is not None:
        call.said, call.counts = penalties.tokens.ctypes.data, penalties.counts.ctypes.data
        call.said_count = len(penalties.tokens)
        call.repetition, call.presence, call.frequency = penalties[2:]
    bits = None
    if allowed is not None:
        bits = np.frombuffer(allowed or b"\0", dtype=np.uint8)
        call.allowed, call.allowed_bytes = bits.ctypes.data, len(bits)
    return call, edits, penalties, bits


def _readable(logits_RV: Tensor) -> Tensor:
    """The numbers of a row side by side, of a kind that C++ knows."""
    assert logits_RV.is_cpu, "C++ reads the host's memory"
    if logits_RV.dtype not in cpp.KINDS:
        logits_RV = logits_RV.float()
    return logits_RV if logits_RV.stride(1) == 1 else logits_RV.contiguous()


def _place(logits_RV: Tensor) -> dict[str, int]:
    rows, vocab = logits_RV.shape
    place = {"logits": logits_RV.data_ptr(), "row_stride": logits_RV.stride(0), "rows": rows, "vocab": vocab}
    return {**place, "kind": cpp.KINDS[logits_RV.dtype]}
