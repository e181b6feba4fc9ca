"""Kernels of GPUs, in Triton: compiled for the GPU at hand at their first use, and run by Python where
TRITON_INTERPRET=1 is set, which is how they are tested without one.

Triton comes with torch's CUDA builds and is no dependency of ours, so nothing here is imported before `missing` says
that it can be.
"""

import importlib.util
import os

LEAST_DOT = 16
"""The least side of a matrix product."""


def missing() -> str | None:
    """Why these kernels cannot be imported, in words; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (torch's CUDA builds bring it; else: pip install triton)"
    return None


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on tensors in host memory. Settled when the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()
