"""Front ends over real streams, with a simulated worker behind the engine."""

import asyncio
import contextlib
import json
import math
import random
import signal
import socket
import sys
import time
from asyncio.subprocess import Process
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from intarsia.controller import losses as losses_module
from intarsia.controller.admission.overload import OverloadGuard
from intarsia.controller.delivery import MESSAGE_BYTES, MOST_UNSENT_BYTES, Outbox
from intarsia.controller.engine import Engine
from intarsia.controller.server import EngineServer
from intarsia.deploy.front_end import cache_watch, liveness, recovery
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.deploy.front_end.liveness import while_we_run
from intarsia.deploy.front_end.questions import Questions
from intarsia.errors import DeadlineExceeded, EngineUnavailable, InvalidRequest, Overloaded
from intarsia.kvcache.events import Cleared, Event, Removed, Stored
from intarsia.proto.channel import Address, ChannelClosed, Stream, StreamServer
from intarsia.proto.codec import pack
from intarsia.proto.messages import (
    FROM_ENGINE,
    FROM_FRONT_END,
    Abort,
    AskLoad,
    AskProbe,
    AskSnapshot,
    Delivery,
    Pair,
    Submit,
)
from intarsia.proto.reply import TOKEN_BYTES, Delta, Rows, TokenLogprobs
from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.tests.controller.test_engine import PROMPT, make_engine
from intarsia.tests.proto.test_channel import far  # noqa: F401 - a fixture
from intarsia.tests.simulated import continuation

Scenario = Callable[[Engine, Address], Awaitable[Any]]


def served(scenario: Scenario, host: str = "127.0.0.1", **engine_options: Any) -> Any:
    """Run `scenario` against an engine that listens."""

    async def run() -> Any:
        engine = make_engine(**engine_options)
        loop = asyncio.create_task(engine.run())
        door = EngineServer(engine)
        try:
            return await asyncio.wait_for(scenario(engine, await door.start(host)), 30)
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
        await client.connection.line.stream.close()  # as when its process is killed
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


def test_what_the_engine_refuses_a_tenant_is_refused_before_it_hears_of_it(monkeypatch: pytest.MonkeyPatch):
    asked: list[str] = []

    def check(guard: OverloadGuard, tenant: str, *about: Any) -> None:
        asked.append(tenant)
        if tenant == "flood" and len(asked) == 1:
            raise Overloaded("its turn would come late", full_for_s=1.0)

    monkeypatch.setattr(OverloadGuard, "check", check)

    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)

        async def ask(tenant: str) -> Delta:
            return await anext(
                client.generate(PROMPT, SamplingParams(max_tokens=1), options=RequestOptions(tenant=tenant))
            )

        for _ in range(10):
            with pytest.raises(Overloaded, match="would come late"):
                await ask("flood")
        assert (await client.questions.load()).refused_requests == 10
        await ask("other")
        assert asked == ["flood", "other"]
        await asyncio.sleep(1.0)
        await ask("flood")
        await client.close()

    served(scenario)
    assert asked == ["flood", "other", "flood"]


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


