"""What an engine shows of itself, taken while it works."""

import asyncio
from array import array
from typing import Any

from intarsia.controller.engine import Engine
from intarsia.kvcache.misses import lost_tokens
from intarsia.proto.request import RequestOptions, SamplingParams
from intarsia.proto.status import SnapshotQuery
from intarsia.tests.controller.test_engine import PROMPT, make_engine, running, submit
from intarsia.tests.local import Completion, asking

ALL = SnapshotQuery(with_tokens=True, with_recount=True)


def slow(engine: Engine) -> Engine:
    group: Any = engine._workers
    group.step_s = 0.002
    return engine


def test_idle_engine_shows_an_empty_pool_that_was_counted():
    engine = make_engine(blocks=32)

    async def scenario() -> None:
        seen = await engine.status.snapshot(ALL)
        assert seen.requests == seen.ended == seen.steps == ()
        assert seen.recount is not None and seen.recount.blank == 31 and seen.faults == ""
        assert len(seen.workers) == 1 and seen.pool is not None

    running(engine, scenario())


def test_running_and_waiting_requests_are_shown_with_the_blocks_they_hold():
    engine = slow(make_engine())

    async def scenario() -> None:
        completions = [submit(engine, [n + 1] * (6 + n), SamplingParams(max_tokens=30)) for n in range(7)]
        while engine.stats.steps < 8:
            await asyncio.sleep(0.001)
        seen = await engine.status.snapshot(ALL)
        assert [each.state for each in seen.requests] == ["running"] * 4 + ["waiting"] * 3  # four seats
        assert [each.slot for each in seen.requests[:4]] == [0, 1, 2, 3]
        assert seen.recount is not None
        for g, held in enumerate(seen.recount.held_blocks):  # nothing is shared: each block has one holder
            shown = [block for each in seen.requests[:4] for block in array("i", each.blocks[g])]
            assert len(shown) == len(set(shown)) == held
        for each in seen.requests[:4]:
            assert each.tokens is not None and each.tokens[0] == (each.tokens[0][0],) * each.prompt_tokens
            assert each.generated_tokens == len(each.tokens[1])
            assert each.max_tokens == 30 and 0 <= each.waited_s <= each.age_s
        await asyncio.gather(*(c.done.wait() for c in completions))

    running(engine, scenario())


def test_only_new_steps_and_no_text_are_shown_unless_asked_for():
    engine = make_engine()

    async def scenario() -> None:
        await submit(engine, PROMPT).done.wait()
        every = (await engine.status.snapshot(SnapshotQuery())).steps
        assert [step.number for step in every] == list(range(1, len(every) + 1))
        assert (every[0].prompt_tokens, every[0].began) == (len(PROMPT), 1)
        assert sum(step.decoding for step in every) == 7 and every[-1].ended + every[-2].ended == 1
        later = await engine.status.snapshot(SnapshotQuery(since_step=3, with_pool=False))
        assert later.steps == every[3:] and later.pool is None and later.recount is None
        assert all(each.tokens is None and each.blocks == () for each in later.ended)
        [ended] = (await engine.status.snapshot(ALL)).ended
        assert ended.tokens is not None and ended.tokens[0] == tuple(PROMPT)

    running(engine, scenario())


def test_ended_requests_say_why():
    engine = slow(make_engine())

    async def scenario() -> None:
        whole = submit(engine, PROMPT)
        late = Completion()
        in_time = RequestOptions(timeout_s=0.02)
        engine.submit(asking([7] * 5, SamplingParams(max_tokens=90), options=in_time), 0, late.sink)
        [left] = engine.submit(asking([8] * 5, SamplingParams(max_tokens=90)), 0, Completion().sink)
        await whole.done.wait()
        engine.abort(left)
        await late.done.wait()
        assert {each.state for each in (await engine.status.snapshot(SnapshotQuery())).ended} == {
            "length",
            "deadline",
            "abort",
        }
        assert engine.status.metrics().finished == {"length": 1, "deadline": 1, "abort": 1}

    running(engine, scenario())


def test_tokens_that_were_evicted_are_shown_as_lost():
    engine = make_engine(blocks=20)

    async def scenario() -> None:
        for prompt in ([1] * 40, [2] * 40, [3] * 40, [1] * 40):
            await submit(engine, prompt, SamplingParams(max_tokens=2)).done.wait()
        first, *_, again = (await engine.status.snapshot(SnapshotQuery())).ended
        assert lost_tokens(first.misses) == {} and lost_tokens(again.misses).get("evicted", 0) > 0
        assert engine.status.metrics().lost_tokens["evicted"] == lost_tokens(again.misses)["evicted"]

    running(engine, scenario())


# What a tenant is told


