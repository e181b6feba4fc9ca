"""What a model does to each token by itself between its matrix products: norms, rotary positions, gated activations.

transformers' modules do these in many small operations. `reference.py` says what each computes, in as few lines as
torch takes; `cpu.py` is one call of C++ each, `triton.py` one launch on a GPU. Which modules of a model compute just
this is said in `workers/cpu/fused_table.py`.
"""

from . import cpu, triton
from .protocol import Activation, Gating, Norm, Operations, Places, Rotary

__all__ = ["Activation", "Gating", "Norm", "Operations", "Places", "Rotary", "operations_of"]


_OPERATIONS: dict[str, Operations] = {"cpu": cpu, "cuda": triton}
"""By the kind of device whose memory they can read."""


def operations_of(device_type: str) -> Operations | None:
    """What computes them on such a device in one call each; None if nothing here does."""
    operations = _OPERATIONS.get(device_type)
    return operations if operations is not None and operations.is_available() else None