@pytest.mark.parametrize("taken", [0, 1, 25])
@pytest.mark.parametrize(("answers", "interval_s"), [(1, 0.0), (3, 0.0), (1, math.inf), (2, 0.02)])
def test_answers_go_on_with_another_engine_when_theirs_is_gone(taken: int, answers: int, interval_s: float):
    async def scenario() -> None:
        engines = [make_engine(), make_engine()]
        slow: Any = engines[0]._workers
        slow.step_s = 0.001
        doors = [EngineServer(engine) for engine in engines]
        clients = [await EngineClient.connect(await door.start("127.0.0.1")) for door in doors]
        loops = [asyncio.create_task(engine.run()) for engine in engines]
        left: list[EngineClient] = []

        async def instead(gone: EngineClient) -> EngineClient:
            left.append(gone)
            return clients[1]

        sampling = SamplingParams(max_tokens=80, n=answers)
        generation = clients[0].generate(PROMPT, sampling, stream_interval_s=interval_s, instead=instead)
        said: list[list[int]] = [[] for _ in range(answers)]
        reasons = []
        if interval_s == math.inf or not taken:  # nothing is told before it is gone
            loops[0].cancel()
            asyncio.get_running_loop().call_later(0.05, lambda: asyncio.ensure_future(doors[0].close()))
        async for delta in generation:
            said[delta.answer] += delta.token_ids
            reasons += [delta.finish_reason] if delta.finish_reason else []
            if taken and not left and sum(map(len, said)) >= taken:
                loops[0].cancel()
                await doors[0].close()
        assert said == [continuation(PROMPT, 80)] * answers
        assert reasons == ["length"] * answers
        assert left == clients[:1]
        await all_free(engines[1])
        for each in (*clients, *doors[1:]):
            await each.close()
        for loop in loops:
            loop.cancel()
        await asyncio.gather(*loops, return_exceptions=True)

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_a_bug_that_one_request_meets_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch):
    """The engine stops on it, and is started again; innocent requests go on."""
    monkeypatch.setattr(recovery, "TURN_PAUSE_S", 0.01)
    monkeypatch.setattr(losses_module, "SUSPECT_FOR_S", 0.0)
    poison = [7, *PROMPT]
    running: list[tuple[EngineServer, asyncio.Task[None]]] = []

    async def start() -> Address:
        engine = make_engine()
        commit = engine._scheduler.commit

        def stumble(result: Any) -> Any:
            if any(request.tokens[0] == 7 for request in engine._scheduler._seats.running):
                raise KeyError("a bug")
            return commit(result)

        monkeypatch.setattr(engine._scheduler, "commit", stumble)
        door = EngineServer(engine)

        async def serve() -> None:
            await engine.run()
            await door.close(engine.failure)

        running.append((door, asyncio.create_task(serve())))
        return await door.start("127.0.0.1")

    async def scenario() -> None:
        client = await EngineClient.connect(await start(), start)
        sampling = SamplingParams(max_tokens=30)
        prompts = [[n, *PROMPT] for n in (1, 2, 3)] + [poison] + [[n, *PROMPT] for n in (4, 5, 6)]
        found = await asyncio.gather(*(collect(client, prompt, sampling) for prompt in prompts), return_exceptions=True)
        error = found.pop(3)
        assert isinstance(error, EngineUnavailable), error
        assert "lost 4 times while this request ran" in error.message
        assert "stopped on an internal error: KeyError('a bug')" in error.message
        assert found == [continuation(prompt, 30) for prompt in prompts if prompt != poison]
        assert len(running) == 5
        await client.close()
        for door, serving in running:
            serving.cancel()
            await door.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_answers_end_with_their_engine_where_there_is_no_other():
    async def scenario() -> None:
        engine = make_engine()
        door = EngineServer(engine)
        client = await EngineClient.connect(await door.start("127.0.0.1"))

        async def no_other(gone: EngineClient) -> None:
            return None

        generation = client.generate(PROMPT, SamplingParams(max_tokens=80), instead=no_other)
        asyncio.get_running_loop().call_later(0.02, lambda: asyncio.ensure_future(door.close()))
        with pytest.raises(EngineUnavailable, match="has gone"):
            async for _ in generation:
                pass
        await client.close()

    asyncio.run(asyncio.wait_for(scenario(), 30))


def test_engine_that_goes_is_told_to_waiting_and_later_callers():
    async def scenario() -> None:
        engine = make_engine()
        door = EngineServer(engine)
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


def test_engine_that_says_nothing_is_given_up_and_so_is_the_next_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "HUNG_AFTER_S", 0.01)

    async def say_nothing(questions: Questions) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(Questions, "load", say_nothing)

    async def scenario(engine: Engine, address: Address) -> None:
        came, third = 0, asyncio.Event()

        async def again() -> Address:
            nonlocal came
            came += 1
            if came == 3:
                third.set()
            return address

        client = await EngineClient.connect(address, again)
        await third.wait()
        await client.close()

    served(scenario)


