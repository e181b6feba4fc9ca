"""Where our state layers enter a transformers module.

transformers runs a state mixer (Mamba, a gated delta net, a short convolution) on whole sequences, one per row of a
batch. Ours runs packed tokens of many requests, each from the state in its page. `adapters.py` puts the forward pass of
`mixers.py` in place of the module's own, over the module's own weights.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from ...kernels.state import STATE_BACKENDS, Recurrence, StateBatch, select_state_backend
from ...kvcache.reach import Keeps
from ..pages import Pages

SPARE = -1
"""The page behind those of the plan: see `Pages`."""


class PagedStates:
    """The states of all layers of one model, and the step they are used in."""

    def __init__(self, device: torch.device):
        self._device = device
        self._backend = select_state_backend(device)
        self._pages: Pages | None = None
        self._metas: dict[int, Any] = {}  # group -> who goes on from which page
        # What rows there are and which pages they have is known step by step, not to a compiler.
        self.scan = cast(Callable[..., Tensor], torch.compiler.disable(self._scan))

    def forget_pages(self) -> None:
        self._pages = None

    def use(self, pages: Pages, backend: str | None) -> None:
        self._pages = pages
        known = {kind.name for kind in STATE_BACKENDS}
        named = backend if backend in known else None  # some know attention only
        self._backend = select_state_backend(self._device, named)

    def begin_step(self, batches: dict[int, StateBatch]) -> None:
        """Who goes on from which page in the next forward pass, by group."""
        self._metas = {g: self._backend.prepare(batch, self._device) for g, batch in batches.items()}

    def frame(self, rows: int) -> Any:
        """Metadata of steps of one token for each of so many rows, in tensors that stay where they are; or None."""
        return self._backend.frame(rows, self._device)

    def refill(self, frame: Any, batch: StateBatch, rows: int) -> None:
        """Put such a step into a frame of `rows`; those beyond its own go on from the spare page."""
        pages = np.full(rows, SPARE, dtype=np.int64)
        pages[: len(batch.pages)] = batch.pages
        self._backend.refill(frame, pages)

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def resume(self, metas: dict[int, Any]) -> None:
        """Run the next forward pass over metadata that was prepared elsewhere."""
        self._metas = metas

    def _scan(
        self, layer: int, which: int, recurrence: Recurrence, constants: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run this step's tokens [T,..] through tensor `which` of a layer's state. Returns [T,..]."""
        assert self._pages is not None, "allocate pages first"
        g, _ = self._pages.group_of[layer, Keeps.STATE]
        pages = self._pages.states[layer][which]
        return self._backend.scan(recurrence, pages, constants, inputs, self._metas[g])
