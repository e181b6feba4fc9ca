"""The whole way: gRPC clients, a front end, a controller actor and two tensor-parallel worker actors on real Ray."""

import asyncio
import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from intarsia import SamplingParams
from intarsia.deploy.client import Asked, AsyncClient, Client
from intarsia.deploy.client.messages import NotCached
from intarsia.deploy.front_end import liveness
from intarsia.deploy.front_end.front_end import FrontEnd
from intarsia.deploy.front_end.tokenizer import Tokenizer
from intarsia.deploy.grpc.server import GrpcServer
from intarsia.deploy.settings.options import engine_settings
from intarsia.deploy.start.launch import RunningEngine, start_engine
from intarsia.errors import (
    DeadlineExceeded,
    InvalidRequest,
    InvalidSetting,
    RequestAborted,
    RequestTooLarge,
)
from intarsia.kvcache.events import Cleared, Stored
from intarsia.proto.request import RequestOptions
from intarsia.tests import models
from intarsia.tests.conftest import Loop, TinyModel
from intarsia.tests.tiny_configs import IMAGE, VOCAB

STREAMS = 64
DISCONNECTS = 20


class Service(NamedTuple):
    """A served model, and transformers' own model of it."""

    engine: RunningEngine
    address: str
    oracle: Any
    model: TinyModel


@pytest.fixture(scope="module")
def service(ray_cluster: None, loop: Loop, tiny: Callable) -> Iterator[Service]:
    """gemma3 on two workers. The pool holds a few of 64 streams at a time, and not one request of 500 tokens."""
    model = tiny("gemma3")
    settings = engine_settings(
        str(model.path), tensor_parallel_size=2, kv_cache_memory="56KiB", max_num_seqs=48, name="end-to-end"
    )
    engine = loop.run(start_engine(settings))

    async def listen() -> tuple[GrpcServer, str]:
        server = GrpcServer(FrontEnd(engine.client, None))
        return server, await server.start(port=0)

    server, address = loop.run(listen())
    yield Service(engine, address, models.load_oracle(model.path), model)
    loop.run(server.stop(grace_s=0))
    loop.run(engine.shutdown())


def all_free(service: Service, loop: Loop, within_s: float = 10) -> bool:
    """Does every block come back?"""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        if loop.run(service.engine.recount()).all_free:
            return True
        time.sleep(0.05)
    return False


def test_64_streams_with_20_disconnects_are_all_right_and_every_block_returns(service: Service, loop: Loop):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng = random.Random(seed)
    # Half of the prompts continue a common beginning, so that streams share blocks while others vanish.
    common = [rng.randrange(VOCAB) for _ in range(40)]
    prompts = [
        (common[: rng.randint(1, 40)] if n % 2 else []) + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 40))]
        for n in range(STREAMS)
    ]
    counts = [rng.randint(16, 48) for _ in prompts]
    leaves_after = {n: rng.randrange(counts[n]) for n in rng.sample(range(STREAMS), DISCONNECTS)}
    for n in leaves_after:
        counts[n] += 100  # tokens come in pieces while many wait: more than the last one may hold
    starting = threading.Barrier(STREAMS)

    def stream(n: int) -> list[int]:
        tokens: list[int] = []
        with Client(service.address) as client:
            starting.wait()
            answer = client.generate(prompts[n], SamplingParams(temperature=0, max_tokens=counts[n]))
            while len(tokens) < leaves_after.get(n, counts[n]):
                tokens += next(answer).token_ids
        return tokens  # the client is closed: a disconnect in the middle of the stream

    with ThreadPoolExecutor(STREAMS) as pool:
        outputs = list(pool.map(stream, range(STREAMS)))
    assert all_free(service, loop), loop.run(service.engine.recount())
    for prompt, output in zip(prompts, outputs, strict=True):
        assert models.is_greedy(service.oracle, prompt, output)
    assert loop.run(service.engine.stats())["preemptions"] > 0
    assert sum(len(o) < c for o, c in zip(outputs, counts, strict=True)) == DISCONNECTS


