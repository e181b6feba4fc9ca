"""The OpenAPI document against the server it describes: whatever fits it is served, whatever does not is refused."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from intarsia.deploy.anthropic.app import add_messages
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.openai.kept import KeptResponses
from intarsia.deploy.openai.stored import ResponseStore, StoreSettings
from intarsia.deploy.settings.limits import Limits
from intarsia.tests import models
from intarsia.tests.conftest import Loop
from intarsia.tests.deploy.openai.conftest import Api

TIMEOUT_S = 900


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """It has room for any prompt that is drawn: a schema cannot say how many tokens a text has."""
    return models.make_talker(tmp_path_factory.mktemp("talker"), length_tokens=2048)


@pytest.fixture
def kept_at(api: Api, loop: Loop) -> Iterator[str]:
    """The URL of a server that keeps responses, and has all routes."""
    limits = Limits()
    store = ResponseStore(StoreSettings(), 0, limits)
    kept = KeptResponses(store, limits)
    server = HttpServer(make_app(lambda: api.front_end, kept=kept, interfaces=(add_messages,)))

    async def listen() -> str:
        await store.open()
        return await server.start(port=0)

    async def end() -> None:
        await server.stop()
        await kept.stop()
        await store.close()

    yield loop.run(listen())
    loop.run(end())


@pytest.mark.timeout(TIMEOUT_S)
@pytest.mark.parametrize(
    ("examples", "phases", "drawn"),
    [
        (12, "coverage,fuzzing", ["--seed", "1"]),
        pytest.param(200, "coverage,fuzzing,stateful", [], marks=pytest.mark.slow),
    ],
    ids=["few", "many"],
)
def test_schemathesis_finds_no_server_error_and_no_mismatch(
    kept_at: str, api: Api, examples: int, phases: str, drawn: list[str]
):
    """examples: of each operation. The few are the same at every run; the many are new ones, and print their seed."""
    here = Path(__file__).parent
    # One worker: Python 3.11 may fail to parse in several threads at once (cpython issue 106905), and hypothesis does.
    command = [
        str(Path(sys.executable).with_name("schemathesis")), "--config-file", str(here / "schemathesis.toml"),
        "run", f"{kept_at}/openapi.json", "--max-examples", str(examples), "--mode", "all", "--workers", "1",
        "--phases", phases, "--no-color", "--suppress-health-check", "too_slow", *drawn,
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
