"""What a model does to each token by itself between its matrix products: norms, rotary positions, gated activations.

transformers' modules do these in many small operations. `reference.py` says what each computes, in as few lines as
torch takes; `cpu.py` is one call of C++ each, for a CPU. Which modules of a model compute just this is said
in `workers/cpu/fused_table.py`.
"""

from .protocol import Activation, Norm, Rotary

__all__ = ["Activation", "Norm", "Rotary"]
