"""A GGUF file is converted once into a checkpoint folder of the user's cache, and served as any checkpoint.

The folder's name ends with the first digits of the file's SHA-256, so another file is another folder. It is made under
another name and then renamed: a reader never sees half of it. Two processes that want the same one take turns.
"""

import contextlib
import errno
import fcntl
import hashlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from ...errors import CorruptCheckpoint, InvalidSetting, ModelError, ModelNotFound, UnsupportedModel
from ...workers.checkpoint.json_file import clipped
from ..terminal.loading_bar import bar
from .child import run_child
from .gguf_header import read_gguf_header

SUFFIX = ".gguf"

ARCHITECTURES = ("gemma2", "gemma3", "llama", "qwen3")
"""What transformers' loader reads and our families run. Mistral's files call themselves llama."""

PIECE_BYTES = 2**20
SPARE_BYTES = 64 * 2**20  # beside the weights: tokenizer, config
LONGEST_PATH_CHARS = 400  # in a message
DIGITS = 16  # of the sum, in a folder's name

MANIFEST = "source.json"


def cache_folder() -> Path:
    """Where converted checkpoints are kept: $INTARSIA_CACHE, else the user's cache."""
    if own := os.environ.get("INTARSIA_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "intarsia" / "models"


def converted(name: str, files: Sequence[Path], pinned: str | None = None) -> Path:
    """The checkpoint folder of a GGUF file, which may lie in several parts. Converts it if that was not done yet.

    pinned: the SHA-256 that the file must have. Where its folder is there already, nothing is read.

    Raises `ModelNotFound`, `CorruptCheckpoint` (cut off, or another sum), `UnsupportedModel` (an architecture that is
    not known) or `InvalidSetting` (the converter is not installed; no room, or a cache that cannot be written).
    """
    # A pinned file that was converted before need not be read.
    if pinned is not None and (ready := _folder(name, pinned)).is_dir():
        return ready
    # Check the cheap things first: the files are there, and a single one has a good header.
    for file in files:
        if not os.path.isfile(file):  # also where that can be no path
            raise ModelNotFound(f"there is no file at {clipped(str(file), LONGEST_PATH_CHARS)}", field="model")
    if len(files) == 1:
        _check(files[0])  # before anything takes time
    # The sum names the folder, and must be the pinned one.
    found = _sum(files)
    if pinned is not None and found != pinned:
        raise CorruptCheckpoint(
            f"the weights of {name} have the SHA-256 {found}, and not {pinned}: they are damaged, or others. Install "
            "them again.",
            field="model",
        )
    folder = _folder(name, found)
    # One process converts; others wait for it and find the folder.
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _alone(folder):
            if not folder.is_dir():
                _make(folder, files, found)
    except OSError as error:
        raise _unwritable(error) from None
    return folder


def _folder(name: str, found: str) -> Path:
    return cache_folder() / f"{name}-{found[:DIGITS]}"


def _check(file: Path) -> int:
    """How many parameters it has. Raises `ModelError` for a file that cannot be converted, `InvalidSetting` where
    nothing can be."""
    header = read_gguf_header(file)
    if header.architecture not in ARCHITECTURES:
        raise UnsupportedModel(
            f"{file} holds a model of architecture {clipped(header.architecture)!r}; GGUF files of "
            f"{', '.join(ARCHITECTURES)} can be served. Use a safetensors checkpoint of the model.",
            field="model",
        )
    if find_spec("gguf") is None:
        raise InvalidSetting("GGUF files are read with the package gguf: pip install 'gguf>=0.17'", field="model")
    return header.num_parameters


def _sum(files: Sequence[Path]) -> str:
    digest = hashlib.sha256()
    try:
        for piece in _pieces(files):
            digest.update(piece)
    except OSError as error:
        raise CorruptCheckpoint(f"{files[0]} cannot be read: {error.strerror}", field="model") from None
    return digest.hexdigest()


def _pieces(files: Sequence[Path]) -> Iterator[bytes]:
    for file in files:
        with file.open("rb") as opened:
            while piece := opened.read(PIECE_BYTES):
                yield piece


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process makes this folder meanwhile."""
    with folder.with_name(f".{folder.name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"another process converts {folder.name}; waiting for it ...", file=sys.stderr, flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _make(folder: Path, files: Sequence[Path], found: str) -> None:
    """The caller holds the lock, so a half-made folder is one that a killed process left."""
    beginning = f".{folder.name}-"
    for left in folder.parent.glob(f"{beginning}*"):
        shutil.rmtree(left, ignore_errors=True)
    making = Path(tempfile.mkdtemp(prefix=beginning, dir=folder.parent))
    try:
        source, joined = files[0].resolve(), making / "source.gguf"
        if len(files) > 1:
            with joined.open("wb") as file:
                file.writelines(_pieces(files))
            source = joined
        _check_room(making, 2 * _check(source))
        with bar("converting weights") as watch:
            _convert(source, making, watch)
        joined.unlink(missing_ok=True)
        (making / MANIFEST).write_text(json.dumps({"file": files[0].name, "sha256": found}))
        making.chmod(0o755)
        making.rename(folder)
    except BaseException:
        shutil.rmtree(making, ignore_errors=True)
        raise


def _check_room(folder: Path, weight_bytes: int) -> None:
    free, needed = shutil.disk_usage(folder).free, weight_bytes + SPARE_BYTES
    if free < needed:
        raise InvalidSetting(
            f"the converted model takes {needed / 1e9:.1f} GB and {cache_folder()} has {free / 1e9:.1f} GB free; make "
            "room, or name another place by INTARSIA_CACHE",
            field="INTARSIA_CACHE",
        )


def _convert(source: Path, folder: Path, watch: Callable[[int, int], None] | None) -> None:
    ended = run_child("deploy.checkpoints.gguf_convert", (str(source), str(folder)), watch)
    if ended.code:
        raise _failed(source, folder, ended.code, ended.errors)


def _failed(source: Path, folder: Path, code: int, errors: list[str]) -> ModelError | InvalidSetting:
    last = errors[-1] if errors else f"it ended with {code}"
    if os.strerror(errno.ENOSPC) in last or not shutil.disk_usage(folder).free:
        return _unwritable(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)))
    if code == -9:
        last = "it was killed, as happens where memory runs out"
    return CorruptCheckpoint(f"{source} cannot be converted: {clipped(last, 300)}", field="model")


def _unwritable(error: OSError) -> InvalidSetting:
    return InvalidSetting(
        f"converted models are kept in {cache_folder()}, which cannot be written: {error.strerror}. Name another "
        "place by INTARSIA_CACHE.",
        field="INTARSIA_CACHE",
    )
