"""GGUF files of the Hub by their kind: which is meant, what is taken from the cache, and what is fetched."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from intarsia.deploy.checkpoints import model_dir
from intarsia.deploy.checkpoints.hub_gguf import GgufName, gguf_name, pick
from intarsia.deploy.checkpoints.model_dir import find_model
from intarsia.deploy.checkpoints.real_models import Found
from intarsia.deploy.checkpoints.weights import weigh
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.tools.model_layers import model_layers
from intarsia.errors import ModelNotFound, UnsupportedModel
from intarsia.tests.gguf_twins import make_twin
from intarsia.tests.hub import Hub
from intarsia.workers.checkpoint.files import Checkpoint

NAME = "maker/tiny-model-GGUF"
SEVERAL = (
    "README.md", "config.json", "mmproj-model-F16.gguf", "tiny-IQ4_XS.gguf", "tiny-Q4_K_M.gguf", "tiny.q8_0.gguf",
    "tiny-UD-Q4_K_XL.gguf", "BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf",
)  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "files"),
    [
        ("Q4_K_M", ["tiny-Q4_K_M.gguf"]),
        ("q4_k_m", ["tiny-Q4_K_M.gguf"]),
        (None, ["tiny-Q4_K_M.gguf"]),
        ("Q8_0", ["tiny.q8_0.gguf"]),
        ("Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("UD-Q4_K_XL", ["tiny-UD-Q4_K_XL.gguf"]),
        ("BF16", ["BF16/tiny-BF16-00001-of-00002.gguf", "BF16/tiny-BF16-00002-of-00002.gguf"]),
        ("tiny-IQ4_XS", ["tiny-IQ4_XS.gguf"]),
    ],
)
def test_a_kind_is_the_end_of_one_name(kind: str | None, files: list[str]):
    assert pick(SEVERAL, GgufName(NAME, kind)) == files


@pytest.mark.parametrize(
    ("files", "kind", "says"),
    [
        (SEVERAL, "Q4", r"no GGUF file whose name ends in Q4: it has BF16/tiny-BF16, tiny-IQ4_XS, .* as in .*:BF16"),
        (SEVERAL, "4_K_M", "no GGUF file whose name ends in 4_K_M"),
        (SEVERAL, "F16", "no GGUF file whose name ends in F16"),  # that of a projector is no model
        (("a-Q4_0.gguf", "b-Q4_0.gguf"), "Q4_0", r"several GGUF files .* end in Q4_0: a-Q4_0, b-Q4_0\. .*:a-Q4_0"),
        (("a-Q4_0.gguf", "a-Q8_0.gguf"), None, r"several GGUF files, and none of Q4_K_M: it has a-Q4_0, a-Q8_0"),
        (("README.md", "mmproj-a.gguf"), None, "holds no GGUF file of a model"),
    ],
)
def test_what_fits_none_or_several_is_refused_with_what_there_is(files: Sequence[str], kind: str | None, says: str):
    with pytest.raises(ModelNotFound, match=says):
        pick(files, GgufName(NAME, kind))


def test_without_a_kind_the_only_one_is_meant():
    assert pick(["x/some.gguf", "mmproj.gguf", "README.md"], GgufName(NAME)) == ["x/some.gguf"]


@pytest.mark.parametrize(
    "model", ["maker/model", "model:Q4_0", "a/b/c:Q4_0", "maker/model:", "maker/model:a/b", "C:/x"]
)
def test_other_names_are_none_of_a_kind(model: str):
    assert gguf_name(model) is None


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[list[Path]]:
    """The files of which a checkpoint would be made: what becomes of them is seen elsewhere."""
    made: list[list[Path]] = []

    def checkpoint(files: Sequence[Path]) -> Found:
        made.append(list(files))
        return Found(files[0].parent, files[0].stem)

    monkeypatch.setattr(model_dir, "gguf_checkpoint", checkpoint)
    return made


def test_only_the_file_of_that_kind_is_fetched_and_only_once(hub: Hub, hub_home: Path, quick: list[list[Path]]):
    hub.add(NAME, {name: name.encode() for name in SEVERAL})
    found = find_model(f"{NAME}:Q8_0")
    assert (found.name, found.is_of_hub) == (f"{NAME}:Q8_0", True)
    assert hub.got() == {"tiny.q8_0.gguf"} and quick[0][0].read_bytes() == b"tiny.q8_0.gguf"
    hub.asked.clear()
    assert find_model(f"{NAME}:q8_0").path == found.path
    assert find_model(NAME).path == found.path  # what is here is taken
    assert not hub.asked
    find_model(f"{NAME}:BF16")
    assert [file.name for file in quick[-1]] == ["tiny-BF16-00001-of-00002.gguf", "tiny-BF16-00002-of-00002.gguf"]
    quick[-1][1].resolve().unlink()
    hub.asked.clear()
    find_model(f"{NAME}:BF16")
    assert hub.got() == {"BF16/tiny-BF16-00002-of-00002.gguf"}


def test_without_a_kind_the_usual_one_is_fetched_where_there_are_no_safetensors_files(
    hub: Hub, quick: list[list[Path]], tiny: Callable
):
    hub.add(NAME, {name: b"x" for name in SEVERAL})
    assert find_model(NAME).name == NAME
    assert hub.got() == {"tiny-Q4_K_M.gguf"}
    plain = {each.name: each.read_bytes() for each in Path(tiny("llama").path).iterdir()}
    hub.add("maker/both", plain | {name: b"x" for name in SEVERAL if name != "config.json"})
    hub.asked.clear()
    find_model("maker/both")
    assert hub.got() == set(plain)
    find_model("maker/both:Q8_0")
    assert find_model("maker/both").path.name == quick[-1][0].parent.name and len(quick) == 2


def test_a_kind_that_is_not_there_is_told_before_anything_is_fetched(hub: Hub, quick: list[list[Path]]):
    hub.add(NAME, {name: b"x" for name in SEVERAL})
    with pytest.raises(ModelNotFound, match=r"no GGUF file whose name ends in Q2_K: it has"):
        find_model(f"{NAME}:Q2_K")
    assert not hub.got()


def test_an_architecture_that_is_not_read_is_told_before_anything_is_fetched(hub: Hub, quick: list[list[Path]]):
    hub.add(NAME, {name: b"x" for name in SEVERAL}, gguf={"architecture": "rwkv7", "total": 7})
    with pytest.raises(UnsupportedModel, match=rf"{NAME} on the Hub holds a model of architecture 'rwkv7'"):
        find_model(f"{NAME}:Q8_0")
    assert not hub.got()


def test_offline_the_command_that_brings_it_is_told(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=rf"hf download {NAME} --include '\*Q8_0\*.gguf'"):
        find_model(f"{NAME}:Q8_0")
    assert not hub.asked


@pytest.mark.parametrize("tensors_a_part", [pytest.param(0, marks=pytest.mark.slow), 7])
def test_a_file_of_the_hub_becomes_a_checkpoint(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensors_a_part: int
):
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    twin = make_twin("llama", tmp_path, "Q4_0", tensors_a_part=tensors_a_part)
    files = {each.name.replace("tiny", "tiny-Q4_0"): each.read_bytes() for each in tmp_path.glob("*.gguf")}
    hub.add(NAME, files, gguf={"architecture": "llama"})
    settings = engine_settings(f"{NAME}:Q4_0")
    assert settings.served_model_name == f"{NAME}:Q4_0"
    folder = Path(settings.model.model_dir)
    assert folder.name.startswith("tiny-Q4_0-packed-") and (folder / "config.json").is_file()
    ours: Any = Checkpoint(folder).gguf
    assert ours is not None and sum(path.stat().st_size for path in ours.manifest.paths) == sum(
        map(len, files.values())
    )
    assert len(ours.manifest.paths) == len(files) and twin.file.is_file()
    hub.asked.clear()
    for name in (NAME, f"{NAME}:q4_0"):
        planned = model_layers(name)
        assert planned.model == name and planned.weights == weigh(Checkpoint(folder), "auto")
    assert not hub.asked
