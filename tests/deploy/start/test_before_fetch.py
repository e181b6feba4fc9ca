"""What a start is refused for before a model of the Hub is fetched, and what before its weights are."""

import json
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from intarsia.deploy.cli import app
from intarsia.deploy.start import before_start
from intarsia.deploy.start.before_start import judged, num_gpus
from intarsia.errors import InvalidSetting, UnsupportedModel
from intarsia.tests.hub import Hub

NAME = "maker/tiny-model"


@pytest.fixture
def files(tiny: Callable) -> dict[str, bytes]:
    return {each.name: each.read_bytes() for each in Path(tiny("llama").path).iterdir() if each.is_file()}


def with_config(files: dict[str, bytes], **fields: Any) -> dict[str, bytes]:
    return files | {"config.json": json.dumps(json.loads(files["config.json"]) | fields).encode()}


@pytest.fixture
def busy() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken.getsockname()[1]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--port {busy}", "in use"),
        ("--port 0 --grpc-port {busy}", "in use"),
        ("--port 8123 --grpc-port 8123", "are both 8123"),
        ("--api-key-file {tmp}/nowhere", "api_key_file"),
        ("--ssl-certfile {tmp}/nowhere --ssl-keyfile {tmp}/nowhere", "no certificate"),
        ("--root-path llm", "root_path"),
        ("--max-streams 0", "max_streams"),
        ("--tokenizer {tmp}/nowhere", "tokenizer"),
        ("--tokenizer {name} --block-size 0", "block_size"),
        ("--chat-template {tmp}/nowhere", "chat_template"),
        ("--attention-backend mystery", "no attention backend 'mystery'"),
        ("--strategy best", "strategy must be one of"),
        ("--dtype int4", "dtype must be one of"),
        ("--revision ../main", "revision must be"),
        ("-tp 3", "needs 3 GPUs; this machine has 2"),
    ],
)
def test_faults_of_settings_and_machine_are_told_before_the_hub_is_asked(
    hub: Hub, files: dict[str, bytes], busy: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: str, says: str
):
    monkeypatch.setattr(before_start, "num_gpus", lambda: 2)
    monkeypatch.setattr(before_start, "_has_ray", lambda: False)  # another module's, in this process
    hub.add(NAME, files)
    ports = [] if "port" in flags else ["--port", "0", "--grpc-port", "0"]
    words = flags.format(busy=busy, tmp=tmp_path, name=NAME).split()
    told = CliRunner().invoke(app, ["serve", NAME, *words, *ports], env={"RAY_ADDRESS": None})
    assert told.exit_code == 2 and says in " ".join(told.stderr.split()), told.stderr
    assert not hub.asked


def test_a_batch_that_cannot_be_read_is_told_before_the_hub_is_asked(hub: Hub, files: dict[str, bytes], tmp_path: Path):
    hub.add(NAME, files)
    words = ["batch", str(tmp_path / "nowhere"), "-o", str(tmp_path / "out"), "--model", NAME]
    assert "cannot be read" in CliRunner().invoke(app, words).stderr
    assert not hub.asked


@pytest.mark.parametrize(
    ("config", "settings", "says"),
    [
        ({"model_type": "bert"}, {}, "bert is not served"),
        ({"quantization_config": {"quant_method": "exl3"}}, {}, "its method is exl3"),
        ({"quantization_config": {"group_size": 64, "bits": 4}}, {}, "its method is mlx"),
        ({}, {"tensor_parallel_size": 64}, "tensor_parallel_size 64"),
        ({}, {"max_model_len": 10**6}, "Lower max_model_len"),
    ],
)
def test_faults_of_the_config_are_told_before_weights_are_fetched(
    hub: Hub, files: dict[str, bytes], config: dict[str, Any], settings: Any, says: str
):
    hub.add(NAME, with_config(files, **config))
    with pytest.raises((InvalidSetting, UnsupportedModel), match=says):
        judged(NAME, settings)
    assert "config.json" in hub.got() and "model.safetensors" not in hub.got()


def test_a_model_that_passes_is_fetched_and_not_asked_for_again(hub: Hub, files: dict[str, bytes]):
    hub.add(NAME, files)
    settings = judged(NAME, {})
    assert hub.got() == set(files) and settings.served_model_name == NAME
    times = [each for each in hub.asked if each.startswith("GET") and "/resolve/" in each]
    assert len(times) == len(files)
    hub.asked.clear()
    assert judged(NAME, {}) == settings and not hub.asked


def test_visible_devices_are_at_most_those_that_are_there(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(before_start.os, "listdir", lambda _: ["nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"])
    for visible, count in ((None, 2), ("0", 1), ("", 0), ("0,1,2", 2)):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if visible is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert num_gpus() == count
