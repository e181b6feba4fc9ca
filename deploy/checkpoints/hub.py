"""A name on the Hugging Face Hub becomes a folder: of files that are on this machine already, or are fetched now.

    cached(name) -> its folder, if the cache has all of it: no network, and no huggingface_hub
    fetched(name) -> the same, after a process of its own (`hub_fetch.py`) has brought what is missing

What is in the cache is taken as it is: that a branch has moved on is seen by `hf download`, not by a start.
The layout of the cache: https://huggingface.co/docs/huggingface_hub/guides/manage-cache
"""

import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ...errors import IntarsiaError, InvalidSetting, ModelNotFound
from ...workers.checkpoint.json_file import clipped
from ...workers.checkpoint.packed.description import CONFIG_FILES
from ...workers.checkpoint.side_files import JSON_FILES, OTHER_FILES
from ..terminal.loading_bar import bytes_bar
from .child import Ended, run_child

HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
"""ORGANISATION/MODEL"""

REVISION = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*", re.ASCII)
"""A branch, a tag or a commit. No part begins with a dot, so that none leads out of the folder of refs."""

MAX_REVISION_CHARS = 250
MAIN = "main"
COMMIT = re.compile(r"[0-9a-f]{40}")

CONFIG, INDEX, SINGLE = "config.json", "model.safetensors.index.json", "model.safetensors"

SIDE_FILES = (CONFIG, *JSON_FILES, *OTHER_FILES, *CONFIG_FILES)
"""All that is read beside weights. Weights in other formats and Python files are never fetched."""

TEMPLATES = re.compile(r"additional_chat_templates/[\w.-]+\.jinja")

ALL, BESIDE_WEIGHTS, TEXT = "all", "beside-weights", "text"
"""What is fetched of a model: all of it; what a model is judged by before its weights come; a tokenizer."""

TRUE = "1", "ON", "YES", "TRUE"
"""As huggingface_hub reads its switches."""


class Fetched(NamedTuple):
    """A model of the Hub on this machine."""

    folder: Path  # of its files
    gguf: Sequence[Path] = ()  # those with the weights, if they are no safetensors files


@dataclass(frozen=True, slots=True)
class HubSettings:
    """Which files of a model on the Hub."""

    revision: str | None = None  # a branch, a tag or a commit; None: main


def cached(name: str, revision: str | None = None, *, with_weights: bool = True) -> Path | None:
    """The folder of a model, if the cache holds all of it. None: there is nothing, or a part.

    Raises `InvalidSetting` for what can be no revision.
    """
    folder = folder_in_cache(name, revision)
    return folder if folder is not None and not lacking(folder, with_weights=with_weights) else None


def fetched(name: str, revision: str | None = None, what: str = ALL, kind: str | None = None) -> Fetched:
    """A model, once it is here. Two processes that fetch the same take turns, file by file. Where there are no
    safetensors files, a GGUF file is taken.

    what: `ALL`, `BESIDE_WEIGHTS` or `TEXT`
    kind: of a GGUF file; None: as `hub_gguf.pick` has it

    Raises `ModelNotFound` where the Hub does not have it, gives it to others only, cannot be reached or may not be
    asked; `InvalidSetting` for a revision that is not there, and for a cache that is full or cannot be written.
    """
    part = folder_in_cache(name, revision)
    if is_offline():
        said = not_here(name, revision, part) if kind is None else gguf_not_here(name, revision, kind)
        raise ModelNotFound(f"{said} HF_HUB_OFFLINE forbids to fetch it now.", field="model")
    with bytes_bar(f"fetching {name}", before=f"asking the Hub for {name}") as watch:
        if watch is None:
            print(f"fetching {name} from the Hub ...", file=sys.stderr, flush=True)
        asked = name, revision or MAIN, what, *((kind,) if kind is not None else ())
        environment = os.environ | {"HF_HUB_CACHE": str(hub_cache().absolute())}
        return _outcome(name, run_child("deploy.checkpoints.hub_fetch", asked, watch, environment))


