"""What a stranger's checkpoint may say. Whatever it says, the answer is one typed error, soon, or a model."""

import json
import os
import random
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from intarsia.errors import CorruptCheckpoint, IntarsiaError, ModelError, ModelNotFound
from intarsia.workers.checkpoint.config_schema import check_config
from intarsia.workers.checkpoint.files import INDEX, SINGLE, Checkpoint

DEEP = 100_000
SAID_CHARS = 700


@pytest.fixture(scope="module")
def family_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def make(family: str) -> Path:
        from intarsia.tests import models

        if family not in made:
            made[family] = models.make_checkpoint(family, tmp_path_factory.mktemp("families") / family)
        return made[family]

    return make


@pytest.fixture
def copy(family_dir: Callable[[str], Path], tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(family_dir("llama"), tmp_path / "model"))


def refused(path: Path, kind: type[IntarsiaError], *said: str) -> str:
    with pytest.raises(kind) as refusal:
        Checkpoint(path)
    sentence = str(refusal.value)
    assert all(text in sentence for text in said), sentence
    assert len(sentence) < SAID_CHARS + 2 * len(str(path)) and "\n" not in sentence
    return sentence


def change_config(path: Path, **fields: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | fields))


# -- config.json -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden_size", "64"),
        ("hidden_size", -64),
        ("hidden_size", 0),
        ("hidden_size", 64.0),
        ("hidden_size", 2**40),
        ("hidden_size", None),
        ("hidden_size", True),
        ("hidden_size", 128),  # the embeddings have 64
        ("num_hidden_layers", 10_000_000),
        ("num_hidden_layers", -3),
        ("num_hidden_layers", "3"),
        ("num_hidden_layers", [3]),
        ("num_hidden_layers", 4),  # the files hold 3
        ("num_attention_heads", {}),
        ("num_attention_heads", 10**30),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", 0),
        ("head_dim", -16),
        ("head_dim", 1.5),
        ("vocab_size", 2**30),
        ("vocab_size", 129),
        ("intermediate_size", 2**23),
        ("max_position_embeddings", 2**40),
        ("max_position_embeddings", 0),
        ("sliding_window", -1),
        ("sliding_window", "many"),
        ("layer_types", ["full_attention"] * 2),
        ("layer_types", ["full_attention"] * 100_000),
        ("layer_types", "full_attention"),
        ("layer_types", [1, 2, 3]),
        ("layer_types", {"0": "full_attention"}),
        ("rope_parameters", [1]),
        ("rope_parameters", {"rope_theta": "10000"}),
        ("rope_parameters", {"rope_theta": -1.0}),
        ("rope_parameters", {"rope_type": {}}),
        ("rope_parameters", {"rope_type": "yarn", "factor": 0}),
        ("rope_scaling", "linear"),
        ("num_experts", 10**9),
        ("num_local_experts", -5),
        ("n_routed_experts", "256"),
        ("linear_conv_kernel_dim", 2**40),
        ("mamba_n_heads", "8"),
        ("mamba_d_state", -9),
        ("conv_L_cache", 10**9),
        ("ssm_state_size", [10**9]),
        ("text_config", {"hidden_size": "64"}),
        ("text_config", []),
        ("vision_config", {"num_hidden_layers": 10**7}),
        ("vision_config", {"encoder": {"patch_size": -2}}),
        ("audio_config", "none"),
        ("torch_dtype", "float33"),
        ("dtype", 5),
        ("model_type", ["llama"]),
        ("model_type", "x" * 1000),
        ("architectures", "LlamaForCausalLM"),
        ("architectures", [None, 1]),
        ("tie_word_embeddings", "yes"),
        ("quantization_config", ["mxfp4"]),
        ("quantization_config", {"quant_method": 4}),
        ("eos_token_id", "</s>"),
        ("eos_token_id", [[1]]),
        ("eos_token_id", 2**80),
        ("rms_norm_eps", "1e-6"),
        ("rms_norm_eps", [[]] * 3 + ["x"]),
        ("anything", 10**13),
        ("anything", "x" * (2**20 + 1)),
        ("anything", [0] * (2**18 + 1)),
        ("anything", [[10**40]]),
    ],
    ids=lambda value: json.dumps(value)[:30],
)
def test_config_out_of_bounds_names_file_and_field(copy: Path, field: str, value: Any):
    change_config(copy, **{field: value})
    words = field.rpartition("_config")[1] or field
    sentence = refused(copy, CorruptCheckpoint, "config.json" if "layers" not in field else "layers")
    assert words in sentence or "layers" in sentence, sentence


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "not readable JSON"),
        ("[]", "holds no JSON object"),
        ("null", "holds no JSON object"),
        ('{"a": NaN}', "NaN"),
        ('{"hidden_size": 64, "hidden_size": 65}', "'hidden_size' is there twice"),
        ('{"a": ' * DEEP + "1" + "}" * DEEP, "nested deeper than 32 levels"),
        ("[" * DEEP, "nested deeper than 32 levels"),
        ('{"a":' + "[" * 40 + "]" * 40 + "}", "nested deeper than 32 levels"),
        ('{"a": ' + "9" * 5000 + "}", "not readable JSON"),
        ('{"a": [' + "{}," * 2**20 + "1]}", "values; the limit is"),
        (" " * (4 * 2**20 + 1), "bytes; the limit is"),
        ("\ud800", "not readable JSON"),
        ('{"hidden_size": Infinity}', "hidden_size"),
    ],
    ids=lambda text: text[:20].encode("unicode_escape").decode(),
)
def test_config_that_is_no_sensible_json(copy: Path, text: str, said: str):
    (copy / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    refused(copy, CorruptCheckpoint, "config.json", said)


def test_configs_of_transformers_own_families_are_in_bounds():
    """As each class has them by default. All 800 were tried once; these are those that are served, and odd ones."""
    from transformers import CONFIG_MAPPING

    from intarsia.workers.known_families import KNOWN_FAMILIES

    for family in (*KNOWN_FAMILIES, "llama4", "gemma3", "mistral3", "deepseek_v4", "kimi_linear", "doge", "gpt2"):
        for saved in (CONFIG_MAPPING[family]().to_json_string(use_diff=whole) for whole in (True, False)):
            check_config(json.loads(saved), family)


@pytest.mark.parametrize(
    "fields",
    [
        {"vocab_size": 262_208, "max_position_embeddings": 10_485_760, "rope_theta": 1e10, "sliding_window": None},
        {"text_config": {"num_hidden_layers": 126, "hidden_size": 16_384}, "vision_config": {"patch_size": [14, 14]}},
        {"time_step_limit": [0.0, float("inf")], "pad_token_id": -1, "image_token_index": -200, "chunk_size": -1},
        {"intermediate_size": [16_384] * 30, "activation_sparsity_pattern": [0.95] * 30, "num_experts": None},
        {"rope_scaling": None, "quantization_config": None, "torch_dtype": "torch.bfloat16", "mscale_all_dim": 1.0},
        {"rope_scaling": {"rope_type": "longrope", "long_factor": [1.0] * 48, "short_factor": [1] * 48}},
    ],
)
def test_extremes_of_real_configs_are_in_bounds(fields: dict[str, Any]):
    check_config(fields, "config.json")


# -- the index ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("index", "kind", "said"),
    [
        ({"weight_map": []}, CorruptCheckpoint, "weight_map must be an object"),
        ({"weight_map": None}, CorruptCheckpoint, "weight_map must be an object"),
        ({"weight_map": 7}, CorruptCheckpoint, "weight_map must be an object"),
        ({"weight_map": {}}, CorruptCheckpoint, "weight_map must be an object"),
        ({}, CorruptCheckpoint, "weight_map must be an object"),
        ([], CorruptCheckpoint, "holds no JSON object"),
        ({"weight_map": {"a": 1}}, CorruptCheckpoint, "must name files, not 1"),
        ({"weight_map": {"a": None}}, CorruptCheckpoint, "must name files, not null"),
        ({"weight_map": {"a": ["b"]}}, CorruptCheckpoint, "must name files, not a list of 1"),
        ({"weight_map": {"a": ""}}, CorruptCheckpoint, "must name files"),
        ({"weight_map": {"a": "x\0y"}}, CorruptCheckpoint, "must name files"),
        ({"weight_map": {"a": "x" * 5000}}, CorruptCheckpoint, "must name files"),
        ({"weight_map": {"a": "/etc/passwd"}}, CorruptCheckpoint, "outside of the folder"),
        ({"weight_map": {"a": "../model.safetensors"}}, CorruptCheckpoint, "outside of the folder"),
        ({"weight_map": {"a": "x/../../y"}}, CorruptCheckpoint, "outside of the folder"),
        ({"weight_map": {"a": "..\\y"}}, CorruptCheckpoint, "outside of the folder"),
        ({"weight_map": {"a": "."}}, CorruptCheckpoint, "is a folder"),
        ({"weight_map": {"a": "gone.safetensors"}}, ModelNotFound, "lacks the weights gone.safetensors"),
        ({"weight_map": {str(n): f"{n}.safetensors" for n in range(4000)}}, ModelNotFound, "and 3996 more"),
        ({"weight_map": {str(n): f"{n}.safetensors" for n in range(5000)}}, CorruptCheckpoint, "names 5000 files"),
        ({"weight_map": {"a": SINGLE}}, CorruptCheckpoint, "names 1 tensors that its files do not hold"),
    ],
    ids=lambda value: json.dumps(value)[:40] if isinstance(value, dict | list) else "",
)
def test_index_that_cannot_be_followed(copy: Path, index: Any, kind: type[IntarsiaError], said: str):
    (copy / INDEX).write_text(json.dumps(index))
    assert "root:" not in refused(copy, kind, said)


