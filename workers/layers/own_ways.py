"""Attention of families whose modules compute it in ways of their own: BLOOM, DiffLlama, Doge, Falcon, GPT-Neo,
Inkling 1 and 2, JetMoE, MPT, XGLM.

Suffixes: T packed tokens    H heads of this rank    K heads of keys    D size of a head
"""

import importlib
import sys
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...errors import UnsupportedModel
from ...kernels.paged_attention import Biases, LayerParams
from ..tensor_parallel import TensorParallel
from .attention import IMPLEMENTATION, PagedAttention

BY_NAME = {
    "falcon": ("falcon.modeling_falcon", "FALCON_ATTENTION_CLASSES"),
    "gpt_neo": ("gpt_neo.modeling_gpt_neo", "GPT_NEO_ATTENTION_CLASSES"),
}
"""model_type -> where transformers keeps classes of attention by the names of implementations."""


def know_implementation(model_type: str) -> None:
    """Let such a model be built with attention of our name: its plain one, whose forward pass ours takes the place
    of."""
    if model_type in BY_NAME:
        module, table = BY_NAME[model_type]
        classes = getattr(importlib.import_module(f"transformers.models.{module}"), table)
        classes.setdefault(IMPLEMENTATION, classes["eager"])


class OwnAttention:
    """From hidden states [1,T,D] to [1,T,D], and the None in the place of weights that such modules give out."""

    output = "dense"

    def __init__(self, module: Any, paged: PagedAttention, parallel: TensorParallel):
        self._module = module
        self._paged = paged
        self._params = LayerParams(self._scale(), slopes=self._slopes(parallel))

    def __call__(self, hidden_states: Tensor, *_: Any, **given: Any) -> Any:
        q_THD, k_TKD, v_TKD = self._heads(hidden_states[0])
        turns = given.get("position_embeddings")
        if turns is not None:
            q_THD, k_TKD = self._turned(q_THD, k_TKD, turns)
        return self._output(self._attend(q_THD, k_TKD, v_TKD)), None

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        raise NotImplementedError

    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        return self._paged.attend_packed(q_THD, k_TKD, v_TKD, self._layer, self._params)

    def _output(self, out_THD: Tensor) -> Tensor:
        return getattr(self._module, self.output)(out_THD.flatten(1).unsqueeze(0))

    def _turned(self, q_THD: Tensor, k_TKD: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        turn: Any = sys.modules[type(self._module).__module__].apply_rotary_pos_emb
        q_1THD, k_1TKD = turn(q_THD.unsqueeze(0), k_TKD.unsqueeze(0), *turns, unsqueeze_dim=2)
        return q_1THD[0], k_1TKD[0]

    @property
    def _layer(self) -> int:
        return self._module.layer_idx

    def _scale(self) -> float:
        return self._module.head_dim**-0.5

    def _slopes(self, parallel: TensorParallel) -> Tensor | None:
        """By which scores fall with each token of distance, of this rank's heads."""
        return None


class BloomAttention(OwnAttention):
    """A query, a key and a value of each head, one head after the other. Adds what it is given beside."""

    def __call__(self, hidden_states: Tensor, residual: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        out, _nothing = super().__call__(hidden_states)
        return residual + out, None

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        all_TH3D = self._module.query_key_value(hidden_TD).unflatten(-1, (-1, 3, self._module.head_dim))
        return all_TH3D[:, :, 0], all_TH3D[:, :, 1], all_TH3D[:, :, 2]

    def _slopes(self, parallel: TensorParallel) -> Tensor:
        heads = self._module.num_heads  # this rank's
        modeling: Any = sys.modules[type(self._module).__module__]
        slopes = modeling._get_alibi_slopes(heads * parallel.size, self._module.dense.weight.device)
        return slopes[parallel.rank * heads :][:heads].float()


class FalconAttention(OwnAttention):
    """A few queries for each key and value, or one key and value for all."""

    def __init__(self, module: Any, paged: PagedAttention, parallel: TensorParallel):
        super().__init__(module, paged, parallel)
        if module.config.alibi:
            raise UnsupportedModel(
                "Falcon with ALiBi (alibi): transformers adds it once or twice, by the way in which attention is "
                "computed, so there is nothing that answers could be held against",
                field="model",
            )

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self._module
        all_THD = module.query_key_value(hidden_TD).unflatten(-1, (-1, module.head_dim))
        if module.new_decoder_architecture:
            each = module.config.num_attention_heads // module.config.num_kv_heads
            all_TKGD = all_THD.unflatten(1, (-1, each + 2))
            return all_TKGD[:, :, :-2].flatten(1, 2), all_TKGD[:, :, -2], all_TKGD[:, :, -1]
        if module.multi_query:
            return all_THD[:, :-2], all_THD[:, -2:-1], all_THD[:, -1:]
        all_TH3D = all_THD.unflatten(1, (-1, 3))
        return all_TH3D[:, :, 0], all_TH3D[:, :, 1], all_TH3D[:, :, 2]


class GptNeoxJapaneseAttention(OwnAttention):
    """The same; positions turn the first numbers of a head, and the last layer gives out a bias beside."""

    def __call__(self, hidden_states: Tensor, *_: Any, **given: Any) -> tuple[Tensor, None, Tensor | None]:
        return *super().__call__(hidden_states, **given), self._module.dense_bias

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        all_TH3D = self._module.query_key_value(hidden_TD).unflatten(-1, (-1, 3, self._module.head_size))
        return all_TH3D[:, :, 0], all_TH3D[:, :, 1], all_TH3D[:, :, 2]

    def _turned(self, q_THD: Tensor, k_TKD: Tensor, turns: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        size = self._module.rotary_ndims
        q_rot, k_rot = super()._turned(q_THD[..., :size], k_TKD[..., :size], turns)
        return torch.cat((q_rot, q_THD[..., size:]), dim=-1), torch.cat((k_rot, k_TKD[..., size:]), dim=-1)

    def _scale(self) -> float:
        return 1 / self._module.norm_factor


class SeparateAttention(OwnAttention):
    """A projection each for queries, keys and values."""

    output = "out_proj"

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self._module
        q, k, v = (
            project(hidden_TD).unflatten(-1, (-1, module.head_dim))
            for project in (module.q_proj, module.k_proj, module.v_proj)
        )
        return q, k, v


class GptNeoAttention(SeparateAttention):
    """Scores are not scaled."""

    @property
    def _layer(self) -> int:
        return self._module.layer_id

    def _scale(self) -> float:
        return 1.0


class FirstGptAttention(OwnAttention):
    """The first GPT: queries, keys and values side by side. Its module is told no layer: it is known by its path."""

    output = "c_proj"

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> list[Tensor]:
        return [super().__call__(hidden_states)[0]]

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        all_TC = self._module.c_attn(hidden_TD)
        q, k, v = (each.unflatten(-1, (self._module.n_head, -1)) for each in all_TC.chunk(3, dim=-1))
        return q, k, v

    def _scale(self) -> float:
        module = self._module
        return (module.split_size // module.n_head) ** -0.5 if module.scale else 1.0


class MptAttention(OwnAttention):
    """Queries, keys and values side by side, which may be held within bounds."""

    output = "out_proj"

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        module = self._module
        all_TC = module.Wqkv(hidden_TD)
        if module.clip_qkv:
            all_TC = all_TC.clamp(-module.clip_qkv, module.clip_qkv)
        q, k, v = (each.unflatten(-1, (-1, module.head_dim)) for each in all_TC.chunk(3, dim=-1))
        return q, k, v

    def _scale(self) -> float:
        return self._module.softmax_scale

    def _slopes(self, parallel: TensorParallel) -> Tensor:
        module, modeling = self._module, sys.modules[type(self._module).__module__]
        before: Tensor = modeling.build_mpt_alibi_tensor(module.n_heads, 2, device=module.Wqkv.weight.device)  # type: ignore[attr-defined]
        own = module.n_heads // parallel.size
        return -before[parallel.rank * own :][:own, 0, 0].float()


class DifferentialAttention(SeparateAttention):
    """DiffLlama (arXiv 2410.05258): heads come in pairs, of whose outputs one is subtracted, times a number that is
    learnt. A head attends to its keys, with values of two heads side by side."""

    output = "o_proj"

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_TKD, v_TKD = super()._heads(hidden_TD)
        pairs = [half.repeat(1, 2, 1) for half in v_TKD.chunk(2, dim=1)]
        return q_THD, k_TKD, torch.cat(pairs, dim=-1)

    def _output(self, out_THD: Tensor) -> Tensor:
        module = self._module
        exponents = ((a * b).sum(dtype=torch.float32) for a, b in (
            (module.lambda_q1, module.lambda_k1), (module.lambda_q2, module.lambda_k2)))  # fmt: skip
        first, second = (exponent.exp().to(out_THD.dtype) for exponent in exponents)
        of_pairs, subtracted = out_THD.chunk(2, dim=1)
        out = of_pairs - (first - second + module.lambda_init) * subtracted
        return super()._output((1 - module.lambda_init) * module.groupnorm(out))


class DogeAttention(SeparateAttention):
    """Each key has a number that is added to scores, made of the value. It is kept as one number more of the key, by
    which a query has one more as well."""

    output = "o_proj"

    def __init__(self, module: Any, paged: PagedAttention, parallel: TensorParallel):
        super().__init__(module, paged, parallel)
        config = module.config
        if module.keep_window_size < config.max_position_embeddings:
            raise UnsupportedModel(
                f"Doge for {config.max_position_embeddings} tokens (max_position_embeddings) of which a query attends "
                f"to {module.keep_window_size} (keep_window_size): a choice among values is not known",
                field="model",
            )
        if parallel.size > 1:
            raise UnsupportedModel(
                "Doge makes a number of each key out of the values of all heads, which ranks have some of. Run it with "
                "tensor_parallel_size 1.",
                field="tensor_parallel_size",
            )

    def _heads(self, hidden_TD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q_THD, k_TKD, v_TKD = super()._heads(hidden_TD)
        return self._module.q_norm(q_THD), self._module.k_norm(k_TKD), v_TKD

    def _attend(self, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> Tensor:
        module = self._module
        added_TK = torch.exp(module.A * F.softplus(module.dt_proj(v_TKD.flatten(1))))
        k_TKD = torch.cat((k_TKD, added_TK.unsqueeze(-1).to(k_TKD.dtype)), dim=-1)
        unscaled = torch.full_like(q_THD[..., :1], 1 / self._params.scale)
        return super()._attend(torch.cat((q_THD, unscaled), dim=-1), k_TKD, v_TKD)


class InklingAttention(SeparateAttention):
    """Keys and values are convolved, and each query has biases for its nearest keys, a mixture of learnt profiles."""

    output = "o_proj"

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, None]:
        module, size = self._module, self._module.head_dim
        q_THD = module.q_norm(module.q_proj(hidden_states[0]).unflatten(-1, (-1, size)))
        k_TKD = module.k_norm(module.k_sconv(module.k_proj(hidden_states))[0].unflatten(-1, (-1, size)))
        v_TKD = module.v_sconv(module.v_proj(hidden_states))[0].unflatten(-1, (-1, size))
        profiles_RE = module.rel_logits_proj.proj
        mixtures_THR = module.r_proj(hidden_states[0]).unflatten(-1, (-1, len(profiles_RE)))
        if not module.is_sliding and module.config.log_scaling_n_floor is not None:
            scale_T11 = self._growth()
            q_THD, mixtures_THR = ((each.float() * scale_T11).to(each.dtype) for each in (q_THD, mixtures_THR))
        params = replace(self._params, biases=Biases(mixtures_THR, profiles_RE))
        return self._output(self._paged.attend_packed(q_THD, k_TKD, v_TKD, self._layer, params)), None

    def _growth(self) -> Tensor:
        """Scores grow with the positions of queries, from some on: [T,1,1]."""
        config = self._module.config
        seen_T = (self._paged.positions_T + 1).float()
        longer_T = torch.log((seen_T / config.log_scaling_n_floor).clamp(min=1.0))
        return (1.0 + config.log_scaling_alpha * longer_T)[:, None, None]

    def _scale(self) -> float:
        return self._module.scaling


class Inkling2Attention(OwnAttention):
    """The same, with a sink of each query; where all earlier tokens are seen, keys and values are made of inputs of
    their own."""

    def __call__(
        self,
        hidden_states: Tensor,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        **given: Any,
    ) -> tuple[Tensor, None]:
        module, positions = self._module, given["position_ids"]
        of_keys = hidden_states if key_hidden_states is None else key_hidden_states
        of_values = hidden_states if value_hidden_states is None else value_hidden_states
        q_THD = module.q_proj(hidden_states, positions)[0].transpose(0, 1)
        own_pass = {"cache_offset": given.get("cache_offset", 0)}  # each pass through the layer is another layer
        k_TKD = module.k_proj(of_keys, **own_pass)[0].transpose(0, 1)
        v_TKD = module.v_proj(of_values, **own_pass)[0].transpose(0, 1)
        bias = module.relative_position_bias
        mixtures_1THR = bias.linear(hidden_states).unflatten(-1, (-1, len(bias.proj)))
        mixtures_THR = bias.norm(mixtures_1THR, positions)[0]
        params = replace(self._params, biases=Biases(mixtures_THR, bias.proj, module.sink_proj(hidden_states)[0]))
        out_THD = self._paged.attend_packed(q_THD, k_TKD, v_TKD, self._layer, params)
        return module.o_proj(out_THD.flatten(1).unsqueeze(0), hidden_states), None


class JetMoeAttention(OwnAttention):
    """Experts make queries and take outputs; each expert of a token has a query for every key head."""

    def __call__(self, hidden_states: Tensor, *_: Any, **given: Any) -> tuple[Tensor, None, None]:
        module = self._module
        queries, _scores, chosen = module.experts.map(hidden_states)
        keys, values = module.kv_proj(hidden_states[0]).unflatten(-1, (2, -1, module.head_dim)).unbind(1)
        q_TEKD = queries[0].unflatten(-1, (-1, module.head_dim))
        q_THD, keys = self._turned(q_TEKD.flatten(1, 2), keys, given["position_embeddings"])
        # Queries of one key side by side.
        q_TKED = q_THD.view(q_TEKD.shape).transpose(1, 2)
        out_TKED = self._attend(q_TKED.flatten(1, 2), keys, values).view(q_TKED.shape)
        out_1TEC = out_TKED.transpose(1, 2).flatten(2).unsqueeze(0)
        return module.experts.reduce(out_1TEC, chosen), None, None


OWN_WAYS: dict[str, type[OwnAttention]] = {
    "BloomAttention": BloomAttention,
    "DiffLlamaAttention": DifferentialAttention,
    "DogeAttention": DogeAttention,
    "FalconAttention": FalconAttention,
    "GPTNeoSelfAttention": GptNeoAttention,
    "GPTNeoXJapaneseAttention": GptNeoxJapaneseAttention,
    "Inkling2FullAttention": Inkling2Attention,
    "Inkling2LoopFullAttention": Inkling2Attention,
    "Inkling2LoopSlidingAttention": Inkling2Attention,
    "Inkling2SlidingAttention": Inkling2Attention,
    "InklingAttention": InklingAttention,
    "JetMoeAttention": JetMoeAttention,
    "MptAttention": MptAttention,
    "XGLMAttention": SeparateAttention,
}
"""Class of a module of transformers -> ours."""


def patch_mpt(model: Any) -> None:
    """Let MPT go on without a mask."""
    if type(model).__name__ != "MptForCausalLM":
        return
    steepest = model.config.attn_config.alibi_bias_max
    if steepest != 8:
        raise UnsupportedModel(
            f"MPT with slopes of {steepest} bits (alibi_bias_max): transformers computes it with 8, so there is "
            "nothing that answers could be held against",
            field="model",
        )
    modeling: Any = sys.modules[type(model).__module__]
    make = modeling.create_causal_mask
    if getattr(make, "may_make_none", False):
        return

    def mask_or_nothing(*args: Any, **given: Any) -> Tensor:
        mask = make(*args, **given)
        return torch.zeros(1, 1, 1, 1) if mask is None else mask

    # For the whole process, which is right for any other model: a mask is what it was.
    mask_or_nothing.may_make_none = True  # type: ignore[attr-defined]
    modeling.create_causal_mask = mask_or_nothing


def is_first_gpt(module: Any) -> bool:
    """Its class has a name that others may have."""
    return type(module).__name__ == "Attention" and type(module).__module__.endswith(".openai.modeling_openai")
