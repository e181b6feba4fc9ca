"""One defect at a time in a packed checkpoint that is good otherwise: it is caught before anything is served.

The error names the tensor, its file and the scheme. Some defects cannot be seen in principle. Two modules of one shape
whose scales were swapped are such a case: all shapes fit, and both scales are of usual size. Scales of one number are
another, whatever the shapes of their modules are. A third are zero points of 8 bits that are not all the same: read by
one too high, they move a weight by less than its mean may be.
"""

import json
import math
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from intarsia.errors import CorruptCheckpoint, UnsupportedModel
from intarsia.proto.worker import ModelSettings
from intarsia.tests import models
from intarsia.tests.packing import FORMATS, GROUP, Format, gptq, make_twins, of_gptq, share
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.load import load_model
from intarsia.workers.tensor_parallel import TensorParallel

FILE = "model.safetensors"
MODULE = "model.layers.1.mlp.down_proj"  # 64 rows, 96 columns
OTHER = "model.layers.1.mlp.up_proj"  # 96 rows, 64 columns

Tensors = dict[str, Tensor]
Config = dict[str, Any]
"""What config.json says of the weights."""

Damage = Callable[[Tensors, Config], None]


@dataclass(frozen=True, slots=True)
class Defect:
    format: str
    damage: Damage
    said: tuple[str, ...]
    """Words of the error."""


# -- damage ------------------------------------------------------------------------------------------------------------


def without(suffix: str) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        del tensors[f"{MODULE}.{suffix}"]

    return damage


def renamed(suffix: str, to: str) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        tensors[f"{MODULE}.{to}"] = tensors.pop(f"{MODULE}.{suffix}")

    return damage


def changed(suffix: str, change: Callable[[Tensor], Tensor], module: str = MODULE) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        tensors[f"{module}.{suffix}"] = change(tensors[f"{module}.{suffix}"]).contiguous()

    return damage


def swapped(suffix: str) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        one, other = f"{MODULE}.{suffix}", f"{OTHER}.{suffix}"
        tensors[one], tensors[other] = tensors[other], tensors[one]

    return damage


def added(suffix: str, tensor: Tensor) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        tensors[f"{MODULE}.{suffix}"] = tensor

    return damage


def plain(dtype: torch.dtype) -> Damage:
    """A weight without anything that says how to read it, and no description."""

    def damage(tensors: Tensors, said: Config) -> None:
        said.clear()
        for name in [name for name in tensors if name.startswith("model.layers.") and "proj." in name]:
            del tensors[name]
        tensors[f"{MODULE}.weight"] = torch.ones(64, 96).to(dtype)

    return damage


def told(**fields: Any) -> Damage:
    return lambda tensors, said: said.update(fields)


def told_of_weights(**fields: Any) -> Damage:
    return lambda tensors, said: said["config_groups"]["group_0"]["weights"].update(fields)


def described_as(format: str) -> Damage:
    def damage(tensors: Tensors, said: Config) -> None:
        said.clear()
        said.update(json.loads(json.dumps(dict(FORMATS[format].config))))

    return damage


def with_nan(scale: Tensor) -> Tensor:
    """In the last place. Those of bytes have a code for it."""
    scale = scale.clone()
    if scale.dtype in (torch.uint8, torch.float8_e4m3fn):
        scale.view(torch.uint8)[-1, -1] = 255
    else:
        scale.flatten()[-1] = torch.nan
    return scale


def less_one(words: Tensor) -> Tensor:
    """Of each of a word's eight integers, all of which are above 0."""
    return words - 0x11111111


def first_out_of_range(groups: Tensor) -> Tensor:
    return torch.cat((torch.tensor([3], dtype=groups.dtype), groups[1:]))


W4 = "W4A16 (groups of 32)"
GPTQ = "GPTQ (4 bits, groups of 32)"
AWQ = "AWQ (4 bits, groups of 32)"
ODD_SIZE = "root mean square"
ODD_ZERO = "zero points"

