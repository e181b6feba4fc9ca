"""Where our state layers enter a transformers module.

transformers runs a state mixer (Mamba, a gated delta net, a short convolution) on whole sequences, one per row of a
batch. Ours runs packed tokens of many requests, each from the state in its page. `adapters.py` puts the forward pass of
a `Mixer` in place of the module's own, over the module's own weights: there is one class for each kind, in a file of
that name.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.activations import ACT2FN

from ...kernels.mixers import cpu, reference, triton
from ...kernels.state import (
    CONVOLUTION,
    GATED_CONVOLUTION,
    SILU_CONVOLUTION,
    STATE_BACKENDS,
    Recurrence,
    SaveAt,
    StateBatch,
    select_state_backend,
)
from ...kernels.transfer import Transfer
from ..pages import Pages
from ..tensor_parallel import Section, TensorParallel

CONV, RECURRENT = 0, 1
"""Places of the tensors of a state; a mixer with one tensor has it at 0."""

AROUND: dict[str, Any] = {"cpu": cpu, "cuda": triton}
"""What computes on one kind of device what goes on around recurrences."""

Save = tuple[int, int, int, int]
"""(slot, group, tokens, block): see `Step.saves`."""


def saves_in(g: int, saves: Sequence[Save]) -> list[Save]:
    """Those of one group."""
    return [save for save in saves if save[1] == g]


def state_batch(
    blocks: np.ndarray, slots: np.ndarray, query_lens: np.ndarray, computed: np.ndarray, saves: Sequence[Save]
) -> StateBatch:
    """What the states of one group go through in a step.

    blocks [slots,1]: the page of each slot. slots, query_lens, computed [R]: of each row, as the runner has them
    saves: of this group
    """
    row_of = {slot: row for row, slot in enumerate(slots.tolist())} if saves else {}
    return StateBatch(
        pages=blocks[slots, 0],
        query_lens=query_lens,
        is_new=computed == 0,
        saves=[SaveAt(row := row_of[slot], length - int(computed[row]), block) for slot, _, length, block in saves],
    )


def is_silu(activation: Any) -> bool:
    return isinstance(activation, (torch.nn.SiLU, type(ACT2FN["silu"])))


class PagedStates:
    """The states of all layers of one model, and the step they are used in."""

    def __init__(self, device: torch.device):
        self._device = device
        self._backend = select_state_backend(device)
        self._pages: Pages | None = None
        self._metas: dict[int, Any] = {}  # group -> from which page each row goes on
        # What rows there are and which pages they have is known step by step, not to a compiler.
        self._scan_uncompiled: Any = torch.compiler.disable(self._scan)

    def forget_pages(self) -> None:
        self._pages = None

    def use(self, pages: Pages, backend: str | None) -> None:
        self._pages = pages
        known = {kind.name for kind in STATE_BACKENDS}
        named = backend if backend in known else None  # some know attention only
        self._backend = select_state_backend(self._device, named)

    def begin_step(self, batches: dict[int, StateBatch]) -> None:
        """From which page each row goes on in the next forward pass, by group."""
        self._metas = {g: self._backend.prepare(batch, self._device) for g, batch in batches.items()}

    def frame(self, rows: int, tokens: int) -> Any:
        """Metadata of steps of up to so many rows and tokens, in tensors that stay where they are; or None."""
        return self._backend.frame(rows, tokens, self._device)

    def refill(self, frame: Any, batch: StateBatch, transfer: Transfer) -> bool:
        """Have such a step put into a frame. False: it does not fit."""
        return self._backend.refill(frame, batch, transfer)

    @property
    def has_mixed_frames(self) -> bool:
        return self._backend.mixed_frames

    @property
    def backend_name(self) -> str:
        return self._backend.name

    def resume(self, metas: dict[int, Any]) -> None:
        """Run the next forward pass over metadata that was prepared elsewhere."""
        self._metas = metas

    def scan(
        self, layer: int, which: int, recurrence: Recurrence, constants: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        """Run this step's tokens [T,..] through tensor `which` of a layer's state. Returns [T,..]."""
        scan = self._scan_uncompiled if torch.compiler.is_compiling() else self._scan
        return scan(layer, which, recurrence, constants, inputs)

    def _scan(
        self, layer: int, which: int, recurrence: Recurrence, constants: Sequence[Tensor], inputs: Sequence[Tensor]
    ) -> Tensor:
        assert self._pages is not None, "allocate pages first"
        pages = self._pages.states[layer][which]
        meta = self._metas[self._pages.state_group_of(layer)]
        return self._backend.scan(recurrence, pages, constants, inputs, meta)


class Mixer:
    """The forward pass of a state mixer, from hidden states [1,T,D] to [1,T,D], in the order of its paper: project,
    convolve, recur, gate, project. What is remembered between steps lies in pages.

    Each kind also says how its weights are cut among ranks: heads and channels go to their rank, and what all heads
    share stays whole.
    """

    conv_name = "conv1d"
    """The submodule that convolves."""

    norms_over_ranks: tuple[str, ...] = ()
    """Names of norms over all channels, of which each rank has some."""

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        self._module = module
        self._states = states
        self._parallel = parallel
        self._activate = ACT2FN[getattr(module, "activation", "silu")]
        self._is_silu = is_silu(self._activate)
        around = AROUND.get(next(module.parameters()).device.type)
        self._fast = around if around is not None and around.is_available() else None

    @property
    def _layer(self) -> int:
        return self._module.layer_idx  # some modules are gone through several times, each time as another layer

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        """Of the parameters and submodules of `module` that are cut, by name."""
        raise NotImplementedError

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    @property
    def _around(self) -> Any:
        """How what goes on around a recurrence is computed: in few calls, or by torch."""
        return reference if self._fast is None or torch.compiler.is_compiling() else self._fast

    def _convolve(self, x_TC: Tensor) -> Tensor:
        """Convolved and activated."""
        if self._is_silu and self._around is not reference:
            return self._convolve_by(SILU_CONVOLUTION, x_TC)
        return self._activate(self._convolve_by(CONVOLUTION, x_TC))

    def _convolve_gated(self, before_TC: Tensor, x_TC: Tensor, after_TC: Tensor) -> Tensor:
        if self._around is not reference:
            return self._convolve_by(GATED_CONVOLUTION, before_TC, x_TC, after_TC)
        return after_TC * self._convolve_by(CONVOLUTION, before_TC * x_TC)

    def _convolve_by(self, recurrence: Recurrence, *inputs: Tensor) -> Tensor:
        conv = getattr(self._module, self.conv_name)
        weight = conv.weight.squeeze(1)
        bias = conv.bias if conv.bias is not None else weight.new_zeros(len(weight))
        return self._states.scan(self._layer, CONV, recurrence, (weight, bias), inputs)
