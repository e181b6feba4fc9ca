"""Which tensors of the files make one packed weight, seen by their names, kinds of numbers and shapes.

    mlp.up_proj.weight            F8_E4M3 [N, K]       ┐ one weight [N, K], whose numbers are
    mlp.up_proj.weight_scale_inv  BF16 [N/128, K/128]  ┘ those of the first times those of the second

Every tensor of a packed weight goes along the rows of the weight, its columns, both or none, and one entry covers some
of them. So any slice of the weight says which slices of the tensors are to be read, rounded outward.

What is stored in fewer bits and is no part of such a weight is refused before anything is read, and so is a scale that
no weight has: both would give wrong numbers, and nothing else would tell.

Suffixes: N rows (outputs)    K columns (inputs)    g columns that share a scale
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from ....errors import UnsupportedModel
from ..json_file import clipped, corrupt
from ..safetensors_header import StoredTensor
from .description import Description, Integers

E4M3, E8M0, FLOATS = ("F8_E4M3",), ("F8_E8M0", "U8"), ("F32", "BF16", "F16")
SHORT = frozenset({"F8_E4M3", "F8_E5M2", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F6_E2M3", "F6_E3M2", "F4",
                   "I8", "U8", "I16", "U16", "I32", "U32"})  # fmt: skip
"""Kinds of numbers that packed weights have, and no plain one."""

PLAIN = frozenset({*FLOATS, "F64"})

GROUP_OF = {"nvfp4": 16, "mxfp4": 32, "mxfp8": 32}
WORDS = frozenset({"awq", "gptq", *(f"w{bits}a16" for bits in range(2, 9))})
"""Formats of integers, several in a word, and so are their zero points."""

WORD_BITS = 32

AWQ_ORDER = 0, 4, 1, 5, 2, 6, 3, 7
"""Which of a word's eight integers is the first column, the second, ..."""


