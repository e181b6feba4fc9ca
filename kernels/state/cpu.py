"""States in C++ on a CPU, in place, token by token: the bits that come out depend on a row's tokens alone, not on how
they were cut into pieces, on the rows beside or on the number of threads."""

import ctypes
from collections.abc import Sequence
from ctypes import c_int32, c_int64, c_void_p
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..tensors import dense
from ..toolchain import cpp
from ..transfer import Transfer
from .protocol import NOWHERE, Piece, Recurrence, StateBatch, Wave, waves
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


class _Columns(NamedTuple):
    """Pieces as a kernel takes them: [N] int64 each."""

    start: np.ndarray
    length: np.ndarray
    page: np.ndarray
    is_new: np.ndarray
    saved_to: np.ndarray

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> "_Columns":
        rows = [
            (start, end - start, page, is_new, NOWHERE if saved_to is None else saved_to)
            for start, end, page, is_new, saved_to in pieces
        ]
        return cls(*np.array(rows, dtype=np.int64).reshape(-1, 5).T.copy())


class _Pieces(ctypes.Structure):
    _fields_ = [*((name, c_void_p) for name in _Columns._fields), ("count", c_int64)]


class _Heads(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("q", "k", "v", "g", "beta", "out", "pages")),
        *((name, c_int64) for name in ("q_token", "q_head", "k_token", "k_head", "v_token", "v_head")),
        *((name, c_int64) for name in ("g_token", "g_head", "beta_token", "beta_head", "page_stride")),
        *((name, c_int32) for name in ("heads", "key_heads", "keys", "values", "keyed", "kind")),
    ]


class _Scan(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("A", "x", "dt", "B", "C", "out", "pages")),
        *((name, c_int64) for name in ("x_token", "dt_token", "B_token", "C_token", "page_stride")),
        *((name, c_int32) for name in ("channels", "states", "kind")),
    ]


class _Sum(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("x", "g", "out", "pages")),
        *((name, c_int64) for name in ("x_token", "g_token", "page_stride")),
        *((name, c_int32) for name in ("channels", "kind")),
    ]


class _Convolution(ctypes.Structure):
    _fields_ = [
        ("pieces", _Pieces),
        *((name, c_void_p) for name in ("weight", "bias", "x", "before", "after", "out", "pages")),
        *((name, c_int64) for name in ("x_token", "before_token", "after_token", "page_stride")),
        *((name, c_int32) for name in ("channels", "window", "activates", "kind")),
    ]


class _Part:
    """The pieces of a wave as a kernel takes them."""

    def __init__(self, wave: Wave):
        self._columns = _Columns.of(wave)
        self._native = _Pieces(*(column.ctypes.data for column in self._columns), len(wave))
        self._counts_from_behind = bool((self._columns.page < 0).any())

    def native(self, slots: int) -> _Pieces:
        if self._counts_from_behind:  # settled once and for all: every layer of a group has as many
            pages = self._columns.page
            pages[pages < 0] += slots
            self._counts_from_behind = False
        return self._native


