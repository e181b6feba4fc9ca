"""The config of a model, scaled down: few narrow layers that keep all that is peculiar to the model.

Kept: every kind of layer and the pattern in which they come, ratios of query heads to key-value heads, unequal sizes
of keys and values, groups of experts, sinks, scales, kinds of rotary positions, kernels of convolutions. Windows and
chunks become shorter than the prompts, so that they matter. Widths, counts of heads, layers, experts, tokens shrink.

Configs have hundreds of names for the same few things. `RULES` says what each name counts; a name that it does not know
keeps its value, unless that is a multiple of the model's width.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import Any

from ...errors import UnsupportedModel

VOCABULARY = 128
"""Tokens; as many more as the model's leaves when ranks divide it: they share it unevenly here as they do there."""

MOST_RANKS = 8
POSITIONS = 512
WINDOW = 12
"""Visible tokens; a model whose window is odd gets one more."""

TRAINED_POSITIONS = 64
"""Beyond which models that stretch positions do so."""

FEWEST_POSITIONS = 4
"""The same for models with two sets of frequencies that reach beyond what they were trained with. All prompts are
longer, so that the set for long texts counts: an engine takes it for all texts then (`workers/layers/positions.py`),
transformers for those that are longer."""

HEAD_SIZE = 16
MOST_KV_HEADS, MOST_QUERIES_EACH = 2, 4
ALONE_HEADS = 4
"""Where each query head has a key-value head of its own."""

MOST_INDEX_HEADS = 16
"""Of few, all are often below zero, and then tokens score alike: it is open which of them is chosen."""

MOST_EXPERTS, MOST_CHOSEN = 8, 2
NGRAM_SIZE = 8
RANK = 8
MOST_LAYERS = 16
"""Where that many show all kinds of layers."""
MOST_LATE = 8
"""Kinds of layers that come after those, each with its neighbours."""