def test_the_cache_is_seen_from_outside(service: Service, loop: Loop):
    prompt = [7, 11, 13] * 14

    async def watch(address: str) -> int:
        async with AsyncClient(address) as client, contextlib.aclosing(client.watch_cache()) as events:
            first = await anext(events)
            await client.complete(prompt, SamplingParams(max_tokens=2))
            assert first[0] == Cleared()
            return sum(isinstance(event, Stored) for event in await anext(events))

    with Client(service.address) as client:
        loop.run(service.engine.reset_prefix_cache())
        assert sum(group.known_blocks for group in client.cache_state().groups) == 0
        assert loop.run(watch(service.address)) > 0
        state, count = client.cache_state(), loop.run(service.engine.recount())
        assert (state.held_pages, state.kept_pages, state.blank_pages) == (count.held, count.kept, count.blank)
        [first, *rest] = [next(client.watch_cache())]
        assert not rest and first[0] == Cleared()
        known = {event.group: len(event.hashes) for event in first[1:] if isinstance(event, Stored)}
        assert known == {number: group.known_blocks for number, group in enumerate(state.groups) if group.known_blocks}


def test_several_answers_prompt_logprobs_and_time_limits_over_the_wire(service: Service, loop: Loop):
    model = service.model
    with Client(service.address) as client:
        params = SamplingParams(temperature=0, max_tokens=24, n=3, prompt_logprobs=2)
        tokens: list[list[int]] = [[], [], []]
        reasons, about_prompt = {}, ()
        for chunk in client.generate(
            model.prompts[2], params, options=RequestOptions(priority=-1, tenant="a", timeout_s=60)
        ):
            tokens[chunk.index] += chunk.token_ids
            about_prompt = about_prompt or chunk.prompt_logprobs
            reasons[chunk.index] = chunk.finish_reason
        assert tokens == [model.expected[2]] * 3
        assert reasons == dict.fromkeys(range(3), "length")
        assert [row.token_id for row in about_prompt] == model.prompts[2][1:]
        with pytest.raises(DeadlineExceeded, match=r"0\.001 s are over") as late:
            list(
                client.generate(
                    model.prompts[2], SamplingParams(max_tokens=100), options=RequestOptions(timeout_s=0.001)
                )
            )
        assert (late.value.field, late.value.retryable) == ("timeout_s", True)
        with pytest.raises(InvalidRequest, match="no end token, so an answer of a given form could not end"):
            client.complete(model.prompts[2], SamplingParams(choice=("a", "b")))
    assert all_free(service, loop)


def test_a_batch_is_answered_in_its_order_and_a_bad_request_fails_alone(service: Service, loop: Loop):
    model, greedy = service.model, SamplingParams(temperature=0, max_tokens=24)
    asked = [Asked(prompt, greedy) for prompt in model.prompts]
    asked.insert(1, Asked([1, 999], greedy))
    with Client(service.address) as client:
        outcomes = client.complete_batch(asked)
    error = outcomes.pop(1)
    assert isinstance(error, InvalidRequest) and error.field == "prompt" and "999" in str(error)
    assert [list(one.token_ids) for one in outcomes if not isinstance(one, Exception)] == model.expected

    async def again() -> list[Any]:
        async with AsyncClient(service.address) as client:
            streamed = [chunk async for chunk in client.generate(model.prompts[0], greedy)]
            with pytest.raises(InvalidRequest, match="empty"):
                await client.complete([])
            info, load = await client.model_info(), await client.load()
            assert info.max_model_len == 512 and load.num_blocks == info.num_blocks and load.steps > 0
            batch: list[Any] = await client.complete_batch(asked[2:])
            return [[token for chunk in streamed for token in chunk.token_ids], *(list(b.token_ids) for b in batch)]

    assert loop.run(again()) == model.expected
    assert all_free(service, loop)


def test_a_request_is_stopped_from_another_connection(service: Service, loop: Loop):
    with Client(service.address) as client, Client(service.address) as other:
        assert not other.abort("nobody")
        answer = client.generate(service.model.prompts[1], SamplingParams(max_tokens=200), request_id="mine")
        next(answer)
        assert other.abort("mine")
        with pytest.raises(RequestAborted, match="'mine' was aborted"):
            list(answer)
        assert not other.abort("mine")
        aborted = other.load().aborted_requests
    assert aborted > 0
    assert all_free(service, loop)


