"""What several backends do to arrays and tensors before a kernel sees them."""

import numpy as np
import torch
from torch import Tensor


def upload(array: np.ndarray, device: torch.device) -> Tensor:
    """An array on the device, in the order of its stream. It does not wait, so the array must not change any more."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def starts_of(lengths: np.ndarray) -> np.ndarray:
    """[R+1] int32: where each of R runs begins that lie side by side, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def dense_heads(tensor: Tensor) -> Tensor:
    """[T,heads,D] with the numbers of a head side by side, as they usually are."""
    return tensor if tensor.stride(2) == 1 or tensor.shape[2] <= 1 else tensor.contiguous()
