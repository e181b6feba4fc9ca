"""What a checkpoint says of its quantised weights: in one of five places, in the words of the tool that wrote it.

Only what tensors do not tell is taken from here: how large blocks and groups are, how many bits an integer has, how a
zero point is stored. Which module is packed, and how, is seen by its tensors (`formats.py`): configs contradict them.

Sources: the configs of published checkpoints; compressed-tensors, AutoGPTQ and AutoAWQ; vLLM for the order of places.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import regex

from ....errors import UnsupportedModel
from ..config_schema import is_whole
from ..json_file import clipped, corrupt, quote, read_object, size_of

CONFIG_FILES = "hf_quant_config.json", "quantize_config.json", "quant_config.json"
"""Of modelopt, old GPTQ and old AWQ: beside a config.json that says nothing."""

METHODS = "fp8", "compressed-tensors", "modelopt", "awq", "gptq", "auto-round", "mxfp4"
MODELOPT_ALGORITHMS = (
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "FP8_PB_WO",
    "MXFP8",
    "NVFP4",
    "W4A16_NVFP4",
    "MIXED_PRECISION",
)
BLOCK = 128, 128
MOST_GROUP = 2**20
BITS = 4, 8
MOST_MATCH_S = 0.1
"""For a stranger's pattern on one name; those of published files take microseconds."""


class Integers(NamedTuple):
    """How packed integers of a module are to be read."""

    bits: int = 4
    group: int | None = None  # inputs that share a scale; None: all of a row
    is_symmetric: bool = True
    zero_is_less_one: bool = False  # a stored zero point is one less than it means


PLAIN_INTEGERS = Integers()


@dataclass(frozen=True, slots=True)
class Description:
    """What was said, and where. The same for all modules, but for `others`."""

    place: str
    method: str
    block: tuple[int, int] = BLOCK
    integers: Integers = PLAIN_INTEGERS
    others: tuple[tuple[str, Integers], ...] = ()
    """Patterns of modules' names (`_named`), and what holds there instead."""

    excluded: tuple[str, ...] = ()
    """Patterns of modules that are said not to be quantised."""

    def integers_of(self, module: str) -> Integers:
        return next((integers for pattern, integers in self.others if _named(pattern, module)), self.integers)

    def excludes(self, module: str) -> bool:
        return any(_named(pattern, module) for pattern in self.excluded)


def read_description(path: Path, config: Mapping[str, Any]) -> Description | None:
    """None: nothing is said. Raises `UnsupportedModel` for what cannot be read, `CorruptCheckpoint` for nonsense."""
    for place, said in _places(path, config):
        method = str(said.get("quant_method") or _guessed_method(place, said)).lower().replace("_", "-")
        read = _READERS.get(method)
        if read is None:
            raise _unsupported(place, f"its method is {clipped(method)}")
        return read(place, said)
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
    if "hf_quant_config" in place or "quant_algo" in said:
        return "modelopt"
    if "config_groups" in said or "compression_config" in place:
        return "compressed-tensors"
    if "quantize_config" in place:
        return "gptq"
    return "awq" if "quant_config" in place else "unknown"


# -- the words of each tool --------------------------------------------------------------------------------------------


def _fp8(place: str, said: Mapping[str, Any]) -> Description:
    fmt = said.get("fmt", "e4m3")
    if not isinstance(fmt, str) or not fmt.startswith(("e4m3", "float8_e4m3fn")) or fmt.endswith("fnuz"):
        raise _unsupported(place, f"fmt is {quote(fmt)}")
    return Description(place, "fp8", block=_block(place, said, "weight_block_size"), excluded=_excluded(place, said))


def _mxfp4(place: str, said: Mapping[str, Any]) -> Description:
    return Description(place, "mxfp4", excluded=_excluded(place, said))


def _compressed_tensors(place: str, said: Mapping[str, Any]) -> Description:
    for name in ("sparsity_config", "transform_config"):
        inner = said.get(name)
        if isinstance(inner, dict) and inner and inner.get("format", "") != "dense":
            raise _unsupported(place, f"it has a {name}: weights that are sparse or turned are not read")
    groups = said.get("config_groups") or {}
    if not isinstance(groups, dict):
        raise corrupt(f"{place}: config_groups must be an object, not {quote(groups)}")
    block, integers, others = BLOCK, PLAIN_INTEGERS, []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            continue
        where = f"{place}, {clipped(name)}"
        if weights.get("strategy") == "block":
            block = _block(where, weights, "block_structure")
        if weights.get("type", "int") == "int":
            integers = _integers(where, weights, bits="num_bits", symmetric="symmetric")
            others += [(pattern, integers) for pattern in _patterns(where, group, "targets")]
    # "Linear" is a class, and means all modules that no other group names.
    others = [(pattern, each) for pattern, each in others if pattern != "Linear"]
    return Description(
        place,
        "compressed-tensors",
        block=block,
        integers=integers,
        others=tuple(others),
        excluded=_excluded(place, said),
    )


