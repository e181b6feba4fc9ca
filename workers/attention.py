"""Where our attention enters a transformers module.

transformers lets a model call an attention function by name. Ours finds, through the calling module's `layer_idx`, the
layer's pages and the metadata its group shares in this step; it writes the new keys and values and attends over the
pages. No mask is built and no cache object exists.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ..kernels.paged_attention import Backend, GroupBatch, LayerParams, Needs, select_backend
from ..kvcache.plan import LayerSpec, MemoryPlan

IMPLEMENTATION = "intarsia"
"""The name under which transformers models find our attention function."""

_OWNER = "intarsia_attention"


class PagedAttention:
    """The pages of all layers of one model, and the step they are used in.

    `begin_step` builds one metadata per group, which all layers of the group share.
    """

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device):
        self._layers = {layer.index: layer for layer in layers}
        self._dtype = dtype
        self._device = device
        self._backend: Backend | None = None
        self._forced_backend: str | None = None
        self._views: dict[int, Tensor] = {}
        self._group_of: dict[int, int] = {}
        self._params: dict[int, LayerParams] = {}
        self._metas: list[Any] = []
        self.buffers: list[Tensor] = []

    def bind(self, model: nn.Module) -> None:
        """Make every attention module of `model` find this object."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                setattr(module, _OWNER, self)

    def allocate(self, plan: MemoryPlan, backend: str | None) -> None:
        """Raw buffers as the plan lays them out, and a strided view of them per layer.

        A view has shape [blocks, block_tokens, kv_heads, key_dim + value_dim]; block b starts at byte b * page_bytes.
        """
        self._forced_backend = backend
        self._backend = None
        self._params.clear()
        self._views.clear()
        self.buffers = [
            torch.zeros(plan.buffer_bytes, dtype=torch.uint8, device=self._device) for _ in range(plan.num_buffers)
        ]
        for g, group in enumerate(plan.groups):
            for buffer, index in zip(self.buffers, group.layers, strict=False):
                self._group_of[index] = g
                self._views[index] = self._view(buffer, self._layers[index], plan, group.block_tokens)

    def begin_step(self, batches: Sequence[GroupBatch]) -> None:
        """The block tables and lengths of the next forward pass, one batch per group."""
        self._batches = batches
        self._metas = [self._backend.prepare(batch, self._device) for batch in batches] if self._backend else []

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, **facts: Any) -> Tensor:
        """Write this step's keys and values of one layer, then attend. Shapes as transformers has them, B == 1.

        Returns [1, T, H, D].
        """
        params = self._params.get(layer) or self._learn(layer, q_BHTD, **facts)
        assert self._backend is not None
        meta, view = self._metas[self._group_of[layer]], self._views[layer]
        q_THD = q_BHTD[0].transpose(0, 1)
        self._backend.write(view, k_BKTD[0].transpose(0, 1), v_BKTD[0].transpose(0, 1), meta)
        out_THD = torch.empty((*q_THD.shape[:2], v_BKTD.shape[-1]), dtype=q_THD.dtype, device=q_THD.device)
        self._backend.attend(q_THD, view, params, meta, out_THD)
        return out_THD.unsqueeze(0)

    def _view(self, buffer: Tensor, layer: LayerSpec, plan: MemoryPlan, block_tokens: int) -> Tensor:
        width = layer.key_dim + layer.value_dim
        return buffer.view(self._dtype).as_strided(
            (plan.num_blocks, block_tokens, layer.kv_heads, width),
            (plan.page_bytes // layer.item_bytes, layer.kv_heads * width, width, 1),
        )

    def _learn(self, layer: int, q_BHTD: Tensor, *, scale: float, softcap: float | None, sinks: Tensor | None):
        """A layer's constants come with its first call, which the warm-up makes; they also decide the backend."""
        spec = self._layers[layer]
        params = LayerParams(scale=scale, softcap=softcap, sinks=sinks)
        if self._backend is None:
            needs = Needs(
                dtype=self._dtype,
                heads=q_BHTD.shape[1],
                kv_heads=spec.kv_heads,
                key_dim=spec.key_dim,
                value_dim=spec.value_dim,
                window=any(other.reach.window_tokens is not None for other in self._layers.values()),
                softcap=softcap is not None,
                sinks=sinks is not None,
            )
            self._backend = select_backend(needs, self._device, self._forced_backend)
            self.begin_step(self._batches)
        self._params[layer] = params
        return params


def _intarsia_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. Windows are known from the layer's reach, so `sliding_window` is not read."""
    paged: PagedAttention = getattr(module, _OWNER)
    scale = scaling if scaling is not None else query.shape[-1] ** -0.5
    layer: Any = module.layer_idx
    return paged.attend(layer, query, key, value, scale=scale, softcap=softcap, sinks=s_aux), None


AttentionInterface.register(IMPLEMENTATION, _intarsia_attention)
