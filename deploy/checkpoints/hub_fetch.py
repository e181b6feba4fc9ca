"""Fetches a model from the Hugging Face Hub into its cache, in a process of its own: one that serves needs no client of
the Hub, nor its threads.

    python -m intarsia.deploy.checkpoints.hub_fetch NAME REVISION all|beside-weights|text [KIND]

prints "done total", in bytes, while it goes on, and at last one JSON object: {"folder": .., "gguf": [..]} or
{"error": ..}. KIND is that of a GGUF file.
"""

import contextlib
import errno
import json
import os
import resource
import shutil
import signal
import sys
import threading
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

from huggingface_hub import HfApi, constants, hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from ...errors import IntarsiaError, InvalidSetting, ModelNotFound
from ...workers.checkpoint.json_file import clipped
from .gguf import SUFFIX, check_architecture, check_library
from .hub import (
    ALL,
    BESIDE_WEIGHTS,
    COMMIT,
    CONFIG,
    INDEX,
    MAIN,
    SIDE_FILES,
    SINGLE,
    TEMPLATES,
    TEXT,
    Fetched,
    files_of_index,
    home_of,
    hub_cache,
)
from .hub_gguf import GgufName, pick
from .hub_resume import LARGE_BYTES, bytes_of_parts, take_up

THREADS = 8
MOST_FILES = 2**16  # that it may have open when it ends
SPARE_BYTES = 2**26
SAY_EVERY_BYTES = 2**22
UNWRITABLE = (
    errno.ENOSPC, errno.EDQUOT, errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST
)  # fmt: skip
LOG_IN = "log in with `hf auth login`, or give a token by HF_TOKEN"


class Repository(NamedTuple):
    """A model on the Hub, at one commit."""

    name: str
    commit: str
    sizes: Mapping[str, int]  # file -> bytes
    gguf: Mapping[str, Any]  # what the Hub read out of a GGUF file

    @property
    def folder(self) -> Path:
        return home_of(self.name) / "snapshots" / self.commit


def fetch(name: str, revision: str, what: str, kind: str | None = None) -> Fetched:
    """A model, once its files are here: those beside the weights first, so that weights are the last to come.

    what: `ALL`, `BESIDE_WEIGHTS` or `TEXT`. Of a GGUF file, which has all in it, nothing is beside the weights
    kind: of a GGUF file

    Raises `ModelNotFound`, `InvalidSetting` and what huggingface_hub does.
    """
    found = _asked(name, revision)
    progress = Progress()
    if what != TEXT and (kind is not None or _is_gguf(found)):
        files = _check_gguf(found, kind)
        if what == ALL:
            _fetch_files(found, files, progress)
    else:
        files = []
        _fetch_safetensors(found, what, progress)
    # The name leads to the folder from now on.
    if what != BESIDE_WEIGHTS and not COMMIT.fullmatch(revision):
        _point(home_of(name) / "refs" / revision, found.commit)
    return Fetched(found.folder, [found.folder / each for each in files])


def _asked(name: str, revision: str) -> Repository:
    info = HfApi().model_info(name, revision=revision, files_metadata=True)
    commit = str(info.sha)
    if not COMMIT.fullmatch(commit):
        raise ModelNotFound(
            f"the Hub calls revision {revision} of {name} {clipped(commit)!r}, no commit", field="model"
        )
    sizes = {each.rfilename: each.size or 0 for each in info.siblings or () if _is_inside(each.rfilename)}
    said: Any = getattr(info, "gguf", None)
    return Repository(name, commit, sizes, said if isinstance(said, dict) else {})


def _fetch_safetensors(found: Repository, what: str, progress: "Progress") -> None:
    sizes = found.sizes
    side = [each for each in sizes if each in SIDE_FILES or TEMPLATES.fullmatch(each)]
    if what != TEXT:
        _check_format(found)
        side += [INDEX] if INDEX in sizes else []
    _fetch_files(found, side, progress)
    if what == ALL:
        weights = sorted(files_of_index(found.folder)) or [SINGLE]
        if lost := [each for each in weights if each not in sizes]:
            raise ModelNotFound(
                f"{found.name} names {lost[0]} in its index, and the Hub does not have it", field="model"
            )
        _fetch_files(found, weights, progress)


