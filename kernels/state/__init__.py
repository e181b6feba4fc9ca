"""States over pages: layers that see the past through something they overwrite token by token.

    meta = prepare(batch, device)                                   # once per group of layers and step
    y = backend.scan(CONVOLUTION, pages, (weight, bias), (x,), meta)  # once per layer and recurrence

`reference.py` says what each recurrence is, one token at a time; `chunked.py` is how it runs by default.
"""

from ...errors import InvalidSetting
from .chunked import ChunkedStates
from .protocol import Recurrence, SaveAt, StateBackend, StateBatch, StateMeta, prepare
from .reference import CONVOLUTION, GATED_DELTA, LINEAR_ATTENTION, SELECTIVE_SCAN, ReferenceStates

__all__ = [
    "CONVOLUTION",
    "GATED_DELTA",
    "LINEAR_ATTENTION",
    "SELECTIVE_SCAN",
    "STATE_BACKENDS",
    "ChunkedStates",
    "Recurrence",
    "ReferenceStates",
    "SaveAt",
    "StateBackend",
    "StateBatch",
    "StateMeta",
    "prepare",
    "select_state_backend",
]

STATE_BACKENDS: tuple[type[StateBackend], ...] = (ChunkedStates, ReferenceStates)
"""Fastest first."""


def select_state_backend(name: str | None = None) -> StateBackend:
    """The backend of that name, or the fastest. Raises `InvalidSetting` if there is none of that name."""
    for backend in STATE_BACKENDS:
        if name in (None, backend.name):
            return backend()
    known = ", ".join(backend.name for backend in STATE_BACKENDS)
    raise InvalidSetting(f"there is no state backend '{name}'; choose one of: {known}.", field="attention_backend")
