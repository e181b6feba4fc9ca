"""The OpenAPI document against the server it describes: whatever fits it is served, whatever does not is refused."""

import os
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from intarsia.tests.deploy.openai.conftest import Api

TIMEOUT_S = 900


@pytest.mark.parametrize(
    ("examples", "phases"),
    [(12, "coverage,fuzzing"), pytest.param(200, "coverage,fuzzing,stateful", marks=pytest.mark.slow)],
)
def test_schemathesis_finds_no_server_error_and_no_mismatch(api: Api, examples: int, phases: str):
    """examples: of each operation"""
    here = Path(__file__).parent
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(here / "schemathesis.toml"),
        "run", f"{api.url}/openapi.json", "--max-examples", str(examples), "--mode", "all", "--workers", "4",
        "--phases", phases, "--no-color",
    ]  # fmt: skip
    environment = os.environ | {"SCHEMATHESIS_HOOKS": "intarsia.tests.deploy.openai.schemathesis_hooks"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    print(done.stdout[-20000:], done.stderr[-2000:])
    assert done.returncode == 0
    assert api.front_end.decode([1]) is not None  # and it goes on


def test_the_document_says_how_many_tokens_the_served_model_knows(api: Api):
    document = httpx.get(f"{api.url}/openapi.json").json()
    tokens = document["components"]["schemas"]["DetokenizeRequest"]["properties"]["tokens"]["items"]
    assert (tokens["minimum"], tokens["maximum"]) == (0, api.front_end.info.vocab_size - 1)
    assert "422" not in str(document["paths"])
