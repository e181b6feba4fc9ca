"""What a model would take in another format: which of its weights are packed as a rule, and into how many bytes.

Checkpoints of one format are alike. Linear layers are packed, experts too. Embeddings, the output (`lm_head`), norms,
routers, convolutions, the narrow projections of delta nets (`in_proj_a`, `in_proj_b`) and what belongs to a state stay
as they are. In GGUF files embeddings and outputs are packed as well, and mixes such as Q4_K_M give more bits to every
second value projection and second matrix of an MLP, and to the output.

Sources: llm-compressor's and modelopt's usual settings; llama.cpp, `llama_tensor_get_type` in src/llama-quant.cpp.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import NamedTuple

from ...errors import InvalidSetting
from ...workers.checkpoint.gguf.header import KINDS, BlockSize
from .weights import ITEM_BYTES, Weights

STAYS = re.compile(
    r".*(embed|wte|lm_head|norm|router|conv|lora|\bgate\.weight|_gate\.weight|\bin_proj_(a|b|ba)\.weight).*"
)
"""Names of weights with rows and columns that are packed in no format but GGUF. `gate_proj` is none of them."""

EMBEDDING = re.compile(r".*(embed_tokens|embeddings?|wte|word_embeddings)\w*\.weight")
OUTPUT = re.compile(r".*\blm_head\.weight")
VALUES, SECOND_OF_MLP = re.compile(r".*\bv_proj\.weight"), re.compile(r".*\b(down_proj|w2|output_linear)(\.weight)?")
LAYER = re.compile(r".*\blayers\.(\d+)\..*")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a format packs a weight [rows, columns]. Sizes of what `weigh` counts."""

    format: str  # as `weigh` calls it
    bits: int  # of a number
    scale_bytes: int
    scale_rows: int = 1  # that share a scale; 0: all
    scale_columns: int = 0
    multiple: int = 1  # of which a weight's columns must be, else it stays
    row_multiple: int = 1
    has_zeros: bool = False  # a zero point for each scale, several in a word along rows
    column_bytes: int = 0
    whole_bytes: int = 0  # of the weight

    def fits(self, rows: int, columns: int) -> bool:
        return columns % self.multiple == 0 and rows % self.row_multiple == 0

    def stored(self, rows: int, columns: int) -> int:
        """Bytes of a weight."""
        groups = math.ceil(columns / self.scale_columns) if self.scale_columns else 1
        shared = math.ceil(rows / self.scale_rows) if self.scale_rows else 1
        zeros = groups * math.ceil(rows * self.bits / 32) * 4 if self.has_zeros else 0
        codes = rows * columns * self.bits // 8
        return codes + groups * shared * self.scale_bytes + zeros + columns * self.column_bytes + self.whole_bytes

    @property
    def bits_per_number(self) -> float:
        """Of a large weight, without what rows and columns take."""
        if not self.scale_columns:
            return self.bits
        each = 8 * self.scale_bytes / max(1, self.scale_rows) + (self.bits if self.has_zeros else 0)
        return self.bits + each / self.scale_columns


@dataclass(frozen=True, slots=True)
class Mix:
    """How a GGUF file of a kind packs its weights."""

    usual: BlockSize
    more: BlockSize  # of what gets more bits
    output: BlockSize
    small: BlockSize  # where columns are no multiple of 256


_BY_NAME = {kind.name: kind for kind in KINDS.values()}


def _mix(usual: str, more: str | None = None, output: str = "Q6_K", small: str = "Q8_0") -> Mix:
    return Mix(_BY_NAME[usual], _BY_NAME[more or usual], _BY_NAME[output], _BY_NAME[small])


RECIPES: Mapping[str, Recipe | Mix] = MappingProxyType(
    {
        "fp8": Recipe("fp8", 8, 2),
        "fp8-blocks": Recipe("fp8", 8, 4, 128, 128),
        "mxfp8": Recipe("mxfp8", 8, 1, 1, 32, multiple=32),
        "int8": Recipe("int8", 8, 2),
        "w8a16": Recipe("w8a16", 8, 2, 1, 128, multiple=128),
        "w4a16": Recipe("w4a16", 4, 2, 1, 128, multiple=128),
        "awq": Recipe("awq", 4, 2, 1, 128, multiple=128, row_multiple=8, has_zeros=True),
        "gptq": Recipe("gptq", 4, 2, 1, 128, multiple=128, row_multiple=8, has_zeros=True, column_bytes=4),
        "nvfp4": Recipe("nvfp4", 4, 1, 1, 16, multiple=16, whole_bytes=4),
        "mxfp4": Recipe("mxfp4", 4, 1, 1, 32, multiple=32),
        "q8_0": _mix("Q8_0", output="Q8_0"),
        "q6_k": _mix("Q6_K"),
        "q5_k_m": _mix("Q5_K", "Q6_K", small="Q5_1"),
        "q5_k_s": _mix("Q5_K", small="Q5_1"),
        "q5_1": _mix("Q5_1"),
        "q5_0": _mix("Q5_0"),
        "q4_k_m": _mix("Q4_K", "Q6_K", small="Q5_0"),
        "q4_k_s": _mix("Q4_K", small="Q5_0"),
        "q4_1": _mix("Q4_1"),
        "iq4_nl": _mix("IQ4_NL"),
        "iq4_xs": _mix("IQ4_XS", small="IQ4_NL"),
        "q4_0": _mix("Q4_0"),
    }
)
"""By the name that people give. Groups are of 128 columns, and blocks of 128 rows and columns."""


