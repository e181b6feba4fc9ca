"""Intarsia: language models of mixed attention, served out of one paged KV block pool, on Ray.

    from intarsia import LLM, SamplingParams

    with LLM("path/to/checkpoint", tensor_parallel_size=2) as llm:
        for output in llm.generate(["The inlay of"], SamplingParams(max_tokens=16)):
            print(output.text)

Importing this package is cheap: neither torch nor Ray is loaded before the first `LLM`.
"""

from typing import TYPE_CHECKING

__version__ = "0.1.0"
__all__ = ["LLM", "IntarsiaError", "SamplingParams"]

if TYPE_CHECKING:
    from .deploy.llm import LLM
    from .errors import IntarsiaError
    from .proto.request import SamplingParams

_HOMES = {"LLM": ".deploy.llm", "SamplingParams": ".proto.request", "IntarsiaError": ".errors"}


def __getattr__(name: str):
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name], __name__), name)
