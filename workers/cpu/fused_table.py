"""Which modules of transformers we compute in one call, and with which constants.

A class of modules is named here only if its forward pass is just what our call computes. The test
`tests/workers/cpu/test_fused.py` watches every tested family and compares what it saw with this table. A class that is
not named runs as it is written.
"""

from collections.abc import Callable
from math import inf
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from ...kernels.routing import Routing, Scoring
from ...kernels.tokenwise import Activation, Gating, Rotary


class NormKind(NamedTuple):
    """See `kernels.tokenwise.Norm`."""

    offset: float = 0.0  # added to the weight
    rounds_first: bool = False
    is_centered: bool = False


LLAMA_NORM = NormKind(rounds_first=True)
FLOAT_NORM = NormKind()  # rounded once, after the product with the weight
GEMMA_NORM = NormKind(offset=1.0)

NORMS: dict[str, NormKind] = {
    **dict.fromkeys(
        (
            "BailingHybridRMSNorm", "BambaRMSNorm", "DeepseekV32RMSNorm", "DeepseekV3RMSNorm", "Exaone4RMSNorm",
            "FalconH1RMSNorm", "Glm4MoeRMSNorm", "Glm5NextTextRMSNorm", "GlmMoeDsaRMSNorm",
            "GraniteMoeHybridRMSNorm", "JambaRMSNorm", "KimiLinearRMSNorm", "Lfm2MoeRMSNorm", "Lfm2RMSNorm",
            "Lfm3RMSNorm", "Llama4TextRMSNorm", "LlamaRMSNorm", "MambaRMSNorm", "MiMoV2FlashRMSNorm",
            "MiniMaxM2RMSNorm", "MiniMaxRMSNorm", "Ministral3RMSNorm", "MinistralRMSNorm", "Mistral4RMSNorm",
            "MistralLarge4RMSNorm", "MistralRMSNorm", "MixtralRMSNorm", "MllamaTextRMSNorm", "Phi3RMSNorm",
            "Qwen2RMSNorm", "Qwen3MoeRMSNorm", "Qwen3RMSNorm", "SmolLM3RMSNorm", "Zamba2RMSNorm", "ZayaRMSNorm",
        ),
        LLAMA_NORM,
    ),
    **dict.fromkeys(
        (
            "AfmoeRMSNorm", "DeepseekV4RMSNorm", "Gemma3nRMSNorm", "Gemma4RMSNorm", "GptOssRMSNorm",
            "MuseGlimmerRMSNorm", "NemotronHRMSNorm", "Olmo2RMSNorm", "Olmo3RMSNorm", "OlmoHybridRMSNorm",
        ),
        FLOAT_NORM,
    ),
    **dict.fromkeys(
        (
            "Gemma2RMSNorm", "Gemma3RMSNorm", "MiniMaxM3VLRMSNorm", "MuseGlimmerTextCenteredRMSNorm",
            "Qwen3NextRMSNorm", "Qwen3_5MoeRMSNorm", "Qwen3_5RMSNorm", "RecurrentGemmaRMSNorm", "Step3p7RMSNorm",
        ),
        GEMMA_NORM,
    ),
    "Cohere2LayerNorm": NormKind(is_centered=True),
}  # fmt: skip
"""Class of a norm -> what it computes."""


ACTIVATIONS: dict[str, Activation] = {
    "SiLU": Activation.SILU, "SiLUActivation": Activation.SILU, "GELUActivation": Activation.GELU,
    "GELUTanh": Activation.GELU_TANH, "NewGELUActivation": Activation.GELU_TANH,
    "FastGELUActivation": Activation.GELU_TANH, "AccurateGELUActivation": Activation.GELU_TANH,
}  # fmt: skip
"""Class of an activation -> what it computes. A config names it, so a class of MLPs may have any."""


class GatingKind(NamedTuple):
    """How gates act, by the names of the numbers that say so: see `kernels.tokenwise.Gating`."""

    limit: str | None = None
    is_cut_after: bool = False
    by_turns: bool = False
    steepness: str | None = None
    added: float = 0.0

    def of(self, module: Any, activation: Activation) -> Gating:
        limit = inf if self.limit is None else getattr(module, self.limit)
        steepness = 1.0 if self.steepness is None else getattr(module, self.steepness)
        return Gating(activation, limit, self.is_cut_after, self.by_turns, steepness, self.added)


