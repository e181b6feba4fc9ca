"""Latent attention to chosen tokens: DeepSeek-V3.2, GLM-5, A.X-K2, Dots 3 Note.

An indexer of few small heads, whole on every rank, scores all earlier tokens for each query; attention goes to those
with the highest scores (arXiv 2512.02556). GLM-5 lets several layers go by one choice: it travels from layer to layer
in the place where transformers has the indices.

Suffixes: T tokens    H heads of this rank    I index heads    E size of an index key    V size of a head's value
"""

import sys
from typing import Any

import torch
from torch import Tensor

from .attention import PagedAttention
from .chosen import Choice, ChoosingAttention
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
        return Choice(q_1TIE[0], weights_1TI[0], k_1T1E[0, :, 0], module.index_topk)


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
        asks = self._indexer is not None
        return self._choosing.attend_chosen(q_THD, keys_T1D, layer, self._params, choice, asks=asks)

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