def test_answers_of_a_given_form_over_the_wire(ray_cluster: None, talker: Path, loop: Loop):
    """The form travels with the request, is compiled on a worker, and shapes what a random model says; one that is none
    disturbs no other request."""
    schema = {
        "type": "object",
        "properties": {"wood": {"enum": ["oak", "ash"]}, "rings": {"type": "integer", "minimum": 1, "maximum": 99}},
        "required": ["wood", "rings"],
        "additionalProperties": False,
    }

    async def start() -> tuple[RunningEngine, GrpcServer, str]:
        engine = await start_engine(engine_settings(str(talker), tensor_parallel_size=2, kv_cache_memory="1MiB"))
        server = GrpcServer(FrontEnd(engine.client, Tokenizer.load(talker)))
        return engine, server, await server.start(port=0)

    engine, server, address = loop.run(start())
    asked = {
        "json_schema": (schema, lambda text: 1 <= json.loads(text)["rings"] <= 99 and json.loads(text)["wood"]),
        "regex": ("[a-c]{3}-[0-9]{2}", lambda text: re.fullmatch("[a-c]{3}-[0-9]{2}", text)),
        "choice": (("walnut", "äsche"), lambda text: text in ("walnut", "äsche")),
    }
    try:
        with Client(address) as client:
            free = client.generate("the inlay", SamplingParams(temperature=0, max_tokens=100, ignore_eos=True))
            next(free)
            for name, (form, is_right) in asked.items():
                params: Any = {name: form, "max_tokens": 60, "seed": 3, "n": 2}
                answers = {0: "", 1: ""}
                for chunk in client.generate("the inlay", SamplingParams(**params)):
                    answers[chunk.index] += chunk.text
                assert all(is_right(text) for text in answers.values()), (name, answers)
            with pytest.raises(InvalidRequest, match="regex cannot be used") as refused:
                client.complete("the inlay", SamplingParams(regex="(ab"))
            assert refused.value.field == "regex"
            assert sum(len(chunk.token_ids) for chunk in free) == 99
    finally:
        loop.run(server.stop(grace_s=0))
        loop.run(engine.shutdown())


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "field", "message"),
    [
        ([], {}, InvalidRequest, "prompt", "the prompt is empty"),
        ([1] * 600, {}, InvalidRequest, "prompt", "too long: it has 600 or more tokens; .* context length is 512"),
        ([1, 128], {}, InvalidRequest, "prompt", "token 128 at position 1 is not in the vocabulary of 128"),
        ([1] * 400, {"max_tokens": 100}, RequestTooLarge, "max_tokens", "400 prompt tokens . 100 new ones need"),
        ("text", {}, InvalidRequest, "prompt", "no tokenizer"),
    ],
)
def test_refused_request_names_the_field_and_disturbs_no_stream(
    prompt, sampling, error, field, message, service: Service, loop: Loop
):
    model = service.model
    with Client(service.address) as client:
        canary = client.generate(model.prompts[1], SamplingParams(temperature=0, max_tokens=24))
        tokens = list(next(canary).token_ids)
        with pytest.raises(error, match=message) as refusal:
            client.complete(prompt, SamplingParams(**sampling))
        assert refusal.value.field == field
        tokens += [token for chunk in canary for token in chunk.token_ids]
    assert tokens == model.expected[1]
    assert all_free(service, loop)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -1.0),
        ("temperature", float("nan")),
        ("top_p", 0.0),
        ("top_k", -7),
        ("max_tokens", 0),
        ("logprobs", 99),
    ],
)
def test_impossible_sampling_value_is_refused_by_the_server_itself(field: str, value: float, service: Service):
    """A client of another language has no `SamplingParams` to stop it."""
    import grpc

    from intarsia.proto import inference_pb2 as pb
    from intarsia.proto import inference_pb2_grpc as pb_grpc

    request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[1]), sampling=pb.SamplingParams(**{field: value}))  # type: ignore[arg-type]
    with grpc.insecure_channel(service.address) as channel:
        call: Any = pb_grpc.InferenceStub(channel).Generate(request)
        with pytest.raises(grpc.RpcError) as refusal:
            next(call)
    status: Any = refusal.value
    assert status.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert status.details().startswith(f"{field} must lie in")


