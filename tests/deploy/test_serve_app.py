"""Engines as replicas of Ray Serve, on the cluster at hand."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai
import pytest
import ray
import ray.util
import yaml
from ray import serve
from ray.serve.config import gRPCOptions
from ray.serve.schema import ServeDeploySchema

from intarsia import SamplingParams
from intarsia.deploy.client import Asked, Chunk, Client
from intarsia.deploy.front_end.router import LOOK_AROUND_EVERY_S
from intarsia.deploy.serve_app import app
from intarsia.errors import InvalidRequest, InvalidSetting, Unauthenticated
from intarsia.tests.conftest import free_port

GREEDY: Any = {"temperature": 0, "max_tokens": 20, "extra_body": {"ignore_eos": True}}


SERVICERS = ["intarsia.proto.inference_pb2_grpc.add_InferenceServicer_to_server"]


def settings_of(model: Path, **others: str) -> dict[str, str]:
    """As the command line hands them over."""
    settings = {"model": str(model), "served_model_name": "talker", "num_replicas": "2", "kv_cache_memory": "1MiB"}
    return settings | others


class Addresses(NamedTuple):
    http: str
    grpc: str


@pytest.fixture(scope="module")
def addresses(ray_cluster: None, talker: Path) -> Iterator[Addresses]:
    """Two replicas behind Serve's proxy."""
    port, grpc_port = free_port(), free_port()
    serve.start(
        http_options={"host": "127.0.0.1", "port": port},
        grpc_options=gRPCOptions(port=grpc_port, grpc_servicer_functions=SERVICERS),
    )
    serve.run(app(settings_of(talker)))
    yield Addresses(f"http://127.0.0.1:{port}/v1", f"127.0.0.1:{grpc_port}")
    serve.shutdown()


@pytest.fixture(scope="module")
def client(addresses: Addresses) -> openai.OpenAI:
    return openai.OpenAI(base_url=addresses.http, api_key="none", max_retries=0)


def test_grpc_through_serve_says_what_http_says(addresses: Addresses, client: openai.OpenAI):
    whole = client.completions.create(model="talker", prompt="The inlay", **GREEDY).choices[0].text
    greedy = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    with Client(addresses.grpc) as other:
        assert "".join(chunk.text for chunk in other.generate("The inlay", greedy)) == whole
        outcomes = other.complete_batch([Asked("The inlay", greedy), Asked([999], greedy)])
        assert isinstance(outcomes[0], Chunk) and outcomes[0].text == whole
        assert isinstance(outcomes[1], InvalidRequest) and outcomes[1].field == "prompt"
        assert other.detokenize(other.tokenize("äsche")) == "äsche"
        assert other.model_info().model == "talker" and other.load().num_blocks > 0
        with pytest.raises(InvalidRequest, match="the prompt is empty"):
            list(other.generate([]))


def test_many_streams_through_serve_say_the_same(client: openai.OpenAI):
    def stream(_: int) -> str:
        events = client.completions.create(model="talker", prompt="The inlay", stream=True, **GREEDY)
        return "".join(event.choices[0].text for event in events)

    whole = client.completions.create(model="talker", prompt="The inlay", **GREEDY).choices[0].text
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(stream, range(32))) == {whole}


def test_a_prefix_is_found_whichever_replica_is_asked(client: openai.OpenAI):
    """Four prompts, each asked six times of two replicas: after the first time it is in the cache of one of them."""
    time.sleep(2 * LOOK_AROUND_EVERY_S)  # until the replicas know of each other
    for n in range(4):
        asked: Any = {"model": "talker", "prompt": f"The inlay, number {n}. " * 12, **GREEDY}
        first, *others = [client.completions.create(**asked) for _ in range(6)]
        assert len({answer.choices[0].text for answer in (first, *others)}) == 1
        for answer in others:
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached_tokens = answer.usage.prompt_tokens_details.cached_tokens
            assert cached_tokens is not None and answer.usage.prompt_tokens - cached_tokens <= 16


def test_an_answer_through_serve_has_one_id_which_its_request_may_bring(addresses: Addresses):
    body = {"model": "talker", "prompt": "x", "max_tokens": 1}
    for brought in ({}, {"X-Request-Id": "mine"}):
        answer = httpx.post(f"{addresses.http}/completions", json=body, headers=brought, timeout=60)
        [found] = answer.headers.get_list("X-Request-Id")
        assert found and found == brought.get("X-Request-Id", found)


def test_errors_pass_through_serve_as_they_are(client: openai.OpenAI):
    with pytest.raises(openai.BadRequestError) as refused:
        client.completions.create(model="talker", prompt="x", extra_body={"max_token": 3})
    assert refused.value.param == "max_token"


