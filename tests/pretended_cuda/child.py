"""`run.py` in a process of its own, for tests: what it answers."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

LIMIT_S = 280.0


def pretend(family: str, model: Path, *flags: str) -> dict[str, Any]:
    """Raises `AssertionError` with the process's last words if it has no answer."""
    command = [sys.executable, "-m", "intarsia.tests.pretended_cuda.run", family, "--model", str(model), "--json"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=LIMIT_S, check=False, cwd="/")
    lines = done.stdout.splitlines()
    assert lines and lines[-1].startswith("{"), f"{' '.join(flags)}: {done.stderr[-3000:]}"
    return json.loads(lines[-1])
