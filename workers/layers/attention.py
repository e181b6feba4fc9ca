"""Where our attention enters a transformers module.

transformers lets a model call an attention function by name. Ours finds, through the calling module's `layer_idx`, the
layer's pages and the metadata its group shares in this step; it writes the new keys and values and attends over the
pages. No mask is built and no cache object exists.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from ...errors import UnsupportedModel
from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta, LayerParams, Needs
from ...kvcache.plan import MemoryPlan
from ...kvcache.reach import Reach
from ...kvcache.spec import LayerSpec
from ..pages import Pages
from .attention_operator import register
from .frames import Recordable
from .needs import needs_of
from .refusals import check_written

IMPLEMENTATION = "intarsia"
"""The name under which transformers models find our attention function."""

_OWNER = "intarsia_attention"
_QUERY_SCALE = "intarsia_query_scale"


def step_masks(plan: MemoryPlan) -> list[tuple[int, Reach]]:
    """What metadata a step needs: one for each group, and for each way its layers look back."""
    return list(
        dict.fromkeys(
            (g, group.mask_of(n))
            for g, group in enumerate(plan.groups)
            for n in range(len(group.layers))
            if group.reach.keeps_tokens
        )
    )


class PagedAttention(Recordable):
    """Attention of all layers of one model over their pages, and the step it is used in.

    Life: `bind` to the model, `use` pages, `learn` from one forward pass what the layers need; then, for each step,
    `begin_step` builds one metadata per group, which all layers of the group share.
    """

    def __init__(self, layers: Sequence[LayerSpec], dtype: torch.dtype, device: torch.device):
        self.layers = {layer.index: layer for layer in layers if layer.reach.keeps_tokens}
        self.dtype = dtype
        self._device = device
        self.learnt: Backend | None = None  # None: it is learning, and each token sees itself alone
        self.views: dict[int, Tensor] = {}  # of each layer's pages; another dict for other pages
        self._mask_of: dict[int, int] = {}  # layer -> place in `step_masks`
        self._needs: dict[int, Needs] = {}
        self._block_tokens: dict[int, int] = {}
        self._any_bytes = False
        self.params: dict[int, LayerParams] = {}  # as learnt, for compiled code
        self._number = register(self)
        self._metas: list[GroupMeta] = []
        self.positions_T = torch.empty(0, dtype=torch.int64)

    def bind(self, module: nn.Module, query_scale: Callable[[Tensor], Tensor] | None) -> None:
        """Let an attention module find this object. query_scale: what its queries are multiplied by, if anything."""
        setattr(module, _OWNER, self)
        setattr(module, _QUERY_SCALE, query_scale)

    def forget_pages(self) -> None:
        self.views = {}

    def use(self, pages: Pages, plan: MemoryPlan) -> None:
        """Attend over these pages from now on."""
        self.learnt = None
        self.views = pages.tokens
        masks = step_masks(plan)
        for index in self.layers:
            g, n = pages.place_of(index)
            self._mask_of[index] = masks.index((g, plan.groups[g].mask_of(n)))
            self._block_tokens[index] = plan.groups[g].block_tokens
        # A page may have been a state's or an encoder's before.
        self._any_bytes = not all(group.reach.keeps_tokens for group in plan.groups)

    def learn(self, forward: Callable[[], object], choose: Callable[[Sequence[Needs]], Backend]) -> None:
        """Run `forward` once to learn each layer's constants, then choose the backend that covers them all.

        Raises `UnsupportedModel`, and what `choose` does when no backend covers them.
        """
        self.learnt = None
        forward()
        silent = sorted(set(self.layers) - set(self._needs))
        if silent:
            raise UnsupportedModel(
                f"layers {', '.join(map(str, silent))} compute their attention in a way of their own, which cannot be "
                "paged",
                field="model",
            )
        self.learnt = choose(list(dict.fromkeys(self._needs.values())))

    @property
    def backend(self) -> Backend:
        assert self.learnt is not None, "learn first"
        return self.learnt

    def begin_step(self, batches: Sequence[GroupBatch], positions_T: Tensor) -> None:
        """The block tables and lengths of the next forward pass, one batch for each of `step_masks`.

        positions_T: of the packed tokens in their sequences, on the device.
        """
        self.positions_T = positions_T
        if self.learnt is not None:
            self._metas = [self.learnt.prepare(batch, self._device) for batch in batches]

    def resume(self, metas: list[GroupMeta], positions_T: Tensor) -> None:
        """Run the next forward pass over metadata that was prepared elsewhere."""
        self._metas, self.positions_T = metas, positions_T

    def attend(self, layer: int, q_BHTD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, params: LayerParams) -> Tensor:
        """Write this step's keys and values of one layer, then attend. Shapes as transformers has them, B == 1.

        Returns [1, T, H, D]."""
        q_THD, k_TKD, v_TKD = (x[0].transpose(0, 1) for x in (q_BHTD, k_BKTD, v_BKTD))
        return self.attend_packed(q_THD, k_TKD, v_TKD, layer, params).unsqueeze(0)

    def attend_packed(
        self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, layer: int, params: LayerParams, write: Any = None
    ) -> Tensor:
        """The same with packed tokens, written by `write` instead of `Backend.write` if given. Returns [T,H,D]."""
        if torch.compiler.is_compiling():
            return torch.ops.intarsia.attend(q_THD, k_TKD, v_TKD, layer, self._number)
        value_dim = params.latent_values or v_TKD.shape[-1]
        if self.learnt is None:
            self.params[layer] = params
            check_written(self.layers, layer, k_TKD, v_TKD)
            block_tokens, heads = self._block_tokens[layer], q_THD.shape[1]
            self._needs[layer] = needs_of(self.layers[layer], heads, params, self.dtype, block_tokens, self._any_bytes)
            values_TKD = k_TKD[..., :value_dim] if params.latent_values else v_TKD
            return values_TKD.repeat_interleave(q_THD.shape[1] // values_TKD.shape[1], dim=1)
        out_THD = torch.empty((*q_THD.shape[:2], value_dim), dtype=q_THD.dtype, device=q_THD.device)
        meta, view = self.meta_of(layer), self.views[layer]
        if self.layers[layer].shares is None:  # else its source has written them, in this very step
            (write or self.learnt.write)(view, k_TKD, v_TKD, meta)
        self.learnt.attend(q_THD, view, params, meta, out_THD)
        return out_THD

    def meta_of(self, layer: int) -> GroupMeta:
        """Of the step that is under way."""
        return self._metas[self._mask_of[layer]]

    @property
    def is_constant(self) -> bool:
        """Whether nothing of what layers attend by is made anew in each step: a compiler sees constants alone."""
        return not self.gathers and all(params.biases is None for params in self.params.values())


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
    query_scale = getattr(module, _QUERY_SCALE)
    if query_scale is not None:
        query = (query * query_scale(paged.positions_T)[:, None]).to(query.dtype)
    return paged.attend(layer, query, key, value, LayerParams(scale, softcap, s_aux)), None


AttentionInterface.register(IMPLEMENTATION, _intarsia_attention)
