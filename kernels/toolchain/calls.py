"""Calls of C++ functions, made one after another without Python between them.

While weights stream through the processor's caches, Python's own code and data leave them, and each call from Python
takes several times as long as in a loop that does nothing else.
"""

import ctypes
import functools
from collections.abc import Sequence
from ctypes import c_int64, c_void_p
from typing import Any, NamedTuple

from . import cpp


class Call(NamedTuple):
    """A function of a library, and its one argument, whose fields may change between runs."""

    function: Any
    arguments: Any  # a ctypes.Structure


class _Call(ctypes.Structure):
    _fields_ = [("function", c_void_p), ("arguments", c_void_p)]


@functools.cache
def _library() -> Any:
    library: Any = cpp.library("toolchain/calls")
    if not isinstance(library, str):
        library.intarsia_run.argtypes = [c_void_p, c_int64]
    return library


def is_available() -> bool:
    return not isinstance(_library(), str)


class CallList:
    """Calls that are made in this order, again and again."""

    def __init__(self, calls: Sequence[Call]):
        self._calls = calls  # whose arguments C++ reads
        self._array = (_Call * len(calls))()
        for entry, call in zip(self._array, calls, strict=True):
            entry.function = ctypes.cast(call.function, c_void_p)
            entry.arguments = ctypes.addressof(call.arguments)
        self._run = functools.partial(_library().intarsia_run, ctypes.addressof(self._array), len(calls))

    def run(self) -> None:
        self._run()
