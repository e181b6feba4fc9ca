"""From a model's config to the kinds of its layers: what each keeps, and how far back it looks.

This is where the conventions of different models end. Everything behind it counts windows in visible tokens, the
query itself included, as transformers does for the families below. A family is named here only where its config says
things in words of its own: the sizes of its states, mostly.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

from ...errors import InvalidSetting, UnsupportedModel
from ...kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from ...kvcache.spec import LayerSpec, StateTensor

FLOAT32_BYTES = 4  # recurrent states are kept in float32 for a model of any dtype

REACH_OF: dict[str, Callable[[Any], Reach]] = {
    "full_attention": lambda config: Full(),
    "sliding_attention": lambda config: Sliding(config.sliding_window),
    "chunked_attention": lambda config: Chunked(config.attention_chunk_size),
    "cross_attention": lambda config: Cross(),
    "hybrid": lambda config: Full(),
    "hybrid_sliding": lambda config: Sliding(config.sliding_window),
    "attention": lambda config: Full(),
    "indexed_attention": lambda config: Full(),  # of all tokens each query attends to some: any may be chosen
    "minimax_m3_sparse": lambda config: Full(),
}
"""Kinds of `config.layer_types` that attend, and how far back."""

HAS_STATE = {"linear_attention", "mamba", "conv", "hybrid", "hybrid_sliding"}

KEEPS_NOTHING = {"mlp", "moe"}


def read_layers(config: Any, tensor_parallel_size: int, item_bytes: int) -> tuple[LayerSpec, ...]:
    """The layers of a transformers text config, with one rank's share of heads and states.

    Raises `UnsupportedModel` for a kind of layer that is not known, `InvalidSetting` when heads do not divide.
    """
    kinds = _layer_types(config)
    sources = _sources(config, kinds)
    specs: list[LayerSpec] = []
    for index, kind in enumerate(kinds):
        if kind in KEEPS_NOTHING:
            continue
        if kind not in REACH_OF and kind not in HAS_STATE:
            known = ", ".join([*REACH_OF, *sorted(HAS_STATE - set(REACH_OF))])
            raise UnsupportedModel(f"{config.model_type} has layers of kind {kind!r}; known are {known}", field="model")
        if kind in REACH_OF:
            layer = layer_config(config, index)
            specs.append(_attention(layer, index, REACH_OF[kind](layer), tensor_parallel_size, item_bytes, sources))
        if kind in HAS_STATE:
            specs.append(LayerSpec(index, State(), state=_state(config, index, tensor_parallel_size, item_bytes)))
    return tuple(specs)


ENDLESS_TOKENS = 1 << 20


def positions_of(config: Any) -> int:
    """Tokens of the longest text. A model of states and windows names no bound, and has none: an engine needs one."""
    return getattr(config, "max_position_embeddings", None) or ENDLESS_TOKENS


def complete_layer_types(config: Any, fields: Mapping[str, Any]) -> str | None:
    """Fill in layer types that a model's config.json (`fields`) should have and has not. Returns what was done.

    Ministral-8B-Instruct-2410 is "Ragged (128k,32k,32k,32k)" by its model card, and its config.json has a window only,
    out of which transformers makes a model that slides in every layer.
    """
    if "layer_types" in fields or any(fields.get(name) != value for name, value in MINISTRAL_8B.items()):
        return None
    config.layer_types = [
        "sliding_attention" if index % 4 else "full_attention" for index in range(config.num_hidden_layers)
    ]
    return (
        "config.json has no layer_types; by the model card of Ministral-8B-Instruct-2410 every fourth layer, from the "
        f"first on, sees everything, the others the last {config.sliding_window} tokens"
    )


def told_prefix(config: Any) -> str | None:
    """What is said of models that were trained on prompts whose tokens see each other both ways. None: nothing."""
    if not getattr(config, "prefix_lm", False):
        return None
    return (
        "config.json has prefix_lm: tokens of an instruction may have seen each other both ways in training. Here each "
        "token sees those before it, as in transformers without token_type_ids"
    )


MINISTRAL_8B = {"num_hidden_layers": 36, "hidden_size": 4096, "vocab_size": 131072, "sliding_window": 32768}
"""By which its config.json is known: it has no name of its own."""


def local_kv_heads(config: Any, tensor_parallel_size: int) -> int:
    """Key and value heads on one rank. With more ranks than heads, each head lives on several ranks."""
    heads, kv_heads = config.num_attention_heads, kv_heads_of(config)
    divides = kv_heads % tensor_parallel_size == 0 or tensor_parallel_size % kv_heads == 0
    if heads % tensor_parallel_size or not divides:
        raise InvalidSetting(
            f"tensor_parallel_size {tensor_parallel_size} does not divide the model's {heads} query heads and "
            f"{kv_heads} key-value heads. Choose a size that divides the query heads, and divides the key-value "
            "heads or is a multiple of them.",
            field="tensor_parallel_size",
            asked=tensor_parallel_size,
            query_heads=heads,
            kv_heads=kv_heads,
        )
    return max(1, kv_heads // tensor_parallel_size)


def told_copies(own: Sequence[LayerSpec], alone: Sequence[LayerSpec], ranks: int) -> str | None:
    """What it costs that heads and latents which do not divide among the ranks are on several of them. None: nothing.

    own: one rank's layers. alone: those of one rank that has no others"""
    kept, least = (
        sum(layer.token_bytes for layer in layers if layer.shares is None and layer.reach.keeps_tokens)
        for layers in (own, alone)
    )
    if not least or ranks * kept == least:
        return None
    return (
        f"keys and values of a token take {ranks * kept / least:.3g} times the memory on {ranks} ranks together that "
        "they take on one: what does not divide among so many (key-value heads, latents) is copied"
    )


