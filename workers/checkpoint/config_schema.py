"""What a config may say: the kind and the bounds of each field, known by its name, before anything is built from it.

Families name their sizes alike, so one table of names serves them all, and the configs within a config too. What is
in bounds may still be wrong; but building it then takes no more than a model takes.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeGuard

from .json_file import MAX_STRING_CHARS, corrupt, quote

MAX_LAYERS = 1024
MAX_EXPERTS = 2**15
MAX_SIZE = 2**24
"""Of one dimension of a tensor; vocabularies of real models have up to 300,000 tokens."""

MAX_POSITIONS = 2**27
MAX_INTEGER = 10**12
MAX_LIST = 2**18

USUAL_SIZE = 2**17
"""A size that a family may name and not use: it is no reason to doubt a tiny model."""

LAYER_COUNTS = "num_hidden_layers", "n_layer", "n_layers", "num_layers"
TEXT_CONFIGS = "text_config", "llm_config", "language_config"
DTYPE_WORDS = (
    "auto", "float64", "float32", "float16", "bfloat16", "float", "half", "double",
    "int8", "uint8", "float8_e4m3fn", "float8_e5m2",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kind:
    """Values that a field may have. None is one of them unless it `must_be` there."""

    words: str
    fits: Callable[[Any], bool]
    must_be: bool = False
    lists: int = 0  # within each other, in which such values may be, too

    def allows(self, value: Any, depth: int = 0) -> bool:
        if value is None:
            return not self.must_be
        if isinstance(value, list) and depth < self.lists:
            return all(self.allows(one, depth + 1) for one in value)
        return self.fits(value)


def is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: Any) -> TypeGuard[float]:
    """Finite, too."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= 1e300


def whole(low: int, high: int, *, must_be: bool = False, lists: int = 0) -> Kind:
    return Kind(
        f"a whole number from {low} to {high}",
        lambda value: is_whole(value) and low <= value <= high,
        must_be,
        lists,
    )


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= 256


NUMBER = Kind("a finite number", is_number, lists=2)
POSITIVE = Kind("a number above 0", lambda value: is_number(value) and value > 0, lists=2)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
WORD = Kind("a word of at most 256 characters", _is_text)
WORDS = Kind("a list of words", lambda value: isinstance(value, list) and all(map(_is_text, value)))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
DTYPE = Kind(
    "the name of a dtype",
    lambda value: isinstance(value, dict) or (_is_text(value) and value.removeprefix("torch.") in DTYPE_WORDS),
)


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0


THETA = Kind(
    "a number above 0, or an object of such",
    lambda value: all(map(_is_positive, value.values())) if isinstance(value, dict) else _is_positive(value),
    lists=2,
)
"""GPTQModel writes one for each kind of layer beside those that are read."""


def _sensible(low: int, high: int) -> Kind:
    """For names that only end like a size: flags and words are let through, numbers must be in bounds."""

    def fits(value: Any) -> bool:
        if isinstance(value, str):
            return not re.fullmatch(r"[\s\d.+-]*", value)
        return isinstance(value, bool | dict) or (is_whole(value) and low <= value <= high)

    return Kind(f"a whole number from {low} to {high}", fits, lists=3)


LAYERS = whole(1, MAX_LAYERS, must_be=True)
SIZE = whole(1, MAX_SIZE, must_be=True, lists=2)
MAYBE_SIZE = whole(0, MAX_SIZE, lists=2)
COUNT = _sensible(-1, MAX_SIZE)

KINDS: tuple[tuple[str, Kind], ...] = (
    ("|".join(LAYER_COUNTS), LAYERS),
    ("hidden_size|num_attention_heads", SIZE),
    ("vocab_size|intermediate_size|head_dim|num_key_value_heads|patch_size|image_size", MAYBE_SIZE),
    ("max_position_embeddings", whole(1, MAX_POSITIONS)),
    ("sliding_window|attention_chunk_size", whole(0, 2**31 - 1, lists=2)),
    ("rope_parameters|rope_scaling|quantization_config|(?!set_)[^_].*_config", OBJECT),
    ("rope_theta", THETA),
    ("factor|rope_local_base_freq", POSITIVE),
    ("(long|short)_factor|beta_fast|beta_slow|mscale|mscale_all_dim|partial_rotary_factor|attention_factor", NUMBER),
    (".*_eps|.*_epsilon|eps|.*_softcapping|.*_multiplier|initializer_range|routed_scaling_factor", NUMBER),
    ("temperature|top_k|top_p|min_p|repetition_penalty", Kind("a finite number", is_number)),
    ("tie_word_embeddings|attention_bias|mlp_bias|use_cache|do_sample|use_sliding_window|set_.*_config", FLAG),
    ("model_type|rope_type|quant_method", WORD),
    ("architectures|layer_types|mlp_layer_types|layers_block_type", WORDS),
    ("torch_dtype|dtype", DTYPE),
    ("(bos|eos|pad|image|decoder_start)_token_(id|index)|eos_token_ids", whole(-(2**31), 2**31 - 1, lists=1)),
    # And what only ends like a size.
    (".*_position_embeddings|n_positions|n_ctx|.*_(len|length)|.*_window", _sensible(-1, 2**31 - 1)),
    (".*_token_ids?|.*_token_index|.*_tokens", _sensible(-(2**31), 2**31 - 1)),
    (".*experts(_.*)?", _sensible(-1, MAX_EXPERTS)),
    (".*_layers|depths?", _sensible(-1, MAX_LAYERS)),
    (".*_(size|sizes|dim|dims|heads|rank|channels|groups|kernel|state|width|latents|conv)", COUNT),
    (".*_(d|n|num)_.*|(n|num|d)_.*|conv_L_cache", COUNT),
)
"""Patterns of a field's whole name; the first that matches says its kind."""