DEFECTS: dict[str, Defect] = {
    # What is not there.
    "fp8 block scale is missing": Defect(
        "fp8-blocks", without("weight_scale_inv"), (f"{MODULE}.weight_scale_inv", "FP8", "lacks")
    ),
    "fp8 row scale is missing": Defect("fp8-rows", without("weight_scale"), (MODULE, "FP8", "lacks")),
    "int8 scale is missing": Defect("int8", without("weight_scale"), (f"{MODULE}.weight", "I8", "no scheme")),
    "nvfp4 global scale is missing": Defect(
        "nvfp4", without("weight_global_scale"), (f"{MODULE}.weight_global_scale", "NVFP4", "lacks")
    ),
    "nvfp4 second scale is missing": Defect(
        "nvfp4-modelopt", without("weight_scale_2"), (f"{MODULE}.weight_scale_2", "NVFP4", "lacks")
    ),
    "nvfp4 group scale is missing": Defect(
        "nvfp4", without("weight_scale"), (f"{MODULE}.weight_scale", "4-bit float", "lacks")
    ),
    "mxfp4 scale is missing": Defect("mxfp4", without("weight_scale"), (MODULE, "4-bit float", "lacks")),
    "w4a16 zero points are missing": Defect(
        "w4a16-zero-points", without("weight_zero_point"), (f"{MODULE}.weight_zero_point", f"asymmetric {W4}", "lacks")
    ),
    "awq zero points are missing": Defect("awq", without("qzeros"), (f"{MODULE}.qzeros", AWQ, "lacks")),
    "gptq zero points are missing": Defect("gptq", without("qzeros"), (f"{MODULE}.qzeros", GPTQ, "lacks")),
    "gptq words are missing": Defect("gptq", without("qweight"), (f"{MODULE}.g_idx", f"{MODULE}.qzeros", "no part of")),
    "gptq groups of shuffled columns are missing": Defect(
        "gptq-v2-by-activation", without("g_idx"), (f"{MODULE}.g_idx", f"{GPTQ} by activation", "lacks")
    ),
    # What has another shape.
    "fp8 scale lacks its last blocks": Defect(
        "fp8-blocks", changed("weight_scale_inv", lambda scale: scale[:-1]), (f"{MODULE}.weight_scale_inv", "FP8")
    ),
    "fp8 scale is turned": Defect(
        "fp8-blocks", changed("weight_scale_inv", lambda scale: scale.T, OTHER), (f"{OTHER}.weight_scale_inv", "FP8")
    ),
    "fp8 row scale is one of columns": Defect(
        "fp8-rows", changed("weight_scale", lambda scale: torch.ones(1, 96)), (f"{MODULE}.weight_scale", "FP8")
    ),
    "w4a16 scale lacks its last group": Defect(
        "w4a16", changed("weight_scale", lambda scale: scale[:, :-1]), (f"{MODULE}.weight_scale", W4)
    ),
    "fp8 scales are those of another module": Defect(
        "fp8-blocks", swapped("weight_scale_inv"), ("weight_scale_inv", "FP8")
    ),
    "fp8 row scales are those of another module": Defect("fp8-rows", swapped("weight_scale"), ("weight_scale", "FP8")),
    "nvfp4 scales are those of another module": Defect("nvfp4", swapped("weight_scale"), ("weight_scale", "NVFP4")),
    "w4a16 scales are those of another module": Defect("w4a16", swapped("weight_scale"), ("weight_scale", W4)),
    "w4a16 words end early": Defect(
        "w4a16", changed("weight_packed", lambda words: words[:, :-1]), (f"{MODULE}.weight_packed", W4)
    ),
    "w4a16 words lack rows": Defect(
        "w4a16", changed("weight_packed", lambda words: words[:-8]), (f"{MODULE}.weight_scale", W4)
    ),
    "awq words end early": Defect("awq", changed("qweight", lambda words: words[:-1]), (f"{MODULE}.qweight", AWQ)),
    "gptq words end early": Defect("gptq", changed("qweight", lambda words: words[:-1]), (f"{MODULE}.g_idx", "GPTQ")),
    "nvfp4 codes end early": Defect(
        "nvfp4", changed("weight_packed", lambda codes: codes[:, :-8]), (f"{MODULE}.weight_scale", "NVFP4")
    ),
    # What is said wrongly.
    "group is larger in the config": Defect("w4a16", told_of_weights(group_size=64), ("weight_packed", "groups of 64")),
    "group divides nothing in the config": Defect(
        "w4a16", told_of_weights(group_size=40), ("weight_packed", "groups of 40")
    ),
    "awq group is smaller in the config": Defect("awq", told(group_size=16), ("scales", "AWQ (4 bits, groups of 16)")),
    "bits are more in the config": Defect("w4a16", told_of_weights(num_bits=8), ("weight_packed", "W8A16")),
    "gptq v1 is said to be v2": Defect("gptq", told(checkpoint_format="gptq_v2"), ("qzeros", "gptq", ODD_ZERO)),
    "gptq v1 with zero points is said to be v2": Defect(
        "gptq-zero-points", told(checkpoint_format="gptq_v2"), ("qzeros", "gptq", ODD_ZERO)
    ),
    "gptq v2 is said to be v1": Defect(
        "gptq-v2-by-activation", told(checkpoint_format="gptq"), ("qzeros", "gptq", ODD_ZERO)
    ),
    "awq zero points are less one": Defect("awq", changed("qzeros", less_one), (f"{MODULE}.qzeros", "awq", ODD_ZERO)),
    "awq is said to be gptq": Defect("awq", described_as("gptq"), ("scales", "GPTQ")),
    "gptq is said to be awq": Defect("gptq", described_as("awq"), ("scales", "AWQ")),
    "fp8 blocks are larger in the config": Defect(
        "fp8-blocks", told(weight_block_size=[48, 48]), ("weight_scale_inv", "FP8", "[48, 48]")
    ),
    # What has another name, or is never read.
    "fp8 scale is misspelt": Defect(
        "fp8-rows", renamed("weight_scale", "weight_scales"), (MODULE, "weight_scales", "FP8")
    ),
    "int8 scale is misspelt": Defect("int8", renamed("weight_scale", "weight_scales"), (f"{MODULE}.weight", "I8")),
    "w4a16 scale is misspelt": Defect("w4a16", renamed("weight_scale", "scale"), (f"{MODULE}.weight_scale", W4)),
    "a scale for the inputs is there": Defect(
        "w4a16", added("pre_quant_scale", torch.ones(96)), (f"{MODULE}.pre_quant_scale", "would never be read", "w4a16")
    ),
    "there are two scales": Defect(
        "fp8-blocks", added("weight_scale", torch.ones(1)), (f"{MODULE}.weight_scale ", "would never be read", "fp8")
    ),
    "something of no known kind is there": Defect(
        "gptq", added("rotation", torch.ones(96)), (f"{MODULE}.rotation", "would never be read", "gptq")
    ),
    "there is a bias that the model does not have": Defect(
        "gptq", added("bias", torch.ones(64)), (f"{MODULE}.bias", "would never be read", "gptq")
    ),
    "a weight is packed and plain": Defect(
        "w4a16", added("weight", torch.ones(64, 96)), (f"{MODULE}.weight_packed", f"{MODULE}.weight itself", "w4a16")
    ),
    "fp8 is stored as if it were int8": Defect(
        "fp8-rows",
        changed("weight", lambda codes: codes.view(torch.int8)),
        (f"{MODULE}.weight", "I8", "no scheme", "(quantization_config) does not"),
    ),
    "int8 is described as floats": Defect(
        "int8", told_of_weights(type="float"), ("down_proj.weight", "I8", "(quantization_config) does not")
    ),
    # Numbers that are no weights.
    "fp8 row scales are inverted": Defect(
        "fp8-rows", changed("weight_scale", lambda scale: 1 / scale), (f"{MODULE}.weight_scale", "fp8", ODD_SIZE)
    ),
    "w4a16 scales are inverted": Defect(
        "w4a16", changed("weight_scale", lambda scale: 1 / scale), (f"{MODULE}.weight_scale", "w4a16", ODD_SIZE)
    ),
    "nvfp4 divisor is a factor": Defect(
        "nvfp4",
        changed("weight_global_scale", lambda scale: 1 / scale),
        (f"{MODULE}.weight_global_scale", "nvfp4", ODD_SIZE),
    ),
    "nvfp4 factor is a divisor": Defect(
        "nvfp4-modelopt",
        changed("weight_scale_2", lambda scale: 1 / scale),
        (f"{MODULE}.weight_scale_2", "nvfp4", ODD_SIZE),
    ),
    "a row scale is no number": Defect(
        "fp8-rows", changed("weight_scale", with_nan), (f"{MODULE}.weight_scale", "fp8", "finite")
    ),
    "an nvfp4 group scale is no number": Defect(
        "nvfp4", changed("weight_scale", with_nan), (f"{MODULE}.weight_scale", "nvfp4", "finite")
    ),
    "an mxfp8 scale is no number": Defect(
        "mxfp8", changed("weight_scale", with_nan), (f"{MODULE}.weight_scale", "mxfp8", "finite")
    ),
    "a code is no number": Defect("fp8-rows", changed("weight", with_nan), (f"{MODULE}.weight", "fp8", "finite")),
    "gptq columns are of a group that is not there": Defect(
        "gptq-v2-by-activation", changed("g_idx", first_out_of_range), (f"{MODULE}.g_idx", "gptq", "groups")
    ),
    # Kinds of numbers that nothing explains.
    "e5m2 with a scale": Defect(
        "fp8-rows", changed("weight", lambda codes: codes.float().to(torch.float8_e5m2)), (MODULE, "F8_E5M2")
    ),
    "fp8 without a scale or a description": Defect(
        "fp8-rows", plain(torch.float8_e4m3fn), (f"{MODULE}.weight_scale_inv", "FP8", "lacks")
    ),
    "int8 without a scale or a description": Defect(
        "fp8-rows", plain(torch.int8), (f"{MODULE}.weight", "I8", "nothing describes them")
    ),
    "bytes without a scale or a description": Defect(
        "fp8-rows", plain(torch.uint8), (f"{MODULE}.weight", "U8", "nothing describes them")
    ),
    "whole numbers without a scale or a description": Defect(
        "fp8-rows", plain(torch.int64), (f"{MODULE}.weight", "I64", "nothing describes them")
    ),
    "words without a description": Defect(
        "w4a16", lambda tensors, said: said.clear(), ("weight_packed", "packed integers", "nothing in the folder")
    ),
}  # fmt: skip