def kv_heads_of(config: Any) -> int:
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


def _layer_types(config: Any) -> list[str]:
    """As the config lists them; configs without a list have one kind throughout, or name the layers that differ."""
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        kinds = list(layer_types[: config.num_hidden_layers])
        further = FURTHER_PASSES.get(config.model_type)
        return kinds if further is None else kinds + further(config, kinds)
    cross = getattr(config, "cross_attention_layers", None) or ()
    has_window = getattr(config, "sliding_window", None) and config.model_type not in WITHOUT_WINDOW
    kind = "sliding_attention" if has_window else "full_attention"
    return ["cross_attention" if n in cross else kind for n in range(config.num_hidden_layers)]


WITHOUT_WINDOW = {"moshi"}
"""Families whose layers see all, whatever window their config names: it is as long as their longest text."""


def _dory_passes(config: Any, kinds: list[str]) -> list[str]:
    """Some layers run several times for each token, and attend to what the same pass had of earlier tokens."""
    passes = config.n_recurrent_loops
    if passes > 1 and config.recurrent_kv_cache_mode != "per_loop":
        raise UnsupportedModel(
            f"{config.model_type} with recurrent_kv_cache_mode {config.recurrent_kv_cache_mode!r} has earlier passes "
            "read what the last pass has kept, so its answers depend on how a prompt is cut into steps. Set it to "
            "'per_loop' in config.json, which keeps keys and values of each pass.",
            field="model",
        )
    first = config.n_input_layers
    return kinds[first : first + config.n_recurrent_layers] * (passes - 1)


FURTHER_PASSES: dict[str, Callable[[Any, list[str]], list[str]]] = {"dory": _dory_passes}
"""model_type -> kinds of the layers that run once more. Each pass is a layer here, behind all others, as transformers
numbers them."""


def layer_config(config: Any, index: int) -> Any:
    """The config as one layer sees it: some models have layers of unequal head sizes, or counts of heads."""
    layers = getattr(config, "per_layer_config", None)
    is_further_pass = index >= config.num_hidden_layers  # of layers that are all alike
    layer = config if layers is None or is_further_pass else layers[index]
    own = LAYERS_OF.get(config.model_type)
    return layer if own is None else own(layer, config.layer_types[index])


def _mimo_v2(layer: Any, kind: str) -> Any:
    """Twice the key-value heads where a window is."""
    if kind != "sliding_attention":
        return layer
    own = copy(layer)
    own.num_key_value_heads = 2 * layer.num_key_value_heads
    return own


LAYERS_OF: dict[str, Callable[[Any, str], Any]] = {"mimo_v2_flash": _mimo_v2}
"""model_type -> what a layer of a kind has of its own that the config does not say."""