def test_same_seed_gives_the_same_tokens_whatever_runs_beside(service: Service):
    sampling = SamplingParams(temperature=1.0, seed=11, max_tokens=20)
    prompt = service.model.prompts[1]
    with Client(service.address) as client:
        alone = client.complete(prompt, sampling).token_ids
        with ThreadPoolExecutor(8) as pool:
            crowd = [pool.submit(client.complete, prompt, SamplingParams(seed=n, max_tokens=20)) for n in range(8)]
            beside = client.complete(prompt, sampling).token_ids
            others = {job.result().token_ids for job in crowd}
    assert beside == alone
    assert len(others) > 1


def test_prefix_hit_is_reported_to_the_client(service: Service, loop: Loop):
    loop.run(service.engine.reset_prefix_cache())
    prompt = service.model.prompts[3]
    with Client(service.address) as client:
        first, second = (client.complete(prompt, SamplingParams(temperature=0, max_tokens=4)) for _ in range(2))
    assert first.usage and second.usage
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, len(prompt) - 1)
    assert sum(miss.tokens for miss in first.usage.not_cached) == len(prompt)
    assert second.usage.not_cached == (NotCached("last_token", 1),)
    assert first.token_ids == second.token_ids


def test_logprobs_are_those_of_transformers(service: Service):
    import torch

    prompt = service.model.prompts[2]
    with Client(service.address) as client:
        answer = client.complete(prompt, SamplingParams(temperature=0, max_tokens=6, logprobs=3))
    with torch.inference_mode():
        logits = service.oracle(torch.tensor([prompt + list(answer.token_ids)]), use_cache=False).logits[0]
    expected = torch.log_softmax(logits[len(prompt) - 1 : -1], -1)
    for row, logprobs in zip(expected, answer.logprobs, strict=True):
        assert logprobs.logprob == pytest.approx(float(row[logprobs.token_id]), abs=1e-3)
        assert [token for token, _ in logprobs.top] == row.topk(3).indices.tolist()


def test_model_info_tells_what_is_served(service: Service):
    with Client(service.address) as client:
        info = client.model_info()
    assert info == service.engine.client.info._replace(model_dir="")
    assert (info.architecture, info.tensor_parallel_size, len(info.groups)) == ("Gemma3ForCausalLM", 2, 6)


class Loaded(NamedTuple):
    """An engine of its own under six requests, some of several answers."""

    engine: RunningEngine
    loop: Loop

    async def streams(self, at: int = 0, then: Callable[[], Any] | None = None) -> list[Any]:
        """Each answer's tokens. `then` happens when the first request has so many deltas."""

        async def one(n: int) -> list[tuple[int, tuple[int, ...]]]:
            sampling = SamplingParams(max_tokens=300, seed=n, temperature=0.0 if n % 2 else 1.0, n=1 + n % 3)
            said = []
            async for delta in self.engine.client.generate([1, 2, 3 + n], sampling):
                said += [(delta.answer, (token,)) for token in delta.token_ids]
                if n == 0 and then is not None and len(said) == at:
                    await then()
            return sorted(said, key=lambda each: each[0])  # by answer; in the order of its tokens

        return await asyncio.gather(*(one(n) for n in range(6)))

    def workers(self) -> list[int]:
        return self.loop.run(self.engine.worker_process_ids())

    def rebuilds(self) -> int:
        return self.loop.run(self.engine.stats())["rebuilds"]

    def all_free(self) -> bool:
        return self.loop.run(self.engine.recount()).all_free


@pytest.fixture(scope="module")
def loaded(ray_cluster: None, loop: Loop, tiny: Callable) -> Iterator[Loaded]:
    settings = engine_settings(str(tiny("llama").path), tensor_parallel_size=2, kv_cache_memory="1MiB")
    engine = loop.run(start_engine(settings))
    yield Loaded(engine, loop)
    loop.run(engine.shutdown())


@pytest.fixture(scope="module")
def undisturbed(loaded: Loaded, loop: Loop) -> list[Any]:
    """What its streams say."""
    return loop.run(loaded.streams())


def test_killed_worker_is_replaced_and_streams_go_on_with_the_same_tokens(
    loaded: Loaded, undisturbed: list[Any], loop: Loop
):
    before, rebuilds = loaded.workers(), loaded.rebuilds()

    async def kill() -> None:
        os.kill(before[-1], signal.SIGKILL)

    assert loop.run(loaded.streams(20, kill)) == undisturbed
    after = loaded.workers()
    assert after[-1] != before[-1]
    assert after[:-1] == before[:-1], "who is well keeps its weights"
    assert loaded.rebuilds() == rebuilds + 1
    assert loaded.all_free()


