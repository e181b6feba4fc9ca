"""What transformers does not say about a family of models, or says for unpacked batches only, in one place."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TENSOR_PARALLEL_PLANS: dict[str, dict[str, str]] = {
    # transformers has no plan for it. Experts are cut along their inner dimension, like any MLP: every rank holds a
    # slice of every expert, so no rank waits for the one with the popular experts.
    "gpt_oss": {
        "model.layers.*.self_attn": "sinks",
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.mlp.experts": "expert_columns",
    },
    # transformers' plan is for the multimodal model's paths. Experts keep gate and up side by side, which no even cut
    # divides: they stay whole on every rank; the shared expert and the heads are cut.
    "llama4_text": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.feed_forward.gate_proj": "colwise",
        "model.layers.*.feed_forward.up_proj": "colwise",
        "model.layers.*.feed_forward.down_proj": "rowwise",
        "model.layers.*.feed_forward.shared_expert.gate_proj": "colwise",
        "model.layers.*.feed_forward.shared_expert.up_proj": "colwise",
        "model.layers.*.feed_forward.shared_expert.down_proj": "rowwise",
    },
    # transformers' plan computes all heads on every rank, because the norms of queries and keys go over all heads. Ours
    # cuts the heads, and the ranks add up what the norm needs: one number per token.
    "olmo3": {
        "model.layers.*.self_attn.q_proj": "colwise",
        "model.layers.*.self_attn.k_proj": "colwise",
        "model.layers.*.self_attn.v_proj": "colwise",
        "model.layers.*.self_attn.o_proj": "rowwise",
        "model.layers.*.self_attn.q_norm": "norm_over_ranks",
        "model.layers.*.self_attn.k_norm": "norm_over_ranks",
        "model.layers.*.mlp.gate_proj": "colwise",
        "model.layers.*.mlp.up_proj": "colwise",
        "model.layers.*.mlp.down_proj": "rowwise",
    },
}
"""model_type -> module path -> style, where transformers states no plan, or one that is not ours. Styles are explained
in `parallel.py`."""


LAYER_FROM_CALL = {"Zamba2Attention"}
"""Modules that are told with each call which layer they are: one block of weights stands at several depths."""


def take_layer_from_call(module: Any) -> None:
    """Let the module's `layer_idx` be the one it was last called with."""
    if type(module).__name__ in LAYER_FROM_CALL:

        def note(called: Any, _args: Any, kwargs: Any) -> None:
            called.layer_idx = kwargs["layer_idx"]

        module.register_forward_pre_hook(note, with_kwargs=True)


def take_query_scale(module: Any) -> Callable[[Tensor], Tensor] | None:
    """What queries of an attention module are multiplied by, given their positions; None: nothing.

    Llama 4 scales the queries of layers without rope by their position, which its module takes to be the place in the
    batch. Tokens here are packed, so the module is told to leave that to us.
    """
    if not getattr(module, "attn_temperature_tuning", False) or module.use_rope:
        return None
    module.attn_temperature_tuning = False

    def scale(positions: Tensor) -> Tensor:
        return torch.log1p(torch.floor((positions.float() + 1.0) / module.floor_scale)) * module.attn_scale + 1.0

    return scale
