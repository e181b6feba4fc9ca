"""Short convolutions: LFM2."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

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
