"""Attention over a paged KV cache: shapes in, a backend chosen, shapes out.

    backend = select_backend(needs, device)           # once per worker and set of needs
    meta = backend.prepare(batch, device)             # once per group of layers and step
    backend.write(kv_view, k, v, meta)                # once per layer: the new tokens enter their pages
    backend.attend(q, kv_view, params, meta, out)     # ... and every new token looks back

`protocol.py` says what these words mean, and `reference.py` shows the arithmetic one query at a time. It runs in plain
torch (`plain_torch.py`), in C++ on a CPU (`cpu.py`), in kernels of our own on a GPU (`triton.py`), or in
FlashAttention's (`flash.py`).
"""

from collections.abc import Collection, Sequence

import torch

from ...errors import UnsupportedModel
from ..names import no_such_backend
from .biases import Biases
from .capabilities import Capabilities, Needs
from .cpu import NativeBackend
from .flash import FlashBackend, LegacyFlashBackend
from .plain_torch import TorchBackend
from .protocol import Backend, GroupBatch, GroupMeta, LayerParams, upload
from .reference import ReferenceBackend
from .triton import TritonBackend

__all__ = [
    "BACKENDS",
    "Backend",
    "Biases",
    "Capabilities",
    "FlashBackend",
    "GroupBatch",
    "GroupMeta",
    "LayerParams",
    "LegacyFlashBackend",
    "NativeBackend",
    "Needs",
    "ReferenceBackend",
    "TorchBackend",
    "TritonBackend",
    "select_backend",
    "upload",
]

BACKENDS: tuple[type[Backend], ...] = (
    NativeBackend, FlashBackend, LegacyFlashBackend, TritonBackend, TorchBackend, ReferenceBackend
)  # fmt: skip
"""Fastest first."""


def select_backend(
    layers: Collection[Needs],
    device: torch.device,
    name: str | None = None,
    backends: Sequence[type[Backend]] = BACKENDS,
) -> Backend:
    """A new instance of the first backend that covers all `layers` on `device`; `name` allows only that one.

    All layers of a model go to one backend, because the layers of a group share one metadata.
    Raises  UnsupportedModel if none does, with every backend's reason; InvalidSetting if no backend has that name
    """
    candidates = [
        backend for backend in backends if name == backend.name or (name is None and not backend.by_name_only)
    ]
    if not candidates:
        raise no_such_backend(str(name), [backend.name for backend in backends])
    # The first that covers every layer is taken; each that does not says why.
    refusals: list[str] = []
    unable: set[Needs] = set()
    for backend in candidates:
        refused = {needs: refusal for needs in layers if (refusal := backend.capabilities.refusal(needs, device))}
        reasons = "; ".join(dict.fromkeys(refused.values())) or backend.lacks()
        if reasons is None:
            return backend()
        unable |= set(refused)
        refusals.append(f"'{backend.name}' {reasons}")
    # None does: name the layers that a backend refused, or all where only the machine lacks something.
    asked = " and ".join(str(needs) for needs in layers if needs in unable or not unable)
    raise UnsupportedModel(
        f"no attention backend can run {asked} on {device}: {'. '.join(refusals)}. "
        "Choose another dtype or device, or add a backend in kernels/paged_attention.",
        field="attention_backend",
    )
