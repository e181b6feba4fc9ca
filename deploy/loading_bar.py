"""A bar that fills while a model is loaded, where somebody sits at a terminal to see it."""

import contextlib
import sys
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

from ..controller.launch import Watch


@contextlib.contextmanager
def loading_bar(console: Console | None = None) -> Iterator[Watch | None]:
    """Gives what to tell the progress to; None when standard error is no terminal. The bar is gone at the end."""
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    columns = TextColumn("loading weights"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total or None)
