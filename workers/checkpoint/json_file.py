"""The JSON files of a checkpoint, read within bounds: what a stranger wrote must not cost more than reading it."""

import json
import math
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ...errors import CorruptCheckpoint, ModelNotFound

MIB = 2**20

MAX_CONFIG_BYTES = 4 * MIB
MAX_DEPTH = 32
"""Of lists and objects within each other; configs of real models have 5."""

MAX_ITEMS = 2**20
"""Of one file. 200,000 tensors need as many in an index, and seven times as many in headers."""

MAX_STRING_CHARS = MIB
QUOTED_CHARS = 80


def read_object(file: Path, max_bytes: int = MAX_CONFIG_BYTES) -> dict[str, Any]:
    """The object that a JSON file holds. Raises `CorruptCheckpoint`, or `ModelNotFound` if there is no such file."""
    found = parse_object(read_bytes(file, max_bytes), str(file))
    if _is_deep(found):
        raise corrupt(f"{file} is not readable JSON: it is nested deeper than {MAX_DEPTH} levels")
    return found


def parse_object(data: bytes, what: str, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """what: is read, for people. It may be nested as deep as it can be read. Raises `CorruptCheckpoint`."""
    items = data.count(b",") + data.count(b"[") + data.count(b"{")
    if items > max_items:
        raise corrupt(f"{what} has up to {items} values; the limit is {max_items}")
    try:
        value = json.loads(data.decode(), object_pairs_hook=_unique, parse_constant=_constant)
    except RecursionError:
        raise corrupt(f"{what} is not readable JSON: it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise corrupt(f"{what} is not readable JSON: {clipped(str(error))}") from None
    if not isinstance(value, dict):
        raise corrupt(f"{what} holds no JSON object")
    return value


def read_bytes(file: Path, max_bytes: int) -> bytes:
    """All of a small file. Raises `CorruptCheckpoint`, or `ModelNotFound` if there is no such file."""
    size = size_of(file)
    if size is None:
        raise ModelNotFound(f"there is no file {file}", field="model")
    if size > max_bytes:
        raise corrupt(f"{file} has {size} bytes; the limit is {max_bytes}")
    try:
        with file.open("rb") as opened:
            return opened.read(max_bytes)
    except OSError as error:
        raise corrupt(f"{file} cannot be read: {error.strerror}") from None


def size_of(file: Path) -> int | None:
    """Bytes of a regular file, wherever links lead; None if there is none. Raises `CorruptCheckpoint` for anything
    else: reading a pipe or a device might never end."""
    try:
        found = os.stat(file)
    except FileNotFoundError:
        if file.is_symlink():
            raise corrupt(f"{file} is a link to a file that is not there") from None
        return None
    except (OSError, ValueError) as error:
        raise corrupt(f"{file} cannot be read: {getattr(error, 'strerror', error)}") from None
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a pipe, a socket or a device"
        raise corrupt(f"{file} is {kind}, not a file")
    return found.st_size


def corrupt(sentence: str) -> CorruptCheckpoint:
    return CorruptCheckpoint(sentence, field="model")


def quote(value: Any) -> str:
    """A value from a file, short enough for a sentence."""
    if isinstance(value, list | dict):
        kind = "list" if isinstance(value, list) else "object"
        return f"{'an' if kind == 'object' else 'a'} {kind} of {len(value)}"
    if isinstance(value, str):
        return clipped(repr(value[: QUOTED_CHARS + 1]))
    return clipped(json.dumps(value))


def clipped(text: str, most: int = QUOTED_CHARS) -> str:
    """On one line, and not longer than that."""
    text = " ".join(text[: 4 * most].split())
    return text if len(text) <= most else text[: most - 3] + "..."


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        twice = next((name for name, value in pairs if found[name] != value), None)
        if twice is not None:
            raise ValueError(f"{quote(twice)} is there twice, with two values")
    return found


def _constant(word: str) -> float:
    """Some configs hold Infinity; NaN is nothing that a model can be made from."""
    if word == "NaN":
        raise ValueError("it holds NaN")
    return math.inf if word == "Infinity" else -math.inf


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [child for parent in level for child in _children(parent)]
        if not level:
            return False
    return True


def _children(value: Any) -> Iterator[Any]:
    members = value.values() if isinstance(value, dict) else value
    return (child for child in members if isinstance(child, list | dict))
