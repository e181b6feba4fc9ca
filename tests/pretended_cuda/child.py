"""`run.py` in processes of their own, for tests: what it answers.

One process imports torch and what else takes seconds, and changes torch. Each run is a fork of it.
"""

import atexit
import contextlib
import functools
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

LIMIT_S = 280.0

ENDED = "ended with "
"""What is printed behind all that a run prints."""


def pretend(family: str, model: Path, *flags: str) -> dict[str, Any]:
    """Raises `AssertionError` with the process's last words if it has no answer."""
    return _parent().run([family, "--model", str(model), "--json", *flags])


class Parent:
    """Of all runs that a process of pytest's asks for."""

    def __init__(self) -> None:
        self._words = tempfile.TemporaryFile("w+")  # noqa: SIM115 (it is written to as long as the process lives)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "intarsia.tests.pretended_cuda.run", "--runs"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._words, text=True, cwd="/",
            start_new_session=True,
        )  # fmt: skip
        atexit.register(self.end)

    def run(self, arguments: list[str]) -> dict[str, Any]:
        assert self._process.stdin is not None
        before = self._words.seek(0, os.SEEK_END)
        with contextlib.suppress(BrokenPipeError):  # its last words say why
            print(json.dumps(arguments), file=self._process.stdin, flush=True)
        lines = self._lines()
        self._words.seek(before)
        said = [line for line in lines if not line.startswith(ENDED)]
        assert said and said[-1].startswith("{"), f"{' '.join(arguments)}: {lines[-1:]} {self._words.read()[-3000:]}"
        return json.loads(said[-1])

    def end(self) -> None:
        """With the run that goes on, if there is one."""
        _parent.cache_clear()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _lines(self) -> list[str]:
        """All that a run prints."""
        assert self._process.stdout is not None
        printed, until = "", time.monotonic() + LIMIT_S
        while not printed.rpartition("\n")[0].rpartition("\n")[2].startswith(ENDED):
            some = b""
            if select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))[0]:
                some = os.read(self._process.stdout.fileno(), 1 << 16)
            if not some:  # it takes too long, or has ended
                self.end()
                break
            printed += some.decode()
        return printed.splitlines()


@functools.cache
def _parent() -> Parent:
    return Parent()
