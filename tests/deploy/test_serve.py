"""`intarsia serve` as a process of its own: what it prints, how it ends."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from intarsia import SamplingParams
from intarsia.deploy.client import Client

COMMAND = Path(sys.executable).parent / "intarsia"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, *arguments], capture_output=True, text=True, timeout=120)


@pytest.mark.parametrize("stop", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_serve_answers_until_it_is_told_to_stop(stop: signal.Signals, tiny: Callable):
    model = tiny("ministral")
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    server = subprocess.Popen(
        [COMMAND, "serve", model.path, "--port", "0", "--grpc-port", "0", "--kv-cache-memory", "2MiB"],
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
    printed = "".join(lines)
    found = re.search(r"gRPC +(\S+)", printed)
    assert found, printed
    with Client(found[1]) as client:
        answer = client.complete(model.prompts[1], SamplingParams(temperature=0, max_tokens=24))
    assert list(answer.token_ids) == model.expected[1]
    for fact in ("ministral (MinistralForCausalLM)", "float32", "2 MiB", "full", "sliding-12", "16 tokens", "requests"):
        assert fact in printed
    server.send_signal(stop)
    rest = server.stdout.read()
    assert server.wait(timeout=60) == 0
    assert rest.strip() == "stopping ..."


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
