"""Which engine gets a request, with real connections to simulated engines."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Mapping
from functools import partial
from typing import Any

import pytest

from intarsia.controller.admission.overload import OverloadSettings
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.front_end import router as fleet_module
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.router import DECODING_TOKENS, MOVE_TOKENS, Router, choose
from intarsia.errors import Overloaded
from intarsia.proto.channel import Address
from intarsia.proto.request import USUAL_OPTIONS, RequestOptions, SamplingParams
from intarsia.proto.status import Probe
from intarsia.tests.controller.test_engine import make_engine

IDLE = Probe(cached_tokens=0, queued_tokens=0, running=0, is_leaving=False)


@pytest.mark.parametrize(
    ("others", "chosen"),
    [
        ({}, "own"),
        ({"b": IDLE}, "own"),
        ({"b": IDLE._replace(cached_tokens=MOVE_TOKENS)}, "own"),  # not worth it
        ({"b": IDLE._replace(cached_tokens=MOVE_TOKENS + 1)}, "b"),
        ({"b": IDLE._replace(cached_tokens=90, is_leaving=True)}, "own"),
        ({"b": IDLE._replace(cached_tokens=90, running=2)}, "own"),  # busy ones answer later
        ({"b": IDLE._replace(cached_tokens=90, queued_tokens=80)}, "own"),
        ({"b": IDLE._replace(cached_tokens=60), "c": IDLE._replace(cached_tokens=90)}, "c"),
    ],
)
def test_an_idle_own_engine_is_left_for_more_of_the_prompt(others: Mapping[str, Probe], chosen: str):
    assert choose({"own": IDLE, **others}, "own", 100) == chosen


def test_a_busy_own_engine_is_left_for_an_idle_one():
    busy = IDLE._replace(cached_tokens=99, running=99 // DECODING_TOKENS + 2)
    assert choose({"own": busy, "b": IDLE}, "own", 100) == "b"
    assert choose({"own": busy._replace(is_leaving=True), "b": busy}, "own", 100) == "b"


def test_where_none_answers_the_own_engine_is_asked():
    assert choose({}, "own", 100) == "own"
    assert choose({"b": IDLE._replace(is_leaving=True)}, "own", 100) == "own"


class Two:
    """Two engines, and a router at the first of them."""

    def __init__(self, engines: Mapping[str, Engine], clients: Mapping[str, EngineClient], router: Router):
        self.engines = engines
        self.clients = clients
        self.router = router

    async def chosen(self, prompt: list[int]) -> str:
        client = await self.router.choose(prompt)
        return "own" if client is self.clients["own"] else "other"


@contextlib.asynccontextmanager
async def two_engines() -> AsyncIterator[Two]:
    engines = {"own": make_engine(), "other": make_engine()}
    doors = {name: EngineServer(engine) for name, engine in engines.items()}
    loops = [asyncio.ensure_future(engine.run()) for engine in engines.values()]
    addresses: dict[str, Address] = {name: await door.start("127.0.0.1") for name, door in doors.items()}

    async def discover(known: Collection[str]) -> Mapping[str, Address]:
        return {name: address for name, address in addresses.items() if name not in known}

    clients = {name: await EngineClient.connect(address) for name, address in addresses.items()}
    router = Router(clients["own"], "own", discover)
    try:
        while len(router._engines) < 2:
            await asyncio.sleep(0.001)
        yield Two(engines, clients, router)
    finally:
        await router.close()
        for closing in (*clients.values(), *doors.values()):
            await closing.close()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)


def run(scenario: Any) -> Any:
    async def begin() -> Any:
        async with two_engines() as two:
            return await asyncio.wait_for(scenario(two), 30)

    return asyncio.run(begin())


PROMPT = [n % 50 for n in range(90)]


def test_a_prompt_goes_where_its_prefix_is():
    async def scenario(two: Two):
        assert await two.chosen(PROMPT) == "own"
        async for _ in two.clients["other"].generate(PROMPT, SamplingParams(max_tokens=2)):
            pass
        assert await two.chosen([*PROMPT, 1, 2, 3]) == "other"
        assert await two.chosen([7] * 60) == "own"
        two.engines["other"].status.is_leaving = True
        assert await two.chosen(PROMPT) == "own"

    run(scenario)


@pytest.mark.parametrize("answers", [1, 3])
def test_a_request_is_refused_where_no_engine_has_room_and_not_before(answers: int):
    async def scenario(two: Two):
        for engine in two.engines.values():
            engine._overload._settings = OverloadSettings(max_requests_per_tenant=answers)
            workers: Any = engine._workers
            workers.step_s = 0.005
        sampling = SamplingParams(max_tokens=80, n=answers)
        with_room = partial(two.router.choose, [1, 2], USUAL_OPTIONS)
        asked = [two.clients["own"].generate([1, 2], sampling, f"mine-{n}", with_room=with_room) for n in range(3)]
        first = [await anext(each) for each in asked[:2]]
        assert [engine.status.load().refused_requests for engine in two.engines.values()] == [1, 0]
        with pytest.raises(Overloaded, match="max_requests_per_tenant"):
            await anext(asked[2])
        assert [engine.status.load().refused_requests for engine in two.engines.values()] == [2, 1]
        for generation, begun in zip(asked, first, strict=False):
            tokens = list(begun.token_ids)
            tokens += [token async for delta in generation for token in delta.token_ids]
            assert len(tokens) == 80 * answers
        for engine in two.engines.values():
            while not engine.recount().all_free:
                await asyncio.sleep(0.001)

    run(scenario)


def test_an_engine_that_has_just_said_that_it_is_full_is_left_for_another():
    async def scenario(two: Two):
        refusal = Overloaded("its turn would come late", full_for_s=60.0)
        two.clients["own"].connection.refusals.note("flood", refusal)
        assert await two.router.choose(PROMPT, RequestOptions(tenant="flood")) is not two.clients["own"]
        assert await two.chosen(PROMPT) == "own"
        two.router._engines["other"].connection.refusals.note("flood", refusal)
        assert await two.router.choose(PROMPT, RequestOptions(tenant="flood")) is two.clients["own"]
        assert await two.router.choose(PROMPT, full=list(two.router.engines.values())) is None

    run(scenario)


def test_an_engine_that_has_gone_is_asked_no_more(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_module, "LOOK_AROUND_EVERY_S", 0.01)

    async def scenario(two: Two):
        other = two.router._engines["other"]
        async for _ in two.clients["other"].generate(PROMPT, SamplingParams(max_tokens=2)):
            pass
        await other.close()
        assert await two.chosen(PROMPT) == "own"
        while two.router._engines.get("other") in (None, other):  # it listens still, so it is met again
            await asyncio.sleep(0.001)
        assert await two.chosen(PROMPT) == "other"

    run(scenario)


def test_an_engine_that_does_not_answer_holds_no_request_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(fleet_module, "ANSWER_WITHIN_S", 0.01)

    async def scenario(two: Two):
        async def never(*_: Any) -> None:
            await asyncio.sleep(60)

        async for _ in two.clients["other"].generate(PROMPT, SamplingParams(max_tokens=2)):
            pass
        monkeypatch.setattr(two.router._engines["other"].questions, "probe", never)
        assert await two.chosen(PROMPT) == "own"

    run(scenario)
