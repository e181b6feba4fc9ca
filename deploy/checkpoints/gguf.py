"""A GGUF file gets a folder in the user's cache and is served as any checkpoint. Its weights stay where they are.

The folder has what transformers makes of the file's other values (`gguf_describe.py`), and the file's name. Its own
name ends with the first digits of the file's SHA-256, so another file is another folder. It is made under another name
and then renamed: a reader never sees half of it. Two processes that want the same one take turns.
"""

import contextlib
import errno
import fcntl
import glob
import json
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from ...errors import CorruptCheckpoint, IntarsiaError, InvalidSetting, ModelNotFound, UnsupportedModel
from ...workers.checkpoint.gguf.header import begins_as_gguf, read_gguf_header, read_gguf_headers
from ...workers.checkpoint.gguf.manifest import GgufFile, pieces_of, read_manifest, sha256_of, write_manifest
from ...workers.checkpoint.json_file import clipped
from .child import run_child

SUFFIX = ".gguf"

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})")
"""The name of a part of a model that is split, without its suffix."""

ARCHITECTURES = (
    "gemma2", "gemma3", "lfm2", "llama", "qwen2", "qwen2moe", "qwen3", "qwen35", "qwen35moe", "qwen3moe",
)  # fmt: skip
"""What transformers' loader reads and the tests check. Mistral's files call themselves llama. Families that
the tests do not cover (qwen2, qwen2moe, qwen3moe) are proven first, as with their checkpoints."""

SPARE_BYTES = 64 * 2**20  # beside weights whose parts are joined: tokenizer, config
LONGEST_PATH_CHARS = 400  # in a message
DIGITS = 16  # of the sum, in a folder's name
JOINED = "source.gguf"

FORM = "packed"
"""In a folder's name. Older ones, which hold converted weights, have none."""

TOLD = 3
"""The exit status of `gguf_describe.py` after an error of ours, which it prints last."""


def cache_folder() -> Path:
    """Where such folders are kept: $INTARSIA_CACHE, else the user's cache."""
    if own := os.environ.get("INTARSIA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intarsia" / "models"


def folder_of(name: str, files: Sequence[Path], pinned: str | None = None) -> Path:
    """The checkpoint folder of a GGUF file. Makes it if it is not there yet.

    files: one; or the parts of a model that is split, which stay where they are; or pieces of one file, which are
        joined in the folder

    pinned: the SHA-256 that the file must have

    Raises `ModelNotFound`, `CorruptCheckpoint` (cut off, incomplete, or another sum), `UnsupportedModel` (an
    architecture that is not known) or `InvalidSetting` (the package gguf is not installed; no room, or a cache that
    cannot be written).
    """
    # A file that is where it was, as it was, need not be read.
    if (ready := _ready(name, files, pinned)) is not None:
        return ready
    # Check the cheap things first: the files are there, and a single one has a good header.
    for file in files:
        if not os.path.isfile(file):  # also where that can be no path
            raise ModelNotFound(f"there is no file at {clipped(str(file), LONGEST_PATH_CHARS)}", field="model")
    is_joined = len(files) > 1 and not is_split(files)
    if not is_joined:
        _check(files)  # before anything takes time
    # The sum names the folder, and must be the pinned one.
    found = sha256_of(*files)
    if pinned is not None and found != pinned:
        raise CorruptCheckpoint(
            f"the weights of {name} have the SHA-256 {found}, and not {pinned}: they are damaged, or others. Install "
            "them again.",
            field="model",
        )
    folder = _folder(name, found)
    # One process makes it; others wait for that and find the folder.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not folder.is_dir():
                _make(folder, files, found, is_joined=is_joined)
            elif not _is_ready(folder, files, is_joined=is_joined):
                _renew(folder, files)
    except OSError as error:
        raise _unwritable(error) from None
    return folder


def _folder(name: str, found: str) -> Path:
    return cache_folder() / f"{name}-{FORM}-{found[:DIGITS]}"


def _ready(name: str, files: Sequence[Path], pinned: str | None) -> Path | None:
    """The folder, if it can be known without reading the weights. Those in pieces are known by a pinned sum."""
    if pinned is not None:
        folders = [_folder(name, pinned)]
    else:
        folders = sorted(cache_folder().glob(f"{glob.escape(name)}-{FORM}-{'?' * DIGITS}"))
    return next((folder for folder in folders if _is_ready(folder, files, is_joined=pinned is not None)), None)


def _is_ready(folder: Path, files: Sequence[Path], *, is_joined: bool) -> bool:
    """Whether it is there, and its weights are in these files as they were."""
    manifest = read_manifest(folder) if folder.is_dir() else None
    if manifest is None:
        return False
    is_same_place = (is_joined and len(files) > 1) or manifest.paths == tuple(file.resolve() for file in files)
    return is_same_place and manifest.is_as_it_was()


def _renew(folder: Path, files: Sequence[Path]) -> None:
    """The same weights are at another place, or have another date."""
    manifest = read_manifest(folder)
    assert manifest is not None, "a folder has had its manifest from the first"
    write_manifest(folder, replace(manifest, files=tuple(GgufFile.at(file.resolve()) for file in files)))


def is_split(files: Sequence[Path]) -> bool:
    """Whether each is a GGUF file, and not a piece of one. Raises `CorruptCheckpoint` where one cannot be read."""
    return all(begins_as_gguf(file) for file in files)


def parts_beside(file: Path) -> list[Path]:
    """The file; or all parts of the model, if it is the first. Raises `ModelNotFound` and `CorruptCheckpoint`."""
    found = PART.fullmatch(file.stem)
    if found is None or not begins_as_gguf(file) or (split := read_gguf_header(file).split) is None:
        return [file]
    if split.number:
        raise ModelNotFound(
            f"{file} is part {split.number + 1} of {split.parts} of a model; give the first part", field="model"
        )
    parts = [file.with_stem(f"{found[1]}-{number:05}-of-{split.parts:05}") for number in range(1, split.parts + 1)]
    if lost := [part for part in parts if not part.is_file()]:
        raise ModelNotFound(
            f"{file} is one of {split.parts} parts of a model, and {lost[0]} is not there", field="model"
        )
    return parts


def _check(files: Sequence[Path]) -> None:
    """Raises `ModelError` for a file that cannot be served, `InvalidSetting` where none can be."""
    check_architecture(str(files[0]), read_gguf_headers(files).architecture)
    check_library()


def check_architecture(file: str, architecture: str) -> None:
    """Raises `UnsupportedModel` for an architecture that is not read. file: which holds it, for people"""
    if architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file} holds a model of architecture {clipped(architecture)!r}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can be served. Use a safetensors checkpoint of the model.",
            field="model",
        )


