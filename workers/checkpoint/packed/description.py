"""What a checkpoint says of its quantised weights: in one of five places, in the words of the tool that wrote it.

Only what tensors do not tell is taken from here: how large blocks and groups are, how many bits an integer has, how a
zero point is stored. Which module is packed, and how, is seen by its tensors (`formats.py`): configs contradict them.

Sources: the configs of published checkpoints; compressed-tensors, AutoGPTQ and AutoAWQ; vLLM for the order of places.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from ....errors import UnsupportedModel
from ..config_schema import is_whole
from ..json_file import clipped, corrupt, quote, read_object, size_of
from .patterns import MOST_PATTERNS, REGULAR, Budget, Patterns

CONFIG_FILES = "hf_quant_config.json", "quantize_config.json", "quant_config.json"
"""Of modelopt, old GPTQ and old AWQ: beside a config.json that says nothing."""

METHODS = "fp8", "mxfp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "mxfp4", "torchao"
MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "W8A16",
    "W8A8_SQ_PER_CHANNEL",
    "W4A16_AWQ",
    "W4A8_AWQ",
    "MXFP8",
    "MXFP4",
    "NVFP4",
    "NVFP4_AWQ",
    "W4A16_NVFP4",
    "W4A8_NVFP4_FP8",
    "W4A8_MXFP4_FP8",
    "MIXED_PRECISION",
)
"""In capitals, as most of its versions write them."""

WITH_INT8 = "W8A16", "W8A8_SQ_PER_CHANNEL"
"""Of these, the ones that store whole numbers of 8 bits."""

WITH_GROUPS_OF_32 = "W4A8_NVFP4_FP8"
"""And of those in NVFP4."""

BLOCK = 128, 128
MOST_GROUP = 2**20
BITS = range(2, 9)
FLOAT_BITS = 4, 8
WHOLE_BITS = 16
"""And more: numbers as models have them."""

MOST_GROUPS = 4096
"""Groups of modules with a scheme of their own. Published configs have up to some hundred."""

AUTO_ROUND_PACKINGS = {
    "auto_gptq": "gptq",
    "gptq": "gptq",
    "auto_round": "gptq_v2",
    "gptqmodel": "gptq_v2",
    "auto_awq": "awq",
    "awq": "awq",
}
"""Of auto-round, whose format each of its own is."""

REGULAR_SIGNS = "*^$|()[]?+\\"
"""A pattern of auto-round that has one is a regular expression."""

EVERY_MODULE = "Linear"
"""A class, where patterns of modules are expected: all that no other group names."""


class Integers(NamedTuple):
    """How packed integers of a module are to be read."""

    bits: int = 4
    group: int | None = None  # inputs that share a scale; None: all of a row
    is_symmetric: bool = True
    zero_is_less_one: bool = False  # a stored zero point is one less than it means
    is_shuffled: bool = False  # columns of a group are anywhere: each says of which it is
    rounds_inputs: bool = False  # what it multiplies was rounded to whole numbers of 8 bits when it was checked


PLAIN_INTEGERS = Integers()


@dataclass(frozen=True, slots=True)
class Description:
    """What was said, and where. The same for all modules, but for `others`."""

    place: str
    method: str
    block: tuple[int, int] = BLOCK
    integers: Integers = PLAIN_INTEGERS
    others: tuple[tuple[Patterns, Integers], ...] = ()
    """Modules for which something else holds, and what."""

    excluded: Patterns | None = None
    """Modules that are said not to be quantised. None: there is no list of them."""

    has_integers: bool = False
    """Are there weights of whole numbers, so that bytes with a sign may be such?"""

    only: Patterns | None = None
    """The only modules that are said to be quantised. None: all that are not excluded."""

    def integers_of(self, module: str) -> Integers:
        return next((integers for patterns, integers in self.others if patterns.match(module)), self.integers)

    def calls_quantised(self, module: str) -> bool:
        """Does it say so plainly? Names are those of the whole model in some configs, those of the text part in
        others."""
        names = {module, module.replace("model.language_model.", "model."), module.removeprefix("model.")}
        if self.excluded is None or any(map(self.excluded.match, names)):
            return False
        return self.only is None or any(map(self.only.match, names))


def read_description(path: Path, config: Mapping[str, Any]) -> Description | None:
    """None: nothing is said. Raises `UnsupportedModel` for what cannot be read, `CorruptCheckpoint` for nonsense."""
    for place, said in _places(path, config):
        if not said:
            continue
        method = str(said.get("quant_method") or _guessed_method(place, said)).lower().replace("_", "-")
        read = _READERS.get("modelopt" if method.startswith("modelopt-") else method)
        if read is None:
            raise _unsupported(place, f"its method is {clipped(method)}")
        description = read(place, said, Budget())
        if description is not None:
            return description
    return None


def _places(path: Path, config: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    text = config.get("text_config")
    for name, holder in (
        ("quantization_config", config),
        ("quantization_config", text if isinstance(text, dict) else {}),
        ("compression_config", config),
    ):
        said = holder.get(name)
        if said is None:
            continue
        place = f"{path / 'config.json'} ({'' if holder is config else 'text_config.'}{name})"
        if not isinstance(said, dict):
            raise corrupt(f"{place} must be an object, not {quote(said)}")
        yield place, said
    for name in CONFIG_FILES:
        if size_of(path / name) is not None:
            yield str(path / name), read_object(path / name)


def _guessed_method(place: str, said: Mapping[str, Any]) -> str:
    """Files of their own do not always name the tool that they are of."""
    if place.endswith("hf_quant_config.json") or "quant_algo" in said:
        return "modelopt"
    if "config_groups" in said or "compression_config" in place:
        return "compressed-tensors"
    if "activation_scheme" in said or "weight_block_size" in said:
        return "fp8"
    if place.endswith("quantize_config.json"):
        return "gptq"
    if place.endswith("quant_config.json"):
        return "awq"
    return "mlx" if {"group_size", "bits"} <= said.keys() else "unknown"


# -- the words of each tool --------------------------------------------------------------------------------------------


def _fp8(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    fmt = said.get("fmt", "e4m3")
    if not isinstance(fmt, str) or not fmt.startswith(("e4m3", "float8_e4m3fn")) or fmt.endswith("fnuz"):
        raise _unsupported(place, f"fmt is {quote(fmt)}")
    return Description(
        place, "fp8", block=_block(place, said, "weight_block_size"), excluded=_excluded(place, said, budget)
    )


def _mxfp4(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    return Description(place, "mxfp4", excluded=_excluded(place, said, budget))


def _compressed_tensors(place: str, said: Mapping[str, Any], budget: Budget) -> Description | None:
    """None: only activations or caches are said to be quantised."""
    for name in ("sparsity_config", "transform_config"):
        inner = _object(place, said, name)
        if inner and inner.get("format", "") != "dense":
            raise _unsupported(place, f"it has a {name}: weights that are sparse or turned are not read")
    block, integers, others, targets = BLOCK, PLAIN_INTEGERS, [], []
    for name, group in _objects(place, said, "config_groups"):
        where = f"{place}, {clipped(name)}"
        weights = _object(where, group, "weights")
        if not weights:
            continue
        patterns = _patterns(where, group, "targets") or [EVERY_MODULE]
        targets += patterns
        if weights.get("type", "int") != "int":
            block = _block_of_floats(where, weights) or block
        else:
            found = _integers(where, weights, bits="num_bits", symmetric="symmetric")
            found = found._replace(rounds_inputs=_rounds_inputs(where, group))
            others.append((Patterns(where, (each for each in patterns if each != EVERY_MODULE), budget), found))
            integers = found if EVERY_MODULE in patterns or integers is PLAIN_INTEGERS else integers
    if not targets:
        return None
    return Description(
        place,
        "compressed-tensors",
        block=block,
        integers=integers,
        others=tuple(others),
        excluded=_excluded(place, said, budget),
        has_integers=bool(others),
        only=None if EVERY_MODULE in targets else Patterns(place, targets, budget),
    )


def _block_of_floats(place: str, weights: Mapping[str, Any]) -> tuple[int, int] | None:
    """None: each weight, or each row, has one scale, or it is a format that knows its groups."""
    bits = weights.get("num_bits", 8)
    if not is_whole(bits) or bits not in FLOAT_BITS:
        raise _unsupported(place, f"its weights are floats of {quote(bits)} bits")
    if weights.get("strategy") == "block":
        return _block(place, weights, "block_structure")
    if weights.get("strategy") == "group" and bits == 8 and weights.get("scale_dtype") != "torch.uint8":
        return 1, _group(place, weights) or MOST_GROUP
    return None


def _rounds_inputs(place: str, group: Mapping[str, Any]) -> bool:
    inputs = _object(place, group, "input_activations")
    return inputs.get("num_bits") == 8 and inputs.get("type", "int") == "int"


def _modelopt(place: str, said: Mapping[str, Any], budget: Budget) -> Description | None:
    """None: only caches are said to be quantised."""
    inner = _object(place, said, "quantization") or said
    layers = _object(place, inner, "quantized_layers")
    for name, holder in (("", inner), *layers.items()):
        if not isinstance(holder, dict):
            raise corrupt(f"{place}: {clipped(name)} in quantized_layers must be an object, not {quote(holder)}")
        if (algorithm := holder.get("quant_algo")) is not None and _algorithm(holder) not in MODELOPT_ALGORITHMS:
            of = f" for {clipped(name)}" if name else ""
            raise _unsupported(place, f"quant_algo is {quote(algorithm)}{of}")
    if inner.get("quant_algo") is None and not layers:
        return None
    only = Patterns(place, layers, budget) if _algorithm(inner) == "MIXED_PRECISION" else None
    algorithms = {_algorithm(holder) for holder in (inner, *layers.values())}
    return Description(
        place,
        "modelopt",
        integers=Integers(
            bits=8,
            group=32 if WITH_GROUPS_OF_32 in algorithms else None,
            rounds_inputs="W8A8_SQ_PER_CHANNEL" in algorithms,
        ),
        excluded=_excluded(place, inner, budget),
        has_integers=not algorithms.isdisjoint(WITH_INT8),
        only=only,
    )


def _algorithm(said: Mapping[str, Any]) -> str:
    return str(said.get("quant_algo")).upper()


def _awq(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    version = str(said.get("version", "gemm")).lower()
    if version != "gemm":
        raise _unsupported(place, f"its version is {clipped(version)}")
    # Some files have other names for two of the fields.
    named = {
        "bits": said.get("bits", said.get("w_bit")),
        "group_size": said.get("group_size", said.get("q_group_size")),
    }
    return Description(
        place,
        "awq",
        integers=_integers(place, {**said, **named})._replace(is_symmetric=False),
        excluded=_excluded(place, said, budget),
    )


def _gptq(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    stored_as = str(said.get("checkpoint_format", "gptq")).lower()
    if stored_as not in ("gptq", "gptq_v2"):
        raise _unsupported(place, f"checkpoint_format is {clipped(stored_as)}")
    where = f"{place}, dynamic"
    excluded, overrides = [], []
    for pattern, each in _objects(place, said, "dynamic"):
        if pattern.startswith("-:"):
            excluded.append(f"{REGULAR}{pattern[2:]}")
        else:
            overrides.append((f"{REGULAR}{pattern.removeprefix('+:')}", each))
    fixed = {"zero_is_less_one": stored_as == "gptq", "is_shuffled": said.get("desc_act") is True}
    return Description(
        place,
        "gptq",
        integers=_integers(place, said)._replace(**fixed),
        others=tuple(_overridden(where, said, overrides, budget, **fixed)),
        excluded=_excluded(place, said, budget, excluded),
    )


def _overridden(
    place: str,
    said: Mapping[str, Any],
    overrides: Iterable[tuple[str, Mapping[str, Any]]],
    budget: Budget,
    **fixed: bool,
) -> Iterator[tuple[Patterns, Integers]]:
    """overrides: a pattern, and what holds for its modules instead of what is said of all. The first that fits counts.
    Neighbours that say the same are one list, as there may be one for each expert."""
    read = [(pattern, _integers(f"{place}, {clipped(pattern)}", {**said, **each})) for pattern, each in overrides]
    for integers, alike in groupby(read, key=lambda each: each[1]):
        yield Patterns(place, [pattern for pattern, _ in alike], budget), integers._replace(**fixed)


def _auto_round(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    """It writes the formats of others, and says whose. Modules with a scheme of their own are in `extra_config`."""
    packing = str(said.get("packing_format", "auto_round:auto_gptq")).lower().removeprefix("auto_round:")
    # Floats, and files whose weights are as long as they were.
    if packing in ("fp8", "fp8_static"):
        return _fp8(place, said, budget)
    if packing == "fake" or (packing == "llm_compressor" and said.get("data_type", "int") != "int"):
        return Description(place, "auto-round", excluded=_excluded(place, said, budget))
    method = AUTO_ROUND_PACKINGS.get(packing)
    if method is None:
        raise _unsupported(place, f"packing_format is {clipped(packing)}")
    # Integers in words.
    where = f"{place}, extra_config"
    excluded, overrides = [], []
    for name, each in _objects(place, said, "extra_config", MOST_PATTERNS):
        pattern = f"{REGULAR}{name}" if any(sign in name for sign in REGULAR_SIGNS) else name
        if _is_whole_width(each):
            excluded.append(pattern)
        else:
            overrides.append((pattern, each))
    overrides.sort(key=lambda each: each[0].startswith(REGULAR))  # whole names count first
    fixed = {"zero_is_less_one": method == "gptq"}
    common = PLAIN_INTEGERS if _is_whole_width(said) else _integers(place, said)
    return Description(
        place,
        "awq" if method == "awq" else "gptq",
        integers=common._replace(**fixed),
        others=tuple(_overridden(where, said, overrides, budget, **fixed)),
        excluded=_excluded(place, said, budget, excluded),
    )


def _is_whole_width(said: Mapping[str, Any]) -> bool:
    bits = said.get("bits")
    return is_whole(bits) and bits >= WHOLE_BITS


def _torchao(place: str, said: Mapping[str, Any], budget: Budget) -> Description:
    """Its tensors say all: what its config has of them are arguments of Python's classes."""
    return Description(place, "torchao", excluded=_excluded(place, said, budget))


