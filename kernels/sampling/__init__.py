"""The draw of tokens from logits.

    backend = select_sampling(device)
    tokens, tell = backend.draw(logits, draws, positions, changes)       # once per step
    about = tell()                                                       # of the rows that ask
    about = backend.logprobs(logits, tokens, count)                      # of tokens that are known

`plain_torch.py` is how it runs in plain torch, `cpu.py` on a CPU with a C++ compiler, `triton.py` on a GPU.
"""

import torch

from .cpu import NativeSampling
from .plain_torch import TorchSampling
from .protocol import PENALTIES, About, Changes, Draw, Penalties, SamplingBackend, Tell
from .triton import TritonSampling

__all__ = [
    "PENALTIES",
    "SAMPLING_BACKENDS",
    "About",
    "Changes",
    "Draw",
    "NativeSampling",
    "Penalties",
    "SamplingBackend",
    "Tell",
    "TorchSampling",
    "TritonSampling",
    "select_sampling",
]

SAMPLING_BACKENDS: tuple[type[SamplingBackend], ...] = (NativeSampling, TritonSampling, TorchSampling)
"""Fastest first."""


def select_sampling(device: torch.device) -> SamplingBackend:
    """The fastest backend that runs on `device`."""
    able = (kind for kind in SAMPLING_BACKENDS if device.type in kind.devices and kind.lacks() is None)
    return next(able, TorchSampling)()