def test_file_in_a_folder_within_and_links_of_a_download_cache_are_read(copy: Path, tmp_path: Path):
    names = list(Checkpoint(copy).names())
    blob = tmp_path / "blobs" / "0123"
    blob.parent.mkdir()
    (copy / SINGLE).rename(blob)
    (copy / "part").mkdir()
    (copy / "part" / "one.safetensors").symlink_to(blob)
    (copy / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "part/one.safetensors")}))
    assert set(Checkpoint(copy).names()) == set(names)


def test_of_a_name_in_two_files_the_index_says_which(copy: Path):
    shutil.copy(copy / SINGLE, copy / "other.safetensors")
    names = list(Checkpoint(copy).names())
    weight_map = {name: "other.safetensors" if n % 2 else SINGLE for n, name in enumerate(names)}
    (copy / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    checkpoint = Checkpoint(copy)
    assert {name: checkpoint._tensors[name].file for name in names} == weight_map


# -- headers -----------------------------------------------------------------------------------------------------------


def with_header(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (path / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)


def tensor(shape: Any, start: Any, stop: Any, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    ("header", "data"),
    [
        (b"", 0),
        (b"{", 0),
        (b"[]", 0),
        (b"[" * DEEP, 0),
        ({"a": tensor([1], 0, 4), "b": tensor([1], 0, 4)}, 4),  # overlap
        ({"a": tensor([1], 4, 8)}, 8),  # a hole
        ({"a": tensor([1], 0, 4)}, 8),  # bytes that belong to no tensor
        ({"a": tensor([1], 0, 4)}, 3),
        ({"a": tensor([2], 0, 4)}, 4),
        ({"a": tensor([-1], 0, 4)}, 4),
        ({"a": tensor([-1, -1], 0, 4)}, 4),
        ({"a": tensor([True], 0, 4)}, 4),
        ({"a": tensor([1.0], 0, 4)}, 4),
        ({"a": tensor("1", 0, 4)}, 4),
        ({"a": tensor({}, 0, 4)}, 4),
        ({"a": tensor(None, 0, 4)}, 4),
        ({"a": tensor([2**62, 2**62], 0, 4)}, 4),
        ({"a": tensor([1] * 100_000, 0, 4)}, 4),
        ({"a": tensor([1], -4, 0)}, 4),
        ({"a": tensor([1], "0", "4")}, 4),
        ({"a": tensor([1], 4, 0)}, 4),
        ({"a": tensor([1], 2**70, 2**70 + 4)}, 4),
        ({"a": tensor([1], 0, 4, "F31")}, 4),
        ({"a": tensor([1], 0, 4, ["F32"])}, 4),
        ({"a": tensor([1], 0, 4, {})}, 4),
        ({"a": {"dtype": "F32", "shape": [1]}}, 4),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, 4),
        ({"a": 1}, 0),
        ({"a": None}, 0),
        ({"x" * 5000: tensor([1], 0, 4)}, 4),
        ({"a\nerror: b": tensor([1], 0, 4)}, 4),
        ({"__metadata__": []}, 0),
        ({"__metadata__": {"a": {}}}, 0),
        (b'{"a": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}, "a": 1}', 0),
        (b'{"a": [' + b"[]," * 2**22 + b"1]}", 0),
    ],
    ids=lambda value: str(value)[:40],
)
def test_header_that_cannot_be_true(copy: Path, header: Any, data: int):
    with_header(copy, header, bytes(data))
    refused(copy, CorruptCheckpoint, "model.safetensors (", "is not a readable safetensors file")


@pytest.mark.parametrize("length", [0, 1, 2**20, 2**63, 2**64 - 1])
def test_header_of_a_false_length(copy: Path, length: int):
    with_header(copy, b"{}", length=length)
    refused(copy, CorruptCheckpoint, "its header")


def test_header_beyond_the_limit_is_not_read(copy: Path):
    with_header(copy, b"", length=2**33)
    os.truncate(copy / SINGLE, 2**34)  # a hole: it takes no room
    refused(copy, CorruptCheckpoint, "bytes; the limit for all files is")


# -- other files, and what are none ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "generation_config.json",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "preprocessor_config.json",
        "chat_template.json",
    ],
)
@pytest.mark.parametrize("text", ["[]", "{", "[" * DEEP, '{"a":' * DEEP, '{"a": NaN}', "\x00"])
def test_side_files_that_are_no_sensible_json(copy: Path, name: str, text: str):
    (copy / name).write_text(text)
    refused(copy, CorruptCheckpoint, name)


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", "hot"), ("top_k", []), ("eos_token_id", {"a": 1}), ("eos_token_id", "x"), ("max_length", "99")],
)
def test_generation_config_of_wrong_types(copy: Path, field: str, value: Any):
    (copy / "generation_config.json").write_text(json.dumps({field: value}))
    refused(copy, CorruptCheckpoint, "generation_config.json", field)