# -- fixtures ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A checkpoint in a format, made once."""
    source = models.make_checkpoint("llama", tmp_path_factory.mktemp("plain"))
    made: dict[str, Path] = {}

    def make(format: str) -> Path:
        if format not in made:
            made[format] = make_twins(source, tmp_path_factory.mktemp("packed"), FORMATS[format]) / "packed"
        return made[format]

    return make


@pytest.fixture
def damaged(good: Callable[[str], Path], tmp_path: Path) -> Callable[[str, Damage], Path]:
    def make(format: str, damage: Damage) -> Path:
        path = Path(shutil.copytree(good(format), tmp_path / "model"))
        tensors = load_file(path / FILE)
        config = json.loads((path / "config.json").read_text())
        damage(tensors, config["quantization_config"])
        if not config["quantization_config"]:
            del config["quantization_config"]
        save_file(tensors, path / FILE, metadata={"format": "pt"})
        (path / "config.json").write_text(json.dumps(config))
        return path

    return make


def notes_of(path: Path) -> Iterator[str]:
    facts = load_model(ModelSettings(str(path), dtype="float32"), TensorParallel(), torch.device("cpu")).facts
    return (note for note in facts.notes if "quantised" in note)


# -- tests -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", FORMATS)
def test_a_good_checkpoint_loads_without_a_note(format: str, good: Callable[[str], Path]):
    """Else a refusal of a damaged one would say nothing."""
    path = good(format)
    if "ignore" in FORMATS[format].config or FORMATS[format].config["quant_method"] == "fp8":
        assert not list(notes_of(path))
    else:
        assert not Checkpoint(path).notes


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_refused_by_tensor_file_and_scheme(name: str, damaged: Callable[[str, Damage], Path]):
    defect = DEFECTS[name]
    path = damaged(defect.format, defect.damage)
    with pytest.raises((CorruptCheckpoint, UnsupportedModel)) as refusal:
        list(notes_of(path))
    sentence = str(refusal.value)
    for words in (*defect.said, str(path / FILE)):
        assert words in sentence, sentence