class Along(NamedTuple):
    """A dimension of a tensor that goes along the weight's rows or columns."""

    dim: int
    per: int = 1  # of the weight's, which one entry covers, or several together
    entries: int = 1

    def of(self, length: int) -> int:
        """Entries for so many of the weight's."""
        return -(-length * self.entries // self.per)

    def around(self, start: int, stop: int) -> tuple[int, int]:
        """Entries that cover those from `start` to `stop`, from where one begins that begins with an entry."""
        return start // self.per * self.entries, -(-stop // self.per) * self.entries


def along_words(dim: int, bits: int) -> Along:
    """Integers without gaps: where a word does not hold a whole number of them, 32 fill as many words as each has
    bits."""
    return Along(dim, WORD_BITS // bits) if WORD_BITS % bits == 0 else Along(dim, WORD_BITS, bits)


@dataclass(frozen=True, slots=True)
class Part:
    """A stored tensor of a packed weight. Without rows or columns one entry is for all of them."""

    name: str
    rows: Along | None = None
    columns: Along | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight of the model, [rows, columns] as an `nn.Linear` has it, in fewer bits."""

    name: str
    format: str
    shape: tuple[int, int]
    parts: Mapping[str, Part]
    """`codes`, `scale` and, where there are such, `zero`, `factor`, `divisor`, `group_of`, `inputs`."""

    bits: int = 8
    order: tuple[int, ...] = ()
    """Of packed integers: which of a word's is the first. Empty: from the lowest bits on."""

    zero: int = 0
    """What is subtracted from a code, beside what `zero` stores."""

    experts: int = 0
    """As many such weights lie along the first dimension of `stacked`. Else it is one."""

    rounds_inputs: bool = False
    """Whether its description rounds inputs to 8 bits, too."""

    stacked: frozenset[str] = frozenset()
    """Tensors with a dimension for experts. It does not count in `shape` and `parts`."""

    is_turned: bool = False
    """Whether the files have its columns before its rows."""

    @property
    def stored(self) -> tuple[str, ...]:
        """Names of its tensors, that of the codes first."""
        return tuple(part.name for part in self.parts.values())

    def numbers(self, codes_shape: tuple[int, ...]) -> int:
        return math.prod(self.shape) * max(1, self.experts)

    def turned(self) -> "Packed":
        """What was taken for its rows are its columns."""
        parts = {role: replace(part, rows=part.columns, columns=part.rows) for role, part in self.parts.items()}
        return replace(self, shape=self.shape[::-1], parts=parts, is_turned=not self.is_turned)


@dataclass(frozen=True, slots=True)
class Blocks:
    """Experts of gpt-oss as released, [experts, rows, columns]: see `weight_map.Mxfp4`."""

    name: str
    codes: str
    scale: str

    @property
    def stored(self) -> tuple[str, ...]:
        return self.codes, self.scale

    def numbers(self, codes_shape: tuple[int, ...]) -> int:
        return 2 * math.prod(codes_shape)


class _Found:
    """The tensors of one module, by what stands behind the module's name."""

    def __init__(
        self,
        module: str,
        tensors: Mapping[str, StoredTensor],
        description: Description | None,
        folder: Path,
        *,
        is_expert: bool = False,
    ):
        """is_expert: it is one of several that lie on top of each other"""
        self.module = module
        self.tensors = tensors
        self.description = description
        self.folder = folder
        self.is_expert = is_expert

    def has(self, suffix: str, dtypes: Iterable[str] = ()) -> bool:
        found = self.tensors.get(suffix)
        return found is not None and (not dtypes or found.dtype in dtypes)

    def name(self, suffix: str) -> str:
        found = self.tensors.get(suffix)
        return f"{self.module}.{suffix}" if found is None else found.name

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.tensors[suffix].shape

    def matrix(self, suffix: str, what: str) -> tuple[int, int]:
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise self.wrong(suffix, "two dimensions", what)
        return shape[0], shape[1]

    def need(self, suffix: str, dtypes: Iterable[str], what: str) -> StoredTensor:
        """Raises `CorruptCheckpoint` if it is not there, or of other numbers."""
        found = self.tensors.get(suffix)
        if found is None:
            one = next(iter(self.tensors.values()))
            raise corrupt(
                f"{self.folder / one.file} lacks {self.name(suffix)}, without which the {what} weight of {self.module} "
                f"cannot be read. It holds {clipped(', '.join(sorted(self.tensors)), 200)} of it."
            )
        if found.dtype not in dtypes:
            raise self.wrong(suffix, f"numbers of {' or '.join(dtypes)}", what)
        return found

    def expect(self, suffix: str, shape: tuple[int, ...], what: str) -> None:
        if self.shape(suffix) != shape:
            raise self.wrong(suffix, f"shape {list(shape)}", what)

    def wrong(self, suffix: str, wanted: str, what: str) -> Exception:
        """what: scheme that the tensor is a part of"""
        found = self.tensors[suffix]
        place = "" if self.description is None else f" (as {self.description.place} has it)"
        return corrupt(
            f"{self.folder / found.file}: {self.name(suffix)} is {found.dtype} {list(found.shape)}; for the {what} "
            f"weight of {self.module}{place} it must have {wanted}"
        )


# -- the formats -------------------------------------------------------------------------------------------------------


def _float8(found: _Found) -> Packed | None:
    """One scale for the tensor, a row, a block of rows and columns, or (MX) 32 columns of a row."""
    if not found.has("weight", E4M3):
        return None
    suffixes = "weight_scale_inv", "weight_scale", "qscale_weight", "scale"
    suffix = next((each for each in suffixes if found.has(each)), suffixes[0])
    shape = found.matrix("weight", "FP8")
    tensor = found.need(suffix, FLOATS + E8M0, "FP8")
    block = found.description.block if found.description is not None else (0, 0)
    if tensor.dtype == "U8" or (tensor.dtype in E8M0 and tensor.shape == (shape[0], -(-shape[1] // 32))):
        found.expect(suffix, (shape[0], -(-shape[1] // 32)), "MXFP8")
        return _plain(found, "mxfp8", shape, Part(found.name(suffix), Along(0), Along(1, 32)))
    return _plain(found, "fp8", shape, _scale(found, suffix, shape, block, "FP8"))


def _int8(found: _Found) -> Packed | None:
    is_said = found.description is not None and found.description.has_integers
    if not (is_said and found.has("weight", ("I8",)) and found.has("weight_scale")):
        return None
    shape = found.matrix("weight", "INT8")
    found.need("weight_scale", FLOATS, "INT8")
    said = _said(found)
    block = (1, said.group) if said.group is not None else (0, 0)
    packed = _plain(found, "int8", shape, _scale(found, "weight_scale", shape, block, "INT8"))
    packed = replace(packed, rounds_inputs=said.rounds_inputs)
    if not found.has("weight_zero_point"):
        return packed
    found.need("weight_zero_point", ("I8",), "INT8")
    return _with(packed, zero=_scale(found, "weight_zero_point", shape, block, "INT8"))


def _torchao(found: _Found) -> Packed | None:
    """Tensors of Python's classes, taken apart: whole numbers or floats of 8 bits, with scales for all, for rows, for
    groups or for blocks, all of one size."""
    if not found.has("_weight_qdata"):
        return None
    format = {"I8": "int8", "F8_E4M3": "fp8"}.get(found.tensors["_weight_qdata"].dtype)
    if format is None or (found.has("_weight_scale") and not found.has("_weight_scale", FLOATS)):
        what = "a weight of torchao in 4 bits, or with scales in the order in which GPUs read them"
        raise _cannot(found, "_weight_qdata", what, "which is not read")
    what = f"torchao {format}"
    shape, name = found.matrix("_weight_qdata", what), found.name("weight")
    found.need("_weight_scale", FLOATS, what)
    parts = {
        "codes": Part(found.name("_weight_qdata"), Along(0), Along(1)),
        "scale": _even_scale(found, "_weight_scale", shape, what),
    }
    if found.has("_weight_zero_point"):
        found.need("_weight_zero_point", ("I8",), what)
        parts["zero"] = _even_scale(found, "_weight_zero_point", shape, what)
    return Packed(name, format, shape, parts)


def _even_scale(found: _Found, suffix: str, shape: tuple[int, int], what: str) -> Part:
    """Its shape says into how many parts rows and columns are divided."""
    stored, name = found.shape(suffix), found.name(suffix)
    if math.prod(stored) == 1:
        return Part(name)
    if len(stored) != 2 or any(not parts or length % parts for length, parts in zip(shape, stored, strict=True)):
        raise found.wrong(suffix, f"two dimensions that divide {list(shape)}", what)
    return Part(name, Along(0, shape[0] // stored[0]), Along(1, shape[1] // stored[1]))


def _scale(found: _Found, suffix: str, shape: tuple[int, int], block: tuple[int, int], what: str) -> Part:
    """By its shape: of all, of a row, of a block."""
    rows, columns = shape
    stored, name = found.shape(suffix), found.name(suffix)
    if math.prod(stored) == 1 and shape != (1, 1):
        return Part(name)
    if stored in ((rows,), (rows, 1)):
        return Part(name, rows=Along(0))
    if 0 in block:
        raise found.wrong(suffix, f"one number, or one for each of {rows} rows", what)
    blocks = -(-rows // block[0]), -(-columns // block[1])
    if stored == blocks:
        return Part(name, Along(0, block[0]), Along(1, block[1]))
    if stored == (blocks[0], 1, blocks[1], 1):
        return Part(name, Along(0, block[0]), Along(2, block[1]))
    raise found.wrong(
        suffix, f"one number, one for each of {rows} rows, or {list(blocks)}, one for each block of {list(block)}", what
    )


def _plain(found: _Found, format: str, shape: tuple[int, int], scale: Part) -> Packed:
    codes = Part(found.name("weight"), Along(0), Along(1))
    return Packed(found.name("weight"), format, shape, {"codes": codes, "scale": scale})


def _with(packed: Packed, **parts: Part) -> Packed:
    return replace(packed, parts={**packed.parts, **parts})


def _float4(found: _Found) -> Packed | None:
    """Pairs of e2m1 in a byte: MXFP4, and NVFP4 in all spellings, of which one divides by its global scale, one
    multiplies with it, and one (Inkling 2 Mini) does both."""
    if found.has("weight_packed", ("U8",)):
        codes, roles = "weight_packed", {"divisor": "weight_global_scale"}
    elif found.has("weight", ("U8",)) and found.has("weight_amax"):
        codes, roles = "weight", {"factor": "weight_amax", "divisor": "weight_outer_scale_denominator"}
    elif found.has("weight", ("U8",)) and (found.has("weight_scale_2") or found.has("weight_scale", E4M3 + E8M0)):
        codes, roles = "weight", {"factor": "weight_scale_2"}
    elif found.has("weight", ("U8", "I8")) and found.has("scale", E8M0):
        return _nibbles(found, "mxfp4", "weight", "scale")
    else:
        return None
    scale = found.need("weight_scale", E4M3 + E8M0, "4-bit float")
    if scale.dtype not in E4M3:
        return _nibbles(found, "mxfp4", codes, "weight_scale")
    packed = _nibbles(found, "nvfp4", codes, "weight_scale", _nvfp4_group(found, codes))
    for suffix in roles.values():
        found.need(suffix, ("F32",), "NVFP4")
        if math.prod(found.shape(suffix)) != 1:
            raise found.wrong(suffix, "one number", "NVFP4")
    return _with(packed, **{role: Part(found.name(suffix)) for role, suffix in roles.items()})


def _nvfp4_group(found: _Found, codes: str) -> int:
    """modelopt has groups of 32, too, and says so."""
    said, (_, half) = found.description, found.matrix(codes, "NVFP4")
    wide = None if said is None or said.method != "modelopt" else said.integers_of(found.module).group
    if wide is not None and found.shape("weight_scale")[-1:] == (-(-half * 2 // wide),):
        return wide
    return GROUP_OF["nvfp4"]


def _nibbles(found: _Found, format: str, codes: str, scale: str, group: int | None = None) -> Packed:
    rows, half = found.matrix(codes, format.upper())
    group = group or GROUP_OF[format]
    # Experts may be stored with their inputs before their outputs: pairs and groups then lie along the first dimension.
    if found.is_expert and found.shape(scale) == (-(-rows * 2 // group), half):
        parts = {
            "codes": Part(found.name(codes), Along(1), Along(0, 2)),
            "scale": Part(found.name(scale), Along(1), Along(0, group)),
        }
        return Packed(found.name("weight"), format, (half, rows * 2), parts, bits=4, is_turned=True)
    found.expect(scale, (rows, -(-half * 2 // group)), format.upper())
    parts = {
        "codes": Part(found.name(codes), Along(0), Along(1, 2)),
        "scale": Part(found.name(scale), Along(0), Along(1, group)),
    }
    return Packed(found.name("weight"), format, (rows, half * 2), parts, bits=4)


def _pairs_of_rows(found: _Found) -> Packed | None:
    """modelopt: integers with a sign, those of two rows in a byte, and a scale for each group of columns."""
    is_modelopt = found.description is not None and found.description.method == "modelopt"
    if not (is_modelopt and found.has("weight", ("U8",)) and found.has("weight_scale", FLOATS)):
        return None
    half, columns = found.matrix("weight", "W4A16_AWQ")
    rows = 2 * half
    stored = found.shape("weight_scale")
    if len(stored) != 2 or stored[0] != rows or not stored[1] or columns % stored[1]:
        raise found.wrong("weight_scale", f"{rows} rows, and columns that divide {columns}", "W4A16_AWQ")
    parts = {
        "codes": Part(found.name("weight"), Along(0, 2), Along(1)),
        "scale": Part(found.name("weight_scale"), Along(0), Along(1, columns // stored[1])),
    }
    return Packed(found.name("weight"), "w4a16_awq", (rows, columns), parts, bits=4, zero=8)


def _words_by_rows(found: _Found) -> Packed | None:
    """compressed-tensors: integers without a sign in words along the columns; zero points in words along rows."""
    if not found.has("weight_packed", ("I32",)):
        return None
    said = _said(found)
    what = f"W{said.bits}A16"
    along_rows, along_columns = along_words(0, said.bits), along_words(1, said.bits)
    rows, words = found.matrix("weight_packed", what)
    columns = _columns_in(words, said)
    if along_columns.of(columns) != words:
        raise found.wrong("weight_packed", f"{along_columns.of(columns)} words for {columns} columns", what)
    what += f" (groups of {said.group or columns})"
    groups = _groups(found, "weight_packed", said, columns, what)
    found.need("weight_scale", FLOATS, what)
    found.expect("weight_scale", (rows, groups), what)
    group = Along(1, said.group or columns)
    parts = {
        "codes": Part(found.name("weight_packed"), Along(0), along_columns),
        "scale": Part(found.name("weight_scale"), Along(0), group),
    }
    if found.has("weight_zero_point"):
        found.need("weight_zero_point", ("I32",), what)
        found.expect("weight_zero_point", (along_rows.of(rows), groups), what)
        parts["zero"] = Part(found.name("weight_zero_point"), along_rows, group)
    elif not said.is_symmetric:
        found.need("weight_zero_point", ("I32",), f"asymmetric {what}")
    if found.has("weight_g_idx"):
        parts |= _order(found, "weight_g_idx", columns, what)
    # A stored code is larger than the number by half the range; so is a zero point, so that both cancel out.
    zero = 0 if "zero" in parts else 1 << (said.bits - 1)
    packed = Packed(found.name("weight"), f"w{said.bits}a16", (rows, columns), parts, said.bits, (), zero)
    return replace(packed, rounds_inputs=said.rounds_inputs)


def _words_by_columns(found: _Found) -> Packed | None:
    """AWQ, whose words lie along rows, and GPTQ, whose words lie along columns. Both store the weight turned."""
    if not found.has("qweight", ("I32",)):
        return None
    said = _said(found)
    is_awq = found.description is not None and found.description.method in ("awq",)
    name = "AWQ" if is_awq else "GPTQ"
    if is_awq and said.bits != 4:
        raise _cannot(found, "qweight", f"AWQ of {said.bits} bits")
    # Words lie along the weight's rows or columns; zero points along rows in both.
    stored = found.matrix("qweight", name)
    along_rows, along_columns = along_words(1, said.bits), along_words(0, said.bits)
    rows, columns = (stored[1] * along_rows.per, stored[0]) if is_awq else (stored[1], _columns_in(stored[0], said))
    if not is_awq and along_columns.of(columns) != stored[0]:
        raise found.wrong("qweight", f"{along_columns.of(columns)} words for {columns} columns", name)
    what = f"{name} ({said.bits} bits, groups of {said.group or columns})"
    group = said.group or columns
    groups = _groups(found, "qweight", said, columns, what)
    found.need("scales", FLOATS, what)
    found.expect("scales", (groups, rows), what)
    found.need("qzeros", ("I32",), what)
    found.expect("qzeros", (groups, along_rows.of(rows)), what)
    codes = (along_rows, Along(0)) if is_awq else (Along(1), along_columns)
    parts = {
        "codes": Part(found.name("qweight"), *codes),
        "scale": Part(found.name("scales"), Along(1), Along(0, group)),
        "zero": Part(found.name("qzeros"), along_rows, Along(0, group)),
    }
    if said.is_shuffled and said.group is not None:
        found.need("g_idx", ("I32", "I64"), f"{what} by activation (desc_act)")
    if found.has("g_idx"):
        parts |= _order(found, "g_idx", columns, what)
    zero = 1 if said.zero_is_less_one else 0
    order = AWQ_ORDER if is_awq else ()
    return Packed(found.name("weight"), name.lower(), (rows, columns), parts, said.bits, order, zero)


def _columns_in(words: int, said: Integers) -> int:
    """Where integers do not fill the last word, a group tells how many there are."""
    columns = words * WORD_BITS // said.bits
    return columns if said.group is None or WORD_BITS % said.bits == 0 else columns // said.group * said.group


def _groups(found: _Found, suffix: str, said: Integers, columns: int, what: str) -> int:
    """Of columns. The last may be smaller only where each column says of which it is."""
    if said.group is None:
        return 1
    if columns % said.group and columns > said.group and not (found.has("g_idx") or found.has("weight_g_idx")):
        raise found.wrong(suffix, f"a multiple of {said.group} columns, and has {columns}", what)
    return -(-columns // said.group)


def _order(found: _Found, suffix: str, columns: int, what: str) -> dict[str, Part]:
    """Each column says which group it belongs to."""
    found.need(suffix, ("I32", "I64"), what)
    found.expect(suffix, (columns,), what)
    return {"group_of": Part(found.name(suffix), columns=Along(0))}


def _of_others(found: _Found) -> None:
    """Raises `UnsupportedModel` for what is known to be read by one tool only."""
    for suffix, tool in ONLY_OF_TOOLS.items():
        if found.has(suffix, SHORT):
            raise _cannot(found, suffix, f"part of a weight of {tool}", "which only that tool reads")


def _said(found: _Found) -> Integers:
    if found.description is None:
        tensor = next(tensor for tensor in found.tensors.values() if tensor.dtype == "I32")
        raise _cannot(found, tensor.name.removeprefix(f"{found.module}."), "packed integers")
    return found.description.integers_of(found.module)


def _cannot(found: _Found, suffix: str, what: str, why: str | None = None) -> UnsupportedModel:
    tensor = found.tensors[suffix]
    if why is None:
        why = "and nothing in the folder describes them" if found.description is None else "which are not read"
    return UnsupportedModel(
        f"{found.folder / tensor.file}: {tensor.name} ({tensor.dtype} {list(tensor.shape)}) holds {what}, {why}. "
        "Take another checkpoint of the model.",
        field="model",
    )


OF_EXPERTS = re.compile(
    r"(?P<weight>w\d+_weight|(gate_up|gate|up|down)_proj)"
    r"(_weight(?=_scale))?(?P<rest>_scale(_inv|_2)?|_amax|_outer_scale_denominator|_input_scale)?"
)
"""Weights of all experts of a layer, and their scales."""

CODES = "weight", "weight_packed", "qweight", "_weight_qdata"
ONLY_OF_TOOLS = {"_data": "optimum-quanto", "W_q": "HQQ"}
MOST_EXPERTS = 2**14
"""Of one layer. Published models have up to some hundred."""

FORMATS: tuple[Callable[[_Found], Packed | None], ...] = (
    _float8, _int8, _pairs_of_rows, _float4, _words_by_rows, _words_by_columns, _torchao, _of_others,
)  # fmt: skip

USED_ELSEWHERE = frozenset({
    # Scales of activations, which stay in 16 bits here, and of caches.
    "input_scale", "activation_scale", "input_global_scale", "input_zero_point", "qscale_act", "output_scale",
    "k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale", "k_cache_scale",
    "weight_shape",  # is that of the codes
})  # fmt: skip

UNUSED = {"w4a16_awq": frozenset({"weight_scale_2"})}
"""Of a format, scales that its numbers do not have. This one (W4A8_AWQ) would make them floats of 8 bits."""


# -- all of a checkpoint -----------------------------------------------------------------------------------------------


class PackedTensors(NamedTuple):
    """What is packed of a checkpoint, and what of its tensors says nothing more."""

    weights: Mapping[str, Packed | Blocks]  # by the name of the weight that they make
    taken: frozenset[str]  # stored tensors that are part of one, or not needed


def find_packed(tensors: Mapping[str, StoredTensor], description: Description | None, folder: Path) -> PackedTensors:
    """folder: of the files

    Raises `CorruptCheckpoint` for a weight that lacks a part or has one of another shape, and `UnsupportedModel` for
    one that is packed in a way that is not known.
    """
    modules: dict[str, dict[str, StoredTensor]] = {}
    weights: dict[str, Packed | Blocks] = {}
    taken: set[str] = set()
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if named := OF_EXPERTS.fullmatch(suffix):  # a parameter of a module that has several
            rest = named["rest"] or ""
            module, suffix = f"{module}.{named['weight']}", "input_scale" if rest == "_input_scale" else f"weight{rest}"
        if suffix.endswith("_blocks") and f"{name.removesuffix('_blocks')}_scales" in tensors:
            blocks = _blocks(name.removesuffix("_blocks"), tensors, folder)
            weights[blocks.name] = blocks
            taken |= {blocks.codes, blocks.scale}
        modules.setdefault(module, {})[suffix] = tensor
    for module, own in modules.items():
        if not any(tensor.dtype in SHORT for tensor in own.values()):
            continue
        packed = _packed(module, own, description, folder)
        if packed is not None:
            _check_alone(packed, tensors, folder)
            weights[packed.name] = packed
            taken |= {part.name for part in packed.parts.values()}
            unused = USED_ELSEWHERE | UNUSED.get(packed.format, frozenset())
            taken |= {tensor.name for suffix, tensor in own.items() if suffix in unused}
    return PackedTensors(weights, frozenset(taken))


def _check_alone(packed: Packed, tensors: Mapping[str, StoredTensor], folder: Path) -> None:
    """A weight that is packed and plain at once: nothing says which is meant. Raises `CorruptCheckpoint`."""
    codes = packed.parts["codes"].name
    if packed.name in tensors and packed.name != codes:
        raise corrupt(
            f"{folder / tensors[codes].file} holds {codes}, of which {packed.format} makes {packed.name}, and "
            f"{folder / tensors[packed.name].file} holds {packed.name} itself"
        )


def _packed(
    module: str, own: Mapping[str, StoredTensor], description: Description | None, folder: Path
) -> Packed | None:
    codes = next((own[suffix] for suffix in CODES if suffix in own), None)
    if codes is None or len(codes.shape) != 3 or not 0 < codes.shape[0] <= MOST_EXPERTS:
        return _first_that_fits(_Found(module, own, description, folder))
    # Experts on top of each other, each of them a weight like any other.
    experts = codes.shape[0]
    stacked = {suffix for suffix, tensor in own.items() if tensor.shape[:1] == (experts,)}
    one = {
        suffix: tensor._replace(shape=tensor.shape[1:]) if suffix in stacked else tensor
        for suffix, tensor in own.items()
    }
    packed = _first_that_fits(_Found(module, one, description, folder, is_expert=True))
    if packed is None:
        return None
    return replace(packed, experts=experts, stacked=frozenset(own[suffix].name for suffix in stacked))


def _first_that_fits(found: _Found) -> Packed | None:
    packed = next(filter(None, (read(found) for read in FORMATS)), None)
    is_modelopt = found.description is not None and found.description.method == "modelopt"
    if packed is None or not is_modelopt or not found.has("pre_quant_scale"):
        return packed
    # modelopt: what inputs are multiplied with, before the weight as it is stored.
    found.need("pre_quant_scale", FLOATS, packed.format)
    found.expect("pre_quant_scale", (packed.shape[1],), packed.format)
    return _with(packed, inputs=Part(found.name("pre_quant_scale"), columns=Along(0)))


def _blocks(name: str, tensors: Mapping[str, StoredTensor], folder: Path) -> Blocks:
    blocks = Blocks(name, f"{name}_blocks", f"{name}_scales")
    codes, scale = tensors[blocks.codes], tensors[blocks.scale]
    is_right = codes.dtype == "U8" and scale.dtype in E8M0 and len(codes.shape) == 4 and codes.shape[3] == 16
    if not is_right or scale.shape != codes.shape[:3]:
        raise corrupt(
            f"{folder / codes.file}: {codes.name} is {codes.dtype} {list(codes.shape)} and {scale.name} {scale.dtype} "
            f"{list(scale.shape)}; of MXFP4 they are [experts, outputs, inputs / 32, 16] and the same without the last"
        )
    return blocks
