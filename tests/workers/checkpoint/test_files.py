import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from intarsia.errors import CorruptCheckpoint, ModelNotFound, UnsupportedModel
from intarsia.proto.worker import ModelSettings
from intarsia.workers.checkpoint.files import Checkpoint
from intarsia.workers.models.load import load_model
from intarsia.workers.tensor_parallel import TensorParallel


@pytest.fixture
def copy(tiny: Callable, tmp_path: Path) -> Path:
    """A checkpoint that a test may damage."""
    return Path(shutil.copytree(tiny("llama").path, tmp_path / "model"))


def load(path: Path) -> torch.nn.Module:
    return load_model(ModelSettings(str(path)), TensorParallel(), torch.device("cpu")).module


def test_missing_directory_is_told_with_what_to_give(tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"no model directory at .*nowhere"):
        Checkpoint(tmp_path / "nowhere")


def test_directory_without_config_is_no_checkpoint(tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        Checkpoint(tmp_path)


def test_directory_without_weights_lists_what_it_holds(copy: Path):
    (copy / "model.safetensors").rename(copy / "pytorch_model.bin")
    with pytest.raises(ModelNotFound, match=r"lacks the weights model\.safetensors; it holds pytorch_model\.bin"):
        Checkpoint(copy)


def test_broken_config_is_corrupt(copy: Path):
    (copy / "config.json").write_text('{"model_type": ')
    with pytest.raises(CorruptCheckpoint, match="not readable JSON"):
        Checkpoint(copy)


@pytest.mark.parametrize("keep", [0, 5, 0.5, 0.999])
def test_truncated_weights_are_corrupt_and_name_the_file(copy: Path, keep: float):
    file = copy / "model.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if keep < 1 else int(keep)])
    with pytest.raises(CorruptCheckpoint, match=r"model\.safetensors \(\d+ bytes\) is not a readable"):
        Checkpoint(copy)


def test_overwritten_header_is_corrupt(copy: Path):
    file = copy / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[8:40] = b"\xff" * 32
    file.write_bytes(bytes(data))
    with pytest.raises(CorruptCheckpoint):
        Checkpoint(copy)


def test_weights_of_another_shape_name_the_tensor_and_both_shapes(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(CorruptCheckpoint, match=r"_proj\.weight has shape .*96.* config\.json makes .*_proj.*100"):
        load(copy)


def test_weights_of_fewer_layers_are_incomplete(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 5}))
    with pytest.raises(CorruptCheckpoint, match="5 layers, and the files hold tensors of 3"):
        load(copy)


def test_unknown_model_type_is_refused(copy: Path):
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"model_type": "marquetry"}))
    with pytest.raises(UnsupportedModel, match="marquetry"):
        load(copy)


def test_sharded_checkpoint_loads_like_a_single_file(tiny: Callable, tmp_path: Path):
    from transformers import AutoModelForCausalLM

    path = tiny("gemma3").path
    AutoModelForCausalLM.from_pretrained(path).save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    whole, sharded = load(path).state_dict(), load(tmp_path).state_dict()
    assert whole.keys() == sharded.keys()
    assert all(torch.equal(whole[name], sharded[name]) for name in whole)


def test_buffers_are_those_of_transformers(tiny: Callable):
    from transformers import AutoModelForCausalLM

    for family in ("gemma3", "gpt_oss"):
        path = tiny(family).path
        theirs = dict(AutoModelForCausalLM.from_pretrained(path).named_buffers())
        ours = dict(load(path).named_buffers())
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