def _outcome(name: str, ended: Ended) -> Fetched:
    """What the process said last: a folder and its GGUF files, or an error of ours."""
    try:
        said = json.loads(ended.last)
    except ValueError:
        said = None
    match said:
        case {"folder": str(folder), "gguf": list(files)}:
            return Fetched(Path(folder), [Path(folder) / str(file) for file in files])
        case {"error": list(wire)}:
            raise IntarsiaError.from_wire(wire)
        case _:
            why = f"the process that fetched it ended with {ended.code}"
            why = clipped(ended.errors[-1], 300) if ended.errors else why
            raise ModelNotFound(
                f"{name} cannot be fetched: {why}. The same command goes on with what is not here yet; or: "
                f"hf download {name}",
                field="model",
            )


def not_here(name: str, revision: str | None, part: Path | None) -> str:
    """The beginning of a refusal. part: what the cache has of it"""
    wanted = "" if revision is None else f" --revision {revision}"
    found = (
        f"there is no folder {name}, and no model of this name{wanted and f' at revision {revision}'} in the Hub's "
        f"cache at {hub_cache()}."
        if part is None
        else f"{part} lacks {lacking(part)}: a download of {name} was not completed."
    )
    return f"{found} Bring it here: hf download {name}{wanted}."


def gguf_not_here(name: str, revision: str | None, kind: str) -> str:
    """The beginning of a refusal."""
    wanted = "" if revision is None else f" --revision {revision}"
    return (
        f"there is no GGUF file of {name} whose name ends in {kind} in the Hub's cache at {hub_cache()}. Bring it "
        f"here: hf download {name}{wanted} --include '*{kind}*.gguf'."
    )


def folder_in_cache(name: str, revision: str | None = None) -> Path | None:
    """What the cache has of a model, all or some of its files. None: not even its config, or tokenizer."""
    home, wanted = home_of(name), checked(revision)
    if COMMIT.fullmatch(wanted) and (home / "snapshots" / wanted).is_dir():
        return home / "snapshots" / wanted
    try:
        commit = (home / "refs" / wanted).read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = home / "snapshots" / commit
    return folder if re.fullmatch(r"\w[\w.-]*", commit) and folder.is_dir() else None


def checked(revision: str | None) -> str:
    """Raises `InvalidSetting` for what can be no branch, tag or commit."""
    wanted = MAIN if revision is None else revision
    if len(wanted) > MAX_REVISION_CHARS or not REVISION.fullmatch(wanted):
        raise InvalidSetting(
            f"revision must be a branch, a tag or a commit of a model on the Hub, got {clipped(repr(wanted))}",
            field="revision",
        )
    return wanted


def lacking(folder: Path, *, with_weights: bool = True) -> str | None:
    """The first file that such a folder lacks to be whole. A file that is being fetched is not in it yet."""
    if not with_weights:
        return None if any((folder / name).is_file() for name in OTHER_FILES) else "its tokenizer"
    if not (folder / CONFIG).is_file():
        return CONFIG
    for name in sorted(files_of_index(folder)) or [SINGLE]:
        if not (folder / name).is_file():
            return name
    return None


def files_of_index(folder: Path) -> set[str]:
    """The files that an index names. What else is wrong with an index, `Checkpoint` says."""
    try:
        named = json.loads((folder / INDEX).read_bytes())["weight_map"].values()
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return set()
    return {name for name in named if isinstance(name, str)}


def home_of(name: str) -> Path:
    """The folder in the cache with all revisions of a model."""
    return hub_cache() / f"models--{name.replace('/', '--')}"


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps its downloads."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{general}/huggingface").expanduser() / "hub"


def is_offline() -> bool:
    """Whether the environment forbids to ask the Hub."""
    return any(os.environ.get(name, "").upper() in TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
