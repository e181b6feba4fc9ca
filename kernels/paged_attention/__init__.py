"""Attention over a paged KV cache: shapes in, a backend chosen, shapes out.

    backend = select_backend(needs, device)           # once per worker and set of needs
    meta = backend.prepare(batch, device)             # once per group of layers and step
    backend.write(kv_view, k, v, meta)                # once per layer: the new tokens enter their pages
    backend.attend(q, kv_view, params, meta, out)     # ... and every new token looks back

`protocol.py` says what these words mean, `reference.py` shows the arithmetic one query at a time, and
`torch_sdpa.py` is how it runs in plain torch, `native.py` how single queries run on a CPU with a C++ compiler.
"""

from collections.abc import Sequence

import torch

from ...errors import InvalidSetting, UnsupportedModel
from .native import NativeBackend
from .protocol import Backend, Capabilities, GroupBatch, GroupMeta, LayerParams, Needs
from .reference import ReferenceBackend
from .torch_sdpa import TorchBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "Capabilities",
    "GroupBatch",
    "GroupMeta",
    "LayerParams",
    "NativeBackend",
    "Needs",
    "ReferenceBackend",
    "TorchBackend",
    "select_backend",
]

BACKENDS: tuple[type[Backend], ...] = (NativeBackend, TorchBackend, ReferenceBackend)
"""Fastest first."""


def select_backend(
    needs: Needs,
    device: torch.device,
    name: str | None = None,
    backends: Sequence[type[Backend]] = BACKENDS,
) -> Backend:
    """A new instance of the first backend that covers `needs` on `device`; `name` allows only that one.

    Raises  UnsupportedModel if none does, with every backend's reason; InvalidSetting if no backend has that name
    """
    candidates = [backend for backend in backends if name in (None, backend.name)]
    if not candidates:
        known = ", ".join(backend.name for backend in backends)
        raise InvalidSetting(
            f"there is no attention backend '{name}'; choose one of: {known}.", field="attention_backend"
        )
    refusals = []
    for backend in candidates:
        refusal = backend.capabilities.refusal(needs, device) or backend.lacks()
        if refusal is None:
            return backend()
        refusals.append(f"'{backend.name}' {refusal}")
    raise UnsupportedModel(
        f"no attention backend can run {needs} on {device}: {'. '.join(refusals)}. "
        "Choose another dtype or device, or add a backend in kernels/paged_attention.",
        field="attention_backend",
    )
