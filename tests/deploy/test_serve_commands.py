"""`serve run` and `serve deploy`, as people type them, on a Ray cluster of their own."""

import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import yaml

from intarsia.tests.conftest import free_port
from intarsia.tests.deploy.batch.test_run import write_batch

pytestmark = pytest.mark.slow

START_TIMEOUT_S = 180
GREEDY: Any = {"temperature": 0, "max_tokens": 300, "extra_body": {"ignore_eos": True}}


class Cluster(NamedTuple):
    environment: dict[str, str]
    url: str  # of the dashboard
    dashboard: httpx.Client


def program(name: str) -> str:
    return str(Path(sys.executable).with_name(name))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A head with its dashboard, which `serve deploy` talks to."""
    port, dashboard = free_port(), free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # short: sockets lie in it
        command = [
            program("ray"), "start", "--head", "--block", "--num-cpus=8", "--disable-usage-stats",
            "--node-ip-address=127.0.0.1", f"--port={port}", f"--temp-dir={folder}",
            "--include-dashboard=true", "--dashboard-host=127.0.0.1", f"--dashboard-port={dashboard}",
            f"--dashboard-agent-listen-port={free_port()}",
        ]  # fmt: skip
        token = secrets.token_hex(32)
        environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
        head = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        url = f"http://127.0.0.1:{dashboard}"
        try:
            with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {token}"}) as asked:
                wait(lambda: asked.get("/api/version").is_success)
                yield Cluster(environment | {"RAY_ADDRESS": f"127.0.0.1:{port}"}, url, asked)
        finally:
            head.terminate()
            head.wait(60)


def wait(is_there: Callable[[], bool], timeout_s: float = START_TIMEOUT_S) -> None:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if is_there():
                return
        except (httpx.HTTPError, openai.OpenAIError):
            pass
        time.sleep(0.5)
    raise TimeoutError(f"not there within {timeout_s} s")


def client_of(port: int) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0)


def stream(client: openai.OpenAI) -> str:
    events = client.completions.create(model="talker", prompt="The inlay", stream=True, **GREEDY)
    return "".join(event.choices[0].text for event in events)


def test_serve_run_serves_until_it_is_interrupted(cluster: Cluster, talker: Path):
    command = [
        program("serve"), "run", "intarsia.deploy.serve_app:app",
        f"model={talker}", "served_model_name=talker", "kv_cache_memory=1MiB",
    ]  # fmt: skip
    running = subprocess.Popen(command, env=cluster.environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    client = client_of(8000)
    try:
        wait(lambda: bool(client.models.list().data))
        assert len(stream(client)) > 100
    finally:
        running.send_signal(signal.SIGINT)
        running.wait(60)
    with pytest.raises(openai.APIError):
        client.models.list()


def test_serve_deploy_and_a_rolling_redeploy_fail_no_stream(cluster: Cluster, talker: Path, tmp_path: Path):
    port = free_port()
    config = yaml.safe_load((Path(__file__).parents[2] / "deploy" / "cluster" / "serve.yaml").read_text())
    config["http_options"]["port"] = port
    config["grpc_options"]["port"] = free_port()
    args = {"model": str(talker), "served_model_name": "talker", "kv_cache_memory": "1MiB", "num_replicas": 2}

    def deploy(**changes: Any) -> None:
        config["applications"][0]["args"] = args | changes
        (tmp_path / "serve.yaml").write_text(yaml.safe_dump(config))
        command = [program("serve"), "deploy", "-a", cluster.url, str(tmp_path / "serve.yaml")]
        subprocess.run(command, env=cluster.environment, check=True, capture_output=True, timeout=60)

    def state() -> dict[str, Any]:
        return cluster.dashboard.get("/api/serve/applications/").json()["applications"]["intarsia"]

    deploy()
    wait(lambda: state()["status"] == "RUNNING")
    client = client_of(port)
    whole = stream(client)
    over = threading.Event()

    def ask_on(_: int) -> list[str]:
        told = []
        while not over.is_set():
            told.append(stream(client))
        return told

    def replicas() -> set[str]:
        [deployment] = state()["deployments"].values()
        return {each["replica_id"] for each in deployment["replicas"] if each["state"] == "RUNNING"}

    before = replicas()
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask_on, n) for n in range(8)]
        deploy(stream_interval_s=0.05)
        wait(lambda: state()["status"] == "RUNNING" and len(replicas()) == 2 and not replicas() & before)
        over.set()
        told = [text for each in clients for text in each.result()]
    print(f"{len(told)} streams")
    assert set(told) == {whole} and len(told) > 16


def test_a_batch_runs_as_a_job_of_the_cluster(cluster: Cluster, talker: Path, tmp_path: Path):
    write_batch(tmp_path / "in.jsonl", 20, no_request=-1)
    batch = [program("intarsia"), "batch", str(tmp_path / "in.jsonl"), "--out", str(tmp_path / "out.jsonl")]
    command = [program("ray"), "job", "submit", "--address", cluster.url, "--", *batch, "--model", str(talker)]
    told = [*command, "--kv-cache-memory", "1MiB"]
    done = subprocess.run(told, env=cluster.environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr
    told = done.stdout + done.stderr
    assert "19 answered, 1 refused" in " ".join(told.split()), told
    assert len((tmp_path / "out.jsonl").read_text().splitlines()) == 20


def test_without_the_variable_ray_and_ours_are_refused_and_with_it_all_answer(cluster: Cluster):
    """`export RAY_AUTH_MODE=token`, as deploy/cluster/README.md says: for `ray`, `serve` and `intarsia`."""
    without = {name: value for name, value in cluster.environment.items() if name != "RAY_AUTH_MODE"}

    def told(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
        words = [program(command[0]), *command[1:]]
        return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=120)

    began = time.monotonic()
    refused = told(without, "intarsia", "serve", "demo", "--port", "0", "--grpc-port", "0")
    assert refused.returncode == 2 and "export RAY_AUTH_MODE=token" in refused.stderr
    assert refused.stderr.count("\n") == 1 and time.monotonic() - began < 60
    assert "refuses this process" in " ".join(told(without, "intarsia", "doctor").stdout.split())
    assert told(without, "serve", "status", "-a", cluster.url).returncode != 0

    assert "answers" in told(cluster.environment, "intarsia", "doctor").stdout
    assert told(cluster.environment, "ray", "status").returncode == 0
    assert told(cluster.environment, "serve", "status", "-a", cluster.url).returncode == 0
    job = told(cluster.environment, "ray", "job", "submit", "--address", cluster.url, "--", "echo", "oak")
    assert job.returncode == 0 and "oak" in job.stdout + job.stderr
