"""Paged attention: shapes in, a backend chosen, shapes out.

    backend = select_backend(Needs(torch.bfloat16, key_dim=128, value_dim=128, window=True), device)
    meta = backend.prepare(batch, device)                  # once per group and step
    backend.write(kv_view, k, v, meta)                     # then, for each layer of the group
    backend.attend(q, kv_view, params, meta, out)

Shapes are explained in `protocol.py`.
"""

import torch

from ...errors import InvalidSetting, UnsupportedModel
from .protocol import Backend, Capabilities, GroupBatch, LayerParams, Needs
from .reference import ReferenceBackend
from .torch_sdpa import TorchBackend

__all__ = ["BACKENDS", "Backend", "Capabilities", "GroupBatch", "LayerParams", "Needs", "select_backend"]

BACKENDS: tuple[type[Backend], ...] = (TorchBackend, ReferenceBackend)
"""Fastest first."""


def select_backend(needs: Needs, device: torch.device, name: str | None = None) -> Backend:
    """The first backend that covers `needs`, or the one called `name`.

    Raises `UnsupportedModel`, naming each backend and why it refused; `InvalidSetting` for an unknown name.
    """
    candidates = [backend for backend in BACKENDS if name in (None, backend.name)]
    if not candidates:
        raise InvalidSetting(
            f"there is no attention backend {name!r}; there are {', '.join(b.name for b in BACKENDS)}",
            field="attention_backend",
        )
    refusals = []
    for backend in candidates:
        refusal = backend.capabilities.refusal(needs, device)
        if refusal is None:
            return backend()
        refusals.append(f"{backend.name} {refusal}")
    raise UnsupportedModel(f"no attention backend covers this model: {'; '.join(refusals)}", field="attention_backend")
