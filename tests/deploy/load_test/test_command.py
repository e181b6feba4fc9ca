"""Against a real server."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from intarsia.deploy.cli import app
from intarsia.errors import EngineUnavailable, InvalidSetting
from intarsia.tests.deploy.openai.conftest import Api, api  # noqa: F401  a fixture

FEW = ("--num-prompts", "6", "--input-len", "20", "--output-len", "7")


@pytest.fixture
def bench(api: Api) -> Callable[..., Result]:  # noqa: F811
    def run(*flags: str) -> Result:
        return CliRunner().invoke(app, ["bench", "serve", "--url", api.url, "--json", *flags])

    return run


def found(result: Result) -> dict[str, Any]:
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_every_request_is_measured(endpoint: str, bench: Callable[..., Result], tmp_path: Path):
    out, svg = tmp_path / "out.json", tmp_path / "out.svg"
    flags = "--endpoint", endpoint, "--max-concurrency", "3", "--goodput", "e2el:600000"
    told = found(bench(*FEW, *flags, "--out", str(out), "--svg", str(svg)))
    assert (told["completed"], told["failed"], told["total_output_tokens"]) == (6, 0, 42)
    assert 0 < told["median_ttft_ms"] <= told["median_e2el_ms"] and told["mean_tpot_ms"] > 0
    assert told["request_goodput"] == told["request_throughput"]
    entries = json.loads(out.read_text())["requests"]
    assert all(0 < len(entry["came_s"]) <= 7 for entry in entries)  # some tokens have no text
    assert svg.read_text().startswith("<svg")


def test_prompts_of_token_ids_have_exactly_their_length(bench: Callable[..., Result]):
    assert found(bench(*FEW, "--token-ids", "320"))["total_input_tokens"] == 6 * 20


def test_agents_find_their_history_again(bench: Callable[..., Result]):
    flags = "--shape", "agents", "--sessions", "2", "--turns", "3", "--kinds", "1", "--pause-s", "0.01", "--no-tools"
    told = found(bench(*flags, "--input-len", "5", "--output-len", "4"))
    assert told["completed"] == 6 and told["total_cached_tokens"] > 0.3 * told["total_input_tokens"]


def test_an_open_loop_sends_at_its_rate(bench: Callable[..., Result]):
    told = found(bench(*FEW, "--request-rate", "20"))
    assert told["completed"] == 6 and told["request_rate"] == 20


def test_requests_that_fail_are_counted_and_named(bench: Callable[..., Result]):
    result = bench(*FEW, "--extra-body", '{"temperature": -1}', "--warm-up", "0")
    told = json.loads(result.stdout)
    assert result.exit_code == 1 and told["failed"] == 6
    assert all("temperature" in error for error in told["errors"])


@pytest.mark.parametrize(
    ("flags", "error", "said"),
    [
        (("--shape", "square"), InvalidSetting, "shape must be one of random, sharegpt, trace, agents"),
        (("--shape", "agents", "--endpoint", "completions"), InvalidSetting, "--endpoint chat"),
        (("--endpoint", "chat", "--token-ids", "320"), InvalidSetting, "--endpoint completions"),
        (("--extra-body", "{"), InvalidSetting, "is no JSON"),
        (("--url", "localhost:8000"), InvalidSetting, "is no URL"),
        (("--url", "http://127.0.0.1:9"), EngineUnavailable, "does not answer"),
    ],
)
def test_a_mistake_is_told_before_anything_is_sent(flags: tuple[str, ...], error: type[Exception], said: str):
    result = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:9", *flags])
    assert result.exit_code != 0 and said in f"{result.output} {result.exception}"
    assert result.exception is None or isinstance(result.exception, error | SystemExit)
