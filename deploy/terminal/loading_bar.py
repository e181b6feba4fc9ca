"""Shows on a terminal that something slow goes on: a spinner first, then a bar that fills."""

import contextlib
import sys
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

Watch = Callable[[int, int], None]
"""Called with the number done and their total."""


def loading_bar(console: Console | None = None) -> contextlib.AbstractContextManager[Watch | None]:
    """While an engine starts, and then while its weights are read."""
    return bar("loading weights", console, before="starting Ray and workers")


def bytes_bar(
    title: str, console: Console | None = None, *, before: str | None = None
) -> contextlib.AbstractContextManager[Watch | None]:
    """A `bar` that is told bytes, and shows them and how many come in a second."""
    return bar(title, console, before=before, more=(DownloadColumn(), TransferSpeedColumn()))


@contextlib.contextmanager
def bar(
    title: str, console: Console | None = None, *, before: str | None = None, more: tuple[ProgressColumn, ...] = ()
) -> Iterator[Watch | None]:
    """Gives what to tell the progress to; None when standard error is no terminal. The bar is gone at the end.

    before: what is done until the first progress is told
    more: columns beside the usual ones
    """
    console = console or Console(file=sys.stderr)
    if not console.is_terminal:
        yield None
        return
    usual = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TaskProgressColumn()
    columns = *usual, *more, TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(before or title, total=None)

        def watch(done: int, total: int) -> None:
            if total:
                progress.update(task, description=title, completed=done, total=total)

        yield watch