USUAL = [(1, 2, 3), SamplingParams(), [], RequestOptions(), 0.0, 3, False]
"""A request, field by field."""


def said(kind: type, *fields: Any) -> bytes:
    """A message with whatever fields."""
    tag, *_ = FROM_FRONT_END.plain(kind(*[None] * len(kind._fields)))  # type: ignore[attr-defined]
    return pack([tag, *fields])


def submitted(place: int, value: Any) -> bytes:
    return said(Submit, 0, [*USUAL[:place], value, *USUAL[place + 1 :]])


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        b"\x92\x00\xa1a",
        b"\x91\x00",
        pack(7),
        pack([99, 1]),
        pack(["fly", 1]),
        pack([[1], 1]),
        said(Abort, "1"),
        said(Abort, 1, 2),
        said(AskLoad, None, None),
        said(Pair, 5),
        said(AskProbe, 0, [1, "a"], ""),
        said(AskProbe, 0, [2**40], ""),
        said(AskProbe, 0, 7, b""),
        said(AskSnapshot, 0, ["a", 1, 2, 3]),
        said(AskSnapshot, 0, [0] * 9),
        said(Submit, -1, USUAL),
        said(Submit, 0, USUAL[:-1]),
        submitted(0, "abc"),
        submitted(1, [1]),
        submitted(1, {"temperature": 0.0, "wings": 2}),
        submitted(1, {7: 2}),
        submitted(2, [[1, 2]]),
        submitted(2, [[b"", "a"]]),
        submitted(2, 5),
        submitted(3, {"trace": 5}),
        submitted(3, "abc"),
        submitted(4, "soon"),
        submitted(4, -1.0),
        submitted(5, None),
        submitted(6, 1),
    ],
)
def test_garbage_from_one_front_end_closes_its_stream_and_disturbs_no_other(
    frame: bytes, caplog: pytest.LogCaptureFixture
):
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        good = asyncio.create_task(collect(client, PROMPT, SamplingParams(max_tokens=30)))
        stranger = await Stream.connect(address)
        await stranger.receive_message()  # who the engine is
        stranger.send(frame)
        with pytest.raises(ChannelClosed):
            await asyncio.wait_for(stranger.receive(), 10)
        tokens = await good
        assert engine.failure is None
        await stranger.close()
        await client.close()
        return tokens

    assert served(scenario) == continuation(PROMPT, 30)
    assert [record.exc_info for record in caplog.records] == [None], "one line, and no traceback"


def test_values_that_a_user_may_have_given_are_refused_and_the_stream_goes_on():
    async def scenario(engine: Engine, address: Address):
        stream = await Stream.connect(address)
        await stream.receive_message()
        refused = []
        for place, value in ((1, {"temperature": "hot"}), (3, {"priority": "a"}), (0, [1.5]), (0, [10**6]), (5, 99)):
            stream.send(submitted(place, value))
            delivery = FROM_ENGINE.read(await asyncio.wait_for(stream.receive_message(), 10))
            refused += [(handle, type(error)) for handle, error in delivery.errors]
        await stream.close()
        return refused

    assert served(scenario) == [(0, InvalidRequest)] * 5


def test_the_two_connections_of_a_front_end_end_together_and_its_requests_with_them():
    async def scenario(engine: Engine, address: Address):
        for which in range(2):
            streams = [await Stream.connect(address) for _ in range(2)]
            for stream in streams:
                stream.send_message(FROM_FRONT_END.plain(Pair(b"me")))
                await stream.receive_message()
            streams[0].send(submitted(1, {"max_tokens": 90, "ignore_eos": True}))
            await streams[0].receive_message()
            streams[which].drop()
            with pytest.raises(ChannelClosed):
                while True:
                    await asyncio.wait_for(streams[1 - which].receive(), 10)
            await all_free(engine)
        return engine.stats.aborted_requests

    assert served(scenario) == 2


