"""States in C++ on a CPU, in place: single tokens of every recurrence, and prompts of those that no product of matrices
would help. Prompts of linear attention and delta nets go in chunks, as `plain_torch.py` does it."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..toolchain import cpp
from .plain_torch import RUNS, run_piece
from .protocol import Columns, Piece, Recurrence, StateBatch, waves
from .reference import CONVOLUTION, GATED_DELTA, LINEAR_ATTENTION, SELECTIVE_SCAN


class _Pieces(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in Columns._fields), ("count", c_int64)]


class _Heads(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "out", "pages")),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, c_int64) for name in ("g_token", "g_head", "beta_token", "beta_head", "page_stride")),
        *((name, c_int32) for name in ("heads", "keys", "values", "kind")),
    ]


class _Scan(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("A", "x", "dt", "B", "C", "out", "pages")),
        *((name, c_int64) for name in ("x_token", "dt_token", "B_token", "C_token", "page_stride")),
        *((name, c_int32) for name in ("channels", "states", "kind")),
    ]


class _Convolution(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("weight", "bias", "x", "out", "pages")),
        *((name, c_int64) for name in ("x_token", "page_stride")),
        *((name, c_int32) for name in ("channels", "window", "kind")),
    ]


class _Part(NamedTuple):
    """Some pieces of a wave, and the same as arrays."""

    pieces: list[Piece]
    columns: Columns

    def native(self, slots: int) -> _Pieces:
        pages = self.columns.page
        if (pages < 0).any():
            pages[pages < 0] += slots  # settled once and for all: every layer of a group has as many
        return _Pieces(*(column.ctypes.data for column in self.columns), len(self.pieces))


class _SplitWave(NamedTuple):
    every: _Part
    singles: _Part
    longer: list[Piece]


class NativeStates:
    """The default on a CPU with a C++ compiler."""

    name: ClassVar[str] = "native"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})

    @classmethod
    def lacks(cls) -> str | None:
        found = cpp.library("state/cpu_states")
        return f"could not be compiled: {found}" if isinstance(found, str) else None

    def __init__(self) -> None:
        self._library: Any = cpp.library("state/cpu_states")
        self._run = {
            CONVOLUTION.name: self._convolve,
            LINEAR_ATTENTION.name: self._heads,
            GATED_DELTA.name: self._heads,
            SELECTIVE_SCAN.name: self._channels,
        }

    def prepare(self, batch: StateBatch, device: torch.device) -> list[_SplitWave]:
        return [
            _SplitWave(
                _part(wave),
                _part([piece for piece in wave if piece.is_single]),
                [piece for piece in wave if not piece.is_single],
            )
            for wave in waves(batch)
        ]

    def frame(self, rows: int, device: torch.device) -> None:
        return None  # on a CPU nothing is gained

    def refill(self, frame: None, pages: np.ndarray) -> None:
        raise AssertionError("there are no frames")

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_SplitWave],
    ) -> Tensor:  # fmt: skip
        return self._run[recurrence.name](recurrence, pages, constants, inputs, meta)

    def _heads(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_SplitWave],
    ) -> Tensor:  # fmt: skip
        q, k, v, g, *beta = (_dense(values) for values in inputs)
        out = torch.empty(v.shape)
        slots, heads, keys, values = pages.shape
        strides = [stride for x in (q, k, v, g, *(beta or (g,))) for stride in x.stride()[:2]]
        for wave in meta:
            # Single tokens in C++.
            if wave.singles.pieces:
                self._library.intarsia_heads(
                    ctypes.byref(
                        _Heads(
                            wave.singles.native(slots),
                            *(x.data_ptr() for x in (q, k, v, g)),
                            beta[0].data_ptr() if beta else None,
                            out.data_ptr(),
                            pages.data_ptr(),
                            *strides,
                            pages.stride(0),
                            heads,
                            keys,
                            values,
                            cpp.KINDS[pages.dtype],
                        )
                    )
                )
            # Longer runs in chunks of matrix products.
            for piece in wave.longer:
                out[piece.start : piece.end] = run_piece(RUNS[recurrence.name], pages, constants, inputs, piece)
        return out

    def _channels(
        self, _: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_SplitWave],
    ) -> Tensor:  # fmt: skip
        A = constants[0].float().contiguous()
        x, dt, B, C = (_dense(values) for values in inputs)
        out = torch.empty(x.shape)
        slots, channels, states = pages.shape
        for wave in meta:
            self._library.intarsia_scan(
                ctypes.byref(
                    _Scan(
                        wave.every.native(slots),
                        *(tensor.data_ptr() for tensor in (A, x, dt, B, C, out, pages)),
                        *(tensor.stride(0) for tensor in (x, dt, B, C, pages)),
                        channels,
                        states,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out

    def _convolve(
        self, _: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_SplitWave],
    ) -> Tensor:  # fmt: skip
        weight, bias = (constant.to(pages.dtype).contiguous() for constant in constants)
        x = inputs[0].to(pages.dtype)
        x = x if x.stride(-1) == 1 else x.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype)
        slots, channels, window = pages.shape
        for wave in meta:
            self._library.intarsia_convolve(
                ctypes.byref(
                    _Convolution(
                        wave.every.native(slots),
                        *(tensor.data_ptr() for tensor in (weight, bias, x, out, pages)),
                        x.stride(0),
                        pages.stride(0),
                        channels,
                        window,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out


def _part(pieces: list[Piece]) -> _Part:
    return _Part(pieces, Columns.of(pieces))


def _dense(values: Tensor) -> Tensor:
    """Float32, the numbers of the last axis side by side."""
    values = values.float()
    return values if values.stride(-1) == 1 else values.contiguous()
