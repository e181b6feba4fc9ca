"""What several backends do to arrays and tensors before a kernel sees them."""

import numpy as np
from torch import Tensor


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """[R+1] int32: where each of R runs begins that lie side by side, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def dense(tensor: Tensor) -> Tensor:
    """[..,C] with the numbers of the last axis side by side, as they usually are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def dense_heads(tensor: Tensor) -> Tensor:
    """[T,heads,D] with the numbers of a head side by side, as they usually are."""
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] <= 1 else tensor.contiguous()