@pytest.mark.parametrize("name", ["tokenizer.json", "vocab.json", "chat_template.jinja", "tokenizer_config.json"])
def test_side_file_without_end_is_refused_by_its_size(copy: Path, name: str):
    (copy / name).touch()
    os.truncate(copy / name, 2**32)
    refused(copy, CorruptCheckpoint, name, f"{2**32} bytes; the limit is")


@pytest.mark.parametrize("name", ["config.json", SINGLE, INDEX, "generation_config.json", "tokenizer.json"])
@pytest.mark.parametrize("instead", ["folder", "pipe", "device", "dangling", "loop", "empty"])
def test_what_is_no_file_in_place_of_a_file(copy: Path, name: str, instead: str):
    file = copy / name
    file.unlink(missing_ok=True)
    said = {"folder": "is a folder", "dangling": "a link to a file that is not there", "loop": "cannot be read"}
    if instead == "folder":
        file.mkdir()
    elif instead == "pipe":
        os.mkfifo(file)
    elif instead == "empty":
        file.touch()
    else:
        file.symlink_to({"device": "/dev/zero", "dangling": copy / "gone", "loop": file}[instead])
    if (instead, name) == ("empty", "tokenizer.json"):
        return  # a file, if no tokenizer: `test_tokenizer.py`
    refused(copy, CorruptCheckpoint, name, said.get(instead, ""))


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
@pytest.mark.parametrize("name", ["config.json", SINGLE])
def test_file_that_may_not_be_read(copy: Path, name: str):
    (copy / name).chmod(0)
    refused(copy, CorruptCheckpoint, name, "Permission denied")


