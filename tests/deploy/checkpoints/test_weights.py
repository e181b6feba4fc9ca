"""What weights take, by their formats, is what loading them takes."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from intarsia.deploy.checkpoints.weights import weigh
from intarsia.deploy.cli import app
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


def test_a_plan_of_a_folder_without_weights_says_nothing_of_them(packed: Path):
    (packed / "model.safetensors").unlink()
    assert "Weights" not in CliRunner().invoke(app, ["plan", str(packed)]).output
