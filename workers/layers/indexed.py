"""Attention to chosen tokens: over latents in DeepSeek-V3.2, GLM-5, GLM-5.3, A.X-K2, Dots 3 Note, HunYuan 4 and Mistral
Large 4; MiniMax-M3 and Qwen4-Exp choose blocks.

An indexer of few small heads, whole on every rank, scores all earlier tokens for each query; attention goes to those
with the highest scores (arXiv 2512.02556). GLM-5 lets several layers go by one choice: it travels from layer to layer
in the place where transformers has the indices.

Suffixes: T tokens    H heads of this rank    K heads of keys    I index heads    E size of an index key
          V size of a head's value
"""

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UnsupportedModel
from ...kernels.paged_attention import LayerParams
from ...kernels.token_choice import Asked, BlockRule
from ..tensor_parallel import TensorParallel
from .attention import PagedAttention
from .chosen import BlockChoice, Choice, ChoosingAttention, PoolChoice, TokenChoice
from .entries import weighed
from .latent import LatentAttention

Turns = tuple[Tensor, Tensor]
"""Cosines and sines."""

INTERLEAVED = {"Dots3NoteTextIndexer", "GlmMoeDsaIndexer", "MistralLarge4TextIndexer"}
"""Classes of indexers that turn neighbours around, as latent attention does; the others turn halves."""


