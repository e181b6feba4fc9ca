"""Residual streams: several vectors of a token where other models have one, of which one goes into each block.

`reference.py` says what is computed, in plain torch; `cpu.py` is one call of C++, `triton.py` two launches on a GPU. As
transformers writes it, it is some 90 operations in front of each block.
"""

from . import cpu, triton
from .protocol import Mixing, Operations

__all__ = ["Mixing", "Operations", "operations_of"]

_OPERATIONS: dict[str, Operations] = {"cpu": cpu, "cuda": triton}


def operations_of(device_type: str) -> Operations | None:
    """What computes it on such a device; None if nothing here does."""
    operations = _OPERATIONS.get(device_type)
    return operations if operations is not None and operations.is_available() else None
