"""Clients that are commands."""

import os
import subprocess
import sys
from pathlib import Path

from probing import expect

COMMAND_S = 300


def command(name: str, *arguments: str, **variables: str) -> str:
    """What a program of this environment prints. Raises if it fails."""
    words = [str(Path(sys.executable).with_name(name)), *arguments]
    done = subprocess.run(
        words, env=os.environ | variables, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace",
        timeout=COMMAND_S, check=False,
    )  # fmt: skip
    expect(done.returncode == 0, done.returncode, (done.stdout + done.stderr)[-350:])
    return done.stdout + done.stderr
