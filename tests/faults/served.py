"""`intarsia serve` as a process of its own, with keys, from any checkout: what the programs at the door attack."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from intarsia.deploy.start.processes import descendants

KEYS = {"alice": "key-of-alice", "bob": "key-of-bob", "carol": "key-of-carol", "": "key-of-nobody"}
"""By tenant."""

ADMIN_KEY = "key-of-the-admin"

START_S = 180.0
STOP_S = 60.0

TRACEBACK = "Traceback (most recent call last)"


class Target(NamedTuple):
    """Where it listens, and what opens it."""

    http: tuple[str, int]
    grpc: str
    keys: Mapping[str, str]
    admin_key: str


class Gone(RuntimeError):
    """The server has ended by itself, or did not start."""


class Served:
    """A server that runs. `pid` is its front end's."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path, target: Target):
        self.pid = process.pid
        self.target = target
        self._process = process
        self._log = log

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def tracebacks(self) -> int:
        return self.log().count(TRACEBACK)

    def is_running(self) -> bool:
        return self._process.poll() is None

    def rss_bytes(self) -> int:
        return rss_bytes(self.pid)

    def family_bytes(self) -> int:
        """Of the front end and all that came from it, what is shared counted once."""
        return sum(_share_bytes(pid) for pid in [self.pid, *descendants(of=self.pid)])

    def view(self) -> dict[str, Any]:
        """What the console shows."""
        return json.loads(self.get("/console/view", self.target.admin_key))

    def worker_pids(self) -> list[int]:
        return [worker["process_id"] for worker in self.view()["workers"]]

    def get(self, path: str, key: str | None = None) -> bytes:
        host, port = self.target.http
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        request = urllib.request.Request(f"http://{host}:{port}{path}", headers=headers)
        with urllib.request.urlopen(request, timeout=30) as answer:
            return answer.read()


@contextlib.contextmanager
def served(
    python: str = sys.executable, within: Sequence[str] = (), model: str = "demo", **options: Any
) -> Iterator[Served]:
    """A model behind `intarsia serve`, of the checkout whose interpreter that is. within: a command that takes the
    server's as its arguments and becomes it. options: flags of `serve`."""
    with tempfile.TemporaryDirectory(prefix="intarsia-door-", dir="/var/tmp") as folder:
        log = Path(folder) / "log"
        process = _started([*within, str(Path(python).parent / "intarsia"), "serve", model], Path(folder), log, options)
        try:
            yield Served(process, log, _target(process, log))
        finally:
            _stop(process)


def _started(command: Sequence[str], folder: Path, log: Path, options: Mapping[str, Any]) -> subprocess.Popen[bytes]:
    keys, admin = folder / "keys", folder / "admin"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in KEYS.items()))
    admin.write_text(ADMIN_KEY)
    for secret in (keys, admin):
        secret.chmod(0o600)
    own = {"port": 0, "grpc_port": 0, "api_key_file": keys, "admin_key_file": admin, "drain_timeout_s": 1}
    flags: dict[str, Any] = {**own, **options}
    words = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    with log.open("wb") as out:
        return subprocess.Popen(
            [*command, *words],
            cwd="/",
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # Ctrl-C is for this program, which then ends the server
        )


def _target(process: subprocess.Popen[bytes], log: Path) -> Target:
    until_s = time.monotonic() + START_S
    while "\nready" not in (said := log.read_text(errors="replace")):
        if process.poll() is not None or time.monotonic() > until_s:
            raise Gone(f"the server is not ready: {said[-2000:]}")
        time.sleep(0.1)
    http = re.search(r"HTTP +https?://([\d.]+):(\d+)", said)
    grpc = re.search(r"gRPC +([\d.]+:\d+)", said)
    assert http and grpc, said
    return Target((http[1], int(http[2])), grpc[1], KEYS, ADMIN_KEY)


def _stop(process: subprocess.Popen[bytes]) -> None:
    """It, and what it may have left. Its workers' fork server is no child of ours, and ends by itself."""
    family = [process.pid, *descendants(of=process.pid)]
    born = {pid: _born(pid) for pid in family}
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S / 3)
            break
    for pid in family:
        if _born(pid) is not None and _born(pid) == born[pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def rss_bytes(pid: int) -> int:
    """Resident memory; 0 if there is no such process."""
    with contextlib.suppress(OSError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _share_bytes(pid: int) -> int:
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    return 0


def _born(pid: int) -> int | None:
    """Clock ticks since boot, which tell a process from a later one of the same number."""
    with contextlib.suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    return None
