"""Cross-attention: layers that attend to what an encoder made of an image, and the encoder itself.

An image is encoded once, when its request is admitted, by the model's own vision tower, on every rank. Each cross layer
makes keys and values of the result and puts them into the request's pages, where the next request with the same image
finds them. In a step only tokens that see an image go through these layers; for all others they do not exist.

transformers lets a token before the first image attend to every image, padding included, and withholds only the MLP.
Here such a token skips the layer, as the model's authors have it.

Suffixes: T tokens that see an image    E tokens of an encoded image    H query heads    K key heads    D head size
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.paged_attention import Backend, GroupBatch, GroupMeta, LayerParams, Needs, select_backend, upload
from ...kvcache.plan import MemoryPlan
from ...kvcache.spec import LayerSpec
from ...proto.step import EncoderInput, View
from ..launched import Rows
from ..pages import Pages
from ..pictures.decoding import decode
from ..pictures.tiling import count_tiles, tile_processor
from ..slots import SlotTables


class CrossAttention:
    """The cross-attention layers of one model, and the step they are used in."""

    def __init__(self, model: Any, model_dir: str, layers: Sequence[LayerSpec], dtype: torch.dtype):
        self._vision = model.model.vision_model
        self._projector = model.model.multi_modal_projector
        self._processor = tile_processor(model_dir)
        self._layers = {layer.index: layer for layer in layers}
        self._modules: dict[int, Any] = {}  # by layer
        self._dtype = dtype
        self._device = next(model.parameters()).device
        self._backend: Backend | None = None
        self._pages: Pages | None = None
        self._metas: dict[int, GroupMeta] = {}  # group -> what each row sees
        self._groups: list[int] = []
        self._size = 0  # tokens of a block
        self.tokens: Tensor | None = None  # [T] of the packed tokens, those that see an image; None: none does

    def add_layer(self, module: Any) -> "CrossLayer":
        """The forward pass of one of the layers."""
        self._modules[module.layer_idx] = module
        return CrossLayer(module, self)

    def forget_pages(self) -> None:
        self._pages = None

    def use(self, pages: Pages, plan: MemoryPlan, backend: str | None) -> None:
        self._pages = pages
        index, module = next(iter(self._modules.items()))
        layer, attention = self._layers[index], module.cross_attn
        self._groups = sorted({pages.encoder_group_of(index) for index in self._modules})
        self._size = plan.groups[self._groups[0]].block_tokens
        needs = Needs(
            dtype=self._dtype,
            heads=attention.q_proj.weight.shape[0] // attention.head_dim,
            kv_heads=layer.kv_heads,
            key_dim=layer.key_dim,
            value_dim=layer.value_dim,
            block_tokens=self._size,
        )
        self._backend = select_backend([needs], self._device, backend)

    # -- images ------------------------------------------------------------------------------------------------------

    def encode(self, tables: Sequence[Sequence[int]], images: Sequence[EncoderInput]) -> None:
        """Encode images into a request's pages. tables: its blocks, [group][block of the sequence]."""
        assert self._pages is not None and self._backend is not None, "allocate pages first"
        for start, data in images:
            states_ED = self._encode_one(data)
            block, offset = np.divmod(np.arange(start, start + len(states_ED)), self._size)
            for index, module in self._modules.items():
                g = self._pages.encoder_group_of(index)
                page = upload(np.array(tables[g], dtype=np.int64)[block], self._device)
                attention = module.cross_attn
                keys = attention.k_norm(attention.k_proj(states_ED).unflatten(-1, (-1, attention.head_dim)))
                values = attention.v_proj(states_ED).unflatten(-1, (-1, attention.head_dim))
                meta = GroupMeta(page, upload(offset, self._device), plan=None)
                self._backend.write(self._pages.tokens[index], keys, values, meta)

    def _encode_one(self, data: bytes) -> Tensor:
        """[E, hidden size]: of the tiles that the image fills."""
        rgb = decode(data)
        inputs = self._processor(images=[[rgb]], return_tensors="pt")
        tiles = inputs["num_tiles"][0][0]
        states = self._vision(
            pixel_values=inputs["pixel_values"].to(self._device, self._dtype),
            aspect_ratio_ids=inputs["aspect_ratio_ids"].to(self._device),
            aspect_ratio_mask=inputs["aspect_ratio_mask"].to(self._device),
        ).last_hidden_state[0, 0, :tiles]
        assert tiles == count_tiles(self._processor, *rgb.size), "the blocks were reckoned by another number of tiles"
        return self._projector(states).flatten(0, 1)

    # -- steps -------------------------------------------------------------------------------------------------------

    def begin_step(self, rows: Rows, slot_tables: SlotTables) -> None:
        """What each row sees in the next forward pass."""
        assert self._pages is not None and self._backend is not None, "allocate pages first"
        query_lens, computed = rows.query_lens, rows.computed
        tables = [table[rows.slots] for table in slot_tables.block_tables]
        views = [slot_tables[slot].views for slot in rows.slots]
        self.tokens = None
        seen: list[tuple[int, View, np.ndarray]] = []  # row, view, its packed tokens
        starts = np.cumsum(query_lens) - query_lens
        # Of each view, the tokens of this step from its position to the next view's.
        for row, its_views in enumerate(views):
            first, stop = int(computed[row]), int(computed[row] + query_lens[row])
            ends = [view.position for view in its_views[1:]] + [stop]
            for view, end in zip(its_views, ends, strict=False):  # none of either where there are no views
                low, high = max(view.position, first), min(end, stop)
                if low < high:
                    seen.append((row, view, np.arange(low, high) - first + starts[row]))
        if not seen:
            return
        # Each view is a row of its own, whose keys are the encoder's tokens that it shows.
        rows_seen = np.array([row for row, _, _ in seen])
        lens = np.array([len(tokens) for _, _, tokens in seen], dtype=np.int32)
        kv_lens = np.array([view.tokens for _, view, _ in seen], dtype=np.int32)
        width = -(-int(kv_lens.max()) // self._size)
        first_block = np.array([view.first_block for _, view, _ in seen])
        columns = np.minimum(first_block[:, None] + np.arange(width), tables[self._groups[0]].shape[1] - 1)
        for g in self._groups:
            batch = GroupBatch(tables[g][rows_seen[:, None], columns], lens, kv_lens, self._size, is_causal=False)
            self._metas[g] = self._backend.prepare(batch, self._device)
        self.tokens = upload(np.concatenate([tokens for _, _, tokens in seen]), self._device)

    def attend(self, layer: int, q_THD: Tensor, scale: float) -> Tensor:
        """Attention of the step's `tokens` over their images. Returns [T,H,D]."""
        assert self._pages is not None and self._backend is not None, "allocate pages first"
        out_THD = torch.empty_like(q_THD)
        meta = self._metas[self._pages.encoder_group_of(layer)]
        self._backend.attend(q_THD, self._pages.tokens[layer], LayerParams(scale), meta, out_THD)
        return out_THD


class CrossLayer:
    """The forward pass of a cross layer, from hidden states [1,T,D] to [1,T,D]."""

    def __init__(self, module: nn.Module, cross: CrossAttention):
        self._module: Any = module
        self._cross = cross

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        tokens = self._cross.tokens
        if tokens is None:
            return hidden_states
        module = self._module
        attention = module.cross_attn
        hidden_TC = hidden_states[0, tokens]
        q_THD = attention.q_proj(module.input_layernorm(hidden_TC)).unflatten(-1, (-1, attention.head_dim))
        out_THD = self._cross.attend(module.layer_idx, attention.q_norm(q_THD), attention.scaling)
        hidden_TC = hidden_TC + module.cross_attn_attn_gate.tanh() * attention.o_proj(out_THD.flatten(1))
        mlp = module.mlp(module.post_attention_layernorm(hidden_TC))
        return hidden_states.index_copy(1, tokens, (hidden_TC + module.cross_attn_mlp_gate.tanh() * mlp).unsqueeze(0))
