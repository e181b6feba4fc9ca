"""Renders a folder of chat templates, each with a small conversation of tools and thoughts."""

from collections.abc import Iterator
from pathlib import Path


def rendered(folder: Path) -> Iterator[str]:
    yield f"{len(list(folder.glob('*.jinja')))} templates"