def test_a_front_end_that_stands_still_finds_all_that_came_and_little_was_kept_for_it():
    steps, handles = 20_000, [3, 4, 5]
    rows = Rows.of([TokenLogprobs(1, -1.0, ((1, -1.0),))])

    async def scenario() -> tuple[int, dict[int, list[int]], list[int]]:
        most_held, standing = 0, asyncio.Event()

        async def serve(stream: Stream) -> None:
            nonlocal most_held
            stream._writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            outbox = Outbox(stream, lambda delivery: True)
            for step in range(steps):
                last = step == steps - 1
                deltas = [(9, Delta((step,), rows))]
                if not last:
                    outbox.deliver(Delivery(handles, [step] * 3, deltas))
                    await asyncio.sleep(0)
                    continue
                deltas += [(handle, Delta((step,), None, "length")) for handle in handles]
                outbox.deliver(Delivery([], [], deltas, [(9, DeadlineExceeded("it is over"))]))
                await asyncio.sleep(0)
            most_held = stream.unsent_bytes + outbox.held_bytes
            standing.set()
            await stream.receive()

        server = StreamServer(serve)
        stream = await Stream.connect(await server.start("127.0.0.1"))
        await standing.wait()
        heard: dict[int, list[int]] = {handle: [] for handle in (*handles, 9)}
        sizes, errors = [], 0
        while not errors:
            delivery = FROM_ENGINE.read(await asyncio.wait_for(stream.receive_message(), 10))
            for handle, token in zip(delivery.handles, delivery.tokens, strict=True):
                heard[handle].append(token)
            for handle, delta in delivery.deltas:
                assert delta.logprobs is None or len(delta.logprobs) == len(delta.token_ids)
                heard[handle] += delta.token_ids
            errors += len(delivery.errors)
            sizes.append(len(pack(FROM_ENGINE.plain(delivery))))
        await stream.close()
        await server.close()
        return most_held, heard, sizes

    most_held, heard, sizes = asyncio.run(asyncio.wait_for(scenario(), 60))
    assert heard == {handle: list(range(steps)) for handle in (*handles, 9)}
    assert max(sizes) < 2 * MESSAGE_BYTES
    assert most_held < 2 * MOST_UNSENT_BYTES + 4 * steps * TOKEN_BYTES + steps * 32


def test_an_engine_is_not_blamed_while_this_process_stands_still():
    async def scenario() -> None:
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(None, time.sleep, 0.2)  # the engine answers, and the answer is not read
        loop.call_later(0.01, time.sleep, 1.5)
        await while_we_run(asked, 0.5)

    asyncio.run(scenario())


def test_an_engine_that_says_nothing_is_blamed_in_time():
    async def scenario() -> float:
        begun_s = time.monotonic()
        with pytest.raises(TimeoutError):
            await while_we_run(asyncio.Event().wait(), 0.2)
        return time.monotonic() - begun_s

    assert 0.2 <= asyncio.run(scenario()) < 5


def test_several_answers_come_in_one_stream_and_one_can_be_ended():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        generation = client.generate(PROMPT, SamplingParams(max_tokens=30, n=3))
        tokens: list[list[int]] = [[], [], []]
        async for delta in generation:
            tokens[delta.answer] += delta.token_ids
            if len(tokens[1]) >= 4:  # more, where several came at once
                generation.end(1)
        await all_free(engine)
        await client.close()
        return tokens, engine.stats.aborted_requests

    tokens, aborted = served(scenario)
    expected = continuation(PROMPT, 30)
    assert (tokens[0], tokens[2]) == (expected, expected)
    assert 4 <= len(tokens[1]) < 30
    assert tokens[1] == expected[: len(tokens[1])]
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


@pytest.mark.parametrize("answers", [1, 2])
def test_who_reads_slowly_gets_what_came_meanwhile_at_once(answers: int):
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        said: list[list[int]] = [[] for _ in range(answers)]
        reasons, deltas = [], 0
        async for delta in client.generate(PROMPT, SamplingParams(max_tokens=60, n=answers)):
            said[delta.answer] += delta.token_ids
            reasons += [delta.finish_reason] if delta.finish_reason else []
            deltas += 1
            await asyncio.sleep(0.02)
        await client.close()
        return said, reasons, deltas

    said, reasons, deltas = served(scenario)
    assert said == [continuation(PROMPT, 60)] * answers
    assert reasons == ["length"] * answers
    assert deltas < 60 or answers > 1


