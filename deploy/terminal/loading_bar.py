"""Shows on a terminal that something slow goes on: a spinner first, then a bar that fills."""

import contextlib
import sys
import time
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


@contextlib.contextmanager
def loading_bar(console: Console | None = None, weight_bytes: int = 0) -> Iterator[Watch | None]:
    """While an engine starts, and then while its weights are read; one line says at the end how fast they were.

    weight_bytes: of all files together, of which as large a share is taken for read as of the numbers; 0: unknown
    """
    console = console or Console(file=sys.stderr)
    kind = bytes_bar if weight_bytes else bar
    began_s = ended_s = 0.0
    with kind("loading weights", console, before="starting Ray and workers") as show:

        def watch(done: int, total: int) -> None:
            nonlocal began_s, ended_s
            assert show is not None
            show(done * weight_bytes // total if weight_bytes and total else done, weight_bytes or total)
            began_s = began_s or (time.monotonic() if total else 0.0)
            ended_s = ended_s or (time.monotonic() if total and done >= total else 0.0)

        yield None if show is None else watch
    if weight_bytes and ended_s > began_s:
        size, took_s = weight_bytes / 1e9, ended_s - began_s
        said = f"loaded {size:.2f} GB of weights in {took_s:.1f} s, {size / took_s:.2f} GB/s"
        console.print(said, highlight=False)


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
    usual = SpinnerColumn(), TextColumn("{task.description}"), BarColumn(16 if more else 40), TaskProgressColumn()
    columns = *usual, *more, TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task(before or title, total=None)

        def watch(done: int, total: int) -> None:
            if total:
                progress.update(task, description=title, completed=done, total=total)

        yield watch