STATE_CHUNK = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """From what a model has to what its copy gets."""

    width: int
    to_width: int
    head: int
    to_head: int
    layers: int
    kept: tuple[int, ...]  # the layers that the copy has, by their places in the model
    trained: int  # positions beyond which the copy's are stretched
    ranks: int  # among which the copy's heads divide, where the model's do
    positions: int = 0  # of the model's longest text; 0: it does not say

    @property
    def to_layers(self) -> int:
        return len(self.kept)

    def widths(self, value: int) -> int:
        """In proportion to the model's width: multiples of 8 that are neither tiny nor large."""
        if value % self.width == 0:
            return value // self.width * self.to_width
        return min(max(round(value * self.to_width / self.width / 8) * 8, 32), 4 * self.to_width)

    def heads(self, value: int) -> int:
        """A size of a head, in proportion to the usual one."""
        exact, rest = divmod(value * self.to_head, self.head)
        return exact if rest == 0 and exact % 4 == 0 else max(8, exact // 4 * 4)


@dataclass(slots=True)
class Scaled:
    """The copy's config as a dictionary, and what was changed: name -> (from, to)."""

    fields: dict[str, Any]
    changed: dict[str, tuple[Any, Any]] = field(default_factory=dict[str, tuple[Any, Any]])


Rule = Callable[[int, Scale], int]

RULES: tuple[tuple[str, Rule], ...] = (
    (r"(.*_)?vocab_size(_per_layer_input)?", lambda value, s: VOCABULARY + value % MOST_RANKS),
    (r"max_position_embeddings|n_positions|n_ctx|max_seq_len|model_max_length|seq_length", lambda value, s: POSITIONS),
    (r"original_max_position_embeddings", lambda value, s: s.trained),
    (
        r"sliding_window(_size)?|attention_window_size|window_size|local_attention|attention_chunk_size",
        lambda value, s: WINDOW + value % 2 if value > 0 else value,
    ),
    (r"keep_window_size", lambda value, s: POSITIONS if value >= s.positions else WINDOW),
    (r"rel_extent", lambda value, s: WINDOW),
    (r"floor_scale|log_scaling_n_floor|log_scaling_floor", lambda value, s: min(value, WINDOW)),
    (r".*head_dim|.*_d_head|.*_headdim|kv_channels|d_head|dim_head|rotary_dim|d_kv", lambda value, s: s.heads(value)),
    (r"q_lora_rank", lambda value, s: min(value, 24)),
    (r"(kv|o)_lora_rank", lambda value, s: min(value, 32)),
    (r".*_(low)?rank|rank", lambda value, s: min(value, RANK)),
    (r"(mamba_)?d_state|ssm_state_size|state_size|mamba_d_state", lambda value, s: min(value, 16)),
    (r"chunk_size|mamba_chunk_size|.*_chunk_length", lambda value, s: min(value, STATE_CHUNK)),
    (r"compressed_sparse_attention", lambda value, s: min(value, 4)),  # tokens of an entry
    (r"heavily_compressed_attention", lambda value, s: min(value, WINDOW)),
    (r"index_kpool", lambda value, s: min(value, 4)),
    (r"index_topk", lambda value, s: min(value, WINDOW)),
    (r"index_topk_blocks|topk_blocks", lambda value, s: min(value, 3)),
    (r"index_block_size|sparse_block_size|indexer_compress_ratio", lambda value, s: min(value, 4)),
    (r"indexer_budget", lambda value, s: min(value, WINDOW)),
    (r"ngram_vocab_size_base", lambda value, s: min(value, VOCABULARY)),
    (r"heads_per_ngram", lambda value, s: min(value, 2)),
    (r"split_ngram_parts", lambda value, s: min(value, 3)),
    (
        r".*num_experts|n_routed_experts|num_local_experts|moe_num_experts|zero_expert_num",
        lambda value, s: min(value, MOST_EXPERTS),
    ),
    (r"num_experts_per_tok(en)?|moe_topk|moe_k|top_k|num_selected_experts", lambda value, s: min(value, MOST_CHOSEN)),
    (r"n_group|num_expert_group", lambda value, s: min(value, 2)),
    (r"topk_group", lambda value, s: min(value, 1)),
    (
        r".*intermediate_size.*|ffn_dim|.*_ffn_dim|ffn_hidden_size|expert_ffn_hidden_size|dim_ff|dff|n_inner|d_inner",
        lambda value, s: s.widths(value) if value > 0 else value,
    ),
    (r"hidden_size_per_layer_input|router_hidden_size", lambda value, s: min(value, 16)),
    (r"(eos|bos|pad|sep|cls|mask|unk|start|decoder_start|eod|image|.*)_token_id", lambda value, s: value % VOCABULARY),
    (r"num_kv_shared_layers", lambda value, s: min(value, max(0, s.to_layers // 3))),
)
"""A pattern of names, and what becomes of a number that has one. The first that fits counts."""

DROPPED = {
    "_name_or_path", "transformers_version", "architectures", "dtype", "torch_dtype", "id2label", "label2id",
    "quantization_config", "compression_config", "auto_map",
}  # fmt: skip
HEADS = ("num_attention_heads", "num_key_value_heads"), ("swa_num_attention_heads", "swa_num_key_value_heads")
"""Counts of query heads and of their key-value heads."""

STATE_HEADS = (
    ("linear_num_value_heads", "linear_num_key_heads"), ("linear_num_heads", None),
)  # fmt: skip
MIXER_HEADS = {
    "mamba_n_heads": ("mamba_d_head", "mamba_expand"), "n_mamba_heads": ("mamba_headdim", "mamba_expand"),
    "mamba_num_heads": ("mamba_head_dim", None), "num_heads": ("head_dim", "expand"),
}  # fmt: skip
"""Heads of state mixers, the size of each, and what their widths together are a multiple of the model's by."""


def scaled(config: Any, ranks: int = 1) -> Scaled:
    """config: of transformers, of a model's text part. ranks: among which the copy's heads divide, if the model's do"""
    given = Given(config)
    scale = _scale(given, ranks)
    fields = {name: _shrunk(given.usual(name), value, scale) for name, value in given.fields.items()}
    _set_heads(given, fields, scale)
    _set_state_heads(given, fields, scale)
    _keep_scales(fields, scale)
    _set_cycles(fields)
    _set_loops(config, fields)
    if fields.get("unpadded_vocab_size"):
        fields["vocab_size"] = max(fields["vocab_size"], fields["unpadded_vocab_size"])
    if given.size("heads_per_ngram"):  # which share a width evenly
        fields["ple_embed_dim"] = NGRAM_SIZE * (fields["ngram_size"] - 1) * fields["heads_per_ngram"]
    made = Scaled(fields)
    made.changed.update(
        {name: (given.fields[name], value) for name, value in fields.items() if given.fields[name] != value}
    )
    return made


USUAL = {"hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "layer_types"}
"""Names by which sizes are asked for here. Some models have them, and other names for the same beside."""


class Given:
    """The fields of a config, by the names that most models have for them."""

    def __init__(self, config: Any):
        self._config = config
        self.fields: dict[str, Any] = {name: value for name, value in config.to_dict().items() if name not in DROPPED}
        self._own: Mapping[str, str] = getattr(config, "attribute_map", None) or {}
        self._usual = {own: usual for usual, own in self._own.items() if own not in USUAL}
        self._layers = self.size("num_hidden_layers")
        kinds: Any = getattr(config, "layer_types", None)  # some are computed
        count = self._layers or 0
        self.kinds: list[Any] = (
            list(kinds) if isinstance(kinds, list | tuple) and len(kinds) == count else [None] * count
        )

    def usual(self, own: str) -> str:
        return self._usual.get(own, own)

    def own(self, usual: str) -> str:
        return self._own.get(usual, usual) if usual not in self.fields else usual

    @property
    def kind_starts(self) -> set[int]:
        """Layers that are the first of their kinds of attention, or of what `per_layer_config` says of them."""
        both = [(kind, str(own)) for kind, own in zip(self.kinds, self.own_of_layers, strict=True)]
        return {both.index(each) for each in both}

    @property
    def own_of_layers(self) -> list[Any]:
        """What `per_layer_config` says of each."""
        own = self.fields.get("per_layer_config") or {}
        return [own.get(n) or own.get(str(n)) or own.get(f"{n:02}") for n in range(len(self.kinds))]

    def has_places(self, name: str) -> bool:
        """Whether that field lists layers by their places."""
        value = self.fields.get(name)
        return bool(PLACES.fullmatch(name)) and isinstance(value, list) and bool(value) and len(value) != self._layers

    @property
    def key_heads(self) -> int | None:
        """Key-value heads. None: it does not say."""
        attention = self.fields.get("attn_config") or {}  # of DBRX
        return self.size("num_key_value_heads") or self.size("num_kv_heads") or attention.get("kv_n_heads")

    def size(self, name: str) -> int | None:
        """None: it has no such number."""
        value = self.fields.get(self.own(name))
        if value is None and self.own(name) not in self.fields:
            try:
                value = getattr(self._config, name, None)  # some are computed
            except AttributeError:  # each layer has its own
                value = None
        return value if isinstance(value, int) and not isinstance(value, bool) else None


# -- sizes that others follow ------------------------------------------------------------------------------------------


def _scale(given: Given, ranks: int) -> Scale:
    width, heads, layers = given.size("hidden_size"), given.size("num_attention_heads"), given.size("num_hidden_layers")
    if width is None or layers is None:
        raise UnsupportedModel(
            "its config has no width, or no number of layers, by a name that is known", field="model"
        )
    kept, trained = _kept_layers(given, layers), _trained(given)
    longest = given.size("max_position_embeddings") or 0
    if heads is None:  # states alone
        return Scale(width, 4 * HEAD_SIZE, HEAD_SIZE, HEAD_SIZE, layers, kept, trained, ranks, longest)
    head = given.size("head_dim") or max(1, width // heads)
    to_head = _head_size(given, head)
    to_heads, _ = _heads(heads, given.key_heads or heads, ranks)
    to_width = to_heads * to_head if heads * head == width else 4 * HEAD_SIZE
    return Scale(width, to_width, head, to_head, layers, kept, trained, ranks, longest)


def _trained(given: Given) -> int:
    """Positions beyond which the copy's are stretched."""
    ropes = given.fields.get("rope_parameters") or {}
    if "longrope" not in str(ropes):
        return TRAINED_POSITIONS
    parts = (given.fields, ropes, *(each for each in ropes.values() if isinstance(each, dict)))
    name = "original_max_position_embeddings"
    trained = next((part[name] for part in parts if isinstance(part.get(name), int)), 0)
    longest = given.size("max_position_embeddings") or 0
    return FEWEST_POSITIONS if longest > trained else POSITIONS


def _heads(queries: int, keys: int, ranks: int) -> tuple[int, int]:
    """Of query heads and key-value heads, in their ratio where that is not large."""
    if queries == keys:
        count = _few(queries, ALONE_HEADS, ranks)
        return count, count
    to_keys, each = min(keys, MOST_KV_HEADS), min(max(queries // keys, 1), MOST_QUERIES_EACH)
    if queries % ranks:
        return to_keys * each, to_keys
    while to_keys * each % ranks and to_keys * each < queries:
        to_keys, each = (2 * to_keys, each) if 2 * to_keys <= keys else (to_keys, 2 * each)
    return (to_keys * each, to_keys) if to_keys * each % ranks == 0 else (queries, keys)


def _few(count: int, most: int, ranks: int) -> int:
    """Heads of a copy, of so many."""
    return min(count, most if count % ranks else lcm(most, ranks))


def _head_size(given: Given, head: int) -> int:
    """The smallest from 16 on of which the rotated part is even, and which divides the model's."""
    ropes = given.fields.get("rope_parameters") or {}
    parts = [each for each in (ropes, *ropes.values()) if isinstance(each, dict)]
    shares = [each.get("partial_rotary_factor", 1.0) for each in (given.fields, *parts)]
    for size in (HEAD_SIZE, 24, 32, 48, 64):
        if head % size == 0 and all(int(size * share) % 2 == 0 for share in shares if share):
            return size
    return head if head <= 64 else 32


def _kept_layers(given: Given, layers: int) -> tuple[int, ...]:
    """As many from the first on as show all kinds of layers, and one more; the last is of the kind of the model's."""
    signs = _signs(given, layers)
    firsts = {sign: signs.index(sign) for sign in signs}
    periods = [value for name, value in given.fields.items() if PERIOD.fullmatch(name) and isinstance(value, int)]
    most = min(layers, MOST_LAYERS)
    if given.fields.get("model_type") == "zamba":  # which shares weights from its second such layer on
        periods += [n + 1 for n, kind in enumerate(given.kinds) if kind == "hybrid"][1:2]
    least = max(2, min(most, max([max(firsts.values()) + 2, *(period + 1 for period in periods)])))
    late = sorted(first for first in given.kind_starts if first >= most)[:MOST_LATE]
    if not late:
        count = next((count for count in range(least, most + 1) if signs[count - 1] == signs[-1]), least)
        return tuple(range(count))
    # Kinds that come later are shown by their first layer and those beside it, if layers know by lists alone what they
    # are. If they count themselves, there must be as many of them.
    if periods or any(given.has_places(name) for name in given.fields):
        return tuple(range(min(layers, max(late) + 2)))
    early = max(first for first in firsts.values() if first < most)
    beside = {place for first in late for place in (first - 1, first, first + 1) if place < layers}
    return tuple(sorted({*range(early + 1), *beside, layers - 1}))


def _signs(given: Given, layers: int) -> list[tuple[str, ...]]:
    """What is said of each layer in lists."""
    lists: list[Sequence[Any]] = [v for v in given.fields.values() if isinstance(v, list) and len(v) == layers]
    lists.append(given.kinds)
    lists.append(given.own_of_layers)
    lists += [
        [n + (name in PLACES_FROM_ONE) in value for n in range(layers)]
        for name, value in given.fields.items()
        if given.has_places(name)
    ]
    return [tuple(str(each[n]) for each in lists) for n in range(layers)]


EPSILON = re.compile(r"(.*_)?eps(ilon)?")
MORE_EPSILON = 1000
"""As many times as large: beside the large numbers of a copy, a norm's epsilon would not be seen."""

PERIOD = re.compile(
    r".*_layer_period|.*every_n_layers|first_k_dense_replace|num_dense_layers|layer_group_size|"
    r".*sliding_window_pattern|no_rope_layer_interval|interleave_moe_layer_step|decoder_sparse_step|"
    r"moe_layer_(interval|start_index)|full_attention_interval"
)
"""Names of fields after so many layers of which something new comes."""

PLACES = re.compile(r".*layer_(indices|ids|idxs|idx_list)|mlp_only_layers|moe_layers|.*_layer_indexes")
"""Names of fields that list layers."""

PLACES_FROM_ONE = {"ple_layer_ids"}
"""Those of them that count layers from 1."""


# -- one field ---------------------------------------------------------------------------------------------------------


def _shrunk(name: str, value: Any, scale: Scale) -> Any:
    if isinstance(value, dict):
        if name == "per_layer_config":
            value = {_place(key, scale): each for key, each in value.items() if int(key) in scale.kept}
        return {key: _shrunk(str(key), each, scale) for key, each in value.items()}
    if isinstance(value, list):
        return _shrunk_list(name, value, scale)
    if isinstance(value, float) and EPSILON.fullmatch(name):
        return value * MORE_EPSILON
    if isinstance(value, bool) or not isinstance(value, int):
        return value
    if name == "hidden_size":
        return scale.to_width
    if name == "num_hidden_layers":
        return scale.to_layers
    if name == "num_layers":  # beside a count of what attends: LongCat's layers attend twice
        return max(2, value * scale.to_layers // scale.layers)
    for pattern, rule in RULES:
        if re.fullmatch(pattern, name):
            return rule(value, scale)
    is_width = value >= scale.width > 64 and value % scale.width == 0
    return value // scale.width * scale.to_width if is_width else value


def _place(key: int | str, scale: Scale) -> int | str:
    """Of a layer, in the copy, written as it was."""
    place = scale.kept.index(int(key))
    return f"{place:0{len(key)}}" if isinstance(key, str) else place


def _shrunk_list(name: str, values: list[Any], scale: Scale) -> list[Any]:
    if len(values) == scale.layers:
        values = [values[n] for n in scale.kept]
    if name in ("short_factor", "long_factor"):  # one for each frequency
        step = max(1, scale.head // scale.to_head)
        return values[::step][: scale.to_head // 2]
    if name == "mrope_section":
        return _sections(values, scale)
    if name in PLACES_FROM_ONE:
        return [place for place in values if place <= scale.to_layers]
    return [_shrunk(name, value, scale) for value in values]


def _sections(values: list[int], scale: Scale) -> list[int]:
    """Frequencies of a head in parts, in about the same ratios and with the right sum."""
    total = sum(values) * scale.to_head // scale.head
    parts = [max(1, value * scale.to_head // scale.head) for value in values]
    # Those that lost most when they were rounded get what is left.
    losses = sorted(range(len(values)), key=lambda n: parts[n] - values[n] * scale.to_head / scale.head)
    for n in losses[: max(0, total - sum(parts))]:
        parts[n] += 1
    parts[0] += total - sum(parts)
    return parts


# -- counts that belong together ---------------------------------------------------------------------------------------


def _set_heads(given: Given, fields: dict[str, Any], scale: Scale) -> None:
    """Of attention; of layers with windows, where these have other ones; of indexers."""
    for names in HEADS:
        queries = given.size(names[0])
        keys = given.key_heads if names is HEADS[0] else given.size(names[1])
        counts = _heads(queries, keys or queries, scale.ranks) if queries else (0, 0)
        for name, count in zip(names, counts, strict=True):
            old = fields.get(given.own(name))
            if isinstance(old, int) and not isinstance(old, bool):
                fields[given.own(name)] = count
            elif isinstance(old, list):
                fields[given.own(name)] = [count if each else each for each in old]
    queries = given.size("num_attention_heads")
    if queries is None:
        return
    _, to_keys = _heads(queries, given.key_heads or queries, scale.ranks)
    is_of_keys = given.size("index_n_heads") == given.size("num_key_value_heads") != queries
    index_heads = to_keys if is_of_keys else MOST_INDEX_HEADS
    most = {"index_n_heads": index_heads, "num_query_groups": to_keys, "num_kv_heads": to_keys}
    for name, count in most.items():
        if given.size(name) is not None:
            fields[name] = min(fields[name], count)
    if "kv_n_heads" in (fields.get("attn_config") or {}):
        fields["attn_config"]["kv_n_heads"] = to_keys
    if "head_dim" in fields and fields["head_dim"] is None:
        fields["head_dim"] = scale.to_head
    if given.size("o_groups") is not None:  # of heads
        fields["o_groups"] = _few(fields["o_groups"], 2, scale.ranks)


def _set_state_heads(given: Given, fields: dict[str, Any], scale: Scale) -> None:
    for values, keys in STATE_HEADS:
        count = given.size(values)
        if count is None:
            continue
        of_keys = (given.size(keys) if keys else None) or count
        to_keys = _few(of_keys, MOST_KV_HEADS, scale.ranks)
        fields[values] = to_keys * max(1, min(count // of_keys, MOST_QUERIES_EACH))
        if keys:
            fields[keys] = to_keys
    for heads, (size, expand) in MIXER_HEADS.items():
        count, each = given.size(heads), given.size(size)
        if count is None or each is None or given.usual(heads) != heads:
            continue
        times = given.fields.get(expand) if expand else None
        is_bound = times is not None and count * each == int(times * scale.width)
        fields[size] = HEAD_SIZE
        fields[heads] = int(times * scale.to_width) // HEAD_SIZE if times is not None and is_bound else 8
        if given.size("mamba_d_ssm"):
            fields["mamba_d_ssm"] = fields[heads] * HEAD_SIZE
    for name in ("mamba_n_groups", "n_groups", "mamba_ngroups"):
        if given.size(name) is not None:
            fields[name] = min(fields[name], 2)


def _set_cycles(fields: dict[str, Any]) -> None:
    """Of stacks of layers that are gone through several times (HRM), each time as other layers: two layers each."""
    each = fields.get("num_layers_per_stack")
    if each is not None:
        fields["num_layers_per_stack"] = min(each, 2)
        fields["num_hidden_layers"] = fields["num_layers_per_stack"] * fields["H_cycles"] * (fields["L_cycles"] + 1)


def _set_loops(config: Any, fields: dict[str, Any]) -> None:
    """Of a run of layers in the model's middle that is gone through several times (Inkling 2 Mini, Dory). Configs of
    Dory count the MLP of a layer as another."""
    if "loop_num_passes" in fields:  # a layer of each kind before, within and behind
        kinds = list(dict.fromkeys(config.layer_types))
        each = fields["n_layers_per_attn_res_block"] = len(kinds)
        fields |= {"loop_layer_index_start": each, "loop_layer_index_end": 2 * each}
        fields |= {"layer_types": 3 * kinds, "num_hidden_layers": 3 * each}
    if "n_recurrent_loops" not in fields:
        return
    own = {name: getattr(config, name) for name in ("n_input_layers", "n_recurrent_layers", "n_output_layers")}
    few = {name: min(count, 4 if name == "n_recurrent_layers" else 2) for name, count in own.items()}
    start, middle = own["n_input_layers"], own["n_recurrent_layers"]
    starts = {"n_input_layers": 0, "n_recurrent_layers": start, "n_output_layers": start + middle}
    kinds = [kind for name, count in few.items() for kind in config.layer_types[starts[name] :][:count]]
    fields |= {name: 2 * count for name, count in few.items()}
    fields["num_hidden_layers"] = 2 * len(kinds)
    fields["layer_types"] = [each for kind in kinds for each in (kind, "mlp")]


def _keep_scales(fields: dict[str, Any], scale: Scale) -> None:
    """Scales of queries that follow from the size of a head follow from the copy's."""
    for name in ("query_pre_attn_scalar", "attention_multiplier", "attention_scale"):
        value = fields.get(name)
        if not isinstance(value, int | float) or not value:
            continue
        for power in (1.0, -1.0, -0.5):
            if abs(value - scale.head**power) < 1e-6 * value:
                fields[name] = type(value)(scale.to_head**power)
