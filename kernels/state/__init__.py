"""States over pages: layers that see the past through something they overwrite token by token.

    meta = backend.prepare(batch, device)                             # once per group of layers and step
    y = backend.scan(CONVOLUTION, pages, (weight, bias), (x,), meta)  # once per layer and recurrence

`reference.py` says what each recurrence is, one token at a time; `plain_torch.py` is how it runs in plain torch,
`cpu.py` on a CPU with a C++ compiler, `triton.py` on a GPU.
"""

import torch

from ...errors import InvalidSetting
from .cpu import NativeStates
from .plain_torch import ChunkedStates
from .protocol import Piece, Recurrence, SaveAt, StateBackend, StateBatch
from .reference import (
    CONVOLUTION,
    DECAYING_SUM,
    GATED_CONVOLUTION,
    GATED_DELTA,
    KEYED_DELTA,
    LINEAR_ATTENTION,
    SELECTIVE_SCAN,
    SILU_CONVOLUTION,
    ReferenceStates,
)
from .triton import TritonStates

__all__ = [
    "CONVOLUTION",
    "DECAYING_SUM",
    "GATED_CONVOLUTION",
    "GATED_DELTA",
    "KEYED_DELTA",
    "LINEAR_ATTENTION",
    "SELECTIVE_SCAN",
    "SILU_CONVOLUTION",
    "STATE_BACKENDS",
    "ChunkedStates",
    "NativeStates",
    "Piece",
    "Recurrence",
    "ReferenceStates",
    "SaveAt",
    "StateBackend",
    "StateBatch",
    "TritonStates",
    "select_state_backend",
]

STATE_BACKENDS: tuple[type[StateBackend], ...] = (NativeStates, TritonStates, ChunkedStates, ReferenceStates)
"""Fastest first."""


def select_state_backend(device: torch.device, name: str | None = None) -> StateBackend:
    """The backend of that name, or the fastest that runs on `device`.

    Raises `InvalidSetting` if there is none of that name, or if it does not run here.
    """
    named = [backend for backend in STATE_BACKENDS if name in (None, backend.name)]
    if not named:
        known = ", ".join(backend.name for backend in STATE_BACKENDS)
        raise InvalidSetting(f"there is no state backend '{name}'; choose one of: {known}.", field="attention_backend")
    refusals = []
    for backend in named:
        if device.type not in backend.devices:
            refusals.append(f"'{backend.name}' runs on {', '.join(sorted(backend.devices))}, not on {device.type}")
        elif lacks := backend.lacks():
            refusals.append(f"'{backend.name}' {lacks}")
        else:
            return backend()
    raise InvalidSetting(f"no state backend can run here: {'. '.join(refusals)}.", field="attention_backend")