def _has_safetensors(found: Repository) -> bool:
    return CONFIG in found.sizes and (SINGLE in found.sizes or INDEX in found.sizes)


def _is_gguf(found: Repository) -> bool:
    """Whether its weights are in GGUF files alone."""
    return not _has_safetensors(found) and any(each.lower().endswith(SUFFIX) for each in found.sizes)


def _check_gguf(found: Repository, kind: str | None) -> list[str]:
    """The files of the model that is meant. Raises `ModelError` and `InvalidSetting` for what could not be served."""
    files = pick(found.sizes, GgufName(found.name, kind))
    if isinstance(architecture := found.gguf.get("architecture"), str):
        check_architecture(f"{found.name} on the Hub", architecture)
    check_library()
    return files


def _is_inside(file: str) -> bool:
    return not Path(file).is_absolute() and ".." not in Path(file).parts


def _check_format(found: Repository) -> None:
    if _has_safetensors(found):
        return
    others = sorted(each for each in found.sizes if each.endswith((".safetensors", ".bin", ".pth", ".pt")))
    what = "the weights model.safetensors" if CONFIG in found.sizes else CONFIG
    raise ModelNotFound(
        f"{found.name} on the Hub lacks {what}; it holds {', '.join(others[:4]) or 'no weight files'}. Only "
        "safetensors and GGUF files are read.",
        field="model",
    )


def _fetch_files(found: Repository, files: Iterable[str], progress: "Progress") -> None:
    missing = [each for each in files if not (found.folder / each).is_file()]
    wanted = sum(found.sizes[each] for each in missing)
    progress.expect(wanted)
    _check_room(found.name, max(0, wanted - bytes_of_parts(found.name)))

    def one(file: str) -> None:
        place: Any = {"revision": found.commit, "cache_dir": hub_cache(), "tqdm_class": progress.bar()}
        if found.sizes[file] > LARGE_BYTES:
            take_up(found.name, found.commit, file, progress.bar())
        hf_hub_download(found.name, file, **place)

    pool = ThreadPoolExecutor(THREADS)
    futures = [pool.submit(one, each) for each in missing]
    try:
        for future in futures:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _check_room(name: str, wanted: int) -> None:
    """wanted: bytes of the files that are to come"""
    cache = hub_cache()
    cache.mkdir(parents=True, exist_ok=True)
    free, needed = shutil.disk_usage(cache).free, wanted + SPARE_BYTES
    if wanted and free < needed:
        raise InvalidSetting(
            f"{name} takes {needed / 1e9:.1f} GB more, and the Hub's cache at {cache} has {free / 1e9:.1f} GB free; "
            "make room, or name another place by HF_HUB_CACHE",
            field="HF_HUB_CACHE",
        )


def _point(ref: Path, commit: str) -> None:
    if ref.is_file() and ref.read_text().strip() == commit:
        return
    ref.parent.mkdir(parents=True, exist_ok=True)
    fresh = ref.with_name(f".{ref.name}.{os.getpid()}")
    fresh.write_text(commit)
    fresh.replace(ref)


class Progress:
    """Adds up the bytes of files that are fetched at the same time, and prints them. Safe to use from threads."""

    def __init__(self):
        self._lock = threading.Lock()
        self._done = self._total = self._told = 0

    def expect(self, more: int) -> None:
        with self._lock:
            self._total += more

    def add(self, more: int) -> None:
        with self._lock:
            self._done += more
            if abs(self._done - self._told) >= SAY_EVERY_BYTES or self._done >= self._total:
                self._told = self._done
                print(min(self._done, self._total), self._total, flush=True)

    def bar(self) -> type["Told"]:
        """A class of bars, as huggingface_hub wants one, that tell this."""
        return type("ToldHere", (Told,), {"progress": self})