def check_config(config: Mapping[str, Any], what: str) -> None:
    """Every field, in configs within it too. what: is read, for people. Raises `CorruptCheckpoint` for the first."""
    for path, value in _fields(config, ""):
        kind = _kind_of(path.rpartition(".")[2])
        if kind is not None and not kind.allows(value):
            raise corrupt(f"{what}: {quote_path(path)} must be {kind.words}, not {quote(value)}")
        if isinstance(value, str | list) or is_whole(value):
            _check_any(what, path, value)
    _check_layers(text_config(config), what)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: within that of a model around it, or all there is."""
    return next((config[name] for name in TEXT_CONFIGS if isinstance(config.get(name), dict)), config)


def num_layers(text: Mapping[str, Any]) -> int | None:
    found = (text[name] for name in LAYER_COUNTS if name in text)
    return next((value for value in found if is_whole(value)), None)


def quote_path(path: str) -> str:
    return quote(path).strip("'\"")


def _kind_of(name: str) -> Kind | None:
    return next((kind for pattern, kind in _PATTERNS if pattern.fullmatch(name)), None)


_PATTERNS = [(re.compile(pattern), kind) for pattern, kind in KINDS]


def _fields(config: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for name, value in config.items():
        yield f"{above}{name}", value
        if isinstance(value, dict):
            yield from _fields(value, f"{above}{name}.")


def _check_any(what: str, path: str, value: Any) -> None:
    """Bounds of values of which nothing else is known."""
    if isinstance(value, str) and len(value) > MAX_STRING_CHARS:
        raise corrupt(f"{what}: {quote_path(path)} has {len(value)} characters; the limit is {MAX_STRING_CHARS}")
    if isinstance(value, list):
        if len(value) > MAX_LIST:
            raise corrupt(f"{what}: {quote_path(path)} has {len(value)} values; the limit is {MAX_LIST}")
        for one in value:
            _check_any(what, path, one)
    elif is_whole(value) and abs(value) > MAX_INTEGER:
        raise corrupt(f"{what}: {quote_path(path)} must be at most {MAX_INTEGER}, not {quote(value)}")


def _check_layers(text: Mapping[str, Any], what: str) -> None:
    """What is said of each layer, and of heads, must agree."""
    layers = num_layers(text)
    types = text.get("layer_types")
    guessing = text.get("num_nextn_predict_layers")  # further tokens; some lists name these layers too
    lengths = (layers, layers + guessing) if layers is not None and is_whole(guessing) else (layers,)
    if layers is not None and types is not None and len(types) not in lengths:
        raise corrupt(f"{what}: layer_types must name each of the {layers} layers, not {len(types)}")
    heads, kv_heads = text.get("num_attention_heads"), text.get("num_key_value_heads")
    if is_whole(heads) and is_whole(kv_heads) and (kv_heads < 1 or heads % kv_heads):
        raise corrupt(f"{what}: num_key_value_heads must divide the {heads} num_attention_heads, not be {kv_heads}")


# -- a config against the tensors of its files -------------------------------------------------------------------------

MAX_LAYERS_COUNTED = 10_000

LAYER_OF = re.compile(r"(?:^|\.)(?:layers|layer|h|blocks|block)\.(\d{1,9})\.")
EMBEDDINGS = re.compile(
    r"(model\.|language_model\.|model\.language_model\.|language_model\.model\.)?embed_tokens\.weight"
)


def check_tensors(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: object) -> None:
    """Raises `CorruptCheckpoint` when the config is of a larger model than the files: building it would be in vain,
    and take as long as the config says. shapes: of each tensor in the files."""
    text = text_config(config)
    layers = _stored_layers(text)
    stored = Counter(int(found[1]) for name in shapes if (found := LAYER_OF.search(name)))
    if layers is not None and stored and layers > (there := max(stored) + 1):
        lacks = sum(stored[layer % there] for layer in range(there, min(layers, MAX_LAYERS_COUNTED)))
        raise corrupt(
            f"{what}: config.json says {layers} layers, and the files hold tensors of {there}: if layers are alike, "
            f"the checkpoint lacks {lacks} of the model's tensors. The files are incomplete, or they are of another "
            "model than config.json says."
        )
    _check_embeddings(text, shapes, what)
    elements = sum(map(math.prod, shapes.values()))
    for name, value in text.items():
        if name.endswith(("_size", "_dim", "_rank")) and is_whole(value) and value > max(elements, USUAL_SIZE):
            raise corrupt(f"{what}: config.json says {name} {value}, and the files hold {elements} numbers in all")


def _stored_layers(text: Mapping[str, Any]) -> int | None:
    """Layers of which the files hold tensors: some are gone through several times, and some configs count a layer's MLP
    as another."""
    layers, kinds = num_layers(text), text.get("layer_types")
    each = text.get("num_layers_per_stack")
    if is_whole(each):
        return each
    return layers // 2 if layers is not None and isinstance(kinds, list) and "mlp" in kinds else layers


def _check_embeddings(text: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], what: object) -> None:
    """Families pad the vocabulary, and never have fewer rows than tokens."""
    vocab, hidden = text.get("vocab_size"), text.get("hidden_size")
    for name, shape in shapes.items():
        if len(shape) != 2 or not EMBEDDINGS.fullmatch(name):
            continue
        if (is_whole(hidden) and shape[1] != hidden) or (is_whole(vocab) and shape[0] < vocab):
            raise corrupt(
                f"{what}: tensor {name} has shape {shape}; config.json makes it {vocab} tokens (vocab_size) of "
                f"{hidden} numbers (hidden_size)"
            )