def test_pieces_of_an_interval_hold_what_single_tokens_hold():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        params = SamplingParams(max_tokens=40)
        asked = [client.generate(PROMPT, params, stream_interval_s=interval_s) for interval_s in (0.0, 0.003, 3600.0)]
        deltas = [[delta async for delta in generation] for generation in asked]
        await client.close()
        return deltas

    single, pieces, two = served(scenario)
    assert len(two) == 2, "the first token is never kept back"
    assert 2 <= len(pieces) <= 40 and 2 < len(single) <= 40
    for deltas in (single, pieces, two):
        assert [token for delta in deltas for token in delta.token_ids] == continuation(PROMPT, 40)
        assert {delta.num_cached_tokens for delta in deltas} == {deltas[0].num_cached_tokens}
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["length"]


def test_a_generation_that_is_not_kept_is_aborted():
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
            async for _ in client.generate(
                PROMPT, SamplingParams(max_tokens=90), options=RequestOptions(timeout_s=0.0001)
            ):
                pass
        await client.close()
        return caught.value

    assert served(scenario).retryable


# -- the cache, watched from outside ---------------------------------------------------------------------------------


class Mirror:
    """What a watcher knows of the cache."""

    def __init__(self, client: EngineClient):
        self.known: dict[int, set[bytes]] = {}
        self.failure: Exception | None = None
        self.task = asyncio.ensure_future(self._follow(client))

    async def _follow(self, client: EngineClient) -> None:
        async with contextlib.aclosing(client.cache_watches.watch()) as watch:
            async for events in watch:
                for event in events:
                    self._apply(event)

    def _apply(self, event: Event) -> None:
        match event:
            case Stored(group, _, _, hashes):
                self.known.setdefault(group, set()).update(hashes)
            case Removed(group, _, hashes):
                self.known[group] -= set(hashes)
            case Cleared():
                self.known = {}

    async def is_true(self, engine: Engine) -> None:
        """Wait until it shows what is there; the test's time limit ends a wait in vain."""
        pool = engine._manager.pool
        groups = range(len(engine.info.groups))
        while any(self.known.get(group, set()) != set(pool.groups[group].index) for group in groups):
            await asyncio.sleep(0.001)


def test_watchers_see_the_cache_as_it_is_whenever_they_come():
    async def scenario(engine: Engine, address: Address):
        client, other = await EngineClient.connect(address), await EngineClient.connect(address)
        early = Mirror(client)
        rng = random.Random(3)
        for round_ in range(12):
            prompts = [[rng.randrange(50) for _ in range(rng.randint(1, 60))] for _ in range(6)]
            await asyncio.gather(*[collect(client, prompt, SamplingParams(max_tokens=9)) for prompt in prompts])
            if round_ == 6:
                engine.reset_prefix_cache()
            await early.is_true(engine)
        assert any(early.known.values())
        late = Mirror(other)
        await late.is_true(engine)
        for mirror in (early, late):
            assert engine.cache_watchers.is_watched
            mirror.task.cancel()
            await asyncio.gather(mirror.task, return_exceptions=True)
        while engine._manager.pool.known.log is not None:  # no client listens, so nothing is collected
            await asyncio.sleep(0.001)
        state = await client.questions.cache_state()
        await client.close()
        await other.close()
        return engine, state

    engine, state = served(scenario)
    count = engine.recount()
    assert (state.held_pages, state.kept_pages, state.blank_pages) == (count.held, count.kept, count.blank)
    assert state.requests == 0
    assert [group.kind for group in state.groups] == [group.kind for group in engine.info.groups]
    assert sum(group.known_blocks for group in state.groups) > 0


def test_the_end_of_a_connection_ends_its_watch():
    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        mirror = Mirror(client)
        await collect(client, PROMPT, SamplingParams(max_tokens=9))
        await mirror.is_true(engine)
        await client.close()
        while engine._manager.pool.known.log is not None:
            await asyncio.sleep(0.001)
        with pytest.raises(EngineUnavailable):
            await mirror.task

    served(scenario)


