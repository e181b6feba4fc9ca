"""`intarsia serve` as a process of its own: what it prints, how it ends."""

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from intarsia import SamplingParams
from intarsia.deploy.client import Client
from intarsia.errors import EngineUnavailable, IntarsiaError
from intarsia.tests.hub import HubServer

COMMAND = Path(sys.executable).parent / "intarsia"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


class Running(NamedTuple):
    process: subprocess.Popen[str]
    printed: str

    def find(self, pattern: str) -> str:
        found = re.search(pattern, self.printed)
        assert found, self.printed
        return found[1]

    def rest(self) -> str:
        """What else it prints until its end."""
        assert self.process.stdout
        rest = self.process.stdout.read()
        assert self.process.wait(timeout=60) == 0
        return rest.strip()


def start(model: Path) -> Running:
    """A server that is ready."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    server = subprocess.Popen(
        [COMMAND, "serve", model, "--port", "0", "--grpc-port", "0", "--kv-cache-memory", "2MiB"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert server.stdout
    lines: list[str] = []
    for line in server.stdout:
        lines.append(line)
        if line.startswith("ready"):
            break
    return Running(server, "".join(lines))


@pytest.mark.parametrize("stop", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_serve_answers_until_it_is_told_to_stop(stop: signal.Signals, tiny: Callable):
    model = tiny("ministral")
    server = start(model.path)
    with Client(server.find(r"gRPC +(\S+)")) as client:
        answer = client.complete(model.prompts[1], SamplingParams(temperature=0, max_tokens=24))
    assert list(answer.token_ids) == model.expected[1]
    for fact in ("ministral (MinistralForCausalLM)", "float32", "2 MiB", "full", "sliding-12", "16 tokens", "requests"):
        assert fact in server.printed
    server.process.send_signal(stop)
    assert server.rest() == "stopping ..."


@pytest.mark.parametrize("signals", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_requests_that_are_being_answered_end_before_the_server_does_unless_it_is_told_twice(
    signals: int, tiny: Callable
):
    model = tiny("llama")
    server = start(model.path)
    url = server.find(r"(http://\S+)").rstrip("/").removesuffix("/v1")
    sampling = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    with Client(server.find(r"gRPC +(\S+)")) as client:
        answer = client.generate(model.prompts[0], sampling)
        tokens = list(next(answer).token_ids)
        assert httpx.get(f"{url}/health").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        while httpx.get(f"{url}/health").status_code == 200:
            time.sleep(0.01)
        with pytest.raises(EngineUnavailable, match="is stopping and takes no new requests"):
            client.complete(model.prompts[1])
        if signals == 2:
            server.process.send_signal(signal.SIGTERM)
            with contextlib.suppress(IntarsiaError):
                tokens += [token for chunk in answer for token in chunk.token_ids]
        else:
            tokens += [token for chunk in answer for token in chunk.token_ids]
            assert len(tokens) == 400
    assert tokens[:24] == model.expected[0]
    said = server.rest().splitlines()
    assert said == ["stopping when 1 requests have their answers; Ctrl-C stops at once", "stopping ..."]


def test_corrupt_weights_are_one_line_and_exit_2(tiny: Callable, tmp_path: Path):
    broken = Path(shutil.copytree(tiny("llama").path, tmp_path / "broken"))
    (broken / "model.safetensors").write_bytes(b"\xff" * 1000)
    result = run("serve", str(broken))
    assert result.returncode == 2
    assert re.fullmatch(r"error: .*model\.safetensors \(1000 bytes\) is not a readable safetensors.*\n", result.stderr)


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--kv-cache-memory", "plenty", "kv_cache_memory must be a number of bytes"),
        ("--tensor-parallel-size", "0", "tensor_parallel_size must be at least 1, got 0"),
        ("--block-size", "-1", "block_size must be at least 1 token, got -1"),
        ("--dtype", "int3", "dtype must be one of auto, float32, bfloat16, float16; got 'int3'"),
    ],
)
def test_impossible_flag_is_one_line_and_exit_2(flag: str, value: str, message: str, tiny: Callable):
    result = run("serve", str(tiny("llama").path), flag, value)
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and message in result.stderr
    assert "Traceback" not in result.stderr


def test_setting_only_the_workers_can_refuse_is_one_line_and_exit_2(tiny: Callable):
    result = run("serve", str(tiny("llama").path), "--tensor-parallel-size", "3")
    assert result.returncode == 2
    assert "tensor_parallel_size 3 does not divide the model's 4 query heads" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
def test_a_name_on_the_hub_is_fetched_served_and_what_clients_call_the_model(
    tiny: Callable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    model, name = tiny("llama"), "maker/tiny-llama"
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.delenv("HF_HUB_OFFLINE")
    with HubServer() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.add(name, {each.name: each.read_bytes() for each in Path(model.path).iterdir() if each.is_file()})
        first = start(Path(name))
        stop(first)
    again = start(Path(name))  # no server answers for the Hub any more
    url = again.find(r"(http://\S+)").rstrip("/").removesuffix("/v1")
    assert [each["id"] for each in httpx.get(f"{url}/v1/models").json()["data"]] == [name]
    asked = {"model": name, "prompt": list(model.prompts[0]), "max_tokens": 2}
    answer = httpx.post(f"{url}/v1/completions", json=asked, timeout=60).json()
    assert answer["model"] == name and answer["usage"]["completion_tokens"] == 2, answer
    stop(again)
    assert f"fetching {name} from the Hub" in first.printed
    assert "fetching" not in again.printed


def stop(server: Running) -> None:
    server.process.send_signal(signal.SIGTERM)
    assert server.rest() == "stopping ..."
