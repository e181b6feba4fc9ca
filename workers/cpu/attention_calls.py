"""Attention of one layer as calls of C++, over tensors that stay where they are."""

from torch import Tensor

from ...kernels.paged_attention import NativeBackend
from ...kernels.toolchain.calls import Call
from .fused_modules import LayerAttention


class AttentionCalls:
    """Writes keys and values, and attends. Set before each run: the step."""

    def __init__(
        self,
        layer: LayerAttention,
        backend: NativeBackend,
        q_THD: Tensor,
        k_TKD: Tensor,
        v_TKD: Tensor,
        out_THD: Tensor,
    ):
        self.out = out_THD
        self._attention, self._layer, self._backend = layer.attention, layer.layer, backend
        view = layer.attention.views[layer.layer]
        attend = backend.attend_call(q_THD, view, layer.params, out_THD)
        has_pages = layer.attention.layers[layer.layer].shares is None
        self.calls: list[Call] = [*([backend.write_call(view, k_TKD, v_TKD)] if has_pages else []), attend]

    def begin_step(self) -> None:
        address = self._backend.step_address(self._attention.meta_of(self._layer))
        for call in self.calls:
            call.arguments.step = address