class Indexer:
    """What a module of transformers asks, in the place of its own forward pass."""

    def __init__(self, module: Any):
        self._module = module
        modeling = sys.modules[type(module).__module__]
        turn = "apply_rotary_pos_emb_interleave" if type(module).__name__ in INTERLEAVED else "apply_rotary_pos_emb"
        self._turn: Any = getattr(modeling, turn)
        self._scale: float = module.softmax_scale * module.n_heads**-0.5

    def __call__(self, hidden_states: Tensor, low_queries: Tensor, turns: Turns | None) -> Choice:
        """[1,T,..] both"""
        module = self._module
        q_1TIE = self._queries(low_queries)
        k_1T1E = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
        if turns is not None:
            q_1TIE, k_1T1E = self._turned(q_1TIE, k_1T1E, turns)
        weights_1TI = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * self._scale
        return TokenChoice(q_1TIE[0], weights_1TI[0], k_1T1E[0, :, 0], module.index_topk)

    def _queries(self, low_queries: Tensor) -> Tensor:
        return self._module.wq_b(low_queries).unflatten(-1, (self._module.n_heads, self._module.head_dim))

    def _turned(self, q_1TIE: Tensor, k_1T1E: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        """Positions turn the first numbers of each; the others stay."""
        turned = self._module.qk_rope_head_dim
        q_rot, k_rot = self._turn(q_1TIE[..., :turned], k_1T1E[..., :turned], *turns, unsqueeze_dim=2)
        q_1TIE = torch.cat((q_rot.to(q_1TIE.dtype), q_1TIE[..., turned:]), dim=-1)
        return q_1TIE, torch.cat((k_rot.to(k_1T1E.dtype), k_1T1E[..., turned:]), dim=-1)


class LateTurningIndexer(Indexer):
    """HunYuan 4: positions turn the last numbers."""

    def _turned(self, q_1TIE: Tensor, k_1T1E: Tensor, turns: Turns) -> tuple[Tensor, Tensor]:
        stays = self._module.head_dim - self._module.qk_rope_head_dim
        q_rot, k_rot = self._turn(q_1TIE[..., stays:], k_1T1E[..., stays:], *turns, unsqueeze_dim=2)
        q_1TIE = torch.cat((q_1TIE[..., :stays], q_rot.to(q_1TIE.dtype)), dim=-1)
        return q_1TIE, torch.cat((k_1T1E[..., :stays], k_rot.to(k_1T1E.dtype)), dim=-1)


class PoolIndexer:
    """The same of pools of tokens, without positions."""

    def __init__(self, module: Any):
        self._module = module
        self._scale: float = module.softmax_scale * module.n_heads**-0.5
        if not module.index_kpool_always_select_tail:
            raise UnsupportedModel(
                "the index chooses whole pools of tokens alone (index_kpool_always_select_tail), of which the first "
                "tokens of a text see none",
                field="model",
            )

    def __call__(self, hidden_states: Tensor, low_queries: Tensor, turns: Turns | None) -> Choice:
        """[1,T,..] both"""
        module = self._module
        q_1TIE = module.wq_b(low_queries).unflatten(-1, (module.n_heads, module.head_dim))
        gates_1TE = F.linear(hidden_states, module.index_kpool_compress_gate)
        given_1TC = torch.cat((module.k_norm(module.wk(hidden_states)), gates_1TE), dim=-1)
        weights_1TI = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * self._scale
        asked = Asked(q_1TIE[0], weights_1TI[0])
        size = module.index_kpool
        return PoolChoice(asked, given_1TC[0], self._keys, size, module.index_topk // size)

    def _keys(self, given_NSC: Tensor, has_before_N: Tensor, first_N: Tensor) -> tuple[Tensor, ...]:
        return (weighed(given_NSC, self._module.index_kpool_compress_ape.float(), has_before_N),)


class IndexedLatentAttention(LatentAttention):
    """Layers with an indexer of their own, and those that attend to all or go by another's choice."""

    passes_choice_on = False
    """Whether a layer is told what the one before it has chosen."""

    def __init__(self, module: Any, paged: PagedAttention):
        super().__init__(module, paged)
        self._has_neighbours = True
        assert isinstance(paged, ChoosingAttention), "layers that choose were found in the config"
        self._choosing = paged
        self._indexer = None if getattr(module, "indexer", None) is None else self._make_indexer(module.indexer)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: Turns | Tensor, *_: Any, **given: Any
    ) -> tuple[Any, ...]:
        assert isinstance(position_embeddings, tuple), "these families have cosines and sines"
        return self._forward(hidden_states, position_embeddings, given.get("prev_topk_indices"))

    def _forward(self, hidden_states: Tensor, turns: Turns | None, choice: Choice | None) -> tuple[Any, ...]:
        """choice: of a layer before"""
        low_queries = self._low_queries(hidden_states)
        q_1THD, gate_THV = self._gated_queries(hidden_states, low_queries)
        q_1HTD, keys_11TD = self._latents(hidden_states, q_1THD, turns)
        if self._indexer is not None:
            choice = self._indexer(hidden_states, self._asking(low_queries), turns)
        out_THR = self._attend(q_1HTD[0].transpose(0, 1), keys_11TD[0].transpose(0, 1), choice)
        out = self._output(out_THR, gate_THV)
        return (out, None, choice) if self.passes_choice_on else (out, None)

    def _make_indexer(self, module: Any) -> Callable[[Tensor, Tensor, Any], Choice]:
        return Indexer(module)

    def _attend(self, q_THD: Tensor, keys_T1D: Tensor, choice: Choice | None) -> Tensor:
        layer: int = self._module.layer_idx
        if choice is None:
            return self._choosing.attend_packed(q_THD, keys_T1D, keys_T1D[..., :0], layer, self._params)
        return self._choosing.attend_chosen(
            q_THD, keys_T1D, keys_T1D[..., :0], layer, self._params, choice, asks=self._indexer is not None
        )

    def _asking(self, low_queries: Tensor) -> Tensor:
        """What the indexer's queries are made of."""
        return low_queries

    def _gated_queries(self, hidden_states: Tensor, low_queries: Tensor) -> tuple[Tensor, Tensor | None]:
        """Queries, and what the numbers of each head's value are multiplied by, if anything."""
        return self._queries(low_queries), None


class SharingLatentAttention(IndexedLatentAttention):
    """GLM-5."""

    passes_choice_on = True


class GatedSinkLatentAttention(SharingLatentAttention):
    """HunYuan 4: halves are turned, heads have sinks, and what they give out has a gate for each number."""

    def __init__(self, module: Any, paged: PagedAttention):
        super().__init__(module, paged)
        self._has_neighbours = False

    @property
    def _params(self) -> LayerParams:
        return replace(super()._params, sinks=self._module.sinks)

    def _make_indexer(self, module: Any) -> Callable[[Tensor, Tensor, Any], Choice]:
        return LateTurningIndexer(module)

    def _gated_queries(self, hidden_states: Tensor, low_queries: Tensor) -> tuple[Tensor, Tensor | None]:
        gate_TC = self._module.gate_proj(hidden_states[0]).sigmoid()
        return self._queries(low_queries), gate_TC.unflatten(-1, (-1, self._module.v_head_dim))


class ScaledIndexer(Indexer):
    """Mistral Large 4: queries of normed hidden states, which grow with their positions."""

    def __init__(self, module: Any, paged: PagedAttention):
        super().__init__(module)
        self._paged = paged

    def _queries(self, low_queries: Tensor) -> Tensor:
        module = self._module
        q_1TIE = super()._queries(module.q_input_norm(low_queries))
        return module.softmax_scaling(q_1TIE, self._paged.positions_T.unsqueeze(0), head_dim_first=False)


class ScaledLatentAttention(SharingLatentAttention):
    """Mistral Large 4: queries grow with their positions, some layers have none, and some read another's latents."""

    def _make_indexer(self, module: Any) -> Callable[[Tensor, Tensor, Any], Choice]:
        return ScaledIndexer(module, self._paged)

    def __call__(self, hidden_states: Tensor, position_embeddings: Any, *_: Any, **given: Any) -> tuple[Any, ...]:
        turns = position_embeddings if self._module.use_rope else None
        return self._forward(hidden_states, turns, given.get("prev_topk_indices"))

    def _low_queries(self, hidden_states: Tensor) -> Tensor:
        return hidden_states

    def _queries(self, low_queries: Tensor) -> Tensor:
        module = self._module
        q_1THD = module.q_proj(low_queries).unflatten(-1, (-1, module.qk_nope_head_dim + module.qk_rope_head_dim))
        return module.softmax_scaling(q_1THD, self._paged.positions_T.unsqueeze(0), head_dim_first=False)

    def _latents(self, hidden_states: Tensor, q_1THD: Tensor, turns: Any) -> tuple[Tensor, Tensor]:
        if not self._module.is_kv_shared_layer:
            return super()._latents(hidden_states, q_1THD, turns)
        # Its source has written them.
        module = self._module
        q_1THN, q_rot = q_1THD.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        if turns is not None:
            q_rot, _ = self._modeling.apply_rotary_pos_emb_interleave(q_rot, None, *turns, unsqueeze_dim=2)
        q_latent = self._products()[0](q_1THN[0]).unsqueeze(0)
        q_1HTD = torch.cat((q_latent, q_rot.to(q_latent.dtype)), dim=-1).transpose(1, 2)
        return q_1HTD, q_1HTD.new_zeros(1, 1, *q_1HTD.shape[2:])


class PoolingLatentAttention(SharingLatentAttention):
    """GLM-5.3: without positions, and its index chooses pools of tokens."""

    def _make_indexer(self, module: Any) -> Callable[[Tensor, Tensor, Any], Choice]:
        return PoolIndexer(module)

    def __call__(self, hidden_states: Tensor, *_: Any, **given: Any) -> tuple[Any, ...]:
        return self._forward(hidden_states, None, given.get("prev_topk_indices"))


class HeadGatedLatentAttention(IndexedLatentAttention):
    """Dots 3 Note: a gate for each head; most layers have a window in the indexer's place."""

    def _low_queries(self, hidden_states: Tensor) -> Tensor:
        return super()._low_queries(hidden_states) * self._module.q_lora_scale

    def _gated_queries(self, hidden_states: Tensor, low_queries: Tensor) -> tuple[Tensor, Tensor | None]:
        return self._queries(low_queries), self._module.g_proj(hidden_states[0]).sigmoid().unsqueeze(-1)


class FusedGateLatentAttention(IndexedLatentAttention):
    """A.X-K2: queries and a gate for each number of a value come out of one product."""

    def _low_queries(self, hidden_states: Tensor) -> Tensor:
        """Before their norm, behind those after it."""
        low = self._module.q_a_proj(hidden_states)
        return torch.cat((self._module.q_a_layernorm(low), low), dim=-1)

    def _asking(self, low_queries: Tensor) -> Tensor:
        return low_queries[..., : self._module.q_lora_rank]

    def _gated_queries(self, hidden_states: Tensor, low_queries: Tensor) -> tuple[Tensor, Tensor | None]:
        module = self._module
        widths = [module.qk_head_dim, module.v_head_dim]
        both = module.q_gate_proj(low_queries).unflatten(-1, (-1, sum(widths)))
        q_1THD, gate_1THV = both.split(widths, dim=-1)
        return q_1THD, gate_1THV[0].float().sigmoid()


class ChoosingHeads:
    """Attention with keys and values for each of its heads, to what an index chooses."""

    def __init__(self, module: Any, paged: PagedAttention):
        assert isinstance(paged, ChoosingAttention), "layers that choose were found in the config"
        self._module = module
        self._paged = paged
        self._turn: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb

    def _attend(self, hidden_states: Tensor, q_1THD: Tensor, turns: Turns) -> Tensor:
        """q: neither normed nor turned. [T,H,D]"""
        module, heads = self._module, (-1, self._module.head_dim)
        k_1TKD = module.k_norm(module.k_proj(hidden_states).unflatten(-1, heads))
        v_1TKD = module.v_proj(hidden_states).unflatten(-1, heads)
        q_1THD, k_1TKD = self._turn(module.q_norm(q_1THD), k_1TKD, *turns, unsqueeze_dim=2)
        choice = self._choice(hidden_states, turns, k_1TKD.shape[2])
        params = LayerParams(module.scaling)
        return self._paged.attend_chosen(q_1THD[0], k_1TKD[0], v_1TKD[0], module.layer_idx, params, choice)

    def _choice(self, hidden_states: Tensor, turns: Turns, kv_heads: int) -> Choice:
        """kv_heads: of this rank. The index is whole on every rank."""
        raise NotImplementedError


class BlockChoosingAttention(ChoosingHeads):
    """MiniMax-M3: each head of keys has a head of the index, which chooses blocks of tokens for it."""

    def __init__(self, module: Any, paged: PagedAttention, parallel: TensorParallel):
        super().__init__(module, paged)
        index = module.indexer
        self._rule = BlockRule(index.block_size, index.topk_blocks, index.local_blocks)
        if not 1 <= self._rule.near <= self._rule.most:
            raise UnsupportedModel(
                f"layer {module.layer_idx} chooses {self._rule.most} blocks, {self._rule.near} of them for being near "
                "a token: of these there must be one at least, and no more than are chosen",
                field="model",
            )
        self._parallel = parallel

    def __call__(self, hidden_states: Tensor, position_embeddings: Turns, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module = self._module
        q_1THD = module.q_proj(hidden_states).unflatten(-1, (-1, module.head_dim))
        out_THD = self._attend(hidden_states, q_1THD, position_embeddings)
        return module.o_proj(out_THD.flatten(1).unsqueeze(0)), None

    def _choice(self, hidden_states: Tensor, turns: Turns, kv_heads: int) -> BlockChoice:
        """Of this rank's heads of keys."""
        index = self._module.indexer
        q_1TIE = index.q_norm(index.q_proj(hidden_states).unflatten(-1, (-1, index.head_dim)))
        k_1T1E = index.k_norm(index.k_proj(hidden_states).unsqueeze(2))
        turns = turns[0][..., : index.head_dim], turns[1][..., : index.head_dim]
        q_1TIE, k_1T1E = self._turn(q_1TIE, k_1T1E, *turns, unsqueeze_dim=2)
        first = self._parallel.rank * index.num_heads // self._parallel.size
        return BlockChoice(q_1TIE[0, :, first : first + kv_heads], k_1T1E[0, :, 0], self._rule)


class PooledChoosingAttention(ChoosingHeads):
    """Qwen4-Exp: pools have one key each, of the mean of their tokens' keys; all heads go by one choice.

    What comes out of each head is multiplied by a gate of the query's.
    """

    def __call__(self, hidden_states: Tensor, position_embeddings: Turns, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module = self._module
        q_1THD, gate_1THD = module.q_proj(hidden_states).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, dim=-1)
        out_THD = self._attend(hidden_states, q_1THD, position_embeddings)
        out_TC = out_THD.flatten(1) * torch.sigmoid(gate_1THD[0].flatten(1))
        return module.o_proj(out_TC.unsqueeze(0)), None

    def _choice(self, hidden_states: Tensor, turns: Turns, kv_heads: int) -> PoolChoice:
        """Its keys are neither normed nor turned before they are pooled, and its heads weigh the same."""
        index = self._module.indexer
        both_1THE = index.index_qk_proj(hidden_states).unflatten(-1, (-1, index.index_head_dim))
        q_1TIE = index.q_layernorm(both_1THE[:, :, : index.index_n_heads])
        q_1TIE = self._turn(q_1TIE, None, *turns, unsqueeze_dim=2)
        asked = Asked(q_1TIE[0], q_1TIE.new_ones(q_1TIE.shape[1:3], dtype=torch.float32))
        return PoolChoice(asked, both_1THE[0, :, -1], self._keys, index.compress_ratio, index.block_topk)

    def _keys(self, given_NSE: Tensor, has_before_N: Tensor, first_N: Tensor) -> tuple[Tensor, ...]:
        """A pool's key is turned as its first token is."""
        index = self._module.indexer
        keys_1NE = index.k_layernorm(given_NSE.float().mean(1).to(given_NSE.dtype)).unsqueeze(0)
        turns = index.rotary_emb(keys_1NE, first_N.unsqueeze(0))
        return (self._turn(keys_1NE.unsqueeze(2), None, *turns, unsqueeze_dim=2)[0, :, 0],)
