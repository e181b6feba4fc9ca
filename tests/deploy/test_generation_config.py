"""How a checkpoint asks to be sampled from, and who goes by it."""

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from intarsia import LLM, SamplingParams
from intarsia.deploy.client import AsyncClient, Client
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.http.server import HttpServer
from intarsia.deploy.openai.app import make_app
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.tests.conftest import Loop
from intarsia.tests.local import make_engine

PROMPT = "the inlay"


@pytest.fixture(scope="module")
def asking(talker: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The talker, whose authors want it greedy: what is not asked otherwise is always the same."""
    path = tmp_path_factory.mktemp("asking") / "asking"
    shutil.copytree(talker, path)
    asked = {"temperature": 0.0, "top_p": 0.9, "top_k": 3.5, "max_new_tokens": 2}
    (path / "generation_config.json").write_text(json.dumps(asked))
    return path


def test_checkpoint_is_sampled_as_it_asks_where_a_request_does_not_say(ray_cluster: None, asking: Path, loop: Loop):
    async def start() -> tuple[RunningEngine, GrpcServer, str, HttpServer, str]:
        engine = await start_engine(engine_settings(str(asking), kv_cache_memory="1MiB"))
        front_end = FrontEnd(engine.client, Tokenizer.load(asking))
        grpc, http = GrpcServer(front_end), HttpServer(make_app(lambda: front_end))
        return engine, grpc, await grpc.start(port=0), http, await http.start(port=0)

    engine, grpc, address, http, url = loop.run(start())
    try:
        with Client(address) as client, httpx.Client(base_url=url, timeout=60) as web:
            greedy = client.complete(PROMPT, SamplingParams(temperature=0)).text
            assert client.complete(PROMPT).text == greedy
            info = client.model_info()
            assert info.sampling(top_p=0.5) == SamplingParams(temperature=0.0, top_p=0.5)
            assert client.complete(PROMPT, info.sampling(max_tokens=4)).text == greedy[:4]

            def asked(path: str, **body: Any) -> Any:
                return web.post(path, json={"model": info.model, **body}).raise_for_status().json()

            def completed(**body: Any) -> str:
                return asked("/v1/completions", prompt=PROMPT, **body)["choices"][0]["text"]

            assert completed() == greedy
            assert len({completed(temperature=2.0, top_p=1.0, seed=n) for n in range(4)}) > 1
            chats = [asked("/v1/chat/completions", messages=[{"role": "user", "content": "x"}]) for _ in range(2)]
            assert len({chat["choices"][0]["message"]["content"] for chat in chats}) == 1
            response = asked("/v1/responses", input="x", max_output_tokens=16, top_p=0.7)
            assert (response["temperature"], response["top_p"]) == (0.0, 0.7)
        assert loop.run(_complete(address)) == greedy
    finally:
        loop.run(http.stop())
        loop.run(grpc.stop(grace_s=0))
        loop.run(engine.shutdown())


async def _complete(address: str) -> str:
    async with AsyncClient(address) as client:
        return (await client.complete(PROMPT)).text


def test_llm_without_params_samples_as_the_checkpoint_asks(ray_cluster: None, asking: Path):
    with LLM(str(asking), kv_cache_memory="1MiB") as llm:
        greedy, usual = (llm.generate(PROMPT, params)[0].text for params in (SamplingParams(temperature=0), None))
        assert usual == greedy


def test_what_cannot_be_asked_of_sampling_is_left_out_with_a_note(asking: Path):
    info = asyncio.run(make_engine(asking)).info
    assert info.sampling_defaults == (("temperature", 0.0), ("top_p", 0.9))
    assert [note for note in info.notes if "top_k" in note] == [
        "generation_config.json: top_k must be a whole number, got 3.5; it is left out"
    ]


def test_generation_config_can_be_left_alone(asking: Path):
    info = asyncio.run(make_engine(asking, generation_config="none")).info
    assert info.sampling() == SamplingParams()


def test_checkpoint_that_asks_for_nothing_is_sampled_as_everywhere(talker: Path):
    assert asyncio.run(make_engine(talker)).info.sampling() == SamplingParams()
