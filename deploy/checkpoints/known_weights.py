"""What the weights of known models take, as they are released and in other formats.

The table says how many numbers the parts of a model have: `total`, `linear` layers (of which `mlp` and `delta_nets` are
part), `experts`, `embedding` and an `output` of its own; of linear layers and experts, `values` and `second_of_mlp` are
what some GGUF files give more bits. `odd_columns`: some weights have columns that are no multiple of 256. What rows
and columns take is not counted: 0.1 % at most.
"""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

from ...errors import InvalidSetting
from .hub_gguf import USUAL, gguf_name
from .known_models import KnownModel, known_models
from .weights import Weights
from .weights_as import RECIPES, Mix, Recipe, recipe_of

DTYPE, ITEM_BYTES = "bfloat16", 2

IN_LINEAR = "mlp", "delta_nets"
"""Parts of linear layers that a release may treat in another way."""

SUFFIXES: Mapping[str, str] = {
    r"-fp8-dynamic": "fp8",
    r"-fp8(?:-block)?": "fp8-blocks",
    r"-mxfp8": "mxfp8",
    r"-(?:quantized\.w8a8|int8|w8a8)": "int8",
    r"-quantized\.w8a16": "w8a16",
    r"-(?:quantized\.w4a16|w4a16)": "w4a16",
    r"-awq": "awq",
    r"-gptq(?:-int4)?": "gptq",
    r"-nvfp4": "nvfp4",
    r"-mxfp4": "mxfp4",
}
"""How a release's name ends, in small letters, and the format that this means."""

PLAIN_KINDS = frozenset({"f16", "bf16", "f32"})
"""Of GGUF files, those that are loaded in the model's numbers."""

BASE_ENDS = "", "-bf16"
"""How the name of the model itself may end, where a release's has its format."""


class Release(NamedTuple):
    """A known model in the format of one of its releases."""

    id: str
    model: KnownModel
    packed: Mapping[str, str | None]  # part -> format; None: it stays as it is


def known_release(name: str) -> Release | None:
    """By its name: one of the table, or that of a known model with a format behind it. None: it is neither.

    Raises `InvalidSetting` for a GGUF file of a kind that is not known.
    """
    models = {model.id.lower(): model for model in known_models()}
    if found := _table().get(name.lower()):
        return Release(found["id"], models[found["of"].lower()], found["packed"])
    by_name = {id_.rpartition("/")[2]: model for id_, model in models.items()}
    if (gguf := gguf_name(name)) or name.lower().endswith("-gguf"):
        repository, kind = (gguf.repository, gguf.kind) if gguf else (name, None)
        model = by_name.get(repository.rpartition("/")[2].lower().removesuffix("-gguf"))
        return None if model is None else Release(name, model, _parts_of_gguf(name, (kind or USUAL).lower()))
    short = name.rpartition("/")[2].lower()
    for suffix, form in SUFFIXES.items():
        found = re.fullmatch(f"(.+){suffix}", short)
        for end in BASE_ENDS if found else ():
            assert found is not None
            if model := by_name.get(found[1] + end):
                return Release(name, model, usual_parts(form))
    return None


def _parts_of_gguf(name: str, kind: str) -> Mapping[str, str | None]:
    if kind in PLAIN_KINDS:
        return {}
    mixes = [form.upper() for form, recipe in RECIPES.items() if isinstance(recipe, Mix)]
    if kind.upper() not in mixes:
        raise InvalidSetting(
            f"what a GGUF file of kind {kind.upper()!r} gives each weight is only known from the file itself: "
            f"`intarsia plan FILE.gguf` counts that. Without the file {name!r} can be planned as "
            f"{', '.join((*mixes, 'F16'))}.",
            field="model",
        )
    return usual_parts(kind)


def usual_parts(form: str) -> Mapping[str, str | None]:
    """What a format packs as a rule. Raises `InvalidSetting` for one that is not known."""
    parts = ("linear", "experts", "embedding", "output") if isinstance(recipe_of(form), Mix) else ("linear", "experts")
    return dict.fromkeys(parts, form.lower())


def known_weights(model: KnownModel, packed: Mapping[str, str | None] | None = None) -> Weights | None:
    """packed: part -> format; None: as the model is released. None is returned where the table does not say how many
    numbers its parts have. Raises `InvalidSetting` for a format that is not known."""
    params: Mapping[str, int] = model.entry.get("params", {})
    released_in: Mapping[str, str | None] = model.entry.get("released_in", {})
    packed = released_in if packed is None else packed
    if not params or (packed and "linear" not in params):
        return None
    if params.get("odd_columns") and any(_has_large_blocks(form) for form in packed.values()):
        return None
    parts = _numbers(params, packed)
    stored: dict[str, float] = {}
    expanded: dict[str, int] = {}
    plain = params["total"]
    for part, form in packed.items():
        recipe = RECIPES[form] if form is not None and parts[part] else None
        if recipe is None:
            continue
        plain -= parts[part]
        for name, numbers, bits in _in_bits(part, parts[part], recipe, params):
            stored[name] = stored.get(name, 0) + numbers * bits / 8
            expanded[name] = expanded.get(name, 0) + ITEM_BYTES * numbers
    return Weights(DTYPE, ITEM_BYTES * plain, {name: round(size) for name, size in stored.items()}, expanded)


def _has_large_blocks(form: str | None) -> bool:
    """Whether it packs blocks of 256 columns. Weights whose columns are no multiple get other kinds, which cannot be
    told without their shapes."""
    recipe = None if form is None else RECIPES[form]
    return isinstance(recipe, Mix) and recipe.usual.numbers > 32


def _numbers(params: Mapping[str, int], packed: Mapping[str, str | None]) -> dict[str, int]:
    """How many each named part has, so that no number is in two. Raises `InvalidSetting` where that is not known."""
    if lost := [part for part in packed if part in IN_LINEAR and part not in params]:
        raise InvalidSetting(f"how large {lost[0]} of this model is, is not known", field="model")
    named = {part: params.get(part, 0) for part in packed}
    if "linear" in named:
        named["linear"] -= sum(named.get(part, 0) for part in IN_LINEAR)
    return named


def _in_bits(part: str, numbers: int, recipe: Recipe | Mix, params: Mapping[str, int]) -> list[tuple[str, int, float]]:
    """Format, how many numbers are in it, and bits of each."""
    if isinstance(recipe, Recipe):
        return [(recipe.format, numbers, recipe.bits_per_number)]
    # An embedding that is the output, too, is packed as an output; half of some layers' weights get more bits.
    kinds = {recipe.usual: numbers}
    if part == "output" or (part == "embedding" and not params.get("output")):
        kinds = {recipe.output: numbers}
    elif part in ("linear", "experts") and recipe.more != recipe.usual:
        more = _with_more_bits(part, params) // 2
        kinds = {recipe.usual: numbers - more, recipe.more: more}
    return [(kind.name, count, 8 * kind.bytes / kind.numbers) for kind, count in kinds.items() if count]


def _with_more_bits(part: str, params: Mapping[str, int]) -> int:
    """Numbers of the part that may get more bits. Second matrices are experts' in the proportion of all weights."""
    second, values = params["second_of_mlp"], params.get("values", 0)
    in_experts = min(second, params.get("experts", 0) // 3)
    return in_experts if part == "experts" else second - in_experts + values


@cache
def _table() -> dict[str, dict[str, Any]]:
    entries = json.loads(files("intarsia.deploy.checkpoints").joinpath("known_releases.json").read_text())
    return {entry["id"].lower(): entry for entry in entries}