_READERS = {
    "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "awq": _awq, "gptq": _gptq, "auto-round": _auto_round, "torchao": _torchao,
}  # fmt: skip


# -- fields ------------------------------------------------------------------------------------------------------------


def _integers(place: str, said: Mapping[str, Any], *, bits: str = "bits", symmetric: str = "sym") -> Integers:
    count = said.get(bits, 4)
    if not is_whole(count) or count not in BITS:
        raise _unsupported(place, f"{bits} is {quote(count)}")
    return Integers(count, _group(place, said), said.get(symmetric, True) is not False)


def _group(place: str, said: Mapping[str, Any]) -> int | None:
    """None: all of a row."""
    group = said.get("group_size", -1)
    if group is not None and (not is_whole(group) or not (group == -1 or 0 < group <= MOST_GROUP)):
        raise corrupt(f"{place}: group_size must be -1 or a whole number from 1 to {MOST_GROUP}, not {quote(group)}")
    return None if group in (None, -1) else group


def _block(place: str, said: Mapping[str, Any], name: str) -> tuple[int, int]:
    """None is said where each tensor has one scale: then no tensor has blocks."""
    block = said.get(name)
    if block is None:
        return BLOCK
    if not (isinstance(block, list) and len(block) == 2 and all(is_whole(n) and 0 < n <= MOST_GROUP for n in block)):
        raise corrupt(f"{place}: {name} must be two whole numbers above 0, not {quote(block)}")
    return block[0], block[1]