class Told:
    """Stands where huggingface_hub expects a bar of tqdm."""

    progress: Progress

    def __init__(self, *_: object, initial: int = 0, total: int | None = None, **__: object):
        self.n, self.total = initial, total
        self.progress.add(initial)

    def update(self, more: float = 1) -> None:
        self.n += int(more)
        self.progress.add(int(more))

    def update_transfer(self, more: float = 1) -> None:
        """Bytes on the wire, which are not those of the files."""

    def set_postfix_str(self, *_: object, **__: object) -> None: ...
    def set_transfer_postfix_str(self, *_: object, **__: object) -> None: ...
    def set_description(self, *_: object, **__: object) -> None: ...
    def refresh(self, *_: object, **__: object) -> None: ...
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def in_our_words(error: Exception, name: str, revision: str) -> IntarsiaError:
    """What went wrong, for the person who has to act."""
    hub = constants.ENDPOINT
    again = "The same command goes on with what is not here yet"
    match error:
        case IntarsiaError():
            return error
        case GatedRepoError():
            return ModelNotFound(
                f"{name} is given only to those who accepted its terms: do so at {hub}/{name}, and {LOG_IN}",
                field="model",
            )
        case RevisionNotFoundError():
            return InvalidSetting(
                f"{name} has no branch, tag or commit {revision} at {hub}; leave revision out for {MAIN}",
                field="revision",
            )
        case RepositoryNotFoundError():
            return ModelNotFound(
                f"there is no folder {name}, and no model {name} at {hub}, or it is private. Check how it is spelt; if "
                f"it is private, {LOG_IN}",
                field="model",
            )
        case HfHubHTTPError() if error.response.status_code in (401, 403):
            return ModelNotFound(f"{hub} does not let you have {name}: {LOG_IN}", field="model")
        case HfHubHTTPError():
            return ModelNotFound(
                f"{name} cannot be fetched: {hub} answered {error.response.status_code}. {again}.", field="model"
            )
        case OfflineModeIsEnabled():
            return ModelNotFound(f"{name} is not here, and HF_HUB_OFFLINE forbids to fetch it", field="model")
        case OSError(errno=int(number)) if number in UNWRITABLE:
            return InvalidSetting(
                f"the Hub's cache at {hub_cache()} cannot be written: {os.strerror(number)}. Name another place by "
                "HF_HUB_CACHE, or make room.",
                field="HF_HUB_CACHE",
            )
        case _:
            why = clipped(str(_origin(error)), 200) or type(error).__name__
            return ModelNotFound(
                f"{name} is not on this machine, and could not be fetched from {hub}: {why}. {again}, and so does "
                f"hf download {name}; or copy the model's folder here and give its path.",
                field="model",
            )


def _origin(error: BaseException) -> BaseException:
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def remove_halves() -> None:
    """Remove the files that huggingface_hub writes here and has not completed: no other try goes on with them. For a
    process that is about to end: from now on its threads, which still fetch, can open no file."""
    most = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, most))
    for opened in range(most):
        with contextlib.suppress(OSError):
            file = Path(os.readlink(f"/proc/self/fd/{opened}"))
            if file.suffix == ".incomplete":
                file.unlink()


def main(name: str, revision: str, what: str, kind: str | None = None) -> int:
    """Returns the exit status."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        found = fetch(name, revision, what, kind)
    except KeyboardInterrupt:
        remove_halves()
        return 130
    except Exception as error:  # noqa: BLE001  whatever it is becomes a sentence
        said = json.dumps({"error": in_our_words(error, name, revision).to_wire()})
        remove_halves()
        print(said, flush=True)
        return 1
    files = [file.relative_to(found.folder).as_posix() for file in found.gguf]
    print(json.dumps({"folder": str(found.folder), "gguf": files}), flush=True)
    return 0


if __name__ == "__main__":
    os._exit(main(*sys.argv[1:5]))  # threads that still wait for the network are not waited for