def test_a_tenant_is_told_of_its_own_requests_only():
    engine = slow(make_engine())

    async def scenario() -> None:
        completions = [Completion() for _ in range(3)]
        for completion, salt in zip(completions, ("alice", "alice", "bob"), strict=True):
            request = asking([1] * 6, SamplingParams(max_tokens=8), options=RequestOptions(salt=salt))
            engine.submit(request, 0, completion.sink)
        while engine.stats.steps < 4:
            await asyncio.sleep(0.001)
        own, others, everybody = (engine.status.load(viewer) for viewer in ("alice", "bob", None))
        assert (own.running, others.running, everybody.running) == (2, 1, 3)
        assert own.generated_tokens + others.generated_tokens == everybody.generated_tokens > 0
        assert own.steps == own.kept_blocks == 0
        assert own.num_blocks - own.free_blocks == 2 * (others.num_blocks - others.free_blocks) > 0
        held, held_by_all = engine.status.cache_state("alice"), engine.status.cache_state()
        assert (held.held_pages, held.requests, held_by_all.requests) == (0, 2, 3)
        assert 0 < held.groups[0].held_blocks < held_by_all.groups[0].held_blocks
        await asyncio.gather(*(c.done.wait() for c in completions))
        assert engine.status.load("alice").finished_requests == 2
        assert engine.status.load("alice").generated_tokens == 16
        assert engine.status.load("carol")[:4] == (0, 0, own.num_blocks, 0)

    running(engine, scenario())


def test_a_probe_tells_what_a_request_would_meet_and_touches_nothing():
    engine = make_engine()

    async def scenario() -> None:
        await submit(engine, PROMPT).done.wait()
        assert engine.status.probe(PROMPT)[:6] == (4, 0, 0, False, 0, 0.0)  # of the prompt, a whole block
        assert engine.status.probe(PROMPT, "alice").cached_tokens == engine.status.probe([]).cached_tokens == 0
        engine.status.is_leaving = True
        assert engine.status.probe([]).is_leaving

    running(engine, scenario())


def test_what_other_sizes_of_the_memory_would_find_is_forecast_from_requests_that_left():
    engine = make_engine()

    async def scenario() -> None:
        assert engine.status.forecasts() == ()
        for _ in range(3):
            await submit(engine, PROMPT, SamplingParams(max_tokens=4)).done.wait()
        [forecast] = engine.status.forecasts()
        assert (forecast.kind, forecast.requests, forecast.one_in) == ("device", 3, 1)
        shares = dict(forecast.found)
        assert sorted(shares) == [0.5, 1.0, 2.0, 4.0] and shares[0.5] <= shares[1.0] == shares[2.0] == shares[4.0] > 0
        seen = await engine.status.snapshot(SnapshotQuery())
        assert seen.forecasts == engine.status.metrics().forecasts == (forecast,)

    running(engine, scenario())


def test_a_probe_finds_what_a_request_would_and_changes_nothing():
    engine = make_engine()

    async def scenario() -> None:
        for n in range(4):
            await submit(engine, [n + 1] * 21).done.wait()
        manager = engine._manager
        before = manager.pool.map(), manager.pool.known.version, [list(group._gone) for group in manager.pool.groups]
        prompts = [[n + 1] * 21 for n in range(4)]
        found = [engine.status.probe(prompt) for prompt in prompts]
        assert [probe.cached_tokens for probe in found] == [manager.lookup(prompt).tokens for prompt in prompts]
        assert min(probe.cached_tokens for probe in found) >= 16
        assert engine.status.probe([9] * 21).cached_tokens == 0 == engine.status.probe(prompts[0], "salt").cached_tokens
        after = manager.pool.map(), manager.pool.known.version, [list(group._gone) for group in manager.pool.groups]
        assert after == before

    running(engine, scenario())


def test_probes_leave_the_order_of_evictions_as_it_is():
    kept: list[list[int]] = []
    for probes in (0, 50):
        engine = make_engine(blocks=32)

        async def scenario(engine: Engine = engine, probes: int = probes) -> None:
            await submit(engine, [1] * 21).done.wait()
            for n in range(2, 8):
                for _ in range(probes):  # a use would keep it
                    engine.status.probe([1] * 21)
                await submit(engine, [n] * 21).done.wait()
            kept.append([engine.status.probe([n] * 21).cached_tokens for n in range(1, 8)])

        running(engine, scenario())
    assert kept[0] == kept[1] and 0 in kept[0]


def test_a_probe_counts_who_waits():
    engine = slow(make_engine())

    async def scenario() -> None:
        completions = [submit(engine, [n + 1] * 6, SamplingParams(max_tokens=30)) for n in range(7)]
        while engine.stats.steps < 8:
            await asyncio.sleep(0.001)
        probe = engine.status.probe([1] * 6)
        assert (probe.running, probe.waiting, probe.queued_tokens) == (4, 3, 18)  # four seats
        assert probe.pool_use > 0 and probe.tokens_per_s is not None and probe.tokens_per_s > 0
        await asyncio.gather(*(c.done.wait() for c in completions))

    running(engine, scenario())
