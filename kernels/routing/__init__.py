"""Which experts a token goes to, and by which shares, from the logits of its router.

`reference.py` says what is computed, in plain torch; `cpu.py` is one call of C++, `triton.py` one launch on a GPU. As
transformers writes it, it is 3 to 16 operations for each layer with experts.
"""

from . import cpu, triton
from .protocol import Operations, Routing, Scoring

__all__ = ["Operations", "Routing", "Scoring", "operations_of"]

_OPERATIONS: dict[str, Operations] = {"cpu": cpu, "cuda": triton}


def operations_of(device_type: str) -> Operations | None:
    """What computes it on such a device; None if nothing here does."""
    operations = _OPERATIONS.get(device_type)
    return operations if operations is not None and operations.is_available() else None