def check_library() -> None:
    """Raises `InvalidSetting` where no GGUF file can be read."""
    if find_spec("gguf") is None:
        raise InvalidSetting("GGUF files are read with the package gguf: pip install 'gguf>=0.17'", field="model")


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process makes this folder meanwhile."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process looks at {folder.name}; waiting for it ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, files: Sequence[Path], found: str, *, is_joined: bool) -> None:
    """The caller holds the lock, so a half-made folder is one that a killed process left."""
    beginning = f".{folder.name}-"
    for left in folder.parent.glob(f"{beginning}*"):
        shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=beginning, dir=folder.parent))
    try:
        sources = [file.resolve() for file in files]
        if is_joined:
            _check_room(making, sum(file.stat().st_size for file in files))
            sources = [making / JOINED]
            with sources[0].open("wb") as file:
                file.writelines(pieces_of(*files))
            _check(sources)
        _describe(sources, making, found)
        making.chmod(0o755)
        making.rename(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _check_room(folder: Path, weight_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, weight_bytes + SPARE_BYTES
    if free < needed:
        raise InvalidSetting(
            f"the joined parts of the model take {needed / 1e9:.1f} GB and {cache_folder()} has {free / 1e9:.1f} GB "
            "free; make room, or name another place by INTARSIA_CACHE",
            field="INTARSIA_CACHE",
        )


def _describe(sources: Sequence[Path], folder: Path, found: str) -> None:
    ended = run_child("deploy.checkpoints.gguf_describe", (str(folder), found, *map(str, sources)), None)
    if ended.code == TOLD:
        raise IntarsiaError.from_wire(json.loads(ended.last))
    if ended.code:
        raise _failed(sources[0], folder, ended.code, ended.errors)


def _failed(source: Path, folder: Path, code: int, errors: list[str]) -> IntarsiaError:
    last = errors[-1] if errors else f"it ended with {code}"
    if os.strerror(errno.ENOSPC) in last or not shutil.disk_usage(folder).free:
        return _unwritable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if code == -9:
        last = "it was killed, as happens where memory runs out"
    return CorruptCheckpoint(f"{source} cannot be read by transformers: {clipped(last, 300)}", field="model")


def _unwritable(error: OSError) -> InvalidSetting:
    return InvalidSetting(
        f"what is known of GGUF files is kept in {cache_folder()}, which cannot be written: {error.strerror}. Name "
        "another place by INTARSIA_CACHE.",
        field="INTARSIA_CACHE",
    )