def recipe_of(name: str) -> Recipe | Mix:
    """Raises `InvalidSetting` for a format that is not known."""
    found = RECIPES.get(name.lower())
    if found is None:
        raise InvalidSetting(
            f"weights_format must be one of {', '.join(RECIPES)}; got {name!r}", field="weights_format"
        )
    return found


class Matrix(NamedTuple):
    """A weight with rows and columns; or as many of them, on top of each other, as there are experts."""

    name: str
    rows: int
    columns: int
    copies: int = 1

    @property
    def numbers(self) -> int:
        return self.copies * self.rows * self.columns


def weights_as(shapes: Mapping[str, tuple[int, ...]], recipe: Recipe | Mix, dtype: str) -> Weights:
    """shapes: of all weights that are loaded, by their names in a checkpoint. dtype: of what is not packed"""
    item_bytes = ITEM_BYTES.get(dtype, 2)
    matrices = list(_matrices(shapes))
    packed: dict[str, int] = {}
    expanded: dict[str, int] = {}
    pairs = _by_recipe(matrices, recipe) if isinstance(recipe, Recipe) else _by_mix(matrices, recipe)
    numbers = sum(map(math.prod, shapes.values()))
    for matrix, form, size in pairs:
        packed[form] = packed.get(form, 0) + size
        expanded[form] = expanded.get(form, 0) + item_bytes * matrix.numbers
        numbers -= matrix.numbers
    return Weights(dtype, item_bytes * numbers, packed, expanded)


def _matrices(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[Matrix]:
    for name, shape in shapes.items():
        if len(shape) == 2 and name.endswith(".weight"):
            yield Matrix(name, *shape)
        elif len(shape) == 3 and ("expert" in name or "_linear" in name) and "conv" not in name and "bias" not in name:
            yield Matrix(name, shape[1], shape[2], shape[0])


def _by_recipe(matrices: Iterable[Matrix], recipe: Recipe) -> Iterator[tuple[Matrix, str, int]]:
    """What is packed, and into how many bytes."""
    for each in matrices:
        if not STAYS.fullmatch(each.name) and recipe.fits(each.rows, each.columns):
            yield each, recipe.format, each.copies * recipe.stored(each.rows, each.columns)


def _by_mix(matrices: list[Matrix], mix: Mix) -> Iterator[tuple[Matrix, str, int]]:
    """As `_by_recipe`. Of layers the first eighth, the last one, and every third between get more bits."""
    layers = 1 + max((layer for each in matrices if (layer := _layer(each.name)) is not None), default=-1)
    with_values = sorted({_layer(each.name) or 0 for each in matrices if VALUES.fullmatch(each.name)})
    has_output = any(OUTPUT.fullmatch(each.name) for each in matrices)
    for each in matrices:
        layer, is_embedding = _layer(each.name), EMBEDDING.fullmatch(each.name) is not None
        kind = mix.usual
        if OUTPUT.fullmatch(each.name) or (is_embedding and "embed_tokens" in each.name and not has_output):
            kind = _of_output(mix, each.columns)
        elif STAYS.fullmatch(each.name) and not is_embedding:
            continue
        elif layer is not None and VALUES.fullmatch(each.name):
            kind = mix.more if gets_more(with_values.index(layer), len(with_values)) else kind
        elif layer is not None and SECOND_OF_MLP.fullmatch(each.name):
            kind = mix.more if gets_more(layer, layers) else kind
        if each.columns % kind.numbers:
            kind = _BY_NAME["Q8_0"] if kind == mix.more != mix.usual else mix.small
        if each.columns % kind.numbers == 0:
            yield each, kind.name, each.numbers // kind.numbers * kind.bytes


def _of_output(mix: Mix, columns: int) -> BlockSize:
    return mix.output if columns % mix.output.numbers == 0 else _BY_NAME["Q8_0"]


def gets_more(layer: int, layers: int) -> bool:
    return layer < layers // 8 or layer >= 7 * layers // 8 or (layer - layers // 8) % 3 == 2


def _layer(name: str) -> int | None:
    found = LAYER.fullmatch(name)
    return int(found[1]) if found else None
