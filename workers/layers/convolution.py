"""Short convolutions: LFM2, Inkling."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.state import CONVOLUTION
from ..tensor_parallel import Section, TensorParallel
from .states import Mixer, PagedStates


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
        return (hidden_states[0] + self._convolved(hidden_states[0])).unsqueeze(0)

    def _convolved(self, x_TC: Tensor) -> Tensor:
        weight_CW = self._module.conv1d.weight.squeeze(1)
        constants = weight_CW, weight_CW.new_zeros(len(weight_CW))
        return self._states.scan(self._layer, self._module.conv_idx, CONVOLUTION, constants, (x_TC,))


class ScaledAddedConv(AddedConv):
    """Inkling 2: in float32, and as large as it was before."""

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        x_TC = hidden_states[0].float()
        scaled_TC = (self._convolved(x_TC) + x_TC) / math.sqrt(self._module.conv_kernel_size + 1)
        return scaled_TC.to(hidden_states.dtype).unsqueeze(0)


class WeighedConv(Mixer):
    """Inkling 2, where all earlier tokens are seen: weights of channels, and of each token those of its heads.

    The state holds the last inputs once for each token that is looked back: so one convolution, whose weights are ones
    and zeros, gives all of them at once.
    """

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._nothing = torch.zeros(0)
        self._shifts = torch.zeros(0)

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        width, channels = module.static_weight.shape
        return {"static_weight": (Section(channels),), "weight_proj": (Section(module.num_heads * width),)}

    def __call__(self, hidden_states: Tensor, dynamic_input: Tensor, *_: Any, **__: Any) -> Tensor:
        module, x_TC = self._module, hidden_states[0].float()
        static_WC = module.static_weight.float()
        width = len(static_WC)
        own_THW = module.weight_proj(dynamic_input)[0].float().unflatten(-1, (-1, width))
        seen_TWC = torch.stack((x_TC, *self._before(x_TC, width - 1)), dim=1)
        each_TWHD = seen_TWC.unflatten(-1, (own_THW.shape[1], -1))
        static_WHD = static_WC.unflatten(-1, (own_THW.shape[1], -1))
        out_THD = (each_TWHD * (static_WHD + own_THW.mT.unsqueeze(-1))).sum(1)
        out_TC = (out_THD.flatten(1) + x_TC) / math.sqrt(2 * width + 1)
        return out_TC.to(hidden_states.dtype).unsqueeze(0)

    def _before(self, x_TC: Tensor, earlier: int) -> Sequence[Tensor]:
        """[T,C] each: of the token before, the one before that, and so on."""
        channels = earlier * x_TC.shape[1]
        if len(self._nothing) != channels:
            # A convolution's last weight is that of the token itself.
            back = torch.eye(earlier, earlier + 1, device=x_TC.device).flip(0)
            self._shifts = back.repeat_interleave(x_TC.shape[1], dim=0)
            self._nothing = x_TC.new_zeros(channels)
        constants = self._shifts, self._nothing
        inputs = (x_TC.repeat(1, earlier),)
        return self._states.scan(self._layer, self._module.conv_idx, CONVOLUTION, constants, inputs).chunk(earlier, -1)
