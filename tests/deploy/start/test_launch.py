"""What is asked of Ray before an engine starts in it."""

import contextlib
import os
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from intarsia.deploy.demo import DEMO_MODEL_DIR
from intarsia.deploy.start.before_ray import INSECURE, check_cluster, check_start
from intarsia.errors import InvalidSetting
from intarsia.tests.conftest import free_port


def test_a_cluster_that_asks_for_a_token_will_do():
    check_cluster(1, asks_for_token=True)
    check_cluster(3, asks_for_token=True)


@pytest.mark.parametrize("machines", [1, 2])
def test_a_cluster_that_anybody_could_run_code_on_is_refused_unless_told_otherwise(
    machines: int, monkeypatch: pytest.MonkeyPatch
):
    with pytest.raises(InvalidSetting, match=rf"\({machines} machines?\) asks for no token") as refusal:
        check_cluster(machines, asks_for_token=False)
    assert refusal.value.field == "RAY_AUTH_MODE"
    check_cluster(machines, asks_for_token=False, is_insecure_fine=True)
    monkeypatch.setenv(INSECURE, "1")
    check_cluster(machines, asks_for_token=False)


@pytest.mark.parametrize("mode", ["disabled", "DISABLED", "k8s", ""])
def test_a_ray_of_our_own_without_a_token_is_refused_unless_told_otherwise(mode: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with pytest.raises(InvalidSetting, match="asks for no token"):
        check_start(is_insecure_fine=False)
    check_start(is_insecure_fine=True)


def test_the_server_refuses_a_ray_without_a_token_before_any_of_it_starts(tmp_path):
    environment = os.environ | {"RAY_AUTH_MODE": "disabled", "RAY_TMPDIR": str(tmp_path), "INTARSIA_PORT": "0"}
    began_s = time.monotonic()
    done = subprocess.run(
        [str(Path(sys.executable).with_name("intarsia")), "serve", str(DEMO_MODEL_DIR)],
        env=environment, capture_output=True, text=True, timeout=60, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: RAY_AUTH_MODE=disabled starts a Ray that asks for no token")
    assert len(done.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())
    assert time.monotonic() - began_s < 30


def test_too_little_address_space_is_told_before_anything_starts():
    done = subprocess.run(
        ["bash", "-c", f"ulimit -v 2000000; {Path(sys.executable).with_name('intarsia')} serve {DEMO_MODEL_DIR}"],
        capture_output=True, text=True, timeout=60, check=False, cwd="/",
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("error: each process may have 2.0 GB of address space here (ulimit -v)"), done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_the_server_starts_where_no_home_can_be_written():
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "XDG_"))}
    server = subprocess.Popen(
        [str(Path(sys.executable).with_name("intarsia")), "serve", "demo", "--port", "0", "--grpc-port", "0"],
        env=environment | {"HOME": "/proc/none"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert server.stdout is not None
    told = []
    for line in server.stdout:
        told.append(line)
        if line.startswith("ready"):
            server.terminate()
    assert server.wait(60) == 0 and "Traceback" not in "".join(told) and any("ready" in line for line in told), told


def test_a_ray_that_cannot_be_started_is_one_sentence_and_leaves_nothing():
    environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    done = subprocess.run(
        [str(Path(sys.executable).with_name("intarsia")), "serve", "demo", "--port", "0", "--grpc-port", "0"],
        env=environment | {"RAY_TMPDIR": "/proc/none"}, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: Ray could not be started on this machine: ")
    assert "/proc/none" in done.stderr and "Try again" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("own_mode", ["disabled", "token"])
def test_a_cluster_without_a_token_is_refused_when_it_is_joined_whatever_we_would_show(own_mode: str):
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp", ignore_cleanup_errors=True) as folder:
        port = free_port()
        environment = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
        head = subprocess.Popen(
            [
                str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", "--num-cpus=1",
                "--disable-usage-stats", "--node-ip-address=127.0.0.1", f"--port={port}",
                f"--temp-dir={folder}", "--include-dashboard=false",
            ],
            env=environment | {"RAY_AUTH_MODE": "disabled"}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        try:
            token = {"RAY_AUTH_MODE": own_mode, "RAY_AUTH_TOKEN": "0" * 64, "RAY_ADDRESS": f"127.0.0.1:{port}"}
            wait_for_port(port)
            done = subprocess.run(
                [str(Path(sys.executable).with_name("intarsia")), "serve", str(DEMO_MODEL_DIR)],
                env=environment | token, capture_output=True, text=True, timeout=120, check=False, cwd="/",
            )  # fmt: skip
            assert done.returncode == 2
            assert "error: the Ray cluster (1 machine) asks for no token" in done.stderr, done.stderr
        finally:
            head.terminate()
            head.wait(60)


def wait_for_port(port: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        time.sleep(0.1)