@pytest.mark.parametrize(
    ("format", "damage", "words"),
    [
        ("w4a16", told_of_weights(num_bits=1), "num_bits is 1"),
        ("gptq", told(bits=9), "bits is 9"),
        ("gptq", told(bits=4.0), "bits is 4.0"),
        ("gptq", told(checkpoint_format="marlin"), "checkpoint_format is marlin"),
        ("awq", told(version="gemv"), "its version is gemv"),
        ("fp8-rows", told(sparsity_config={"format": "sparse-24-bitmask"}), "sparsity_config"),
        ("fp8-rows", told(transform_config={"config_groups": {"u": {"type": "hadamard"}}}), "transform_config"),
        ("nvfp4-modelopt", told(quant_algo="NVFP4_SVD"), "NVFP4_SVD"),
        ("fp8-blocks", told(fmt="e5m2"), "fmt is 'e5m2'"),
    ],
)
def test_a_scheme_that_is_not_read_is_refused_by_its_place(
    format: str, damage: Damage, words: str, damaged: Callable[[str, Damage], Path]
):
    """Tensors are not looked at: the config alone says that they would be misread."""
    path = damaged(format, damage)
    with pytest.raises(UnsupportedModel) as refusal:
        Checkpoint(path)
    assert words in str(refusal.value) and f"{path / 'config.json'} (quantization_config)" in str(refusal.value)


