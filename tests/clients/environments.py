"""An environment of its own for each client, kept in a folder of the checkout."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from .table import PROGRAMS, Client

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / ".clients"

INSTALL_S = 1200.0
REASON_CHARACTERS = 300


class NotInstalled(RuntimeError):
    """A client cannot be installed here; the text is the installer's reason."""


class Ready(NamedTuple):
    """A client that can be run."""

    command: tuple[str, ...]
    folder: Path  # of its environment
    versions: dict[str, str]  # of the packages that were asked for


def ready(client: Client) -> Ready:
    """Install what is not there yet. Raises `NotInstalled`."""
    folder = FOLDER / client.name
    folder.mkdir(parents=True, exist_ok=True)
    return (_python if client.source == "pip" else _node)(client, folder)


def _python(client: Client, folder: Path) -> Ready:
    python = folder / "bin" / "python"
    if not python.exists():
        _run([sys.executable, "-m", "venv", *(["--without-pip"] if _uv() else []), str(folder)])
    wanted = list(client.packages)
    if not shutil.which("nvidia-smi"):
        wanted += ["--constraint", str(ROOT / "constraints.txt")]
    installer = [_uv(), "pip", "install", "--python", str(python)] if _uv() else [str(python), "-m", "pip", "install"]
    if not _is_made(folder, client):
        _run([*map(str, installer), "--quiet", *wanted])
        _mark_made(folder, client)
    code = "import importlib.metadata as m, json, sys; print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    names = [package.split(">")[0].split("[")[0] for package in client.packages]
    return Ready((str(python), str(client.program)), folder, json.loads(_run([str(python), "-c", code, *names])))


def _node(client: Client, folder: Path) -> Ready:
    if not _is_made(folder, client):
        (folder / "package.json").write_text('{"private": true, "type": "module"}\n')
        _run(["npm", "install", "--no-progress", "--loglevel=error", *client.packages], folder)
        _mark_made(folder, client)
    for script in PROGRAMS.glob("*.mjs"):  # a module finds its packages from where it lies
        shutil.copy(script, folder)
    names = [package.rpartition("@")[0] for package in client.packages]
    found = {name: json.loads((folder / "node_modules" / name / "package.json").read_text()) for name in names}
    command = ("node", str(folder / client.program.name))
    return Ready(command, folder, {name: facts["version"] for name, facts in found.items()})


def _is_made(folder: Path, client: Client) -> bool:
    mark = folder / "made.json"
    return mark.exists() and json.loads(mark.read_text()) == list(client.packages)


def _mark_made(folder: Path, client: Client) -> None:
    (folder / "made.json").write_text(json.dumps(client.packages))


def _uv() -> str | None:
    """A faster installer, if it can be installed itself."""
    folder = FOLDER / "uv"
    if not folder.exists():
        _run([sys.executable, "-m", "venv", str(folder)])
        subprocess.run([str(folder / "bin" / "pip"), "install", "--quiet", "uv"], check=False)
    program = folder / "bin" / "uv"
    return str(program) if program.exists() else None


def _run(command: list[str], folder: Path | None = None) -> str:
    environment = os.environ | {"UV_PYTHON_DOWNLOADS": "never"}
    if "PIP_FIND_LINKS" in environment:
        environment.setdefault("UV_FIND_LINKS", environment["PIP_FIND_LINKS"])
    try:
        done = subprocess.run(
            command, cwd=folder, env=environment, capture_output=True, text=True, timeout=INSTALL_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(str(error)) from error
    if done.returncode:
        said = " ".join(line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip())
        raise NotInstalled(said[:REASON_CHARACTERS])
    return done.stdout
