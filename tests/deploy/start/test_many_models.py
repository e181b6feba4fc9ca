"""`intarsia serve --config` with several models, as a process of its own; and what is refused before it starts."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from typer.testing import CliRunner

from intarsia import SamplingParams
from intarsia.deploy.cli import app
from intarsia.deploy.client import Client

COMMAND = Path(sys.executable).parent / "intarsia"


def written(folder: Path, *models: dict[str, Any], **others: Any) -> str:
    path = folder / "many.yaml"
    path.write_text(yaml.safe_dump({"port": 0, "grpc-port": 0, **others, "models": list(models)}))
    return str(path)


def test_models_of_a_file_answer_by_name_and_one_that_does_not_start_leaves_the_others(
    talker: Path, tiny: Callable, tmp_path: Path
):
    other = tiny("ministral")
    file = written(
        tmp_path,
        {"model": str(talker), "served-model-name": "talker", "name": "twin"},
        {"model": str(talker), "served-model-name": "late", "name": "twin"},  # a name in use: it cannot start
        {"model": str(other.path), "kv-cache-memory": "1MiB", "max_model_len": "256"},
        kv_cache_memory="2MiB",
        store_responses=False,
    )
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    server = subprocess.Popen(
        [COMMAND, "serve", "--config", file],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )
    assert server.stdout
    printed = ""
    for line in server.stdout:
        printed += line
        if line.startswith("ready"):
            break
    try:
        assert "late does not start: an engine named 'twin' runs in this Ray cluster already" in printed, printed
        url = next(iter(re.findall(r"(http://\S+)/v1", printed)))
        with httpx.Client(base_url=url, timeout=60) as http:
            cards = {card["id"]: card for card in http.get("/v1/models").json()["data"]}
            assert list(cards) == ["talker", "ministral"] and cards["ministral"]["max_model_len"] == 256
            assert cards["talker"]["capabilities"]["tools"] and not cards["ministral"]["capabilities"]["tools"]
            body = {"model": "talker", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert http.post("/v1/chat/completions", json=body).json()["model"] == "talker"
            assert http.post("/v1/chat/completions", json=body | {"model": "x"}).status_code == 404
            assert http.post("/v1/chat/completions", json=body | {"model": "late"}).status_code == 503
            assert http.get("/health").json() == {"status": "degraded"}
        with Client(re.findall(r"gRPC +(\S+)", printed)[0], model="ministral") as client:
            answer = client.complete(other.prompts[1], SamplingParams(temperature=0, max_tokens=24))
            assert client.model_info().kv_cache_bytes <= 2**20  # its own, where the file says 2 MiB for all
        assert list(answer.token_ids) == other.expected[1]
    finally:
        server.send_signal(signal.SIGTERM)
        rest = server.stdout.read()
        assert server.wait(timeout=60) == 0, rest
    assert rest.strip() == "stopping ..."


@pytest.mark.parametrize(
    ("models", "arguments", "said"),
    [
        ([{"max_num_seqs": 3}], (), r"models\[0\]: model is missing"),
        ([{"model": "x", "max_num_seq": 3}], (), r"models\[0\]: max_num_seq is no setting. Did you mean max_num_seqs"),
        ([{"model": "x", "port": 3}], (), r"models\[0\]: port is no setting"),
        ([{"model": "x", "max_num_seqs": "many"}], (), r"models\[0\]: max_num_seqs: .* got 'many'"),
        ([{"model": "TALKER"}, {"model": "no/where/at/all"}], (), r"models\[1\]: .*no/where/at/all"),
        ([{"model": "TALKER"}, {"model": "TALKER"}], (), r"models\[1\]: another model is called .* served_model_name"),
        ([{"model": "TALKER"}], ("TALKER",), "lists 1 models, and .* is named beside it"),
        ([], (), "must be a list, each entry with a model"),
        (["x"], (), "must be a list, each entry with a model"),
    ],
)
def test_what_is_wrong_with_an_entry_is_told_before_anything_starts(
    models: list[Any], arguments: tuple[str, ...], said: str, talker: Path, tmp_path: Path
):
    def named(value: Any) -> Any:
        return {**value, "model": str(talker)} if isinstance(value, dict) and value.get("model") == "TALKER" else value

    file = written(tmp_path, *map(named, models))
    result = CliRunner().invoke(app, ["serve", *(str(talker) for _ in arguments), "--config", file])
    assert result.exit_code == 2
    assert re.search(said, result.output.replace("\n", " ")), result.output


def test_batch_takes_no_list_of_models(talker: Path, tmp_path: Path):
    file = written(tmp_path, {"model": str(talker)})
    result = CliRunner().invoke(app, ["batch", "in.jsonl", "-o", "out", "--model", str(talker), "--config", file])
    assert result.exit_code == 2 and "which is no setting" in result.output


def test_what_is_printed_has_the_models(talker: Path, tmp_path: Path):
    file = written(tmp_path, {"model": str(talker), "max_num_seqs": 3})
    printed = CliRunner().invoke(app, ["serve", "--config", file, "--print-config"]).output
    assert yaml.safe_load(printed)["models"] == [{"model": str(talker), "max_num_seqs": 3}]
    assert yaml.safe_load(printed)["model"] is None
