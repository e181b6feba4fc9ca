"""Processes forked from one that has imported all: how they live, are called, and end."""

import os
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from intarsia.environment import OWNER, is_running, name_of_process
from intarsia.errors import EngineUnavailable, ModelNotFound
from intarsia.proto.worker import ModelSettings
from intarsia.tests.faults.processes import parent_of
from intarsia.workers.process import fork_server
from intarsia.workers.process.fork_server import AHEAD, ForkServer, WorkerProcess


@pytest.fixture(autouse=True)
def _no_server_of_a_ray_of_ours(monkeypatch: pytest.MonkeyPatch):
    """Another module's Ray may still run in this process."""
    monkeypatch.delenv(AHEAD, raising=False)


@pytest.fixture
def server() -> Iterator[ForkServer]:
    made = ForkServer()
    yield made
    leave(made)


def leave(server: ForkServer) -> None:
    """As the end of its actor's process does."""
    if server._connection is not None:
        server._connection.close()


def ended(pid: int) -> bool:
    """Whether a process ends within a second, be its end noted by its parent or not."""
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


def test_worker_runs_in_a_process_of_its_own_in_the_folder_of_who_asked(
    server: ForkServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    worker = server.fork(0, 1, 1)
    assert worker.call("status").process_id == worker.pid != os.getpid()
    assert Path(f"/proc/{worker.pid}/cwd").readlink() == tmp_path


def test_actors_of_a_node_share_a_server(server: ForkServer):
    other = ForkServer()
    try:
        workers = [server.fork(0, 2, 2), other.fork(1, 2, 2)]
        assert len({parent_of(worker.pid) for worker in workers}) == 1
    finally:
        leave(other)
    assert ended(workers[1].pid)
    assert workers[0].call("status").process_id == workers[0].pid


def test_what_a_worker_raises_comes_back(server: ForkServer, tmp_path: Path):
    worker = server.fork(0, 1, 1)
    with pytest.raises(ModelNotFound, match="no model directory"):
        worker.call("load", ModelSettings(str(tmp_path / "nowhere")))
    with pytest.raises(RuntimeError, match="allocate first"):
        worker.call("clear")
    assert worker.call("status").process_id == worker.pid


def test_killed_worker_is_noticed_and_the_next_one_is_there_at_once(server: ForkServer, tiny: Callable):
    worker = server.fork(0, 1, 1)
    os.kill(worker.pid, signal.SIGKILL)
    with pytest.raises(EngineUnavailable, match="is gone"):
        worker.call("status")
    assert not worker.is_alive
    again = server.fork(0, 1, 1)
    assert again.is_alive and again.pid != worker.pid
    assert again.call("load", ModelSettings(str(tiny("llama").path))).architecture == "LlamaForCausalLM"


@pytest.mark.parametrize("state", ["waiting", "stopped"])
def test_worker_ends_with_its_actor(state: str):
    server = ForkServer()
    worker = server.fork(0, 1, 1)
    if state == "stopped":
        os.kill(worker.pid, signal.SIGSTOP)
    end_of_actor(server, worker)
    assert ended(worker.pid)


def end_of_actor(server: ForkServer, worker: WorkerProcess) -> None:
    worker._connection.close()
    leave(server)


def test_server_that_dies_leaves_its_workers_and_is_replaced(server: ForkServer):
    worker = server.fork(0, 1, 1)
    gone = parent_of(worker.pid)
    os.kill(gone, signal.SIGKILL)
    assert ended(gone)
    assert worker.call("status").process_id == worker.pid
    other = server.fork(0, 1, 1)
    assert parent_of(other.pid) != gone


@pytest.mark.parametrize("is_importing", [True, False])
def test_server_ends_with_the_process_that_started_a_ray_for_it(is_importing: bool, monkeypatch: pytest.MonkeyPatch):
    name = f"\0intarsia-test-{os.getpid()}-{time.monotonic_ns()}"  # used by no other process
    monkeypatch.setattr(fork_server, "_name", lambda: name)
    owner = subprocess.Popen(["sleep", "600"])
    try:
        monkeypatch.setenv(OWNER, name_of_process(owner.pid))
        server = ForkServer()
        pid = process_of(server) if is_importing else parent_of(server.fork(0, 1, 1).pid)
        assert is_running(name_of_process(pid))
    finally:
        owner.kill()
        owner.wait()
    leave(server)
    deadline = time.monotonic() + 10  # it would stay for 30 s
    while not ended(pid) and time.monotonic() < deadline:
        pass
    assert ended(pid)


def test_server_that_is_started_ahead_does_not_keep_our_output_open(monkeypatch: pytest.MonkeyPatch):
    name = f"\0intarsia-test-{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setattr(fork_server, "_name", lambda: name)
    monkeypatch.setattr(fork_server, "_ahead", {})
    assert fork_server.start_ahead() == name[1:]
    while not fork_server._is_listening(name):
        time.sleep(0.01)
    server = ForkServer()
    pid = process_of(server)
    try:
        outputs = {os.readlink(f"/proc/{pid}/fd/{number}") for number in (1, 2)}
        assert outputs == {"/dev/null"}
    finally:
        os.kill(pid, signal.SIGKILL)
        leave(server)


def process_of(server: ForkServer) -> int:
    assert server._connection is not None
    credentials = server._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    return struct.unpack("<3i", credentials)[0]