def test_a_sparsity_that_is_dense_is_read(damaged: Callable[[str, Damage], Path]):
    assert Checkpoint(damaged("fp8-rows", told(sparsity_config={"format": "dense"}, transform_config={}))).packed


@pytest.mark.parametrize("holder", ["text_config", None])
def test_a_scheme_elsewhere_in_the_config_is_read(holder: str | None, good: Callable[[str], Path], tmp_path: Path):
    """In the part of the config that is of the text model, or under the older name."""
    path = Path(shutil.copytree(good("fp8-blocks"), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    said = config.pop("quantization_config")
    text = {"text_config": {"quantization_config": said}} if holder else {"compression_config": said}
    (path / "config.json").write_text(json.dumps(config | text))
    there, usual = Checkpoint(path), Checkpoint(good("fp8-blocks"))
    assert there.packed == usual.packed and there.packed.weights
    assert there.description is not None and there.description.block == (24, 40)


def test_biases_of_zeros_that_the_model_does_not_have_are_passed_by(damaged: Callable[[str, Damage], Path]):
    """AutoGPTQ writes them to all modules."""
    list(notes_of(damaged("gptq", added("bias", torch.zeros(64)))))


def test_a_misspelt_exclusion_loads_right_with_a_note_of_the_weight(good: Callable[[str], Path], tmp_path: Path):
    folder = make_twins(
        good("fp8-rows").parent / "plain", tmp_path, FORMATS["fp8-rows"], lambda name: name != f"{MODULE}.weight"
    )
    path = folder / "packed"
    config = json.loads((path / "config.json").read_text())
    config["quantization_config"]["ignore"] = ["lm_head", MODULE.replace("down_proj", "donw_proj")]
    (path / "config.json").write_text(json.dumps(config))
    (note,) = notes_of(path)
    assert note.startswith("1 weight that ") and f"{MODULE}.weight" in note and "config.json" in note
    config["quantization_config"]["ignore"] = ["lm_head", MODULE]
    (path / "config.json").write_text(json.dumps(config))
    assert not list(notes_of(path))


def test_a_description_of_weights_that_are_plain_is_noted(good: Callable[[str], Path], tmp_path: Path):
    path = Path(shutil.copytree(good("awq").parent / "plain", tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": dict(FORMATS["awq"].config)}))
    (note,) = notes_of(path)
    assert "the files hold none" in note and "config.json" in note


def test_a_module_of_many_tensors_is_refused_in_a_short_sentence(damaged: Callable[[str, Damage], Path]):
    def damage(tensors: Tensors, said: Config) -> None:
        del tensors[f"{MODULE}.weight_scale"]
        tensors.update({f"{MODULE}.{n}{'x' * 500}": torch.ones(1) for n in range(100)})

    path = damaged("fp8-rows", damage)
    with pytest.raises(CorruptCheckpoint, match="lacks") as refusal:
        Checkpoint(path)
    assert len(str(refusal.value)) < 700 + len(str(path))


@pytest.mark.parametrize("shape", [(0, 64, 96), (2**40, 0, 96), (2, 2, 64, 96)])
def test_experts_of_a_number_that_no_model_has_are_refused(shape: tuple[int, ...], tmp_path: Path):
    """A shape with a 0 costs its writer nothing."""
    empty = {"dtype": "F8_E4M3", "shape": list(shape), "data_offsets": [0, math.prod(shape)]}
    header = json.dumps({f"{MODULE}.weight": empty}).encode()
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(header)) + header + bytes(math.prod(shape)))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(CorruptCheckpoint, match=rf"{MODULE}\.weight is F8_E4M3 .* two dimensions"):
        Checkpoint(tmp_path)


def test_symmetric_zero_points_of_eight_bits_that_are_said_to_be_of_another_version_are_refused(
    good: Callable[[str], Path], tmp_path: Path
):
    said = {**of_gptq(version=2), "bits": 8}
    format = Format(said, lambda weight: gptq(weight, bits=8), GROUP, 8)
    path = make_twins(good("gptq").parent / "plain", tmp_path, format) / "packed"
    with pytest.raises(CorruptCheckpoint, match=r"gptq, made of .*qzeros.* all its zero points would be 127"):
        list(notes_of(path))


KINDS = torch.float32, torch.float16, torch.int8, torch.uint8, torch.int32, torch.int64, torch.float8_e5m2, torch.bool
SUFFIXES = "weight", "weight_scale", "scale", "qweight", "qzeros", "g_idx", "weight_zero_point", "bias", "other"


def at_random(tensors: Tensors, draw: random.Random) -> str:
    """Changes one tensor of a packed weight. Returns which, and how."""
    name = draw.choice(sorted(name for name in tensors if "proj." in name))
    tensor, module = tensors.pop(name), name.rpartition(".")[0]
    how = draw.choice(("gone", "turned", "cut", "of another kind", "twice", "with a dimension more", "renamed"))
    if how == "turned":
        tensors[name] = tensor.T.contiguous() if tensor.dim() == 2 else tensor.view(-1, 1)
    elif how == "cut":
        tensors[name] = tensor[:-1].contiguous() if tensor.dim() else tensor.view(1)[:0]
    elif how == "of another kind":
        tensors[name] = tensor.float().to(draw.choice(KINDS))
    elif how == "twice":
        tensors[name] = torch.cat([tensor.view(-1, *tensor.shape[1:])] * 2)
    elif how == "with a dimension more":
        tensors[name] = tensor.unsqueeze(0)
    elif how == "renamed":
        tensors[f"{module}.{draw.choice(SUFFIXES)}"] = tensor
    return f"{name} {how}"


def test_any_damage_is_a_typed_error_or_a_model(good: Callable[[str], Path], tmp_path: Path):
    """Some of it cannot be told: a square weight that is turned is as good as any."""
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    refused = 0
    for n in range(60):
        format = draw.choice(sorted(FORMATS))
        path = Path(shutil.copytree(good(format), tmp_path / str(n)))
        tensors = load_file(path / FILE)
        what = f"{format}: {at_random(tensors, draw)}"
        save_file(tensors, path / FILE, metadata={"format": "pt"})
        began_s = time.process_time()
        try:
            share(path, *draw.choice([(0, 1), (1, 2)]))
        except (CorruptCheckpoint, UnsupportedModel) as error:
            assert str(path) in str(error) and len(str(error)) < 1000, (what, str(error))
            refused += 1
        except Exception as error:
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        assert time.process_time() - began_s < 20, what
        shutil.rmtree(path)
    assert refused > 20


def test_blocks_of_experts_with_a_scale_that_is_no_number_are_refused(tmp_path: Path):
    from intarsia.workers.models.weight_map import Mxfp4, Stored

    tensors = {
        "experts.up_proj_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8) + 17,
        "experts.up_proj_scales": torch.full((2, 4, 1), 127, dtype=torch.uint8),
    }
    tensors["experts.up_proj_scales"][1, 2, 0] = 255
    save_file(tensors, tmp_path / FILE)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_oss"}))
    checkpoint = Checkpoint(tmp_path)
    with pytest.raises(CorruptCheckpoint, match=r"experts\.up_proj_blocks \(MXFP4.*up_proj_scales.*finite"):
        Mxfp4(Stored(checkpoint, "experts.up_proj_blocks"), Stored(checkpoint, "experts.up_proj_scales")).read()