@pytest.mark.parametrize("path", ["x" * 5000, "a/" * 3000, "a\0b"])
def test_impossible_path(path: str):
    with pytest.raises(ModelNotFound):
        Checkpoint(path)


# -- in bounds, and still no model -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", {"hidden_act": "marquetry"}),
        ("llama", {"hidden_act": {"a": 1}}),
        ("llama", {"head_dim": 15}),
        ("llama", {"head_dim": 8}),
        ("llama", {"num_attention_heads": 2, "num_key_value_heads": 1}),
        ("llama", {"rope_parameters": {"rope_type": "no-such"}}),
        ("llama", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4}}),
        ("llama", {"layer_types": ["warp"] * 3}),
        ("llama", {"num_key_value_heads": None, "rms_norm_eps": None}),
        ("llama", {"model_type": "bert"}),
        ("llama", {"model_type": None}),
        ("llama", {"auto_map": {"AutoConfig": "x.Y"}, "model_type": "marquetry"}),
        ("falcon_h1", {"attention_in_multiplier": None}),
        ("falcon_h1", {"time_step_limit": [0.0, 1e300]}),
        ("zamba2", {"mamba_headdim": 8}),
        ("mllama", {"vision_config": {}}),
        ("mllama", {"text_config": {}}),
    ],
    ids=lambda value: json.dumps(value)[:40],
)
def test_config_in_bounds_that_no_model_can_be_made_of_is_a_typed_error(
    family: str, fields: dict[str, Any], family_dir: Callable[[str], Path], tmp_path: Path
):
    """transformers and torch raise anything, some of it in the first step only."""
    from intarsia.kvcache.plan import PlanSettings
    from intarsia.kvcache.strategies import plan_memory
    from intarsia.proto.worker import ModelSettings, RunnerLimits
    from intarsia.workers.worker import Worker

    path = Path(shutil.copytree(family_dir(family), tmp_path / "model"))
    change_config(path, **fields)
    worker = Worker()
    with pytest.raises(ModelError) as refusal:
        facts = worker.load(ModelSettings(str(path)))
        plan = plan_memory(facts.layers, PlanSettings(memory_bytes=2**23, block_tokens=16), 512)
        worker.allocate(plan, RunnerLimits(4, 256, 512))
    assert len(str(refusal.value)) < 3 * SAID_CHARS