def index_key_size(config: Any, index: int) -> int:
    """Numbers that a layer keeps of each token to choose by; 0 if it attends to all, or to what another has chosen."""
    kinds = dict(enumerate(getattr(config, "layer_types", None) or ()))
    if kinds.get(index) not in ("indexed_attention", "minimax_m3_sparse"):
        return 0
    if config.model_type == "qwen4_exp_text":
        return config.indexer_head_dim
    indexers = getattr(config, "indexer_types", None)
    return config.index_head_dim if indexers is None or indexers[index] == "full" else 0


def _sources(config: Any, kinds: list[str]) -> dict[int, int]:
    """Layers that own no keys and values, and the one they read: the last before them of their kind that does."""
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    first = len(kinds) - shared
    last_of = {kind: index for index, kind in enumerate(kinds[:first])}
    return {index: last_of[kinds[index]] for index in range(first, len(kinds))}


def _attention(
    config: Any, index: int, reach: Reach, ranks: int, item_bytes: int, sources: Mapping[int, int]
) -> LayerSpec:
    shares = sources.get(index)
    beside = index_key_size(config, index) * item_bytes
    if getattr(config, "kv_lora_rank", None):  # one latent for all heads, on every rank
        RankShare(ranks, item_bytes).part(config.num_attention_heads, "query heads")
        width = config.kv_lora_rank + config.qk_rope_head_dim
        return LayerSpec(index, reach, 1, width, 0, item_bytes, beside, shares=shares)
    head = (
        getattr(config, "attention_head_dim", None)
        or getattr(config, "head_dim", None)
        or config.hidden_size // config.num_attention_heads
    )
    value = getattr(config, "v_head_dim", None) or head
    return LayerSpec(index, reach, local_kv_heads(config, ranks), head, value, item_bytes, beside, shares=shares)


