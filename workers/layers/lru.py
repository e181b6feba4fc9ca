"""Real-gated linear recurrent units: RecurrentGemma.

Suffixes: T packed tokens    D hidden size    C channels    H heads of gates on this rank    W channels of a head
"""

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from ...kernels.state import CONVOLUTION, DECAYING_SUM
from ..tensor_parallel import Section, TensorParallel
from .head_products import HeadProduct, head_product
from .states import RECURRENT, Mixer, PagedStates

STRONGEST_DECAY = -8.0
"""What a gate that is wide open multiplies a channel's rate by: the paper's c."""


class GatedLinearRecurrence(Mixer):
    """Griffin's recurrent block: arXiv 2402.19427. What it lets in grows as the sum before decays."""

    conv_name = "conv_1d"

    def __init__(self, module: Any, states: PagedStates, parallel: TensorParallel):
        super().__init__(module, states, parallel)
        self._rate_C = STRONGEST_DECAY * F.softplus(module.rg_lru.recurrent_param.float())
        self._gates: tuple[HeadProduct, HeadProduct] | None = None

    @staticmethod
    def sections(module: Any, ranks: int) -> dict[str, Sequence[Section]]:
        channels, heads = (Section(module.lru_width),), (Section(module.rg_lru.num_attention_heads),)
        gates = [f"rg_lru.{gate}_gate_{part}" for gate in ("input", "recurrent") for part in ("weight", "bias")]
        return {
            "linear_x": channels, "linear_y": channels, "conv_1d": channels, "rg_lru.recurrent_param": channels,
            **dict.fromkeys(gates, heads),
        }  # fmt: skip

    def __call__(self, hidden_states: Tensor, position_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module, unit, hidden_TD = self._module, self._module.rg_lru, hidden_states[0]
        x_TC = self._convolve_by(CONVOLUTION, module.linear_x(hidden_TD))
        x_THW = x_TC.unflatten(-1, (len(unit.input_gate_bias), -1))
        let_in, forget = self._products()
        input_TC = (let_in(x_THW) + unit.input_gate_bias).flatten(1)
        forget_TC = (forget(x_THW) + unit.recurrent_gate_bias).flatten(1)
        inputs = self._around.lru_inputs(x_TC, input_TC, forget_TC, self._rate_C, position_ids[0])
        out_TC = self._states.scan(self._layer, RECURRENT, DECAYING_SUM, (), inputs).to(hidden_TD.dtype)
        return module.linear_out(out_TC * module.act_fn(module.linear_y(hidden_TD))).unsqueeze(0), None

    def _products(self) -> tuple[HeadProduct, HeadProduct]:
        """Of the gates; made of the weights once."""
        if self._gates is None:
            unit, beside = self._module.rg_lru, self._module.linear_x
            weights = unit.input_gate_weight, unit.recurrent_gate_weight
            to_input, to_forget = (head_product(weight_HIO.detach().mT, beside) for weight_HIO in weights)
            self._gates = to_input, to_forget
        return self._gates
