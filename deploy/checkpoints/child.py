"""A program of ours in a process of its own, which tells how far it is. Conversion needs torch, a download a client of
the Hub, and the process that starts an engine should have neither."""

import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

END_WITHIN_S = 3.0


class Ended(NamedTuple):
    """How a program ended."""

    code: int
    last: str  # the last line of its standard output
    errors: list[str]  # the lines of its standard error


def run_child(
    module: str,
    arguments: Sequence[str],
    watch: Callable[[int, int], None] | None,
    environment: Mapping[str, str] | None = None,
) -> Ended:
    """Run `python -m intarsia.MODULE` to its end. Lines "done total" that it prints go to `watch`.

    environment: None: ours
    """
    command = [sys.executable, "-m", f"intarsia.{module}", *arguments]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, cwd="/", env=environment) as child,
    ):
        last = ""
        try:
            assert child.stdout is not None
            for last in child.stdout:
                done, _, total = last.partition(" ")
                if watch is not None and done.isdecimal() and total.strip().isdecimal():
                    watch(int(done), int(total))
        except BaseException:
            _end(child)
            raise
        code = child.wait()
        errors.seek(0)
        return Ended(code, last, errors.read().strip().splitlines())


def _end(child: subprocess.Popen[str]) -> None:
    """It may remove its files that are not complete, first."""
    child.terminate()
    try:
        child.wait(END_WITHIN_S)
    except subprocess.TimeoutExpired:
        child.kill()
