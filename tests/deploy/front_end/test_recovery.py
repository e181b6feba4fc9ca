"""Where a request goes on, and with what."""

import asyncio
from typing import Any

import pytest

from intarsia.controller.engine import Engine
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.recovery import MOST_MOVES_TOGETHER, Lost, Recovery
from intarsia.errors import EngineUnavailable, RequestAborted
from intarsia.proto.channel import Address
from intarsia.proto.request import GenerateRequest, RequestOptions, SamplingParams
from intarsia.tests.controller.test_engine import PROMPT
from intarsia.tests.controller.test_server import served

GONE = Lost(EngineUnavailable("the engine has gone"))


def asked(**about: Any) -> GenerateRequest:
    sampling = SamplingParams(n=3, seed=7, prompt_logprobs=1)
    return GenerateRequest(PROMPT, sampling, (), RequestOptions(**about), 0.0, len(PROMPT), is_known=False)


def test_each_answer_goes_on_from_its_tokens_with_the_draws_it_would_have_had():
    sent: list[Any] = []

    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        recovery = Recovery("mine", asked(timeout_s=60.0), client, None, None)
        await recovery.begin({0: [], 1: [], 2: []}, lambda *about: sent.append(about))
        await recovery.go_on_after(GONE, {0: [], 2: [8, 9]}, lambda *about: sent.append(about))
        await client.close()

    served(scenario)
    (_, first, answers), (_, rest, answers_of_each) = sent
    assert (first, answers, answers_of_each) == ({0: asked(timeout_s=60.0)}, 3, 1)
    assert {answer: each.tokens for answer, each in rest.items()} == {0: PROMPT, 2: [*PROMPT, 8, 9]}
    assert {answer: each.sampling.seed for answer, each in rest.items()} == {0: 7, 2: 9}
    assert {answer: each.sampling.prompt_logprobs for answer, each in rest.items()} == {0: 1, 2: None}
    assert all(each.is_known and each.sampling.n == 1 and 50 < each.options.timeout_s <= 60 for each in rest.values())


def test_a_request_closed_while_it_waits_for_its_turn_sends_nothing_and_gives_the_turn_back():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        turns = client.connection.turns
        await turns.acquire()
        recovery, said, sent = Recovery("mine", asked(), client, None, None), {0: [5]}, list[Any]()
        recovery.moves_in_vain = MOST_MOVES_TOGETHER
        moving = asyncio.create_task(recovery.go_on_after(GONE, said, lambda *about: sent.append(about)))
        await asyncio.sleep(0.01)
        said.clear()
        turns.release()
        await moving
        recovery.end_turn()
        assert not sent and not turns.locked()
        await client.close()

    served(scenario)


def test_a_request_aborted_on_its_way_to_another_engine_ends_with_the_error_and_is_not_asked_there():
    async def scenario(engine: Engine, address: Address):
        lost, other = [await EngineClient.connect(address) for _ in range(2)]
        is_moving, may_move = asyncio.Event(), asyncio.Event()

        async def instead(gone: EngineClient) -> EngineClient:
            is_moving.set()
            await may_move.wait()
            return other

        generation = lost.generate(PROMPT, SamplingParams(max_tokens=80), instead=instead)
        await anext(generation)
        await lost.close()

        async def read() -> None:
            async for _ in generation:
                pass

        reading = asyncio.create_task(read())
        await is_moving.wait()
        generation.abort(RequestAborted("by its caller"))
        may_move.set()
        with pytest.raises(RequestAborted, match="by its caller"):
            await reading
        load = await other.questions.load()
        assert (load.running, load.waiting, load.aborted_requests) == (0, 0, 1)  # aborted: at the lost one
        await other.close()

    served(scenario)
