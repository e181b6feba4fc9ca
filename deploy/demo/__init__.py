"""The demo: a tiny model that was really trained, which comes with the package, and a tour with it.

    model/      the checkpoint: Gemma 3 in miniature, five layers with a window and one that sees everything, on bytes
    train.py    how it was made, from a text in the public domain
    (the tour, `intarsia demo`, is tools/demo_tour.py)

`intarsia serve demo` serves it, and so does `LLM("demo")`.
"""

from collections.abc import Iterator
from pathlib import Path

DEMO = "demo"
"""Instead of the folder of a checkpoint."""

DEMO_MODEL_DIR = Path(__file__).parent / "model"

TOY = "a toy of 2 MB: its words are words, and that is all"
"""What to expect of its text."""


def is_demo(model: str) -> bool:
    """Is this the demo model's name, and no folder of the user's?"""
    return model == DEMO and not Path(model).exists()


def demo_notes(model_dir: str) -> Iterator[str]:
    """What a banner says of the demo model's text; nothing of other models."""
    if Path(model_dir) == DEMO_MODEL_DIR:
        yield f"the demo model is {TOY}"
