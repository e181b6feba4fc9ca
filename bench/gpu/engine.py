"""Whole engines with models of random weights: step times, prompts, a mixed load, and what a step is made of.

Times are of the worker's part of a step, from its plan to its tokens, the wait for the device included: in a cluster
the controller plans beside it. Floors are bytes over this run's best rate of memory (weights, keys and values, states),
or products over this run's best rate of products.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from .device import Bench, busy_share, by_name, kernels_of
from .floors import prompt_flops, step_floor_us, weight_bytes
from .lines import short
from .models import config_of
from .parts import Case, Row
from .session import Phase, Session
from .shapes import ENGINES, Engine

SIZES = ((1, 1024), (16, 1024), (64, 1024), (1, 4096), (16, 4096), (64, 4096))
TINY_SIZES = ((1, 20), (2, 20), (1, 24), (1, 28), (1, 28), (2, 28))
ONE_LONG, TINY_ONE_LONG = ((63, 1024), (1, 65_536)), ((1, 20), (1, 40))
FEW = "steps of 1 x 1024", "steps of 64 x 1024", "prompt of 2048"
"""Cases of an engine that is there for comparison."""
PROMPTS = (2048, 16_384)
TINY_PROMPTS = (20, 40)
STEPS = 20
PROFILED_STEPS = 5
LARGEST_KERNELS = 15
PEER_REQUESTS, PEER_PROMPT, PEER_NEW = 64, 256, 128

_sessions: dict[str, Session | str] = {}
"""Of this process: the one that its cases share, or why it could not be made."""


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    asked = next(engine for engine in ENGINES if engine.name == name)
    if asked.is_peer:
        return [Case("64 requests of 256 tokens and 128 new ones", partial(_beside_peer, asked))]
    sizes, prompts = (TINY_SIZES, TINY_PROMPTS) if is_rehearsed else (SIZES, PROMPTS)
    steps = [
        (f"steps of {told[0]} x {told[1]}", partial(_steps, asked, (size,)))
        for told, size in zip(SIZES, sizes, strict=True)
    ]
    told = " and ".join(f"{rows} x {length}" for rows, length in ONE_LONG)
    steps.append((f"steps of {told}", partial(_steps, asked, TINY_ONE_LONG if is_rehearsed else ONE_LONG)))
    first = [
        (f"prompt of {told}", partial(_prompt, asked, length)) for told, length in zip(PROMPTS, prompts, strict=True)
    ]
    if asked.enforce_eager:
        steps, first = ([run for run in runs if run[0] in FEW] for runs in (steps, first))
    runs = [*steps, *first, ("mixed load", partial(_mixed, asked))]
    return [Case("start", partial(_start, asked), partial(_touch, asked)), *(Case(title, run) for title, run in runs)]


def _touch(asked: Engine, bench: Bench) -> None:
    """A prompt and some steps, alone and with another, through a few layers."""
    session = Session(asked, bench, is_cut=True)

    async def ask() -> None:
        for count in (1, 2):
            answers = [session.submit(12 if bench.is_rehearsed else 700, 3) for _ in range(count)]
            for answer in answers:
                await answer.done.wait()

    session.run(ask)


def _session(asked: Engine, bench: Bench) -> Session:
    found = _sessions.get(asked.name)
    if found is None:
        try:
            found = Session(asked, bench)
        except Exception as error:
            _sessions[asked.name] = f"the engine did not start: {type(error).__name__}"
            raise
        _sessions[asked.name] = found
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def _start(asked: Engine, bench: Bench) -> Iterator[Row]:
    session = _session(asked, bench)
    info = session.engine.info
    yield {
        "start_s": round(session.start_s, 2),
        "weight_gb": short(info.weight_bytes / 1e9),
        "kv_cache_gb": short(info.kv_cache_bytes / 1e9),
        "attention": session.workers.runner.model.attention.backend.name,
        "not_recorded": session.refusal(),
        "reserved_gb": short(torch.cuda.memory_reserved() / 1e9) if not bench.is_rehearsed else 0.0,
    }


# -- decode steps ------------------------------------------------------------------------------------------------------


def _steps(asked: Engine, sizes: Sequence[tuple[int, int]], bench: Bench) -> Iterator[Row]:
    """With graphs, 5 of them under a profiler, then with the same kernels launched by Python.

    sizes: so many rows of so many tokens, all in one step
    """
    session = _session(asked, bench)
    lengths = [length for rows, length in sizes for _ in range(rows)]
    rows = len(lengths)
    if not session.fits(sizes, 0 if bench.is_rehearsed else 1024):
        yield {"skipped": f"the pages do not hold so many tokens: {sizes}"}
        return
    settling, count, profiling = (1, 1, 1) if bench.is_rehearsed else (3, STEPS, PROFILED_STEPS)
    seen = _Seen(session, bench)
    is_recorded = session.refusal() is None
    settle, timed = Phase("settle", settling), Phase("graphs" if is_recorded else "eager", count, leave=seen.look)
    profiled = Phase("profile", profiling, seen.begin, seen.end)
    phases = [settle, timed, profiled]
    eager = Phase("launched", count, seen.drop_graphs, seen.restore_graphs)
    session.in_phases(lengths, phases + [eager] * is_recorded)
    floor = step_floor_us(session, seen.lengths, bench)
    for phase in (timed, eager) if is_recorded else (timed,):
        us = statistics.median(phase.run_us[1:] or phase.run_us)
        row: Row = {"how": phase.name, "rows": rows, "step_us": short(us), "tokens_per_s": short(rows / us * 1e6)}
        yield row | ({"floor_us": short(floor), "times_floor": short(us / floor)} if floor else {})
    yield seen.told(profiling)


class _Seen:
    """What is looked at between phases."""

    def __init__(self, session: Session, bench: Bench):
        self._runner, self._bench = session.workers.runner, bench
        self._graphs = self._runner.graphs
        self._profile: Any = None
        self.lengths: list[int] = []  # of the rows

    def look(self) -> None:
        tables = self._runner.tables
        self.lengths = [int(tables.known[slot]) for slot, held in enumerate(tables.slots) if held is not None]

    def begin(self) -> None:
        activity = torch.profiler.ProfilerActivity
        torch.cuda.synchronize()
        self._profile = torch.profiler.profile(activities=[activity.CPU if self._bench.is_rehearsed else activity.CUDA])
        self._profile.__enter__()

    def end(self) -> None:
        torch.cuda.synchronize()
        self._profile.__exit__(None, None, None)

    def drop_graphs(self) -> None:
        self._runner.graphs = None

    def restore_graphs(self) -> None:
        self._runner.graphs = self._graphs

    def told(self, steps: int) -> Row:
        kernels = kernels_of(self._profile, self._bench.is_rehearsed)
        largest = {
            name: {"of_a_step": short(count / steps), "us_of_a_step": short(us / steps)}
            for name, (count, us) in by_name(kernels)[:LARGEST_KERNELS]
        }
        busy_us = sum(kernel.end - kernel.start for kernel in kernels) / steps
        row: Row = {"profile": f"{steps} steps", "kernels_of_a_step": round(len(kernels) / steps, 1)}
        return row | {"busy_us": short(busy_us), "busy_share": short(busy_share(kernels)), "largest": largest}


# -- prompts -----------------------------------------------------------------------------------------------------------


def _prompt(asked: Engine, length: int, bench: Bench) -> Iterator[Row]:
    """Time to the first token of one request in an engine that has nothing else to do."""
    session = _session(asked, bench)
    if not session.fits([(1, length)], 16):
        yield {"skipped": f"the pages do not hold {length} tokens"}
        return

    async def ask() -> tuple[float, int]:
        before = len(session.workers.ran)
        answer = session.submit(length, 1)
        await answer.done.wait()
        if answer.error is not None:
            raise answer.error
        return answer.times[0] - answer.asked, len(session.workers.ran) - before

    took = [session.run(ask) for _ in range(1 if bench.is_rehearsed else 4)]
    seconds = statistics.median(each for each, _ in took[-3:])
    flops = prompt_flops(session, length)
    floor = bench.floor_us(weight_bytes(session, length), flops)
    row: Row = {"tokens": length, "first_token_ms": short(seconds * 1e3), "steps": took[-1][1]}
    row |= {"tokens_per_s": short(length / seconds), "tflop_per_s": short(flops / seconds / 1e12)}
    yield row | ({"floor_ms": short(floor / 1e3), "times_floor": short(seconds * 1e6 / floor)} if floor else {})


# -- both at once ------------------------------------------------------------------------------------------------------


def _mixed(asked: Engine, bench: Bench) -> Iterator[Row]:
    """16 requests decode when 4 prompts of 2,048 tokens come: what their tokens wait for, and when the prompts' come.
    Prompts get all that a step holds (prefill_share 1)."""
    session = _session(asked, bench)
    rows, prompts, length, context = (1, 1, 24, 20) if bench.is_rehearsed else (16, 4, 2048, 1024)
    workers = session.workers

    async def ask() -> tuple[list[Any], list[Any]]:
        with session.skipping():
            running = [session.submit(context, 64 if bench.is_rehearsed else 512) for _ in range(rows)]
            while not all(answer.times for answer in running):
                await _soon(running)
        workers.ran.clear()
        arriving = [session.submit(length, 1) for _ in range(prompts)]
        while not all(answer.done.is_set() for answer in arriving):
            await _soon(arriving)
        return arriving, list(workers.ran)

    arriving, ran = session.run(ask)
    mixed = [step for step in ran if not step.is_decode]
    # The host is late where it launches such steps by Python: one seems to take longer then, the next one shorter.
    us, tokens = (
        statistics.mean(values) for values in zip(*((step.run_us, step.tokens) for step in mixed), strict=True)
    )
    # What its tokens would take without those before them.
    floor = bench.floor_us(weight_bytes(session, int(tokens)), prompt_flops(session, int(tokens)))
    yield {
        "steps": len(mixed),
        "tokens_of_a_step": short(tokens),
        "mixed_step_us": short(us),
        "slowest_us": max(step.run_us for step in mixed),
        **({"floor_us": short(floor), "times_floor": short(us / floor)} if floor else {}),
        "first_token_ms": [short((answer.times[0] - answer.asked) * 1e3) for answer in arriving],
        "tokens_per_s": short(sum(step.tokens for step in ran) / max(1e-9, sum(step.run_us for step in ran)) * 1e6),
    }


async def _soon(answers: list[Any]) -> None:
    """Let the engine run. Raises what came instead of tokens."""
    import asyncio

    await asyncio.sleep(0)
    for answer in answers:
        if answer.error is not None:
            raise answer.error


# -- a peer ------------------------------------------------------------------------------------------------------------


def _beside_peer(asked: Engine, bench: Bench) -> Iterator[Row]:
    """The same requests through our engine, then through transformers' continuous batching, with the same weights."""
    from .peer import continuous_batching

    sizes = (2, 8, 3) if bench.is_rehearsed else (PEER_REQUESTS, PEER_PROMPT, PEER_NEW)
    ours = _tokens_per_s(asked, *sizes, bench)
    yield {"engine": "ours", "tokens_per_s": short(ours)}
    _sessions.clear()  # and the memory of its pages and weights with it
    bench.tidy()
    theirs = continuous_batching(config_of(asked.model, bench.is_rehearsed), *sizes, bench)
    yield {"engine": "transformers", "tokens_per_s": short(theirs), "ours_to_theirs": short(ours / theirs)}


def _tokens_per_s(asked: Engine, count: int, length: int, new: int, bench: Bench) -> float:
    """Of the second time; the first one compiles."""
    session = _session(asked, bench)

    async def ask() -> float:
        started = time.perf_counter()
        answers = [session.submit(length, new) for _ in range(count)]
        for answer in answers:
            await answer.done.wait()
            if answer.error is not None:
                raise answer.error
        return time.perf_counter() - started

    session.run(ask)
    return count * new / session.run(ask)
