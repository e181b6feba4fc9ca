"""What a start can be refused for before anything is started; each is judged again, in the same words, by who loads."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from intarsia.controller.startup import _max_model_len
from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start import before_start
from intarsia.deploy.start.before_start import check_engine, check_memory, weight_bytes
from intarsia.errors import IntarsiaError, InvalidSetting, UnsupportedModel
from intarsia.kernels.names import ATTENTION_BACKENDS
from intarsia.kernels.paged_attention import BACKENDS, select_backend
from intarsia.workers.checkpoint.files import Checkpoint

GIB = 2**30


def demo_with(folder: Path, **fields: Any) -> str:
    """A copy of the demo whose config says something else; None: nothing."""
    shutil.copytree(DEMO_MODEL_DIR, folder)
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({name: v for name, v in config.items() if v is not None}))
    return str(folder)


def refusal(**settings: Any) -> IntarsiaError:
    with pytest.raises(IntarsiaError) as caught:
        check_engine(engine_settings(**settings))
    return caught.value


def test_the_demo_passes_with_all_that_it_can_do():
    for ranks in (1, 2, 4):
        check_engine(engine_settings("demo", tensor_parallel_size=ranks, max_model_len="2k", attention_backend="torch"))


def test_names_of_backends_are_those_of_the_kernels():
    assert {backend.name: set(backend.capabilities.devices) for backend in BACKENDS} == {
        name: set(devices) for name, devices in ATTENTION_BACKENDS.items()
    }


def test_an_unknown_backend_is_refused_in_one_text():
    import torch

    with pytest.raises(InvalidSetting) as late:
        select_backend([], torch.device("cpu"), "mystery")
    assert str(refusal(model="demo", attention_backend="mystery")) == str(late.value)


def test_a_length_that_is_too_large_is_refused_in_one_text():
    settings = engine_settings("demo", max_model_len=10**6)
    positions = json.loads((DEMO_MODEL_DIR / "config.json").read_text())["max_position_embeddings"]
    with pytest.raises(InvalidSetting) as late:
        _max_model_len(settings, SimpleNamespace(max_positions=positions))  # type: ignore[arg-type]
    assert str(refusal(model="demo", max_model_len=10**6)) == str(late.value)


def test_what_a_config_leaves_to_its_family_is_not_judged(tmp_path: Path):
    model = demo_with(tmp_path / "m", num_key_value_heads=None, layer_types=None, max_position_embeddings=None)
    check_engine(engine_settings(model, max_model_len=10**5))
    assert "does not divide" in str(refusal(model=model, tensor_parallel_size=3))


def test_a_family_within_another_model_passes(tmp_path: Path):
    text = json.loads((DEMO_MODEL_DIR / "config.json").read_text())
    check_engine(engine_settings(demo_with(tmp_path / "m", model_type="gemma3", text_config=text)))


def test_weights_count_in_the_type_that_they_will_have(tmp_path: Path):
    checkpoint = Checkpoint(DEMO_MODEL_DIR)
    whole = weight_bytes(checkpoint, "float32")
    assert weight_bytes(checkpoint, "auto") == whole == 2 * weight_bytes(checkpoint, "bfloat16")
    stored = (DEMO_MODEL_DIR / "model.safetensors").stat().st_size
    assert 0.9 * stored < weight_bytes(checkpoint, "bfloat16") < 1.1 * whole


@pytest.mark.parametrize(
    ("weights", "cache", "ranks", "field"),
    [(1, 9, 1, None), (1, 5, 2, "kv_cache_memory"), (1, 10, 1, "kv_cache_memory"), (11, 1, 1, "model")],
)
def test_memory_is_that_of_weights_and_of_every_workers_cache(weights: int, cache: int, ranks: int, field: str | None):
    settings = engine_settings("demo", tensor_parallel_size=ranks, kv_cache_memory=cache * GIB)
    if field is None:
        check_memory(weights * GIB, settings, 10 * GIB)
        return
    with pytest.raises(InvalidSetting, match="10 GiB of memory free") as caught:
        check_memory(weights * GIB, settings, 10 * GIB)
    assert caught.value.field == field


def test_gpu_backends_are_refused_where_no_gpu_is(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if any(map(os.path.exists, ("/dev/nvidia0", "/dev/kfd"))):
        pytest.skip("a GPU is here")
    monkeypatch.setattr(before_start, "_has_ray", lambda: False)  # another module's, in this process
    assert isinstance(refusal(model="demo", attention_backend="triton"), UnsupportedModel)
