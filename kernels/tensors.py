"""What several backends do to arrays and tensors before a kernel sees them."""

import numpy as np
from torch import Tensor


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """[R+1] int32: where each of R runs begins that lie side by side, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def spread(counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For counts 2, 1, 3: which one, 0 0 1 2 2 2, and the place in it, 0 1 0 0 1 2."""
    which = np.repeat(np.arange(len(counts)), counts)
    return which, np.arange(len(which)) - (np.cumsum(counts) - counts)[which]


def table_of(width: int, *columns: np.ndarray) -> np.ndarray:
    """[n,width] int32: the first numbers of each entry are those of the columns [n], the others are zero."""
    table = np.zeros((len(columns[0]), width), dtype=np.int32)
    for n, column in enumerate(columns):
        table[:, n] = column
    return table


def dense(tensor: Tensor) -> Tensor:
    """[..,C] with the numbers of the last axis side by side, as they usually are."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def dense_heads(tensor: Tensor) -> Tensor:
    """[T,heads,D] with the numbers of a head side by side, as they usually are."""
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] <= 1 else tensor.contiguous()
