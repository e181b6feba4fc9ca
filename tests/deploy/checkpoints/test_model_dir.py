"""What MODEL means."""

from pathlib import Path

import pytest

from intarsia.deploy.checkpoints.hub import hub_cache
from intarsia.deploy.checkpoints.model_dir import find_model
from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import ModelNotFound

NAME = "google/gemma-3-1b-it"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("HF_HOME", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def download(cache: Path, name: str, commit: str = "c0ffee") -> Path:
    """As `hf download` leaves a model."""
    home = cache / f"models--{name.replace('/', '--')}"
    folder = home / "snapshots" / commit
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    for name in ("model.safetensors", "tokenizer.json"):
        (folder / name).touch()
    (home / "refs").mkdir()
    (home / "refs" / "main").write_text(commit)
    return folder


def test_a_model_that_was_downloaded_is_found_by_its_name_and_called_so(cache: Path):
    folder = download(cache, NAME)
    assert find_model(NAME) == (folder, NAME, True)
    settings = engine_settings(NAME)
    assert (settings.model.model_dir, settings.served_model_name) == (str(folder), NAME)
    assert engine_settings(NAME, served_model_name="g").served_model_name == "g"
    assert engine_settings("demo", tokenizer=NAME).model.tokenizer_dir == str(folder)


def test_huggingface_hub_itself_finds_the_same(cache: Path):
    from huggingface_hub import try_to_load_from_cache

    folder = download(cache, NAME)
    assert try_to_load_from_cache(NAME, "config.json", cache_dir=hub_cache()) == str(folder / "config.json")


def test_a_model_that_was_not_downloaded_is_refused_with_the_command_that_does(cache: Path):
    with pytest.raises(ModelNotFound, match=f"hf download {NAME}"):
        find_model(NAME)


def test_a_folder_comes_before_a_name(cache: Path, tmp_path: Path):
    download(cache, NAME)
    (tmp_path / NAME).mkdir(parents=True)
    assert find_model(NAME) == (Path(NAME), None, False)


def test_a_ref_that_leads_out_of_the_cache_is_not_followed(cache: Path):
    folder = download(cache, NAME)
    (folder.parent.parent / "refs" / "main").write_text("../../..")
    with pytest.raises(ModelNotFound):
        find_model(NAME)


@pytest.mark.parametrize(
    ("variables", "place"),
    [
        ({}, "home/.cache/huggingface/hub"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/huggingface/hub"),
        ({"HF_HOME": "/h", "XDG_CACHE_HOME": "/x"}, "/h/hub"),
        ({"HF_HUB_CACHE": "/c", "HF_HOME": "/h"}, "/c"),
    ],
)
def test_the_cache_is_where_huggingface_hub_has_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], place: str
):
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert hub_cache() == tmp_path / place


def test_demo_is_the_demo_and_what_is_like_it_is_told(cache: Path):
    assert find_model("demo") == (DEMO_MODEL_DIR, "demo", False)
    for misspelt in ("dmo", "demoo", "Demo"):
        with pytest.raises(ModelNotFound, match="Did you mean demo"):
            find_model(misspelt)


@pytest.mark.parametrize("model", ["nowhere", "a/b/c", "./x", "/x/y", "x" * 5000, "a\0b", "org/", "../x", "~/x"])
def test_what_is_no_name_is_left_to_the_checkpoint(cache: Path, model: str):
    assert not find_model(model).is_of_hub


def test_a_gguf_file_of_the_hub_by_a_path_is_told_how_it_is_named(cache: Path):
    with pytest.raises(ModelNotFound, match=r"is named so: maker/model:some-Q4_0, or by the end of that"):
        find_model("maker/model/some-Q4_0.gguf")
