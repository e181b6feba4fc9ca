"""Attention to chosen tokens: over latents in DeepSeek-V3.2, GLM-5, A.X-K2 and Dots 3 Note; MiniMax-M3 and Qwen4-Exp
choose blocks.

An indexer of few small heads, whole on every rank, scores all earlier tokens for each query; attention goes to those
with the highest scores (arXiv 2512.02556). GLM-5 lets several layers go by one choice: it travels from layer to layer
in the place where transformers has the indices.

Suffixes: T tokens    H heads of this rank    K heads of keys    I index heads    E size of an index key
          V size of a head's value
"""

import sys
from typing import Any

import torch
from torch import Tensor

from ...errors import UnsupportedModel
from ...kernels.paged_attention import LayerParams
from ...kernels.token_choice import BlockRule, PooledRule
from ..tensor_parallel import TensorParallel
from .attention import PagedAttention
from .chosen import BlockChoice, Choice, ChoosingAttention, PooledChoice, TokenChoice
from .latent import LatentAttention

Turns = tuple[Tensor, Tensor]
"""Cosines and sines."""

INTERLEAVED = {"Dots3NoteTextIndexer", "GlmMoeDsaIndexer"}
"""Classes of indexers that turn neighbours around, as latent attention does; the others turn halves."""


class Indexer:
    """What a module of transformers asks, in the place of its own forward pass."""

    def __init__(self, module: Any):
        self._module = module
        modeling = sys.modules[type(module).__module__]
        turn = "apply_rotary_pos_emb_interleave" if type(module).__name__ in INTERLEAVED else "apply_rotary_pos_emb"
        self._turn: Any = getattr(modeling, turn)
        self._scale: float = module.softmax_scale * module.n_heads**-0.5

    def __call__(self, hidden_states: Tensor, low_queries: Tensor, turns: Turns) -> Choice:
        """[1,T,..] both"""
        module = self._module
        q_1TIE = module.wq_b(low_queries).unflatten(-1, (module.n_heads, module.head_dim))
        k_1T1E = module.k_norm(module.wk(hidden_states)).unsqueeze(2)
        # Positions turn the first numbers of each; the others stay.
        turned = module.qk_rope_head_dim
        q_rot, k_rot = self._turn(q_1TIE[..., :turned], k_1T1E[..., :turned], *turns, unsqueeze_dim=2)
        q_1TIE = torch.cat((q_rot.to(q_1TIE.dtype), q_1TIE[..., turned:]), dim=-1)
        k_1T1E = torch.cat((k_rot.to(k_1T1E.dtype), k_1T1E[..., turned:]), dim=-1)
        weights_1TI = module.weights_proj(hidden_states.to(module.weights_proj.weight.dtype)).float() * self._scale
        return TokenChoice(q_1TIE[0], weights_1TI[0], k_1T1E[0, :, 0], module.index_topk)


class IndexedLatentAttention(LatentAttention):
    """Layers with an indexer of their own, and those that attend to all or go by another's choice."""

    passes_choice_on = False
    """Whether a layer is told what the one before it has chosen."""

    def __init__(self, module: Any, paged: PagedAttention):
        super().__init__(module, paged)
        self._has_neighbours = True
        assert isinstance(paged, ChoosingAttention), "layers that choose were found in the config"
        self._choosing = paged
        self._indexer = None if getattr(module, "indexer", None) is None else Indexer(module.indexer)

    def __call__(
        self, hidden_states: Tensor, position_embeddings: Turns | Tensor, *_: Any, **given: Any
    ) -> tuple[Any, ...]:
        assert isinstance(position_embeddings, tuple), "these families have cosines and sines"
        low_queries = self._low_queries(hidden_states)
        q_1THD, gate_THV = self._gated_queries(hidden_states, low_queries)
        q_1HTD, keys_11TD = self._latents(hidden_states, q_1THD, position_embeddings)
        choice: Choice | None = given.get("prev_topk_indices")
        if self._indexer is not None:
            choice = self._indexer(hidden_states, self._asking(low_queries), position_embeddings)
        out_THR = self._attend(q_1HTD[0].transpose(0, 1), keys_11TD[0].transpose(0, 1), choice)
        out = self._output(out_THR, gate_THV)
        return (out, None, choice) if self.passes_choice_on else (out, None)

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


