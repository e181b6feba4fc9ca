"""GGUF files of the Hub: `OWNER/MODEL:KIND` is the file of a repository whose name ends in KIND, as `:Q4_K_M`.

A model may be split into several files, which are taken together. What else such a repository holds (projectors of
images, matrices of importance) is no model.
"""

import re
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from ...errors import ModelNotFound
from .gguf import PART, SUFFIX
from .hub import HUB_NAME, folder_in_cache

KIND = re.compile(r"[\w.-]{1,96}", re.ASCII)
USUAL = "Q4_K_M"
"""Taken where no kind is named."""

NO_MODEL = "mmproj", "imatrix"
"""How files begin that are no models."""

BEFORE_KIND = "-", "_", "."
"""What stands before a kind in the name of a file."""

MOST_NAMED = 12


class GgufName(NamedTuple):
    """What a name says of a GGUF file on the Hub."""

    repository: str
    kind: str | None = None  # None: the usual one, or the only one


def gguf_name(model: str) -> GgufName | None:
    """OWNER/MODEL:KIND. None: it is no such name."""
    repository, colon, kind = model.partition(":")
    is_one = colon and HUB_NAME.fullmatch(repository) and KIND.fullmatch(kind)
    return GgufName(repository, kind) if is_one else None


def says_gguf(repository: str) -> bool:
    """Whether a repository's name says that GGUF files are in it."""
    return "gguf" in repository.lower()


def pick(files: Iterable[str], name: GgufName) -> list[str]:
    """The files of a model among those of a repository: one, or all parts in their order.

    Raises `ModelNotFound`, with what there is, where none fits, or more than one.
    """
    models = _models(files)
    wanted = name.kind or USUAL
    fitting = [model for model in models if _is_of_kind(model, wanted)]
    # Without a kind the only one will do.
    if not fitting and name.kind is None and len(models) == 1:
        fitting = list(models)
    if len(fitting) != 1:
        raise ModelNotFound(_refusal(name, fitting, list(models)), field="model")
    return models[fitting[0]]


def gguf_in_cache(name: GgufName, revision: str | None = None) -> list[Path] | None:
    """The files of a model, if the cache has all of them. None: there are none, or it cannot be told which are meant.

    Raises `InvalidSetting` for what can be no revision.
    """
    folder = folder_in_cache(name.repository, revision)
    if folder is None:
        return None
    here = [file.relative_to(folder).as_posix() for file in folder.rglob(f"*{SUFFIX}") if file.is_file()]
    try:
        files = pick(here, name)
    except ModelNotFound:
        return None
    return [folder / each for each in files] if len(files) == _num_parts(files[0]) else None


def _models(files: Iterable[str]) -> dict[str, list[str]]:
    """Path without suffix, and without the number of a part -> files in their order."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == SUFFIX and not path.name.lower().startswith(NO_MODEL):
            part = PART.fullmatch(path.stem)
            models.setdefault(str(path.with_name(part[1] if part else path.stem)), []).append(file)
    return models


def _num_parts(file: str) -> int:
    part = PART.fullmatch(PurePosixPath(file).stem)
    return int(part[3]) if part else 1


def _is_of_kind(model: str, kind: str) -> bool:
    name, kind = PurePosixPath(model).name.lower(), kind.lower()
    return name == kind or name.endswith(tuple(f"{before}{kind}" for before in BEFORE_KIND))


def _refusal(name: GgufName, fitting: list[str], models: list[str]) -> str:
    """Of none, or several."""
    repository, wanted = name.repository, name.kind or USUAL
    listed = fitting or models
    named = ", ".join(listed[:MOST_NAMED]) + (", ..." if len(listed) > MOST_NAMED else "")
    if fitting:
        whole = PurePosixPath(fitting[0]).name
        return (
            f"{repository} has several GGUF files whose names end in {wanted}: {named}. Say more of the end of one's "
            f"name, as in {repository}:{whole}"
        )
    if not models:
        return f"{repository} holds no GGUF file of a model"
    said = f"no GGUF file whose name ends in {wanted}" if name.kind else f"several GGUF files, and none of {USUAL}"
    return f"{repository} has {said}: it has {named}. Name the end of one, as in {repository}:{_kind_of(models[0])}"


def _kind_of(model: str) -> str:
    """The end of a file's name, after the last hyphen or dot."""
    return re.split(r"[-.]", PurePosixPath(model).name)[-1]