def test_a_watcher_who_does_not_read_is_told_to_begin_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(cache_watch, "UNWATCH_AFTER_S", 0.01)

    async def scenario(engine: Engine, address: Address):
        client = await EngineClient.connect(address)
        async with contextlib.aclosing(client.cache_watches.watch(None, 10)) as watch:
            assert await anext(watch) == [Cleared()]
            for n in range(6):
                await collect(client, [n] * 40, SamplingParams(max_tokens=1))
            with pytest.raises(Overloaded, match="watch it anew"):
                async for _ in watch:
                    pass
        while engine._manager.pool.known.log is not None:
            await asyncio.sleep(0.001)
        await client.close()

    served(scenario)


FOUR_STREAMS = """
import asyncio, json, sys
from intarsia.deploy.front_end.engine_client import EngineClient
from intarsia.proto.request import SamplingParams
from intarsia.proto.channel import Address

async def main():
    host, port, secret = json.loads(sys.stdin.readline())
    client = await EngineClient.connect(Address(host, port, bytes.fromhex(secret)))

    async def collect(n):
        answer = []
        async for delta in client.generate([n, 1, 2, 3], SamplingParams(max_tokens=80)):
            answer += delta.token_ids
            if n == 0:
                print("token", flush=True)
        return answer

    print(json.dumps(await asyncio.gather(*map(collect, range(4)))), flush=True)
    await client.close()

asyncio.run(main())
"""


async def front_end_with_streams(address: Address, *within: str) -> Process:
    """A process with four streams that run. within: what runs it"""
    command = [*within, sys.executable, "-c", FOUR_STREAMS]
    process = await asyncio.create_subprocess_exec(
        *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, cwd="/"
    )
    assert process.stdin and process.stdout
    process.stdin.write(json.dumps([address.host, address.port, address.secret.hex()]).encode() + b"\n")
    for _ in range(5):
        await process.stdout.readline()
    return process


def test_machine_of_a_front_end_that_is_gone_is_heard_of_while_tokens_are_on_their_way(far: str):  # noqa: F811
    async def scenario(engine: Engine, address: Address) -> tuple[float, int]:
        workers: Any = engine._workers
        workers.step_s = 0.2
        process = await front_end_with_streams(address, "ip", "netns", "exec", far)
        try:
            cut = await asyncio.create_subprocess_exec("ip", "-n", far, "link", "set", f"{far}b", "down")
            await cut.wait()
            begun_s = time.monotonic()
            await all_free(engine)
            return time.monotonic() - begun_s, engine.stats.aborted_requests
        finally:
            with contextlib.suppress(ProcessLookupError):  # it may have noticed, and ended
                process.kill()
            await process.wait()

    took_s, aborted = served(scenario, host="10.77.0.1")
    assert aborted == 4 and took_s < 9, took_s


def test_streams_of_a_front_end_that_was_stopped_go_on_and_others_never_waited():
    async def scenario(engine: Engine, address: Address) -> tuple[list[list[int]], list[int], float]:
        workers: Any = engine._workers
        workers.step_s = 0.02
        process = await front_end_with_streams(address)
        process.send_signal(signal.SIGSTOP)
        try:
            client = await EngineClient.connect(address)
            longest_s, last_s, said = 0.0, math.inf, []
            async for delta in client.generate(PROMPT, SamplingParams(max_tokens=80)):
                now_s = time.monotonic()
                longest_s, last_s = max(longest_s, now_s - last_s), now_s
                said += delta.token_ids
            await client.close()
        finally:
            process.send_signal(signal.SIGCONT)
        lines = (await process.communicate())[0].splitlines()
        return json.loads(lines[-1]), said, longest_s

    stopped, other, longest_s = served(scenario)
    assert stopped == [continuation([n, 1, 2, 3], 80) for n in range(4)]
    assert other == continuation(PROMPT, 80)
    assert longest_s < 5