class NativeStates:
    """The default on a CPU with a C++ compiler."""

    name: ClassVar[str] = "native"
    devices: ClassVar[frozenset[str]] = frozenset({"cpu"})
    mixed_frames: ClassVar[bool] = False

    @classmethod
    def lacks(cls) -> str | None:
        found = cpp.library("state/cpu_states")
        return f"could not be compiled: {found}" if isinstance(found, str) else None

    def __init__(self) -> None:
        self._library: Any = cpp.library("state/cpu_states")
        self._run = {
            CONVOLUTION.name: self._convolve,
            SILU_CONVOLUTION.name: self._convolve,
            GATED_CONVOLUTION.name: self._convolve,
            LINEAR_ATTENTION.name: self._heads,
            GATED_DELTA.name: self._heads,
            KEYED_DELTA.name: self._heads,
            SELECTIVE_SCAN.name: self._channels,
            DECAYING_SUM.name: self._sums,
        }

    def prepare(self, batch: StateBatch, device: torch.device) -> list[_Part]:
        return [_Part(wave) for wave in waves(batch)]

    def frame(self, rows: int, tokens: int, device: torch.device) -> None:
        return None  # on a CPU nothing is gained

    def refill(self, frame: None, batch: StateBatch, transfer: Transfer) -> bool:
        raise AssertionError("there are no frames")

    def scan(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_Part],
    ) -> Tensor:  # fmt: skip
        return self._run[recurrence.name](recurrence, pages, constants, inputs, meta)

    def _heads(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_Part],
    ) -> Tensor:  # fmt: skip
        q, k, v, g, *beta = (_dense_in(values) for values in inputs)
        out = torch.empty(v.shape)
        slots, heads, keys, values = pages.shape
        strides = [stride for x in (q, k, v, g, *(beta or (g,))) for stride in x.stride()[:2]]
        for wave in meta:
            self._library.intarsia_heads(
                ctypes.byref(
                    _Heads(
                        wave.native(slots),
                        *(x.data_ptr() for x in (q, k, v, g)),
                        beta[0].data_ptr() if beta else None,
                        out.data_ptr(),
                        pages.data_ptr(),
                        *strides,
                        pages.stride(0),
                        heads,
                        q.shape[1],
                        keys,
                        values,
                        recurrence is KEYED_DELTA,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out

    def _channels(
        self, _: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_Part],
    ) -> Tensor:  # fmt: skip
        A = constants[0].float().contiguous()
        x, dt, B, C = (_dense_in(values) for values in inputs)
        out = torch.empty(x.shape)
        slots, channels, states = pages.shape
        for wave in meta:
            self._library.intarsia_scan(
                ctypes.byref(
                    _Scan(
                        wave.native(slots),
                        *(tensor.data_ptr() for tensor in (A, x, dt, B, C, out, pages)),
                        *(tensor.stride(0) for tensor in (x, dt, B, C, pages)),
                        channels,
                        states,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out

    def _sums(
        self, _: Recurrence, pages: Tensor, __: Sequence[Tensor], inputs: Sequence[Tensor], meta: list[_Part]
    ) -> Tensor:
        x, g = (_dense_in(values) for values in inputs)
        out = torch.empty(x.shape)
        slots, channels = pages.shape
        for wave in meta:
            self._library.intarsia_sum(
                ctypes.byref(
                    _Sum(
                        wave.native(slots),
                        *(tensor.data_ptr() for tensor in (x, g, out, pages)),
                        *(tensor.stride(0) for tensor in (x, g, pages)),
                        channels,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out

    def _convolve(
        self, recurrence: Recurrence, pages: Tensor, constants: Sequence[Tensor], inputs: Sequence[Tensor],
        meta: list[_Part],
    ) -> Tensor:  # fmt: skip
        weight, bias = (_dense_in(constant, pages.dtype).contiguous() for constant in constants)
        given = [_dense_in(values, pages.dtype) for values in inputs]
        before, x, after = given if recurrence is GATED_CONVOLUTION else (None, given[0], None)
        out = torch.empty(x.shape, dtype=x.dtype)
        slots, channels, window = pages.shape
        for wave in meta:
            self._library.intarsia_convolve(
                ctypes.byref(
                    _Convolution(
                        wave.native(slots),
                        *(tensor.data_ptr() for tensor in (weight, bias, x)),
                        *(gate.data_ptr() if gate is not None else None for gate in (before, after)),
                        out.data_ptr(),
                        pages.data_ptr(),
                        x.stride(0),
                        *(gate.stride(0) if gate is not None else 0 for gate in (before, after)),
                        pages.stride(0),
                        channels,
                        window,
                        recurrence is SILU_CONVOLUTION,
                        cpp.KINDS[pages.dtype],
                    )
                )
            )
        return out


def _dense_in(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    return dense(values if values.dtype is dtype else values.to(dtype))  # which takes a microsecond to do nothing
