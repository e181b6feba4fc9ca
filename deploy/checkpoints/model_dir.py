"""What MODEL means: the demo's name, a folder, a GGUF file, a model whose weights are a package, or a name on the
Hugging Face Hub."""

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...errors import InvalidSetting, ModelNotFound
from ..demo import DEMO, DEMO_MODEL_DIR, is_demo
from .gguf import SUFFIX
from .hub import ALL, BESIDE_WEIGHTS, HUB_NAME, TEXT, cached, fetched
from .hub_gguf import GgufName, gguf_in_cache, gguf_name, says_gguf
from .real_models import REAL_MODELS, gguf_checkpoint, real_checkpoint

SIMILAR = 0.7
"""The least likeness of two spellings that counts as a slip, from 0 to 1."""


FEWEST_CHARS = 5
"""The fewest characters of a name that is taken for the beginning of a known one."""


Judge = Callable[[Path | None], None]
"""Raises what a model of the Hub is refused for. Called with None before anything of it is fetched, and before its
weights are with the folder of the files beside them."""


class FoundModel(NamedTuple):
    """Where a checkpoint is, and what it is called."""

    path: Path
    name: str | None = None  # None: as its folder
    is_of_hub: bool = False


def find_model(
    model: str, revision: str | None = None, *, with_weights: bool = True, judge: Judge | None = None
) -> FoundModel:
    """Fetches a model of the Hub that is not here.

    revision: of a model on the Hub, its branch, tag or commit; None: main
    with_weights: False where only the tokenizer is wanted
    judge: of a model that is to be fetched with its weights

    Raises what `fetched` and `judge` do, and `InvalidSetting` for a revision of what is not on the Hub. What else there
    is not, `Checkpoint` says as it says what a folder lacks.
    """
    if not _exists(model) and (named := gguf_name(model)):
        files = gguf_in_cache(named, revision)
        if files is None and judge is not None:
            judge(None)
        return _of_gguf(model, files or fetched(named.repository, revision, ALL, named.kind).gguf)
    if is_hub_name(model):
        return _of_hub(model, revision, with_weights=with_weights, judge=judge)
    found = _of_this_machine(model)
    if revision is not None:
        raise InvalidSetting(
            f"revision is of models on the Hub, and {model} is on this machine; leave revision out", field="revision"
        )
    return found


def is_hub_name(model: str) -> bool:
    """Whether only the Hub can have it: a folder or file of that path, or a model by name, comes first."""
    return HUB_NAME.fullmatch(model) is not None and not _exists(model) and Path(model).suffix.lower() != SUFFIX


def _of_hub(model: str, revision: str | None, *, with_weights: bool, judge: Judge | None) -> FoundModel:
    # What the cache has is taken.
    if folder := cached(model, revision, with_weights=with_weights):
        return FoundModel(folder, model, is_of_hub=True)
    if with_weights and says_gguf(model) and (files := gguf_in_cache(GgufName(model), revision)):
        return _of_gguf(model, files)
    # Else it is fetched, once it is judged by what comes before its weights.
    if judge is not None:
        judge(None)
        beside = fetched(model, revision, BESIDE_WEIGHTS)
        if not beside.gguf:
            judge(beside.folder)
    found = fetched(model, revision, ALL if with_weights else TEXT)
    return _of_gguf(model, found.gguf) if found.gguf else FoundModel(found.folder, model, is_of_hub=True)


def _of_gguf(model: str, files: Sequence[Path]) -> FoundModel:
    """model: as it was named"""
    return FoundModel(gguf_checkpoint(files).folder, model, is_of_hub=True)


def _of_this_machine(model: str) -> FoundModel:
    if is_demo(model):
        return FoundModel(DEMO_MODEL_DIR, DEMO)
    _refuse_gguf_of_hub(model)
    if real := real_checkpoint(model):
        return FoundModel(real.folder, real.name)
    _suggest(model)
    return FoundModel(Path(model))


def _refuse_gguf_of_hub(model: str) -> None:
    """Raises `ModelNotFound` for ORGANISATION/MODEL/FILE.gguf that is no path here."""
    name, _, file = model.rpartition("/")
    if file.lower().endswith(SUFFIX) and HUB_NAME.fullmatch(name) and not _exists(model):
        raise ModelNotFound(
            f"there is no file {model}. A GGUF file of the Hub is named so: {name}:{Path(file).stem}, or by the end of "
            "that",
            field="model",
        )


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
