"""Kernels of GPUs, in Triton: compiled for the GPU at hand at their first use, and run by Python where
TRITON_INTERPRET=1 is set, which is how they are tested without one.

Triton comes with torch's CUDA builds and is no dependency of ours, so nothing here is imported before `missing` says
that it can be.
"""

import functools
import importlib.util
import os

import torch

# A product and its sum are rounded once. Triton 3.9 does so unless told otherwise, and says that 3.10 will not: kernels
# would be slower then, and give other bits.
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

LEAST_DOT = 16
"""The least side of a matrix product."""

BLACKWELL = 100
"""Its matrix instructions sum in a memory beside the registers, and each warp reads a part of that into its own."""


def missing() -> str | None:
    """Why these kernels cannot run here, in words; None if they can. Where there is a GPU, one is launched."""
    if importlib.util.find_spec("triton") is None:
        return "needs triton, which is not installed (torch's CUDA builds bring it; else: pip install triton)"
    return _cannot_launch() if torch.cuda.is_available() and not is_interpreted() else None


@functools.cache
def _cannot_launch() -> str | None:
    """Triton builds what launches a kernel with a C compiler and Python's headers, which small containers lack."""
    try:
        from . import triton_probe  # here and not above: triton may be missing

        triton_probe.launch()
    except Exception as error:  # noqa: BLE001  whatever Triton, the compiler or the driver raise
        return (
            f"needs triton to compile and launch kernels, and it cannot: {error}. It takes a C compiler and Python's "
            "headers (Debian: apt-get install gcc python3-dev)"
        )
    return None


@functools.cache
def capability() -> int:
    """Of the GPU at hand, 90 for an H100; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    major, minor = torch.cuda.get_device_capability()
    return 10 * major + minor


def is_blackwell(asked: int | None) -> bool:
    """asked: a capability; None: that of the GPU at hand"""
    return (capability() if asked is None else asked) >= BLACKWELL


def is_interpreted() -> bool:
    """Whether Triton runs kernels in Python, on tensors in host memory. Settled when the kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def power_of_two(number: int) -> int:
    """The least one that is not below `number`."""
    return 1 << max(0, number - 1).bit_length()


def row_warps(block: int) -> int:
    """Of a program that holds a whole row: 16 numbers for each thread, so that many loads are in flight."""
    return min(max(block // 512, 1), 16)


def precision_of(dtype: torch.dtype) -> str:
    """Of matrix products of float32: three of short numbers, almost exact; the other kinds know one way only."""
    return "tf32x3" if dtype == torch.float32 else "tf32"
