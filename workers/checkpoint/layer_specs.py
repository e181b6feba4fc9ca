"""From a model's config to the kinds of its layers: what each keeps, and how far back it looks.

This is where the conventions of different models end. Everything behind it counts windows in visible tokens, the
query itself included, as transformers does for the families below. A family is named here only where its config says
things in words of its own: the sizes of its states, mostly.
"""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...errors import InvalidSetting, UnsupportedModel
from ...kvcache.reach import Chunked, Cross, Full, Reach, Sliding, State
from ...kvcache.spec import LayerSpec, StateTensor

FLOAT32_BYTES = 4  # recurrent states are kept in float32 for a model of any dtype

REACH_OF: dict[str, Callable[[Any], Reach]] = {
    "full_attention": lambda config: Full(),
    "sliding_attention": lambda config: Sliding(
        config.window_size if config.model_type == "gpt_neo" else config.sliding_window
    ),
    "chunked_attention": lambda config: Chunked(config.attention_chunk_size),
    "cross_attention": lambda config: Cross(),
    "hybrid": lambda config: Full(),
    "hybrid_sliding": lambda config: Sliding(config.sliding_window),
    "attention": lambda config: Full(),
    "indexed_attention": lambda config: Full(),  # of all tokens each query attends to some: any may be chosen
    "minimax_m3_sparse": lambda config: Full(),
    "compressed_sparse_attention": lambda config: Sliding(config.sliding_window),  # beside entries of several tokens
    "heavily_compressed_attention": lambda config: Sliding(config.sliding_window),
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
            layer = layer_config(config, _place_in_model(config, index))
            specs.append(_attention(layer, index, REACH_OF[kind](layer), tensor_parallel_size, item_bytes, sources))
            specs += _entries(config, index, kind, index in sources, item_bytes)
        if kind in HAS_STATE:
            place = _place_in_model(config, index)
            layer = layer_config(config, place)
            specs.append(LayerSpec(index, State(), state=_state(layer, place, tensor_parallel_size, item_bytes)))
    return tuple(specs)


ENDLESS_TOKENS = 1 << 20


def positions_of(config: Any) -> int:
    """Tokens of the longest text. A model of states and windows names no bound, and has none: an engine needs one."""
    positions = (getattr(config, name, None) for name in ("max_position_embeddings", "max_seq_len"))
    return next(filter(None, positions), ENDLESS_TOKENS)


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
    if config.model_type == "falcon":
        many = config.num_kv_heads if config.new_decoder_architecture else config.num_attention_heads
        return 1 if config.multi_query and not config.new_decoder_architecture else many
    return getattr(config, "num_key_value_heads", None) or config.num_attention_heads


GPT_NEO = {"global": "full_attention", "local": "sliding_attention"}


def _layer_types(config: Any) -> list[str]:
    """As the config lists them; configs without a list have one kind throughout, or name the layers that differ."""
    layer_types = getattr(config, "layer_types", None)
    if config.model_type == "gpt_neo":
        layer_types = [GPT_NEO[kind] for kind in config.attention_layers]
    if layer_types is not None:
        return [*layer_types[: config.num_hidden_layers], *_times_around(config)]
    cross = getattr(config, "cross_attention_layers", None) or ()
    has_window = getattr(config, "sliding_window", None) and config.model_type not in WITHOUT_WINDOW
    kind = "sliding_attention" if has_window else "full_attention"
    return ["cross_attention" if n in cross else kind for n in range(config.num_hidden_layers)]


WITHOUT_WINDOW = {"moshi"}
"""Families whose layers see all, whatever window their config names: it is as long as their longest text."""


def _times_around(config: Any) -> list[str]:
    """Layers that are gone through again (Dory, Inkling 2 Mini): each time is another layer, behind the model's own."""
    start, end, times = _looped(config)
    return list(config.layer_types[start:end]) * (times - 1) if times > 1 else []


def _looped(config: Any) -> tuple[int, int, int]:
    """First and last of the layers that are gone through several times, and how often."""
    if getattr(config, "loop_num_passes", None) is not None:
        return config.loop_layer_index_start, config.loop_layer_index_end, config.loop_num_passes
    loops = getattr(config, "n_recurrent_loops", None)
    if loops is None:
        return 0, 0, 1
    if config.recurrent_kv_cache_mode != "per_loop":
        raise UnsupportedModel(
            f"{config.model_type} keeps what its last loop computes for all loops (recurrent_kv_cache_mode "
            f"{config.recurrent_kv_cache_mode!r}): then an answer depends on how its prompt was cut",
            field="model",
        )
    return config.n_input_layers, config.n_input_layers + config.n_recurrent_layers, loops


def _place_in_model(config: Any, index: int) -> int:
    """Which of the model's own layers a layer is."""
    start, end, times = _looped(config)
    again = index - config.num_hidden_layers
    return index if times == 1 or again < 0 else start + again % (end - start)


def layer_config(config: Any, index: int) -> Any:
    """The config as one layer sees it: some models have layers of unequal head sizes, or counts of heads."""
    layers = getattr(config, "per_layer_config", None)
    layer = layers[index] if layers is not None and index < config.num_hidden_layers else config
    own = LAYERS_OF.get(config.model_type)
    return layer if own is None else own(layer, index)


def _mimo_v2(layer: Any, index: int) -> Any:
    """Twice the key-value heads where a window is."""
    if layer.layer_types[index] != "sliding_attention":
        return layer
    own = copy(layer)
    own.num_key_value_heads = 2 * layer.num_key_value_heads
    return own


def _inkling(layer: Any, index: int) -> Any:
    """Heads of their own where a window is."""
    if layer.layer_types[index] != "hybrid_sliding":
        return layer
    own = copy(layer)
    own.num_attention_heads, own.num_key_value_heads = layer.swa_num_attention_heads, layer.swa_num_key_value_heads
    own.head_dim = layer.swa_head_dim
    return own


def _mistral_large4(layer: Any, index: int) -> Any:
    """No rotary numbers where positions do not count."""
    if layer.no_rope_layers[index]:
        return layer
    own = copy(layer)
    own.qk_rope_head_dim = 0
    return own


def _diffllama(layer: Any, index: int) -> Any:
    """Each head of keys has the values of two."""
    own = copy(layer)
    own.v_head_dim = 2 * (layer.head_dim or layer.hidden_size // layer.num_attention_heads)
    return own


def _doge(layer: Any, index: int) -> Any:
    """Keys have one number more."""
    own = copy(layer)
    own.v_head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
    own.head_dim = own.v_head_dim + 1
    return own


LAYERS_OF: dict[str, Callable[[Any, int], Any]] = {
    "diffllama": _diffllama,
    "doge": _doge,
    "inkling2_loop_text": _inkling,
    "inkling2_text": _inkling,
    "inkling_text": _inkling,
    "mimo_v2_flash": _mimo_v2,
    "mistral_large4_text": _mistral_large4,
}
"""model_type -> the config as a layer sees it, where that is other than the config says."""


def index_key_size(config: Any, index: int) -> int:
    """Numbers that a layer keeps of each token to choose by; 0 if it attends to all, or to what another has chosen, or
    chooses by what several tokens have together."""
    return config.index_head_dim if _chooses(config, index) and _pools(config) is None else 0


def _chooses(config: Any, index: int) -> bool:
    kinds: Sequence[str] = getattr(config, "layer_types", None) or ()
    if index >= len(kinds) or kinds[index] not in ("indexed_attention", "minimax_m3_sparse"):
        return False
    indexers = getattr(config, "indexer_types", None)
    return indexers is None or indexers[index] == "full"


def _pools(config: Any) -> "Compression | None":
    """Of layers that choose by the keys of pools of tokens: the mean of what tokens give, or that by their weights."""
    if config.model_type == "qwen4_exp_text":
        return Compression(config.indexer_compress_ratio, config.indexer_head_dim, has_weights=False)
    if getattr(config, "index_kpool", None):
        return Compression(config.index_kpool, config.index_head_dim)
    return None


# -- entries of several tokens -----------------------------------------------------------------------------------------

COMPRESSED = {"compressed_sparse_attention", "heavily_compressed_attention"}
"""Kinds of layers that keep, beside a window, one entry for so many tokens (DeepSeek-V4)."""


class Compression(NamedTuple):
    """What a layer keeps beside what it keeps of each token: an entry of `tokens` tokens, made of what each of them
    gives to it, and, where entries overlap, of what each of those before them gives.

    tokens 4, overlapping    0 1 2 3 4 5 6 7 8 9      the entry of 4 .. 7 is made of 0 .. 7
                             ^^^^^^^^^^^^^^^
    """

    tokens: int
    entry: int  # numbers
    index_key: int = 0  # of an entry, beside it, by which queries choose it
    has_weights: bool = True
    overlaps: bool = False
    is_beside_window: bool = False

    @property
    def given(self) -> int:
        """Numbers that a token gives: values and their weights, if they have any, of each entry that it is part of."""
        return (1 + self.has_weights) * (1 + self.overlaps) * (self.entry + self.index_key)

    @property
    def reach(self) -> Reach:
        """Of what tokens give: needed until their entries are made. Beside windows it moves on as they do: where both
        are as long, they are one group."""
        if self.is_beside_window:
            return Sliding((1 + self.overlaps) * self.tokens)
        return Chunked(self.tokens)

    def layers(self, index: int, item_bytes: int) -> tuple[LayerSpec, LayerSpec]:
        """Entries, and what tokens give, as if each were a layer."""
        beside = self.index_key * item_bytes
        return (
            LayerSpec(ENTRIES + index, Full(), 1, self.entry, 0, item_bytes, beside, entry_tokens=self.tokens),
            LayerSpec(GIVERS + index, self.reach, 1, self.given, 0, item_bytes),
        )


ENTRIES, GIVERS = 1 << 16, 2 << 16
"""Numbers of "layers" begin here that are the entries of the model's own, and what tokens give to them."""


def _entries(config: Any, index: int, kind: str, shares: bool, item_bytes: int) -> Sequence[LayerSpec]:
    """Of layers that keep such. One that shares another's pages, and has an index, keeps an entry of each token.

    Raises `UnsupportedModel` for other entries of one token."""
    if shares and index_key_size(config, index):
        return (LayerSpec(ENTRIES + index, Full(), 1, config.index_head_dim, 0, item_bytes),)
    if kind in COMPRESSED:
        overlaps = kind == "compressed_sparse_attention"
        tokens, index_key = config.compress_rates[kind], config.index_head_dim if overlaps else 0
        compression = Compression(tokens, config.head_dim, index_key, overlaps=overlaps, is_beside_window=True)
    else:
        compression = _pools(config) if _chooses(config, index) else None
    if compression is None:
        return ()
    if compression.tokens < 2:
        raise UnsupportedModel(
            f"layer {index} of {config.model_type} keeps an entry for each {compression.tokens} tokens; an entry of "
            "two or more is known",
            field="model",
        )
    return compression.layers(index, item_bytes)


def _sources(config: Any, kinds: list[str]) -> dict[int, int]:
    """Layers that own no keys and values, and the one they read: that which the config names, or the last before them
    of their kind that does."""
    named: Sequence[int] | None = getattr(config, "kv_source_layers", None)
    if named is not None:
        return {index: source for index, source in enumerate(named) if source != index}
    shared = getattr(config, "num_kv_shared_layers", 0) or 0
    first = len(kinds) - shared
    last_of = {kind: index for index, kind in enumerate(kinds[:first])}
    return {index: last_of[kinds[index]] for index in range(first, len(kinds))}


SHARED_KEY_VALUE = {"deepseek_v4"}


def _attention(
    config: Any, index: int, reach: Reach, ranks: int, item_bytes: int, sources: Mapping[int, int]
) -> LayerSpec:
    shares = sources.get(index)
    beside = index_key_size(config, index) * item_bytes if shares is None else 0
    if config.model_type in SHARED_KEY_VALUE:  # one vector for all heads, on every rank, is key and value
        RankShare(ranks, item_bytes).part(config.o_groups, "groups of heads of the output projection")
        return LayerSpec(index, reach, 1, config.head_dim, 0, item_bytes)
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


def _headed_mamba1(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    heads, channels = share.part(c.n_mamba_heads, "state heads"), c.mamba_expand * c.hidden_size // c.n_mamba_heads
    own = StateTensor((channels, c.mamba_d_state), FLOAT32_BYTES)
    return share.conv(heads * channels, c.mamba_d_conv), *(own,) * heads


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


def _four_convolutions(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    """Of keys, of values, and of what attention and experts give out, which is whole on every rank."""
    keys = share.conv(share.kv_heads(c.num_key_value_heads) * c.head_dim, c.conv_kernel_size)
    return keys, keys, *(share.conv(c.hidden_size, c.conv_kernel_size),) * 2


def _four_or_weighed_convolutions(c: Any, share: RankShare) -> tuple[StateTensor, ...]:
    """Where all earlier tokens are seen, the first two have each input once for each token that is looked back."""
    *of_heads, attended, computed = _four_convolutions(c, share)
    if c.layer_types[share.layer] == "hybrid":
        keys = (c.conv_kernel_size - 1) * share.kv_heads(c.num_key_value_heads) * c.head_dim
        of_heads = [share.conv(keys, c.conv_kernel_size)] * 2
    return *of_heads, attended, computed


STATE_OF: dict[str, Callable[[Any, RankShare], tuple[StateTensor, ...]]] = {
    "bailing_hybrid": _keyed_delta,
    "bamba": _usual_mamba2,
    "falcon_h1": _usual_mamba2,
    "falcon_mamba": _plain_mamba,
    "glm5_next_text": _keyed_delta,
    "granitemoehybrid": _usual_mamba2,
    "inkling2_loop_text": _four_or_weighed_convolutions,
    "inkling2_text": _four_or_weighed_convolutions,
    "inkling_text": _four_convolutions,
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
    "zamba": _headed_mamba1,
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
