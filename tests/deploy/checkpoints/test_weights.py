"""What weights take, by their formats, is what loading them takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia.deploy.checkpoints.weights import shapes_of, weigh
from intarsia.deploy.checkpoints.weights_as import RECIPES, weights_as
from intarsia.deploy.cli import app
from intarsia.tests.gguf_twins import make_twin
from intarsia.tests.packing import FORMATS, make_twins
from intarsia.workers.checkpoint.files import Checkpoint


@pytest.fixture(params=["fp8-blocks", "nvfp4-modelopt"])
def packed(request: pytest.FixtureRequest, tiny: Callable, tmp_path: Path) -> Path:
    return make_twins(Path(tiny("llama").path), tmp_path, FORMATS[request.param]) / "packed"


def test_packed_weights_count_as_they_are_stored_and_as_they_would_be_expanded(packed: Path):
    weights = weigh(Checkpoint(packed), "bfloat16")
    whole = weigh(Checkpoint(packed.parent / "plain"), "bfloat16")
    assert whole.packed == {} and whole.total(expands=False) == whole.total(expands=True)
    assert weights.total(expands=True) == whole.plain
    assert weights.total(expands=False) < whole.plain
    stored = sum(each.stop - each.start for each in map(Checkpoint(packed).stored, Checkpoint(packed).names()))
    twice = weigh(Checkpoint(packed), "float32")  # as the files have it
    assert 0.99 * stored <= twice.total(expands=False) <= stored


def test_a_plan_shows_formats_and_what_they_expand_to(packed: Path):
    shown = CliRunner().invoke(app, ["plan", str(packed), "--kv-memory", "1MiB"])
    (form,) = weigh(Checkpoint(packed), "auto").packed
    line = next(line for line in shown.output.splitlines() if line.startswith("Weights"))
    assert form.upper() in line and "float32" in line
    found = json.loads(CliRunner().invoke(app, ["plan", str(packed), "--kv-memory", "1MiB", "--json"]).output)
    assert set(found["weights"]["bytes"]) == {form, "float32"}
    assert found["weights"]["expanded_bytes"] > sum(found["weights"]["bytes"].values())


def test_a_known_model_has_the_bytes_of_its_numbers():
    found = json.loads(CliRunner().invoke(app, ["plan", "gemma-3-27b", "--json"]).output)
    assert found["weights"]["bytes"] == {"bfloat16": 2 * 27_009_346_304}
    assert json.loads(CliRunner().invoke(app, ["plan", "deepseek-v3.2", "--json"]).output)["weights"] is None


def test_a_plan_shows_what_a_model_would_take_in_another_format(tiny: Callable):
    folder = str(tiny("llama").path)
    counted = weights_as(shapes_of(Checkpoint(folder)), RECIPES["fp8"], "float32")
    words = ["plan", folder, "--weights-format", "fp8", "--kv-memory", "1MiB"]
    found = json.loads(CliRunner().invoke(app, [*words, "--json"]).output)["weights"]
    assert found["bytes"] == counted.by_format() and found["triton_bytes"] == counted.total(expands=False)
    shown = " ".join(CliRunner().invoke(app, words).output.split())
    assert "as FP8 is usual: linear layers and experts; embeddings, outputs, norms, routers" in shown
    told = CliRunner().invoke(app, ["plan", "gemma-3-27b", "--weights-format", "exl3"]).stderr
    assert "weights_format must be one of fp8," in told


def test_a_plan_of_a_release_says_of_which_model_it_is():
    shown = " ".join(CliRunner().invoke(app, ["plan", "RedHatAI/gemma-3-27b-it-FP8-dynamic"]).output.split())
    assert "a release of google/gemma-3-27b-it" in shown and "FP8 23.84 GiB, bfloat16 2.628 GiB" in shown
    shown = " ".join(CliRunner().invoke(app, ["plan", "gpt-oss-20b", "--weights-format", "q4_k_m"]).output.split())
    assert "what the weights of openai/gpt-oss-20b take so is not known" in shown


def test_a_plan_of_a_gguf_file_shows_its_kinds_and_what_gpus_expand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    twin = make_twin("llama", tmp_path, lambda name: "Q4_K" if "ffn" in name else "Q8_0")
    found = json.loads(CliRunner().invoke(app, ["plan", str(twin.file), "--json"]).output)
    assert found["model"] == str(twin.file) and set(found["weights"]["bytes"]) == {"Q4_K", "Q8_0", "bfloat16"}
    stored = sum(found["weights"]["bytes"].values())
    assert stored < found["weights"]["triton_bytes"] < found["weights"]["expanded_bytes"]


def test_a_plan_of_a_folder_without_weights_says_nothing_of_them(packed: Path):
    (packed / "model.safetensors").unlink()
    assert "Weights" not in CliRunner().invoke(app, ["plan", str(packed)]).output
