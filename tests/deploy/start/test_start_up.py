"""What a start imports and starts, and what not: budgets without a clock. `bench/start_up.py` measures the time."""

import json
import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path

import pytest

from intarsia.deploy.start.processes import descendants
from intarsia.environment import OWNER, name_of_process

HEAVY = ("torch", "transformers", "ray", "grpc", "fastapi", "numpy")

LOADED = f"""
import json, sys
from intarsia.deploy.cli import app
try:
    app(sys.argv[1:])
except SystemExit:
    pass
print(json.dumps([name for name in {HEAVY} if name in sys.modules]))
"""


@pytest.mark.parametrize("words", [("--version",), ("serve", "--help"), ("serve", "demo", "--port", "99999")])
def test_the_command_imports_nothing_heavy_to_answer_what_needs_no_engine(words: tuple[str, ...]):
    done = subprocess.run([sys.executable, "-c", LOADED, *words], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == []


def test_serve_starts_one_fork_server_and_of_ray_only_what_one_machine_needs():
    words = ["serve", "demo", "--port", "0", "--grpc-port", "0"]
    command = [sys.executable, "-c", "from intarsia.deploy.cli import main; main()", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        banner = [*takewhile(lambda line: not line.startswith("ready"), server.stdout)]
        commands = [_command(pid) for pid in descendants(of=server.pid)]
        servers = _fork_servers_of(server.pid)
        server.send_signal(signal.SIGINT)
        server.wait(60)
    assert any("the demo model is a toy" in line for line in banner), banner
    told = "\n".join(commands)
    assert not re.search(r"monitor\.py|dashboard\.py|log_monitor", told), told
    assert sum("gcs_server" in each for each in commands) == 1
    assert len(servers) == 1, "what begins before Ray is what its actors find"


def _fork_servers_of(pid: int) -> list[int]:
    """Those that end with a process, but for the workers that they forked."""
    mark = f"{OWNER}={name_of_process(pid)}\0".encode()
    found = [each for each in map(int, filter(str.isdigit, os.listdir("/proc"))) if _is_marked(each, mark)]
    return [each for each in found if "fork_server" in _command(each) and _parent(each) not in found]


def _is_marked(pid: int, mark: bytes) -> bool:
    try:
        return mark in Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return False


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    except OSError:
        return ""


def _parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