# -- states ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one rank has of sizes that are divided among ranks."""

    ranks: int
    item_bytes: int
    model: str = "the model"  # for errors
    layer: int = 0  # whose state it is, where layers have unequal ones

    def part(self, size: int, what: str) -> int:
        """Raises `InvalidSetting` if the ranks do not divide it."""
        if size % self.ranks:
            self._refuse(size, what)
        return size // self.ranks

    def kv_heads(self, heads: int) -> int:
        """With more ranks than heads, each head lives on several ranks."""
        if heads % self.ranks and self.ranks % heads:
            self._refuse(heads, "key-value heads")
        return max(1, heads // self.ranks)

    def _refuse(self, size: int, what: str) -> None:
        raise InvalidSetting(
            f"tensor_parallel_size {self.ranks} does not divide the {size} {what} of {self.model}",
            field="tensor_parallel_size",
            asked=self.ranks,
        )

    def conv(self, channels: int, kernel: int) -> StateTensor:
        """The last inputs of a causal convolution, one fewer than its kernel is long."""
        return StateTensor((channels, kernel - 1), self.item_bytes)

    def mamba2(self, heads: int, head_dim: int, groups: int, state: int, kernel: int) -> tuple[StateTensor, ...]:
        """Heads are split; the two projections that they share in groups stay whole where groups are too few."""
        own = self.part(heads, "state heads")
        shared = 2 * (groups // self.ranks if groups % self.ranks == 0 else groups) * state
        return (
            self.conv(own * head_dim + shared, kernel),
            StateTensor((own, state, head_dim), FLOAT32_BYTES),
        )

    def delta(self, key_heads: int, key: int, value_heads: int, value: int, kernel: int) -> tuple[StateTensor, ...]:
        keys, values = self.part(key_heads, "key heads of states"), self.part(value_heads, "value heads of states")
        return (
            self.conv(2 * keys * key + values * value, kernel),
            StateTensor((values, key, value), FLOAT32_BYTES),
        )


def _usual_mamba2(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return share.mamba2(c.mamba_n_heads, c.mamba_d_head, c.mamba_n_groups, c.mamba_d_state, c.mamba_d_conv)


def _nemotron_h(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return share.mamba2(c.mamba_num_heads, c.mamba_head_dim, c.n_groups, c.ssm_state_size, c.conv_kernel)


def _zamba2(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return share.mamba2(c.n_mamba_heads, c.mamba_headdim, c.mamba_ngroups, c.mamba_d_state, c.mamba_d_conv)


def _plain_mamba2(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return share.mamba2(c.num_heads, c.head_dim, c.n_groups, c.state_size, c.conv_kernel)


def _plain_mamba(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    channels = share.part(c.intermediate_size, "channels of states")
    return share.conv(channels, c.conv_kernel), StateTensor((channels, c.state_size), FLOAT32_BYTES)


def _gated_linear_recurrence(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    share.part(c.num_attention_heads, "heads of gates")
    channels = share.part(c.lru_width, "channels of states")
    return share.conv(channels, c.conv1d_width), StateTensor((channels,), FLOAT32_BYTES)


def _mamba1(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    channels = share.part(c.mamba_expand * c.hidden_size, "channels of states")
    return share.conv(channels, c.mamba_d_conv), StateTensor((channels, c.mamba_d_state), FLOAT32_BYTES)


def _lightning(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    return (StateTensor((share.part(c.num_attention_heads, "state heads"), head, head), FLOAT32_BYTES),)


def _gated_delta_net(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return share.delta(
        c.linear_num_key_heads, c.linear_key_head_dim, c.linear_num_value_heads, c.linear_value_head_dim,
        c.linear_conv_kernel_dim,
    )  # fmt: skip


def _delta_net_and_ngrams(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    """Some layers add features of the last tokens: what these are convolved from and the tokens' ids, on every rank."""
    state = _gated_delta_net(c, share)
    if share.layer + 1 not in c.ple_layer_ids:
        return state
    earlier = c.ngram_size - 1
    convolved = share.conv(c.hc_count * c.hidden_size, (c.ple_conv_kernel_size - 1) * c.ngram_size + 1)
    return *state, convolved, StateTensor((earlier, earlier), FLOAT32_BYTES)


def _keyed_delta(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    heads, head = c.linear_num_heads, c.linear_head_dim
    return share.delta(heads, head, heads, head, c.linear_conv_kernel_dim)


def _short_conv(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    return (share.conv(share.part(c.hidden_size, "channels of convolutions"), c.conv_L_cache),)


def _convolved_heads(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    """All heads on every rank: what the convolution of each channel reads, and what the one within heads does, with
    the halves of values that are one token late."""
    if c.cca_time1 != 2:
        raise UnsupportedModel(
            f"{c.model_type} convolves within heads over {c.cca_time1} tokens (cca_time1); 2 are known", field="model"
        )
    keys = c.num_key_value_heads * c.head_dim
    channels = c.num_attention_heads * c.head_dim + keys
    return share.conv(channels, c.cca_time0), StateTensor((channels + keys // 2, 1), FLOAT32_BYTES)


STATE_OF: dict[str, Callable[[Any, RankShare], tuple[StateTensor, ...]]] = {
    "bailing_hybrid": _keyed_delta,
    "bamba": _usual_mamba2,
    "falcon_h1": _usual_mamba2,
    "falcon_mamba": _plain_mamba,
    "granitemoehybrid": _usual_mamba2,
    "jamba": _mamba1,
    "kimi_linear": _keyed_delta,
    "lara_mini": _gated_delta_net,
    "lfm2": _short_conv,
    "lfm2_moe": _short_conv,
    "lfm3": _short_conv,
    "mamba": _plain_mamba,
    "mamba2": _plain_mamba2,
    "minimax": _lightning,
    "nemotron_h": _nemotron_h,
    "olmo_hybrid": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_next": _gated_delta_net,
    "qwen4_exp_text": _delta_net_and_ngrams,
    "recurrent_gemma": _gated_linear_recurrence,
    "zamba2": _zamba2,
    "zaya": _convolved_heads,
}
"""model_type -> the tensors of one layer's state."""


def _state(config: Any, index: int, ranks: int, item_bytes: int) -> tuple[StateTensor, ...]:
    if config.model_type not in STATE_OF:
        raise UnsupportedModel(
            f"the states of {config.model_type} are not known; known are those of {', '.join(STATE_OF)}",
            field="model",
        )
    return STATE_OF[config.model_type](config, RankShare(ranks, item_bytes, layer=index))