def test_chat_with_a_schema_through_serve(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model="talker",
        messages=[{"role": "user", "content": "wood?"}],
        response_format={
            "type": "json_schema",
            "json_schema": {"name": "timber", "schema": {"enum": ["oak", "ash"]}},
        },
    )
    assert json.loads(answer.choices[0].message.content or "") in ("oak", "ash")


def test_a_rolling_redeploy_under_load_fails_no_stream(client: openai.OpenAI, talker: Path):
    """Eight clients ask without a pause, and never again, while both replicas are replaced."""
    long: Any = GREEDY | {"max_tokens": 300}
    whole = client.completions.create(model="talker", prompt="The inlay", **long).choices[0].text
    over = threading.Event()

    def ask_on(_: int) -> list[str]:
        told = []
        while not over.is_set():
            events = client.completions.create(model="talker", prompt="The inlay", stream=True, **long)
            told.append("".join(event.choices[0].text for event in events))
        return told

    before = replica_names()
    with ThreadPoolExecutor(8) as pool:
        clients = [pool.submit(ask_on, n) for n in range(8)]
        serve.run(app(settings_of(talker, stream_interval_s="0.05")))
        over.set()
        told = [text for each in clients for text in each.result()]
    print(f"{len(told)} streams")
    assert set(told) == {whole} and len(told) > 16
    assert not before & replica_names()


def test_keys_are_asked_for_through_serve_too(addresses: Addresses, talker: Path, tmp_path: Path):
    (tmp_path / "keys").write_text("oak\n")
    serve.run(app(settings_of(talker, num_replicas="1", api_key_file=str(tmp_path / "keys"))))
    for key in ("oak", "ash"):
        http = openai.OpenAI(base_url=addresses.http, api_key=key, max_retries=0)
        with Client(addresses.grpc, api_key=key) as grpc:
            if key == "oak":
                assert http.models.list().data and grpc.model_info().model == "talker"
                continue
            with pytest.raises(openai.AuthenticationError):
                http.models.list()
            with pytest.raises(Unauthenticated, match="this key is not known here"):
                grpc.model_info()


def test_below_a_route_prefix_each_key_opens_what_it_opens_elsewhere(
    addresses: Addresses, talker: Path, tmp_path: Path
):
    (tmp_path / "keys").write_text("oak\n")
    (tmp_path / "admin").write_text("elm\n")
    keys = {"api_key_file": str(tmp_path / "keys"), "admin_key_file": str(tmp_path / "admin")}
    serve.run(app(settings_of(talker, num_replicas="1", **keys)), name="below", route_prefix="/llm")
    root = addresses.http.removesuffix("/v1") + "/llm"
    opened = {
        (path, key): httpx.get(root + path, headers={"Authorization": f"Bearer {key}"} if key else {}).status_code
        for path in ("/health", "/console", "/console/view", "/v1/models")
        for key in (None, "oak", "elm")
    }
    serve.delete("below")
    assert {path_and_key for path_and_key, status in opened.items() if status == 200} == {
        *(("/health", key) for key in (None, "oak", "elm")),
        *(("/console", key) for key in (None, "oak", "elm")),
        ("/console/view", "elm"),
        ("/v1/models", "oak"),
    }
    assert {status for status in opened.values() if status != 200} == {401}


def replica_names() -> set[str]:
    actors: list[Any] = ray.util.list_named_actors(all_namespaces=True)
    names = {actor["name"] for actor in actors}
    return {name for name in names if name.startswith("SERVE_REPLICA::default#")}


@pytest.mark.parametrize(
    ("args", "field", "message"),
    [
        ({}, "model", "model is missing"),
        ({"model": "m", "block_sise": "3"}, "block_sise", "Did you mean block_size?"),
        ({"model": "m", "block_size": "x"}, "block_size", "got 'x'"),
        ({"model": "m", "num_replicas": "0"}, "num_replicas", "greater than or equal to 1"),
        ({"model": "m", "block_size": "-1"}, "block_size", "at least 1 token"),
    ],
)
def test_an_impossible_setting_is_refused_before_anything_starts(args: dict, field: str, message: str):
    with pytest.raises(InvalidSetting, match=message) as refused:
        app(args)
    assert refused.value.field == field


def test_the_example_for_serve_deploy_is_one_that_serve_and_we_understand():
    text = (Path(__file__).parents[2] / "deploy" / "cluster" / "serve.yaml").read_text()
    [application] = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    assert application.import_path == "intarsia.deploy.serve_app:app"
    app(application.args)