def test_killed_controller_is_replaced_over_the_same_workers_and_streams_go_on(
    loaded: Loaded, undisturbed: list[Any], loop: Loop
):
    before = loaded.workers()
    controllers = [loaded.engine.controller_process_id]

    async def kill() -> None:
        os.kill(controllers[-1], signal.SIGKILL)

    for _ in range(2):
        assert loop.run(loaded.streams(20, kill)) == undisturbed
        controllers.append(loaded.engine.controller_process_id)
    assert len(set(controllers)) == 3
    assert loaded.workers() == before
    assert loaded.rebuilds() == 0, "the new controller has seen none"
    assert loaded.all_free()


def test_controller_that_stops_on_a_bug_is_replaced_over_the_same_workers(
    loaded: Loaded, undisturbed: list[Any], loop: Loop
):
    before, controller = loaded.workers(), loaded.engine.controller_process_id

    async def break_it() -> None:
        def lose_a_part(actor: Any) -> None:
            actor._engine._scheduler.commit = None

        await loaded.engine._controller.__ray_call__.remote(lose_a_part)

    assert loop.run(loaded.streams(20, break_it)) == undisturbed
    assert loaded.engine.controller_process_id != controller
    assert loaded.workers() == before
    assert loaded.all_free()


def test_controller_and_worker_killed_at_once_are_both_replaced(loaded: Loaded, undisturbed: list[Any], loop: Loop):
    before = loaded.workers()

    async def kill() -> None:
        os.kill(loaded.engine.controller_process_id, signal.SIGKILL)
        os.kill(before[0], signal.SIGKILL)

    assert loop.run(loaded.streams(20, kill)) == undisturbed
    assert loaded.workers()[0] != before[0]
    assert loaded.all_free()


def test_stopped_controller_is_given_up_and_replaced(
    loaded: Loaded, undisturbed: list[Any], loop: Loop, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(liveness, "HUNG_AFTER_S", 0.5)  # the watch looks at it again when its wait is over
    stopped = loaded.engine.controller_process_id

    async def stop() -> None:
        os.kill(stopped, signal.SIGSTOP)

    assert loop.run(loaded.streams(20, stop)) == undisturbed
    assert loaded.engine.controller_process_id != stopped
    with pytest.raises(ProcessLookupError):  # it is not left behind, to wake up some day
        os.kill(stopped, 0)
    assert loaded.all_free()


def test_second_engine_of_the_same_name_is_refused(service: Service, loop: Loop):
    with pytest.raises(InvalidSetting, match="named 'end-to-end' runs in this Ray cluster already"):
        loop.run(start_engine(engine_settings(str(service.model.path), name="end-to-end")))
    assert all_free(service, loop)


def test_images_go_through_grpc_to_the_vision_towers_of_two_workers(ray_cluster: None, loop: Loop, tiny: Callable):
    model: TinyModel = tiny("mllama")
    settings = engine_settings(
        str(model.path), tensor_parallel_size=2, kv_cache_memory="1MiB", max_images_per_request=3, name="images"
    )
    engine = loop.run(start_engine(settings))

    async def listen() -> tuple[GrpcServer, str]:
        server = GrpcServer(FrontEnd(engine.client, None))
        return server, await server.start(port=0)

    server, address = loop.run(listen())
    try:
        with Client(address) as client:
            assert client.model_info().image_token_id == IMAGE
            greedy = SamplingParams(temperature=0, max_tokens=24)
            with ThreadPoolExecutor() as pool:
                asked = zip(model.prompts, model.images, strict=True)
                answers = [pool.submit(client.complete, prompt, greedy, images=about) for prompt, about in asked]
                with pytest.raises(InvalidRequest, match="cannot be decoded"):
                    client.complete(model.prompts[1], greedy, images=[model.images[1][0][:80]])
                with pytest.raises(InvalidRequest, match=r"has 1 image tokens .* and the request 2 images"):
                    client.complete(model.prompts[1], greedy, images=model.images[1] * 2)
            assert [list(answer.result().token_ids) for answer in answers] == model.expected
        assert loop.run(engine.recount()).all_free
    finally:
        loop.run(server.stop(grace_s=0))
        loop.run(engine.shutdown())
