"""The least kernel there is: where it can be compiled and launched, the others can."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_one(number_ptr):
    tl.store(number_ptr, tl.load(number_ptr) + 1)


def launch() -> None:
    """Raises what Triton raises when it cannot compile, or build what launches the kernel."""
    number = torch.zeros(1, dtype=torch.int32, device="cuda")
    _add_one[(1,)](number)
    assert number.item() == 1, "a kernel that adds one has not"
