"""Multi-head latent attention (arXiv 2405.04434): one latent per token serves all heads.

transformers expands each latent into keys and values of every head. Here pages hold the latent itself and its rotary
key, as the paper means it: queries are taken into the latent's space, attention runs over latents as over one head of
keys that are also its values, and what comes out is taken to the heads' values. On every rank the pages hold the whole
latent; heads are cut.

Suffixes: T tokens    H heads of this rank    N size of a head without its rotary part    R rank of the latent
"""

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...kernels.paged_attention import LayerParams
from .attention import PagedAttention
from .head_products import HeadProduct, head_product


class LatentAttention:
    """The forward pass of DeepSeek's attention, from hidden states [1,T,D] to [1,T,D]."""

    def __init__(self, module: Any, paged: PagedAttention):
        self._module = module
        self._paged = paged
        self._modeling = sys.modules[type(module).__module__]
        # Longcat scales queries and latents, and its rotary numbers are neighbours always.
        self._query_scale: float = getattr(module, "mla_scale_q_lora", 1.0)
        self._latent_scale: float = getattr(module, "mla_scale_kv_lora", getattr(module, "kv_lora_scale", 1.0))
        has_halves = hasattr(self._modeling, "apply_rotary_pos_emb")
        self._has_neighbours: bool = getattr(module.config, "rope_interleave", not has_halves)
        self._is_gated = hasattr(module, "g_proj")  # Ling 3: each head's output by one number
        self._rotary_norm: Any = getattr(module, "k_rope_only_layernorm", None)
        self._made: tuple[HeadProduct, HeadProduct] | None = None
        # Mistral 4 scales queries by their positions, beyond those that it was trained with.
        self._scale_at: Callable[..., Tensor] | None = getattr(self._modeling, "get_llama_4_attn_scale", None)

    def __call__(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | Tensor | None = None,
        *_: Any,
        position_ids: Tensor | None = None,
        **__: Any,
    ) -> tuple[Tensor, None]:
        q_1THD = self._queries(self._low_queries(hidden_states))
        q_1HTD, keys_11TD = self._latents(hidden_states, q_1THD, position_embeddings)
        if self._scale_at is not None:
            ropes = self._module.config.rope_parameters
            beta, trained = ropes.get("llama_4_scaling_beta"), ropes.get("original_max_position_embeddings")
            q_1HTD = q_1HTD * self._scale_at(position_ids, beta, trained).to(q_1HTD.dtype)
        out_THR = self._paged.attend(self._module.layer_idx, q_1HTD, keys_11TD, keys_11TD[..., :0], self._params)
        # In float64, since torch's float32 has other last bits at a tensor's end than before.
        gate = self._module.g_proj(hidden_states[0]).double().sigmoid().unsqueeze(-1) if self._is_gated else None
        return self._output(out_THR[0], None if gate is None else gate.to(out_THR.dtype)), None

    @property
    def _params(self) -> LayerParams:
        return LayerParams(self._module.scaling, latent_values=self._module.kv_lora_rank)

    def _latents(
        self, hidden_states: Tensor, q_1THD: Tensor, turns: tuple[Tensor, Tensor] | Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Queries in the latent's space [1,H,T,R+..] and latents [1,1,T,R+..], each with its rotary part behind it."""
        module = self._module
        rank = module.kv_lora_rank
        q_1THN, q_rot = q_1THD.split([module.qk_nope_head_dim, module.qk_rope_head_dim], dim=-1)
        latent, k_rot = module.kv_a_proj_with_mqa(hidden_states).split([rank, module.qk_rope_head_dim], dim=-1)
        if self._rotary_norm is not None:
            k_rot = self._rotary_norm(k_rot)
        q_rot, k_rot = self._rotate(q_rot.transpose(1, 2), k_rot.unsqueeze(1), turns)
        q_latent = self._products()[0](q_1THN[0]).transpose(0, 1).unsqueeze(0)
        latent = module.kv_a_layernorm(latent)
        if self._latent_scale != 1.0:
            latent = latent * self._latent_scale
        q_rot, k_rot = q_rot.to(q_latent.dtype), k_rot.to(latent.dtype)
        return torch.cat((q_latent, q_rot), dim=-1), torch.cat((latent.unsqueeze(1), k_rot), dim=-1)

    def _output(self, out_THR: Tensor, gate_THV: Tensor | None = None) -> Tensor:
        """Of what comes out of the latent's space. [1,T,D]"""
        out_THV = self._products()[1](out_THR)
        if gate_THV is not None:
            out_THV = (out_THV * gate_THV).to(out_THV.dtype)
        return self._module.o_proj(out_THV.flatten(1).unsqueeze(0))

    def _products(self) -> tuple[HeadProduct, HeadProduct]:
        """Of queries into the latent's space, and of what comes out into that of values; made of the weights once."""
        if self._made is None:
            module = self._module
            widths = [module.qk_nope_head_dim, module.v_head_dim]
            weight_HOR = module.kv_b_proj.weight.detach().unflatten(0, (-1, sum(widths)))
            to_keys_HNR, to_values_HVR = weight_HOR.split(widths, dim=1)
            beside = module.kv_b_proj
            self._made = head_product(to_keys_HNR.mT, beside), head_product(to_values_HVR, beside)
            module.kv_b_proj = None  # which is not called: its weight was read
        return self._made

    def _low_queries(self, hidden_states: Tensor) -> Tensor:
        """What queries are made of: of low rank, where the model has such; else the hidden states."""
        module = self._module
        if module.q_lora_rank is None:
            return hidden_states
        return module.q_a_layernorm(module.q_a_proj(hidden_states))

    def _queries(self, low_queries: Tensor) -> Tensor:
        """[1,T,H,N and the rotary part]"""
        module = self._module
        project = module.q_proj if module.q_lora_rank is None else module.q_b_proj
        q_1THD = project(low_queries).unflatten(-1, (-1, module.qk_head_dim))
        return q_1THD if self._query_scale == 1.0 else q_1THD * self._query_scale

    def _rotate(self, q: Tensor, k: Tensor, turns: tuple[Tensor, Tensor] | Tensor | None) -> tuple[Tensor, Tensor]:
        """turns: cosines and sines, or complex numbers, as the model's own embedding makes them; None: it has none"""
        if turns is None:
            return q, k
        if isinstance(turns, Tensor):
            return self._modeling.apply_rotary_emb(q, k, turns)
        if self._has_neighbours:
            return self._modeling.apply_rotary_pos_emb_interleave(q, k, *turns)
        return self._modeling.apply_rotary_pos_emb(q, k, *turns)