# -- in time -----------------------------------------------------------------------------------------------------------


def test_serve_refuses_before_anything_slow_is_imported(copy: Path):
    """In 0.3 s on our two cores. What takes seconds is not loaded, so that busy ones still answer within two."""
    change_config(copy, num_hidden_layers=10_000_000)
    heavy = ("torch", "ray", "grpc", "transformers", "numpy", "fastapi")
    code = f"""
import sys
from intarsia.deploy.cli import app
try:
    app(["serve", {str(copy)!r}])
except SystemExit as end:
    print(end.code, [name for name in {heavy} if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert result.stdout == "2 []\n"
    assert result.stderr.startswith("error: ") and "num_hidden_layers must be" in result.stderr
    assert result.stderr.count("\n") == 1


# -- at random ---------------------------------------------------------------------------------------------------------

ODD: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63), 10**30, 0.5, -2.0, 1e308, float("inf"), "", "64", "x" * 300,
    "\ud800", [], [1], ["a"], [[]], [None], {}, {"a": 1}, {"rope_type": 3}, [10**9] * 20,
)  # fmt: skip


def mutate(value: Any, draw: random.Random) -> Any:
    """The same with one thing changed, somewhere."""
    if isinstance(value, dict) and value and draw.random() < 0.95:
        name = draw.choice(list(value))
        kind = draw.random()
        if kind < 0.1:
            return {key: held for key, held in value.items() if key != name}
        if kind < 0.2:
            return value | {draw.choice(list(value)): value[name]}
        return value | {name: mutate(value[name], draw)}
    if isinstance(value, list) and value and draw.random() < 0.5:
        at = draw.randrange(len(value))
        return [*value[:at], mutate(value[at], draw), *value[at + 1 :]]
    return draw.choice(ODD)


@pytest.mark.parametrize("family", ["llama", "gemma4_e", "qwen3_next", "granite4", "mllama"])
def test_random_changes_end_in_a_model_or_a_typed_error(family: str, family_dir: Callable[[str], Path], tmp_path: Path):
    seed = int(os.environ.get("SEED", random.randrange(2**32)))
    print(f"SEED={seed}")
    draw = random.Random(seed)
    path = Path(shutil.copytree(family_dir(family), tmp_path / "model"))
    config = json.loads((path / "config.json").read_text())
    data = (path / SINGLE).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(list(header)[1:], SINGLE)}
    refusals = 0
    for n in range(400):
        what = n % 4
        changed = mutate((config, header, index, config)[what], draw)
        if what == 3:
            changed = mutate(mutate(changed, draw), draw)
        text = json.dumps(changed).encode()
        if draw.random() < 0.1:  # bytes, not values
            at = draw.randrange(len(text))
            text = text[:at] + draw.randbytes(draw.randrange(4)) + text[at + draw.randrange(40) :]
        file = path / ("config.json", SINGLE, INDEX, "config.json")[what]
        before = file.read_bytes() if file.exists() else None
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :] if what == 1 else text)
        began_s = time.process_time()
        try:
            Checkpoint(path)
        except ModelError as error:
            refusals += 1
            assert len(str(error)) < SAID_CHARS + 2 * len(str(path))
        assert time.process_time() - began_s < 10
        file.unlink() if before is None else file.write_bytes(before)
    assert refusals > 100
