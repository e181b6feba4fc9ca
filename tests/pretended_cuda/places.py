"""Where in the code something happened: the line nearest to it that is neither torch's nor of this package."""

import os
import sys
from pathlib import Path

import torch

HERE = Path(__file__).parent
ROOT = HERE.parents[1]  # of our package
SITE = Path(torch.__file__).parents[1]

HIDDEN = (*(f"{folder}{os.sep}" for folder in (SITE / "torch", SITE / "triton", HERE)), "<")
SHOWN = str(HERE / "planted.py")
"""Its mistakes stand for mistakes of the product."""
STANDARD = f"{os.path.dirname(os.__file__)}{os.sep}"  # `contextlib` and others stand between
OURS = (str(SITE), str(ROOT))


def place() -> str:
    """`workers/runner.py:238`, of the caller that is to be named."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name == SHOWN or not (name.startswith(HIDDEN) or _is_standard(name)):
            return f"{_short(name)}:{frame.f_lineno}"
        frame = frame.f_back
    return "nowhere"


def _is_standard(name: str) -> bool:
    return name.startswith(STANDARD) and not name.startswith(OURS)


def _short(name: str) -> str:
    for root in (ROOT, SITE):
        if name.startswith(f"{root}{os.sep}"):
            return name[len(str(root)) + 1 :]
    return name
