"""Cross-attention: layers that attend to what an encoder made of an image, and the encoder itself.

An image is encoded once, when its request is admitted, by the model's own vision tower, on every rank. Each cross layer
makes keys and values of the result and puts them into the request's pages, where the next request with the same image
finds them. For tokens that see no image these layers do not exist.

transformers lets a token before the first image attend to every image, padding included, and withholds only the MLP.
Here such a token skips the layer, as the model's authors have it. `sight.py` says which tokens see what.

Suffixes: T tokens of a layer    E tokens of an encoded image    H query heads    K key heads    D head size
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ...kernels.paged_attention import Backend, GroupMeta, LayerParams, Needs, select_backend, upload
from ...kvcache.plan import MemoryPlan
from ...kvcache.spec import LayerSpec
from ...proto.step import EncoderInput, View
from ..launched import Rows
from ..pages import Pages
from ..pictures.decoding import decode
from ..pictures.tiling import count_tiles, tile_processor
from ..slots import SlotTables
from .sight import Seen, Sight, SightFrames, seen_once, sight_of


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
        self._widths: dict[int, int] = {}  # group -> blocks of what an encoder makes for a request
        self._size = 0  # tokens of a block
        self.seen: Seen | None = None  # in the next forward pass; None: nothing

    def add_layer(self, module: Any) -> "CrossLayer":
        """The forward pass of one of the layers."""
        self._modules[module.layer_idx] = module
        return CrossLayer(module, self)

    def forget_pages(self) -> None:
        self._pages = self.seen = None

    def use(self, pages: Pages, plan: MemoryPlan, backend: str | None) -> None:
        self._pages = pages
        index, module = next(iter(self._modules.items()))
        layer, attention = self._layers[index], module.cross_attn
        groups = sorted({pages.encoder_group_of(index) for index in self._modules})
        self._widths = {g: -(-plan.groups[g].encoder_tokens // plan.groups[g].block_tokens) for g in groups}
        self._size = plan.groups[groups[0]].block_tokens
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
            pixel_values=upload(inputs["pixel_values"].numpy(), self._device).to(self._dtype),
            aspect_ratio_ids=upload(inputs["aspect_ratio_ids"].numpy(), self._device),
            aspect_ratio_mask=upload(inputs["aspect_ratio_mask"].numpy(), self._device),
        ).last_hidden_state[0, 0, :tiles]
        assert tiles == count_tiles(self._processor, *rgb.size), "the blocks were reckoned by another number of tiles"
        return self._projector(states).flatten(0, 1)

    # -- steps -------------------------------------------------------------------------------------------------------

    def sight(self, rows: Rows, slot_tables: SlotTables) -> Sight | None:
        """What each row of a step sees. None: nothing."""
        return sight_of(rows, slot_tables, list(self._widths), self._size)

    def begin_step(self, sight: Sight | None) -> None:
        """What the next forward pass sees."""
        assert self._backend is not None, "allocate pages first"
        self.seen = None if sight is None else seen_once(sight, self._backend, self._device)

    def resume(self, seen: Seen | None) -> None:
        """Run the next forward pass over what was prepared elsewhere."""
        self.seen = seen

    @property
    def has_frames(self) -> bool:
        """Whether steps that see an image can be recorded. Else only those that see none are."""
        assert self._backend is not None, "allocate pages first"
        able = self._backend.capabilities
        return able.wide_frames and able.mixed_frames and bool(self.dearest_views)

    def frames(self, most_rows: int, most_tokens: int) -> SightFrames | None:
        """Of recorded steps. most_rows: of decode steps. most_tokens: of steps with prompts"""
        assert self._backend is not None, "allocate pages first"
        if not self.has_frames:
            return None
        return SightFrames(self._backend, self._widths, self._size, self._device, most_rows, most_tokens)

    def table_bytes(self, stretches: int) -> int:
        """Of the tables of a frame."""
        return stretches * 4 * sum(self._widths.values())

    @property
    def dearest_views(self) -> tuple[View, ...]:
        """From the first token on all that an encoder may make for a request. Empty where requests have no images."""
        blocks = min(self._widths.values())
        return (View(0, 0, blocks * self._size),) if blocks else ()

    def attend(self, layer: int, q_THD: Tensor, scale: float, seen: Seen) -> Tensor:
        """Attention over what tokens see. Returns [T,H,D]."""
        assert self._pages is not None and self._backend is not None, "allocate pages first"
        out_THD = torch.empty_like(q_THD)
        meta = seen.metas[self._pages.encoder_group_of(layer)]
        self._backend.attend(q_THD, self._pages.tokens[layer], LayerParams(scale), meta, out_THD)
        return out_THD


class CrossLayer:
    """The forward pass of a cross layer, from hidden states [1,T,D] to [1,T,D]."""

    def __init__(self, module: nn.Module, cross: CrossAttention):
        self._module: Any = module
        self._cross = cross

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        seen = self._cross.seen
        if seen is None:
            return hidden_states
        module = self._module
        attention = module.cross_attn
        hidden_TC = seen.taken(hidden_states)
        q_THD = attention.q_proj(module.input_layernorm(hidden_TC)).unflatten(-1, (-1, attention.head_dim))
        out_THD = self._cross.attend(module.layer_idx, attention.q_norm(q_THD), attention.scaling, seen)
        hidden_TC = hidden_TC + module.cross_attn_attn_gate.tanh() * attention.o_proj(out_THD.flatten(1))
        mlp = module.mlp(module.post_attention_layernorm(hidden_TC))
        return seen.put(hidden_states, hidden_TC + module.cross_attn_mlp_gate.tanh() * mlp)