class BlockChoosingAttention:
    """MiniMax-M3: each head of keys has a head of the index, which chooses blocks of tokens for it."""

    def __init__(self, module: Any, paged: PagedAttention, parallel: TensorParallel):
        assert isinstance(paged, ChoosingAttention), "layers that choose were found in the config"
        self._module = module
        self._paged = paged
        self._turn: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
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
        heads = (-1, module.head_dim)
        q_1THD = module.q_norm(module.q_proj(hidden_states).unflatten(-1, heads))
        k_1TKD = module.k_norm(module.k_proj(hidden_states).unflatten(-1, heads))
        v_1TKD = module.v_proj(hidden_states).unflatten(-1, heads)
        q_1THD, k_1TKD = self._turn(q_1THD, k_1TKD, *position_embeddings, unsqueeze_dim=2)
        choice = self._choice(hidden_states, position_embeddings, k_1TKD.shape[2])
        params = LayerParams(module.scaling)
        out_THD = self._paged.attend_chosen(q_1THD[0], k_1TKD[0], v_1TKD[0], module.layer_idx, params, choice)
        return module.o_proj(out_THD.flatten(1).unsqueeze(0)), None

    def _choice(self, hidden_states: Tensor, turns: Turns, kv_heads: int) -> BlockChoice:
        """Of this rank's heads of keys. The index is whole on every rank."""
        index = self._module.indexer
        q_1TIE = index.q_norm(index.q_proj(hidden_states).unflatten(-1, (-1, index.head_dim)))
        k_1T1E = index.k_norm(index.k_proj(hidden_states).unsqueeze(2))
        turns = turns[0][..., : index.head_dim], turns[1][..., : index.head_dim]
        q_1TIE, k_1T1E = self._turn(q_1TIE, k_1T1E, *turns, unsqueeze_dim=2)
        first = self._parallel.rank * index.num_heads // self._parallel.size
        return BlockChoice(q_1TIE[0, :, first : first + kv_heads], k_1T1E[0, :, 0], self._rule)


class PooledChoosingAttention:
    """Qwen4-Exp: blocks have one key each, of the mean of their tokens' keys; all heads go by one choice.

    What comes out of each head is multiplied by a gate of the query's.
    """

    def __init__(self, module: Any, paged: PagedAttention):
        assert isinstance(paged, ChoosingAttention), "layers that choose were found in the config"
        self._module = module
        self._paged = paged
        self._turn: Any = sys.modules[type(module).__module__].apply_rotary_pos_emb
        index = module.indexer
        self._rule = PooledRule(index.compress_ratio, index.block_topk, self._key_of)

    def __call__(self, hidden_states: Tensor, position_embeddings: Turns, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module = self._module
        heads = (-1, module.head_dim)
        q_1THD, gate_1THD = module.q_proj(hidden_states).unflatten(-1, (-1, 2 * module.head_dim)).chunk(2, dim=-1)
        q_1THD = module.q_norm(q_1THD)
        k_1TKD = module.k_norm(module.k_proj(hidden_states).unflatten(-1, heads))
        v_1TKD = module.v_proj(hidden_states).unflatten(-1, heads)
        q_1THD, k_1TKD = self._turn(q_1THD, k_1TKD, *position_embeddings, unsqueeze_dim=2)
        choice = self._choice(hidden_states, position_embeddings)
        params = LayerParams(module.scaling)
        out_THD = self._paged.attend_chosen(q_1THD[0], k_1TKD[0], v_1TKD[0], module.layer_idx, params, choice)
        out_TC = out_THD.flatten(1) * torch.sigmoid(gate_1THD[0].flatten(1))
        return module.o_proj(out_TC.unsqueeze(0)), None

    def _choice(self, hidden_states: Tensor, turns: Turns) -> PooledChoice:
        """Of the index, which is whole on every rank. Its keys are neither normed nor turned before they are pooled."""
        index = self._module.indexer
        both_1THE = index.index_qk_proj(hidden_states).unflatten(-1, (-1, index.index_head_dim))
        q_1TIE = index.q_layernorm(both_1THE[:, :, : index.index_n_heads])
        q_1TIE = self._turn(q_1TIE, None, *turns, unsqueeze_dim=2)
        return PooledChoice(q_1TIE[0], both_1THE[0, :, -1], self._rule)

    def _key_of(self, mean_RBE: Tensor, firsts_B: Tensor) -> Tensor:
        """A block's key is turned as its first token is."""
        index = self._module.indexer
        keys_RBE = index.k_layernorm(mean_RBE.to(index.index_qk_proj.weight.dtype))
        turns = index.rotary_emb(keys_RBE, firsts_B[None])
        return self._turn(keys_RBE.unsqueeze(2), None, *turns, unsqueeze_dim=2).squeeze(2)
