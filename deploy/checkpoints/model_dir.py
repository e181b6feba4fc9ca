"""What MODEL means: the demo's name, a folder, a GGUF file, a model whose weights are a package, or a name on the
Hugging Face Hub whose files are on this machine."""

import difflib
import os
import re
from pathlib import Path
from typing import NamedTuple

from ...errors import ModelNotFound
from ..demo import DEMO, DEMO_MODEL_DIR, is_demo
from .real_models import REAL_MODELS, real_checkpoint

HUB_NAME = re.compile(r"[\w-][\w.-]{0,95}/[\w-][\w.-]{0,95}", re.ASCII)
"""ORGANISATION/MODEL"""

SIMILAR = 0.7
"""The least likeness of two spellings that counts as a slip, from 0 to 1."""


FEWEST_CHARS = 5
"""The fewest characters of a name that is taken for the beginning of a known one."""


class FoundModel(NamedTuple):
    """Where a checkpoint is, and what it is called."""

    path: Path
    name: str | None = None  # None: as its folder
    is_of_hub: bool = False


def find_model(model: str) -> FoundModel:
    """Raises `ModelNotFound` for a name on the Hub whose files are not here. What else there is not, `Checkpoint` says
    as it says what a folder lacks."""
    if is_demo(model):
        return FoundModel(DEMO_MODEL_DIR, DEMO)
    if real := real_checkpoint(model):
        return FoundModel(real.folder, real.name)
    if _exists(model) or not HUB_NAME.fullmatch(model):
        _suggest(model)
        return FoundModel(Path(model))
    folder = hub_folder(model)
    if folder is None:
        raise ModelNotFound(
            f"there is no folder {model}, and no model of this name in the Hub's cache at {hub_cache()}. Bring it "
            f"here: hf download {model}",
            field="model",
        )
    return FoundModel(folder, model, is_of_hub=True)


def hub_folder(name: str) -> Path | None:
    """The files of a model that was downloaded, as of its main branch; None if there are none. The layout of the cache:
    https://huggingface.co/docs/huggingface_hub/guides/manage-cache"""
    home = hub_cache() / f"models--{name.replace('/', '--')}"
    try:
        commit = (home / "refs" / "main").read_text().strip()
    except (OSError, UnicodeDecodeError):
        return None
    folder = home / "snapshots" / commit
    return folder if re.fullmatch(r"[\w.-]+", commit) and (folder / "config.json").is_file() else None


def hub_cache() -> Path:
    """The folder in which huggingface_hub keeps its downloads."""
    if cache := os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE"):
        return Path(cache).expanduser()
    general = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("HF_HOME") or f"{general}/huggingface").expanduser() / "hub"


def _suggest(model: str) -> None:
    """Raises `ModelNotFound` for what is no path and looks like a name that we know."""
    if _exists(model) or "/" in model or len(model) > 64:
        return
    from .known_models import known_models  # whose table takes a while to read

    known = [each.id for each in known_models() if each.id.rpartition("/")[2].lower().startswith(model.lower())]
    if len(model) >= FEWEST_CHARS and known:
        raise ModelNotFound(
            f"there is no model directory at {model}. For {known[0]}: hf download {known[0]}, then give {known[0]} "
            "as MODEL_DIR",
            field="model",
        )
    if near := difflib.get_close_matches(model, [DEMO, *REAL_MODELS], n=1, cutoff=SIMILAR):
        raise ModelNotFound(
            f"there is no model directory at {model}, and no model of this name. Did you mean {near[0]}?", field="model"
        )


def _exists(model: str) -> bool:
    try:
        return Path(model).exists()
    except (OSError, ValueError):  # no path at all; `Checkpoint` says so
        return True
