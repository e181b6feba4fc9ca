"""What a bare machine lacks and is not needed there."""

import contextlib
import importlib
import sys
import types
from typing import Any


def provide_msgpack() -> None:
    """The product's messages are packed with msgpack, which a bare machine lacks. Nothing is packed within a process,
    so pip's own copy will do, or an empty module."""
    for name in ("msgpack", "pip._vendor.msgpack"):
        with contextlib.suppress(ImportError):
            sys.modules["msgpack"] = importlib.import_module(name)
            return
    empty: Any = types.ModuleType("msgpack")
    empty.UnpackException = ValueError
    sys.modules["msgpack"] = empty
