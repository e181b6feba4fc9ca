"""Names on the Hub: what is taken from the cache, what is fetched, and what is said when it cannot be."""

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from intarsia.deploy.checkpoints.hub import cached, fetched, hub_cache
from intarsia.deploy.checkpoints.model_dir import find_model
from intarsia.deploy.settings.options import engine_settings
from intarsia.errors import InvalidSetting, ModelNotFound
from intarsia.tests.hub import Hub, commit_of

NAME = "maker/tiny-model"


@pytest.fixture
def files(tiny: Callable) -> dict[str, bytes]:
    """Of a tiny checkpoint, and what a repository has beside."""
    folder = Path(tiny("llama").path)
    needed = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    return needed | dict.fromkeys(UNWANTED, b"no")


UNWANTED = (
    "README.md", "pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/model.onnx",
    "modeling_tiny.py", "model.gguf", "tf_model.h5",
)  # fmt: skip


def only(files: dict[str, bytes], *, beside: tuple[str, ...] = ()) -> set[str]:
    return set(files) - set(UNWANTED) - set(beside)


def test_a_model_is_fetched_once_with_only_the_files_that_are_needed(hub: Hub, hub_home: Path, files: dict[str, bytes]):
    commit = hub.add(NAME, files)
    found = find_model(NAME)
    assert found == (hub_home / "models--maker--tiny-model" / "snapshots" / commit, NAME, True)
    assert hub.got() == {each.relative_to(found.path).as_posix() for each in found.path.rglob("*")} == only(files)
    assert all((found.path / name).read_bytes() == files[name] for name in hub.got())
    asked = len(hub.asked)
    settings = engine_settings(NAME)
    assert (settings.model.model_dir, settings.served_model_name) == (str(found.path), NAME)
    assert len(hub.asked) == asked


def test_several_files_are_those_that_the_index_names(hub: Hub, files: dict[str, bytes]):
    weights = files.pop("model.safetensors")
    files |= {"part-1.safetensors": weights, "more/part-2.safetensors": weights + b"2", "part-3.safetensors": weights}
    files["model.safetensors.index.json"] = (
        b'{"weight_map": {"a": "part-1.safetensors", "b": "more/part-2.safetensors"}}'
    )
    hub.add(NAME, files)
    assert hub.got() == set()
    folder = find_model(NAME).path
    assert hub.got() == only(files, beside=("part-3.safetensors",))
    (folder / "more/part-2.safetensors").unlink()
    assert cached(NAME) is None


def test_a_revision_is_a_branch_a_tag_or_a_commit(hub: Hub, files: dict[str, bytes]):
    hub.add(NAME, files)
    other = files | {"generation_config.json": b'{"temperature": 0.5}'}
    commit = commit_of(other)
    repository = hub.repositories[NAME]
    repository.commits[commit] = other
    repository.refs |= {"v1.0": commit, "refs/pr/1": commit}
    for revision in ("v1.0", commit, "refs/pr/1"):
        assert find_model(NAME, revision).path.name == commit
        assert cached(NAME, revision) is not None
    assert cached(NAME) is None
    assert find_model(NAME).path.name == repository.refs["main"]
    assert engine_settings(NAME, revision="v1.0").model.model_dir.endswith(commit)
    for unknown in ("v2", "f" * 40):
        with pytest.raises(InvalidSetting, match=f"has no branch, tag or commit {unknown}") as refused:
            find_model(NAME, unknown)
        assert refused.value.field == "revision"


@pytest.mark.parametrize("revision", ["", "../main", "a/../b", "a b", ".x", "x" * 300, "a//b"])
def test_what_can_be_no_revision_is_refused_before_anybody_is_asked(hub: Hub, revision: str):
    with pytest.raises(InvalidSetting, match="revision must be"):
        find_model(NAME, revision)
    assert not hub.asked


def test_a_revision_of_what_is_here_is_refused(hub: Hub):
    with pytest.raises(InvalidSetting, match="demo is on this machine"):
        find_model("demo", "v1")


def test_a_branch_that_moved_is_not_noticed_until_it_is_asked_for(hub: Hub, files: dict[str, bytes]):
    first = hub.add(NAME, files)
    find_model(NAME)
    second = hub.add(NAME, files | {"generation_config.json": b"{}"})
    assert first != second
    assert find_model(NAME).path.name == first
    assert fetched(NAME).folder.name == find_model(NAME).path.name == second


