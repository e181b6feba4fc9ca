"""What a state mixer does to each token by itself around its recurrence: the numbers that go in, the gated norm after.

`reference.py` says what each operation computes, in plain torch, which runs anywhere; `cpu.py` is one call of C++ each,
`triton.py` one launch on a GPU.
"""

from .protocol import DeltaSizes, Function, GatedNorm, Mamba2Sizes, Order

__all__ = ["DeltaSizes", "Function", "GatedNorm", "Mamba2Sizes", "Order"]