def _object(place: str, said: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Empty where there is none."""
    found = said.get(name)
    if found is None:
        return {}
    if not isinstance(found, dict):
        raise corrupt(f"{place}: {clipped(name)} must be an object, not {quote(found)}")
    return found


def _objects(
    place: str, said: Mapping[str, Any], name: str, most: int = MOST_GROUPS
) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Objects by their names."""
    found = _object(place, said, name)
    if len(found) > most:
        raise corrupt(f"{place}: {name} holds {len(found)} objects; the limit is {most}")
    return ((each, _object(f"{place}, {name}", found, each)) for each in found)


def _excluded(place: str, said: Mapping[str, Any], budget: Budget, more: Iterable[str] = ()) -> Patterns | None:
    names = "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"
    patterns = [pattern for name in names for pattern in _patterns(place, said, name)]
    patterns += more
    return Patterns(place, patterns, budget) if patterns else None


def _patterns(place: str, said: Mapping[str, Any], name: str) -> list[str]:
    patterns = said.get(name)
    if patterns is None:
        return []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise corrupt(f"{place}: {name} must be a list of words, not {quote(patterns)}")
    return patterns


def _unsupported(place: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{place} describes quantised weights that are not read: {what}. Read are {', '.join(METHODS)}. "
        "Take one of those, or a bfloat16 checkpoint of the model.",
        field="model",
    )