def test_a_connection_that_broke_goes_on_where_it_was(hub: Hub, files: dict[str, bytes]):
    large = files["model.safetensors"] = files["model.safetensors"] + os.urandom(40_000_000)
    hub.add(NAME, files)
    hub.cut_after["model.safetensors"] = [15_000_000, 15_000_000]
    folder = find_model(NAME).path
    assert hub.ranges == [f"bytes={10 * 2**20}-", f"bytes={20 * 2**20}-"]
    assert (folder / "model.safetensors").read_bytes() == large


def test_a_download_that_was_cut_goes_on_with_the_files_that_are_not_there(
    hub: Hub, hub_home: Path, files: dict[str, bytes]
):
    hub.add(NAME, files)
    hub.cut_after["model.safetensors"] = [0] * 6
    with pytest.raises(ModelNotFound, match="goes on with what is not here yet"):
        find_model(NAME)
    assert cached(NAME) is None and not list(hub_home.rglob("*.incomplete"))
    hub.asked.clear()
    folder = find_model(NAME).path
    assert hub.got() == {"model.safetensors"}
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_file_that_another_process_began_is_taken_up_in_the_middle(hub: Hub, hub_home: Path, files: dict[str, bytes]):
    large = files["model.safetensors"] = files["model.safetensors"] + os.urandom(40_000_000)
    hub.add(NAME, files)
    hub.cut_after["model.safetensors"] = [25_000_000, *[0] * 6]
    with pytest.raises(ModelNotFound, match="goes on with what is not here yet"):
        find_model(NAME)
    (part,) = hub_home.rglob("*.part")
    assert part.read_bytes() == large[: 20 * 2**20] and cached(NAME) is None
    hub.ranges.clear()
    hub.cut_after.clear()
    folder = find_model(NAME).path
    assert hub.ranges == [f"bytes={20 * 2**20}-"]
    assert (folder / "model.safetensors").read_bytes() == large and not list(hub_home.rglob("*.part"))


def test_a_large_file_of_a_private_model_comes_with_the_token(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    large = files["model.safetensors"] = files["model.safetensors"] + os.urandom(12_000_000)
    hub.add(NAME, files, token="hf_secret")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (find_model(NAME).path / "model.safetensors").read_bytes() == large


@pytest.mark.parametrize("kept", [b"other bytes" * 10**6, b"x" * 60_000_000], ids=["damaged", "longer"])
def test_a_beginning_that_is_not_the_file_s_is_fetched_anew(
    hub: Hub, hub_home: Path, files: dict[str, bytes], kept: bytes
):
    large = files["model.safetensors"] = files["model.safetensors"] + os.urandom(40_000_000)
    hub.add(NAME, files)
    blobs = hub_home / "models--maker--tiny-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(large).hexdigest()}.part").write_bytes(kept)
    assert (find_model(NAME).path / "model.safetensors").read_bytes() == large
    assert not list(hub_home.rglob("*.part"))


def test_a_hub_that_knows_no_ranges_sends_the_file_from_the_front(hub: Hub, hub_home: Path, files: dict[str, bytes]):
    large = files["model.safetensors"] = files["model.safetensors"] + os.urandom(40_000_000)
    hub.add(NAME, files)
    hub.has_ranges = False
    blobs = hub_home / "models--maker--tiny-model" / "blobs"
    blobs.mkdir(parents=True)
    (blobs / f"{hashlib.sha256(large).hexdigest()}.part").write_bytes(large[:12_000_000])
    assert (find_model(NAME).path / "model.safetensors").read_bytes() == large


def test_a_small_file_that_is_stopped_leaves_nothing(hub: Hub, hub_home: Path, files: dict[str, bytes]):
    files["model.safetensors"] += os.urandom(4_000_000)
    hub.add(NAME, files)
    hub.cut_after["model.safetensors"] = [1_000_000, *[0] * 6]
    program = f"from intarsia.deploy.checkpoints.model_dir import find_model; find_model({NAME!r})"
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.DEVNULL) as starting:
        while not list(hub_home.rglob("*.incomplete")):
            time.sleep(0.01)
        starting.send_signal(signal.SIGINT)
    assert not list(hub_home.rglob("*.incomplete"))
    hub.cut_after.clear()
    assert find_model(NAME).is_of_hub


def test_threads_that_open_files_while_a_download_ends_leave_nothing(tmp_path: Path):
    program = f"""
import itertools, os, threading, time
from pathlib import Path
from intarsia.deploy.checkpoints.hub_fetch import remove_halves

def fetch(thread):
    for number in itertools.count():
        with Path({str(tmp_path)!r}, f"{{thread}}-{{number}}.incomplete").open("wb") as file:
            file.write(bytes(100))
        Path(file.name).unlink()

threads = [threading.Thread(target=fetch, args=(each,), daemon=True) for each in range(8)]
[each.start() for each in threads]
time.sleep(0.05)
remove_halves()
os._exit(0)
"""
    for _ in range(5):
        subprocess.run([sys.executable, "-c", program], check=True, stderr=subprocess.DEVNULL)
        assert not list(tmp_path.iterdir())


