"""Front ends over real streams, with a simulated worker behind the engine."""

import asyncio
import math
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from intarsia.controller.client import EngineClient
from intarsia.controller.engine import Engine
from intarsia.controller.front_door import FrontDoor
from intarsia.controller.request import SamplingParams, Terms
from intarsia.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest
from intarsia.proto.channel import Address, Stream
from intarsia.tests.controller.test_engine import PROMPT, make_engine
from intarsia.tests.simulated import continuation

Scenario = Callable[[Engine, Address], Awaitable[Any]]


def served(scenario: Scenario, **engine_options: Any) -> Any:
    """Run `scenario` against an engine that listens."""

    async def run() -> Any:
        engine = make_engine(**engine_options)
        loop = asyncio.create_task(engine.run())
        door = FrontDoor(engine)
        try:
            return await asyncio.wait_for(scenario(engine, await door.start("127.0.0.1")), 30)
        finally:
            await door.close()
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    return asyncio.run(run())


async def collect(client: EngineClient, prompt: list[int], sampling: SamplingParams) -> list[int]:
    return [token async for delta in client.generate(prompt, sampling) for token in delta.token_ids]


async def all_free(engine: Engine) -> None:
    while not engine.recount().all_free:
        await asyncio.sleep(0.001)


def test_client_hears_what_the_engine_is():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        await client.close()
        return client.info == engine.info

    assert served(scenario)


def test_many_requests_over_one_connection_each_get_their_own_tokens():
    prompts = [[n] * (n % 7 + 1) for n in range(30)]

    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        outputs = await asyncio.gather(*(collect(client, p, SamplingParams(max_tokens=9)) for p in prompts))
        await client.close()
        return outputs

    assert served(scenario) == [continuation(p, 9) for p in prompts]


def test_closed_generator_aborts_its_request_and_no_other():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        kept = asyncio.create_task(collect(client, PROMPT, SamplingParams(max_tokens=60)))
        dropped = client.generate([9], SamplingParams(max_tokens=90))
        await anext(dropped)
        await dropped.aclose()
        tokens = await kept
        await all_free(engine)
        await client.close()
        return tokens, engine.stats.aborted_requests

    assert served(scenario) == (continuation(PROMPT, 60), 1)


def test_front_end_that_vanishes_frees_all_its_blocks():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        running = [client.generate([n], SamplingParams(max_tokens=90)) for n in range(3)]
        for generator in running:
            await anext(generator)
        await client._stream.close()  # as when its process is killed
        await all_free(engine)
        return engine.stats.aborted_requests

    assert served(scenario) == 3


def test_refusal_reaches_the_caller_as_it_was_raised():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        with pytest.raises(InvalidRequest, match="the prompt is empty") as refusal:
            await collect(client, [], SamplingParams())
        await client.close()
        return refusal.value.field

    assert served(scenario) == "prompt"


def test_request_id_in_use_is_refused_and_the_first_goes_on():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        first = client.generate(PROMPT, SamplingParams(max_tokens=20), request_id="mine")
        tokens = list((await anext(first)).token_ids)
        with pytest.raises(InvalidRequest, match="'mine' is in use"):
            await anext(client.generate(PROMPT, SamplingParams(), request_id="mine"))
        tokens += [token async for delta in first for token in delta.token_ids]
        await client.close()
        return tokens

    assert served(scenario) == continuation(PROMPT, 20)


def test_engine_that_goes_is_told_to_waiting_and_later_callers():
    async def scenario() -> None:
        engine = make_engine()
        door = FrontDoor(engine)
        client = await EngineClient.connect(await door.start("127.0.0.1"))
        waiting = asyncio.create_task(collect(client, PROMPT, SamplingParams()))
        await asyncio.sleep(0.05)
        await door.close()
        with pytest.raises(EngineUnavailable, match="the engine has gone"):
            await waiting
        with pytest.raises(EngineUnavailable):
            await collect(client, PROMPT, SamplingParams())
        await client.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("frame", [b"", b"\xc1", b"\x93\x01\x02", b"\x92\xa6submit\xa1a", b"\x91\xa6submit"])
def test_garbage_from_one_front_end_disturbs_no_other(frame: bytes):
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        good = asyncio.create_task(collect(client, PROMPT, SamplingParams(max_tokens=30)))
        stranger = await Stream.connect(address)
        stranger.send(frame)
        await asyncio.sleep(0.05)
        tokens = await good
        await stranger.close()
        await client.close()
        return tokens

    assert served(scenario) == continuation(PROMPT, 30)


def test_several_answers_come_in_one_stream_and_one_can_be_ended():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        generation = client.generate(PROMPT, SamplingParams(max_tokens=30, n=3))
        tokens: list[list[int]] = [[], [], []]
        async for delta in generation:
            tokens[delta.answer] += delta.token_ids
            if len(tokens[1]) == 4:
                generation.end(1)
        await all_free(engine)
        await client.close()
        return tokens, engine.stats.aborted_requests

    tokens, aborted = served(scenario)
    expected = continuation(PROMPT, 30)
    assert (tokens[0], tokens[2]) == (expected, expected)
    assert tokens[1] == expected[:4]
    assert aborted == 1


def test_an_answer_that_is_not_streamed_comes_as_one():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        generation = client.generate(PROMPT, SamplingParams(max_tokens=12, n=2), stream_interval_s=math.inf)
        deltas = [delta async for delta in generation]
        await client.close()
        return deltas

    deltas = served(scenario)
    assert sorted((delta.answer, delta.finish_reason) for delta in deltas) == [(0, "length"), (1, "length")]
    assert [list(delta.token_ids) for delta in deltas] == [continuation(PROMPT, 12)] * 2


def test_pieces_of_an_interval_hold_what_single_tokens_hold():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        params = SamplingParams(max_tokens=40)
        asked = [client.generate(PROMPT, params, stream_interval_s=interval_s) for interval_s in (0.0, 0.003, 3600.0)]
        deltas = [[delta async for delta in generation] for generation in asked]
        await client.close()
        return deltas

    single, pieces, two = served(scenario)
    assert len(single) == 40 >= len(pieces) >= len(two) == 2  # the first token is never kept back
    for deltas in (single, pieces, two):
        assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 40)
        assert {delta.num_cached_tokens for delta in deltas} == {deltas[0].num_cached_tokens}
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_a_generation_nobody_keeps_is_aborted():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        async for _ in client.generate(PROMPT, SamplingParams(max_tokens=90)):
            break
        await all_free(engine)
        await client.close()
        return engine.stats.aborted_requests

    assert served(scenario) == 1


def test_time_that_is_over_ends_the_stream_with_a_typed_error():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        with pytest.raises(DeadlineExceeded, match="s are over") as caught:
            async for _ in client.generate(PROMPT, SamplingParams(max_tokens=90), terms=Terms(timeout_s=0.0001)):
                pass
        await client.close()
        return caught.value

    assert served(scenario).retryable
