"""What transformers does not say about a family of models, in one place."""

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
}
"""model_type -> module path -> style, where transformers states no plan. Styles are explained in `parallel.py`."""
