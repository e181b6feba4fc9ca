"""Short convolutions: LFM2, Inkling."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...kernels.state import CONVOLUTION
from ..tensor_parallel import Section
from .states import Mixer


class ShortConv(Mixer):
    """LFM2: two gates around a short convolution."""

    conv_name = "conv"

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels = Section(module.in_proj.weight.shape[0] // 3)
        return {"in_proj": (channels,) * 3, "conv": (channels,)}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        before, after, x = self._module.in_proj(hidden_states[0]).chunk(3, dim=-1)
        return self._module.out_proj(self._convolve_gated(before, x, after)).unsqueeze(0)


class AddedConv(Mixer):
    """Inkling: a short convolution that is added to what it convolves: of keys, of values, of what attention and
    experts give out. Each has a tensor of the layer's state."""

    OF_HEADS = 2
    """The first so many convolve keys and values, of which each rank has its own."""

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        is_cut = module.conv_idx < AddedConv.OF_HEADS
        return {"conv1d": (Section(len(module.conv1d.weight)),)} if is_cut else {}

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        weight_CW = self._module.conv1d.weight.squeeze(1)
        constants = weight_CW, weight_CW.new_zeros(len(weight_CW))
        x_TC = hidden_states[0]
        out_TC = self._states.scan(self._layer, self._module.conv_idx, CONVOLUTION, constants, (x_TC,))
        return (x_TC + out_TC).unsqueeze(0)