GATED_EXPERTS: dict[str, GatingKind] = {
    "DeepseekV4Experts": GatingKind("limit"),
    "Glm5NextTextExperts": GatingKind("swiglu_limit"),
    "GptOssExperts": GatingKind("limit", by_turns=True, steepness="alpha", added=1.0),
    "MiniMaxM3VLExperts": GatingKind("swiglu_limit", steepness="swiglu_alpha", added=1.0),
    "Step3p7Experts": GatingKind("limit", is_cut_after=True),
}
"""Class of experts whose gates are not transformers' usual ones -> what they do. Without an `act_fn` it is SiLU."""


class GatedMLP(NamedTuple):
    """down(activation(gate(x)) * up(x)), by the names of its parts."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    activation: str | None = "act_fn"  # None: always SiLU
    merged: str | None = None  # gate and up in one product, where they are
    gating: GatingKind = GatingKind()
    is_plain: Callable[[Any], bool] = lambda module: True  # whether this one does nothing else


GATED_MLPS: dict[str, GatedMLP] = {
    **dict.fromkeys(
        (
            "AfmoeMLP", "BailingHybridMLP", "BambaMLP", "Cohere2MLP", "DeepseekV32MLP", "DeepseekV3MLP",
            "Exaone4MLP", "Gemma2MLP", "Gemma3MLP", "Gemma4TextMLP", "Glm4MoeMLP", "GlmMoeDsaMLP", "JambaMLP",
            "KimiLinearMLP", "LlamaMLP", "MiMoV2FlashMLP", "Ministral3MLP", "MinistralMLP", "Mistral4MLP",
            "MistralLarge4TextMLP", "MistralMLP", "MllamaTextMLP", "MuseGlimmerTextMLP", "Olmo2MLP", "Olmo3MLP",
            "OlmoHybridMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3MoeMLP", "Qwen3NextMLP", "Qwen3_5MLP", "Qwen3_5MoeMLP",
            "RecurrentGemmaMlp", "SmolLM3MLP",
        ),
        GatedMLP(),
    ),
    "Gemma3nTextMLP": GatedMLP(is_plain=lambda mlp: mlp.activation_sparsity == 0),  # the others drop small gates
    "Llama4TextMLP": GatedMLP(activation="activation_fn"),
    "DeepseekV4MLP": GatedMLP(gating=GatingKind("limit")),
    "Glm5NextTextMLP": GatedMLP(gating=GatingKind("swiglu_limit")),
    "MiniMaxM3VLDenseMLP": GatedMLP(
        merged="gate_up_proj", activation=None, gating=GatingKind("swiglu_limit", steepness="swiglu_alpha", added=1.0)
    ),
    "Step3p7MLP": GatedMLP(gating=GatingKind("limit", is_cut_after=True)),
    "Phi3MLP": GatedMLP(merged="gate_up_proj", activation="activation_fn"),
    **dict.fromkeys(("Lfm2MLP", "Lfm2MoeMLP", "Lfm3MLP"), GatedMLP("w1", "w3", "w2", activation=None)),
}  # fmt: skip
"""Class of a gated MLP -> its parts."""


def _plain_logits(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden.to(router.weight.dtype), router.weight)


def _wide_logits(router: Any, hidden: Tensor) -> Tensor:
    return F.linear(hidden.float(), router.weight.float())


class RouterKind(NamedTuple):
    """What a router makes of its logits, by the names of the numbers that say so: see `kernels.routing.Routing`. What
    it is called with beside hidden states is its bias."""

    scoring: Scoring
    logits: Callable[[Any, Tensor], Tensor] = _plain_logits  # [T,D] -> [T,E]
    most: str = "top_k"
    is_of_chosen: bool = False
    rounds: bool = False
    groups: tuple[str, str] | None = None  # how many there are, and of how many experts are chosen
    normalizes: str | bool = True  # whether, or which flag says so
    least: float = 0.0
    scale: str | None = None
    dtype: torch.dtype | None = None
    bias: str | None = None
    scale_of_experts: str | None = None
    is_plain: Callable[[Any], bool] = lambda router: True  # whether this one does nothing else

    def of(self, router: Any) -> Routing:
        number = lambda name, default: default if name is None else getattr(router, name)  # noqa: E731
        of_each = lambda name: None if name is None else getattr(router, name).detach().float().contiguous()  # noqa: E731
        groups, most_groups = (1, 1) if self.groups is None else (getattr(router, name) for name in self.groups)
        normalizes = self.normalizes if isinstance(self.normalizes, bool) else getattr(router, self.normalizes)
        return Routing(
            attrgetter(self.most)(router), self.scoring, self.is_of_chosen, self.rounds, groups, most_groups,
            self.least if normalizes else None, number(self.scale, 1.0), self.dtype,
            of_each(self.bias), of_each(self.scale_of_experts),
        )  # fmt: skip


OF_CHOSEN = RouterKind(Scoring.SOFTMAX, is_of_chosen=True, normalizes=False)
OF_GROUPS = RouterKind(
    Scoring.SIGMOID, _wide_logits, groups=("num_group", "topk_group"), normalizes="norm_topk_prob", least=1e-20,
    scale="routed_scaling_factor", dtype=torch.float32, bias="e_score_correction_bias",
)  # fmt: skip
WITH_BIAS = RouterKind(Scoring.SIGMOID, dtype=torch.float32, bias="e_score_correction_bias")
SHARES_OF_ALL = RouterKind(Scoring.SOFTMAX, dtype=torch.float32)

ROUTERS: dict[str, RouterKind] = {
    **dict.fromkeys(
        (
            "BailingHybridTopkRouter", "DeepseekV32TopkRouter", "DeepseekV3TopkRouter", "Glm4MoeTopkRouter",
            "Glm5NextTextTopkRouter", "GlmMoeDsaTopkRouter", "KimiLinearTopkRouter", "MiMoV2FlashTopkRouter",
            "NemotronHTopkRouter",
        ),
        OF_GROUPS,
    ),
    "Mistral4TopkRouter": OF_GROUPS._replace(
        scoring=Scoring.SOFTMAX, logits=_plain_logits, rounds=True, dtype=None, bias=None
    ),
    "MistralLarge4TextTopkRouter": OF_GROUPS._replace(scoring=Scoring.SOFTMAX, normalizes=True, bias=None),
    **dict.fromkeys(("MiniMaxM3VLTopKRouter", "Step3p7TopKRouter"), WITH_BIAS),
    "MiniMaxM2TopKRouter": WITH_BIAS._replace(bias=None),
    "AfmoeTokenChoiceRouter": RouterKind(
        Scoring.SIGMOID, lambda router, hidden: router.gate(hidden), least=1e-20, scale="route_scale",
        dtype=torch.float32,
    ),
    "Lfm2MoeTopKRouter": RouterKind(
        Scoring.SIGMOID, rounds=True, normalizes="norm_topk_prob", least=1e-6, scale="routed_scaling_factor"
    ),
    "DeepseekV4TopKRouter": RouterKind(
        Scoring.SQRT_SOFTPLUS, rounds=True, least=1e-20, scale="routed_scaling_factor",
        bias="e_score_correction_bias",
        is_plain=lambda router: type(router.score_fn).__name__ == "SqrtSoftplusActivation",
    ),
    **dict.fromkeys(("MiniMaxTopKRouter", "MixtralTopKRouter"), SHARES_OF_ALL),
    **dict.fromkeys(
        ("Qwen3MoeTopKRouter", "Qwen3NextTopKRouter"), SHARES_OF_ALL._replace(normalizes="norm_topk_prob", dtype=None)
    ),
    "Qwen3_5MoeTopKRouter": SHARES_OF_ALL._replace(dtype=None),
    "JambaTopKRouter": SHARES_OF_ALL._replace(normalizes=False, dtype=None),
    "Gemma4TextRouter": SHARES_OF_ALL._replace(
        logits=lambda router, hidden: router.proj(router.norm(hidden) * router.scale * router.scalar_root_size),
        most="config.top_k_experts", scale_of_experts="per_expert_scale",
    ),
    "GraniteMoeHybridTopKRouter": OF_CHOSEN,
    "GptOssTopKRouter": OF_CHOSEN._replace(
        logits=lambda router, hidden: F.linear(hidden, router.weight, router.bias)
    ),
}  # fmt: skip
"""Class of a router -> how it chooses experts and weighs them."""


class AttentionKind(NamedTuple):
    """Attention of heads that are projected, normed where that is named, rotated by their position and attended to."""

    rotary: Rotary = Rotary.HALVES
    angles_per_head: int = 1  # how often a cosine is used in a head; 2 where both halves share theirs
    rotates: Callable[[Any], bool] = lambda module: True  # whether this layer does, if it is given angles
    norms: tuple[str, str] | None = None  # of queries and of keys, where the layer has them
    out: str = "o_proj"
    merged: str | None = None  # queries, keys and values in one product, where they are
    has_query_factor: bool = False  # whether its configuration has one: see `fused_modules.QueryFactor`


QK_NORMS = "q_norm", "k_norm"
QK_LAYERNORMS = "q_layernorm", "k_layernorm"

ATTENTIONS: dict[str, AttentionKind] = {
    **dict.fromkeys(
        (
            "BambaAttention", "Gemma2Attention", "GraniteMoeHybridAttention", "LlamaAttention", "MiniMaxAttention",
            "MinistralAttention", "MistralAttention", "MixtralAttention", "MllamaTextSelfAttention", "Qwen2Attention",
        ),
        AttentionKind(),
    ),
    "Ministral3Attention": AttentionKind(has_query_factor=True),
    "Phi3Attention": AttentionKind(merged="qkv_proj"),
    **dict.fromkeys(
        (
            "Gemma3Attention", "Glm4MoeAttention", "MiniMaxM2Attention", "MiniMaxM3VLAttention", "Qwen3Attention",
            "Qwen3MoeAttention",
        ),
        AttentionKind(norms=QK_NORMS),
    ),
    **dict.fromkeys(("JambaAttention", "NemotronHAttention"), AttentionKind(Rotary.NONE)),
    **dict.fromkeys(("Lfm2Attention", "Lfm2MoeAttention"), AttentionKind(norms=QK_LAYERNORMS, out="out_proj")),
    "Cohere2Attention": AttentionKind(Rotary.PAIRS, rotates=lambda layer: layer.sliding_window is not None),
    "Exaone4Attention": AttentionKind(
        norms=QK_NORMS, rotates=lambda layer: layer.sliding_window is None or layer.is_sliding
    ),
    "GptOssAttention": AttentionKind(angles_per_head=2),
    **dict.fromkeys(("Olmo2Attention", "Olmo3Attention", "OlmoHybridAttention"), AttentionKind(norms=QK_NORMS)),
    "SmolLM3Attention": AttentionKind(rotates=lambda layer: bool(layer.use_rope)),
}  # fmt: skip
"""Class of attention modules -> what they do to queries and keys before our attention."""


class StreamsKind(NamedTuple):
    """Residual streams that become one, by the names of what says how: see `kernels/streams/protocol.py`."""

    product: str = "fn"
    base: str = "base"
    scale: str = "scale"
    eps: str = "hc_eps"
    rounds: str | None = "hc_sinkhorn_iters"  # None: they become one for good


STREAMS: dict[str, StreamsKind] = {
    **dict.fromkeys(("DeepseekV4HyperConnection", "Glm5NextTextHyperConnection"), StreamsKind()),
    "DeepseekV4HyperHead": StreamsKind("hc_fn", "hc_base", "hc_scale", "eps", rounds=None),
}
"""Class of what mixes residual streams -> its parts."""


class DecoderLayerKind(NamedTuple):
    """x + after_mixer(mixer(before_mixer(x))), and of that the same with an MLP, by the names of its parts."""

    mixers: tuple[str, ...] = ("self_attn",)  # of which a layer has one
    before_mixer: str | None = "input_layernorm"
    after_mixer: str | None = None
    mlp: str = "mlp"
    before_mlp: str | None = "post_attention_layernorm"
    after_mlp: str | None = None
    added_scale: str | None = None  # what scales what is added to x
    gives_weights: bool = False  # a pair: beside x the weights of attention
    is_plain: Callable[[Any], bool] = lambda layer: True  # whether this one does nothing else


DECODER_LAYERS: dict[str, DecoderLayerKind] = {
    **dict.fromkeys(
        (
            "BailingHybridDecoderLayer", "DeepseekV32DecoderLayer", "DeepseekV3DecoderLayer", "GptOssDecoderLayer",
            "Glm4MoeDecoderLayer", "KimiLinearDecoderLayer", "LlamaDecoderLayer", "MiMoV2FlashDecoderLayer",
            "MiniMaxM2DecoderLayer", "MiniMaxM3VLDecoderLayer", "Ministral3DecoderLayer", "MinistralDecoderLayer",
            "Mistral4DecoderLayer", "MistralDecoderLayer", "MixtralDecoderLayer", "MllamaSelfAttentionDecoderLayer",
            "Phi3DecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "Qwen3MoeDecoderLayer", "SmolLM3DecoderLayer",
            "Step3p7DecoderLayer",
        ),
        DecoderLayerKind(),
    ),
    **dict.fromkeys(
        ("Gemma2DecoderLayer", "Gemma3DecoderLayer", "MuseGlimmerTextDecoderLayer"),
        DecoderLayerKind(
            after_mixer="post_attention_layernorm",
            before_mlp="pre_feedforward_layernorm",
            after_mlp="post_feedforward_layernorm",
        ),
    ),
    "AfmoeDecoderLayer": DecoderLayerKind(
        after_mixer="post_attention_layernorm", before_mlp="pre_mlp_layernorm", after_mlp="post_mlp_layernorm"
    ),
    **dict.fromkeys(
        ("Exaone4DecoderLayer", "Olmo2DecoderLayer", "Olmo3DecoderLayer", "OlmoHybridAttentionDecoderLayer"),
        DecoderLayerKind(
            before_mixer=None,
            after_mixer="post_attention_layernorm",
            before_mlp=None,
            after_mlp="post_feedforward_layernorm",
        ),
    ),
    "OlmoHybridLinearAttentionDecoderLayer": DecoderLayerKind(mixers=("linear_attn",)),
    **dict.fromkeys(
        ("Qwen3NextDecoderLayer", "Qwen3_5DecoderLayer", "Qwen3_5MoeDecoderLayer"),
        DecoderLayerKind(mixers=("linear_attn", "self_attn")),
    ),
    **dict.fromkeys(
        ("JambaAttentionDecoderLayer", "JambaMambaDecoderLayer"),
        DecoderLayerKind(mixers=("mamba", "self_attn"), mlp="feed_forward", before_mlp="pre_ff_layernorm"),
    ),
    "BambaDecoderLayer": DecoderLayerKind(
        mixers=("mamba", "self_attn"), mlp="feed_forward", before_mlp="pre_ff_layernorm", gives_weights=True
    ),
    "GraniteMoeHybridDecoderLayer": DecoderLayerKind(
        mixers=("mamba", "self_attn"),
        mlp="shared_mlp",
        added_scale="residual_multiplier",
        is_plain=lambda layer: not layer.has_experts,
    ),
    **dict.fromkeys(
        ("Lfm2DecoderLayer", "Lfm2MoeDecoderLayer"),
        DecoderLayerKind(
            mixers=("conv", "self_attn"), before_mixer="operator_norm", mlp="feed_forward", before_mlp="ffn_norm"
        ),
    ),
    "Lfm3DecoderLayer": DecoderLayerKind(
        mixers=("conv", "self_attn"),
        before_mixer="operator_norm",
        after_mixer="post_operator_norm",
        mlp="feed_forward",
        before_mlp="ffn_norm",
        after_mlp="post_ffn_norm",
    ),
}  # fmt: skip
"""Class of a decoder layer -> its parts."""