def _modelopt(place: str, said: Mapping[str, Any]) -> Description:
    inner = said.get("quantization", said)
    if not isinstance(inner, dict):
        raise corrupt(f"{place}: quantization must be an object, not {quote(inner)}")
    layers = inner.get("quantized_layers") or {}
    if not isinstance(layers, dict):
        raise corrupt(f"{place}: quantized_layers must be an object, not {quote(layers)}")
    algorithms = [inner.get("quant_algo")]
    algorithms += [layer.get("quant_algo") for layer in layers.values() if isinstance(layer, dict)]
    for algorithm in algorithms:
        if algorithm is not None and algorithm not in MODELOPT_ALGORITHMS:
            raise _unsupported(place, f"quant_algo is {quote(algorithm)}")
    return Description(place, "modelopt", excluded=_excluded(place, inner))


def _awq(place: str, said: Mapping[str, Any]) -> Description:
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
        excluded=_excluded(place, said),
    )


def _gptq(place: str, said: Mapping[str, Any]) -> Description:
    stored_as = str(said.get("checkpoint_format", "gptq")).lower()
    if stored_as not in ("gptq", "gptq_v2"):
        raise _unsupported(place, f"checkpoint_format is {clipped(stored_as)}")
    common = _integers(place, said)._replace(zero_is_less_one=stored_as == "gptq")
    others, excluded = [], list(_excluded(place, said))
    dynamic = said.get("dynamic") or {}
    if not isinstance(dynamic, dict):
        raise corrupt(f"{place}: dynamic must be an object, not {quote(dynamic)}")
    for pattern, overrides in dynamic.items():
        if pattern.startswith("-:"):
            excluded.append(f"re:{pattern[2:]}")
        elif isinstance(overrides, dict):
            merged = _integers(place, {**said, **overrides})
            others.append(
                (f"re:{pattern.removeprefix('+:')}", merged._replace(zero_is_less_one=common.zero_is_less_one))
            )
    return Description(place, "gptq", integers=common, others=tuple(others), excluded=tuple(excluded))


def _auto_round(place: str, said: Mapping[str, Any]) -> Description:
    """It writes the formats of others, and says whose."""
    packing = str(said.get("packing_format", "auto_round:auto_gptq")).lower()
    if packing.endswith("awq"):
        return _awq(place, {**said, "version": "gemm"})
    if packing.endswith("gptq"):
        return _gptq(place, {**said, "checkpoint_format": "gptq"})
    raise _unsupported(place, f"packing_format is {clipped(packing)}")


_READERS = {
    "fp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "awq": _awq,
    "gptq": _gptq, "auto-round": _auto_round,
}  # fmt: skip


# -- fields ------------------------------------------------------------------------------------------------------------


def _integers(place: str, said: Mapping[str, Any], *, bits: str = "bits", symmetric: str = "sym") -> Integers:
    count, group = said.get(bits, 4), said.get("group_size", -1)
    if count not in BITS or isinstance(count, bool):
        raise _unsupported(place, f"{bits} is {quote(count)}")
    if group is not None and (not is_whole(group) or not (group == -1 or 0 < group <= MOST_GROUP)):
        raise corrupt(f"{place}: group_size must be -1 or a whole number from 1 to {MOST_GROUP}, not {quote(group)}")
    return Integers(count, None if group in (None, -1) else group, said.get(symmetric, True) is not False)


def _block(place: str, said: Mapping[str, Any], name: str) -> tuple[int, int]:
    """None is said where each tensor has one scale: then no tensor has blocks."""
    block = said.get(name)
    if block is None:
        return BLOCK
    if not (isinstance(block, list) and len(block) == 2 and all(is_whole(n) and 0 < n <= MOST_GROUP for n in block)):
        raise corrupt(f"{place}: {name} must be two whole numbers above 0, not {quote(block)}")
    return block[0], block[1]


def _excluded(place: str, said: Mapping[str, Any]) -> tuple[str, ...]:
    names = "modules_to_not_convert", "ignored_layers", "ignore", "exclude_modules"
    return tuple(pattern for name in names for pattern in _patterns(place, said, name))


def _patterns(place: str, said: Mapping[str, Any], name: str) -> list[str]:
    patterns = said.get(name) or []
    if not isinstance(patterns, list) or not all(isinstance(pattern, str) for pattern in patterns):
        raise corrupt(f"{place}: {name} must be a list of words, not {quote(patterns)}")
    for pattern in patterns:
        if pattern.startswith("re:"):
            try:
                regex.compile(pattern[3:])
            except regex.error as error:
                raise corrupt(f"{place}: {name} holds {quote(pattern)}, which is no pattern: {error}") from None
    return patterns


def _named(pattern: str, module: str) -> bool:
    """Tools agree on `re:`; else a pattern is a whole name, a part of it, or has stars."""
    if pattern.startswith("re:"):
        return regex.match(pattern[3:], module, timeout=MOST_MATCH_S) is not None
    return pattern in module or fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")


def _unsupported(place: str, what: str) -> UnsupportedModel:
    return UnsupportedModel(
        f"{place} describes quantised weights that are not read: {what}. Read are {', '.join(METHODS)}. "
        "Take one of those, or a bfloat16 checkpoint of the model.",
        field="model",
    )