def test_two_starts_at_once_fetch_each_file_once(hub: Hub, files: dict[str, bytes]):
    files["model.safetensors"] += os.urandom(40_000_000)
    hub.add(NAME, files)
    program = f"from intarsia.deploy.checkpoints.model_dir import find_model; print(find_model({NAME!r}).path)"
    both = [subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    first, second = (each.communicate()[0].strip() for each in both)
    assert first == second == str(cached(NAME))
    assert sum(each.startswith("GET") and each.endswith("/model.safetensors") for each in hub.asked) == 1


def test_half_of_a_download_is_completed_or_refused_and_never_served(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
):
    hub.add(NAME, files)
    folder = find_model(NAME).path
    (folder / "model.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=r"lacks model.safetensors: .* was not completed\. .*hf download maker"):
        find_model(NAME)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    assert find_model(NAME).path == folder
    assert (folder / "model.safetensors").read_bytes() == files["model.safetensors"]


def test_a_model_that_is_not_there_is_told(hub: Hub):
    with pytest.raises(ModelNotFound, match=r"no model maker/tiny-model at http.*private.*hf auth login"):
        find_model(NAME)


def test_a_private_model_wants_a_token(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch):
    hub.add(NAME, files, token="hf_secret")
    for wrong in (None, "hf_other"):
        if wrong:
            monkeypatch.setenv("HF_TOKEN", wrong)
        with pytest.raises(ModelNotFound, match="HF_TOKEN") as refused:
            find_model(NAME)
        assert "hf_other" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert find_model(NAME).is_of_hub


@pytest.mark.parametrize("token", [None, "hf_other"])
def test_a_gated_model_wants_its_terms_accepted(
    hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch, token: str | None
):
    hub.add(NAME, files, token="hf_secret", is_gated=True)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ModelNotFound, match=f"accepted its terms: do so at {hub.url}/{NAME}"):
        find_model(NAME)
    Path(os.environ["HF_TOKEN_PATH"]).write_text("hf_secret")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    assert find_model(NAME).is_of_hub


def test_offline_no_host_is_asked(hub: Hub, files: dict[str, bytes], monkeypatch: pytest.MonkeyPatch):
    hub.add(NAME, files)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ModelNotFound, match=rf"hf download {NAME} --revision v1\. HF_HUB_OFFLINE forbids"):
        find_model(NAME, "v1")
    assert not hub.asked


def test_without_network_the_error_says_so(hub_home: Path, monkeypatch: pytest.MonkeyPatch, loopback_port: int):
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{loopback_port}")
    with pytest.raises(ModelNotFound, match=r"could not be fetched .*refused.*hf download maker/tiny-model"):
        find_model(NAME)


@pytest.fixture
def loopback_port() -> int:
    """At which no server listens."""
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def test_a_cache_that_cannot_be_written_is_told(hub: Hub, hub_home: Path, files: dict[str, bytes]):
    hub.add(NAME, files)
    hub_home.write_text("a file")
    with pytest.raises(InvalidSetting, match=f"cache at {hub_home} cannot be written") as refused:
        find_model(NAME)
    assert refused.value.field == "HF_HUB_CACHE"


def test_a_model_without_safetensors_is_refused_before_anything_is_fetched(hub: Hub, files: dict[str, bytes]):
    del files["model.safetensors"], files["model.gguf"]
    hub.add(NAME, files)
    with pytest.raises(ModelNotFound, match=r"lacks the weights model.safetensors; it holds consolidated.safetensors"):
        find_model(NAME)
    assert not hub.got()


def test_files_that_lead_out_of_the_folder_are_not_fetched(hub: Hub, tmp_path: Path, files: dict[str, bytes]):
    files["model.safetensors.index.json"] = b'{"weight_map": {"a": "../../../../../out"}}'
    files["../../../../../out"] = b"out"
    hub.add(NAME, files)
    with pytest.raises(ModelNotFound, match="the Hub does not have it"):
        find_model(NAME)
    assert not list(tmp_path.rglob("out"))


def test_of_a_tokenizer_no_weights_are_fetched(hub: Hub, files: dict[str, bytes]):
    hub.add(NAME, files | {"tokenizer.json": b"{}"})
    folder = find_model(NAME, with_weights=False).path
    assert (folder / "tokenizer.json").is_file() and "model.safetensors" not in hub.got()
    assert cached(NAME) is None
    assert find_model(NAME).path == folder
    shutil.rmtree(hub_cache())
