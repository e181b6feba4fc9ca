"""A thousand streams at once, opened in waves, half of them left at a random moment once all are open.

    python -m intarsia.tests.faults.waves --streams 1000

Clients are a process of their own. Those that stay must say what they say undisturbed. Of those that leave, the time is
taken from the client's cancelling to the plan of a step without them, which is when their blocks are free: seen through
counters of the engine that are read every few milliseconds, so a little later than it was. Prints JSON; exits with 1 if
anything is left behind.
"""

import asyncio
import contextlib
import multiprocessing
import random
import time
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

from intarsia.deploy.client import AsyncClient
from intarsia.errors import IntarsiaError
from intarsia.proto.status import EngineLoad

from .program import program
from .service import Known, Service, answered, draw, read, service

WAVES = 10

WAVE_EVERY_S = 0.3

LOOK_EVERY_S = 0.003

ARRIVING_S = 2.0
"""From the last wave to the first that leaves: all have reached the engine by then, so all are to be aborted there."""

LEAVING_S = 10.0
"""From the first that leaves to the last."""

STAYING = 400, 500
"""Tokens of those that stay, at least and at most: the first of them are not done before the last wave has come."""

ENDLESS = 1800
"""Tokens of those that leave: more than they get."""


class Watch:
    """When the engine's counters passed which number."""

    def __init__(self, served: Service):
        self._client = served.engine.client
        self.looks: list[tuple[float, EngineLoad]] = []
        self._task = asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            load = await self._client.questions.load()
            self.looks.append((time.monotonic(), load))
            await asyncio.sleep(LOOK_EVERY_S)

    async def stop(self) -> None:
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    def freed_s(self, aborted: int) -> float:
        """When so many had been aborted, and a later step was planned."""
        at_step = None
        for seen_s, load in self.looks:
            if at_step is None and load.aborted_requests >= aborted:
                at_step = load.steps
            if at_step is not None and (load.steps > at_step or load.running + load.waiting == 0):
                return seen_s
        return float("inf")

    def step_s(self) -> float:
        """Of a usual step."""
        (first_s, first), (last_s, last) = self.looks[0], self.looks[-1]
        return (last_s - first_s) / max(1, last.steps - first.steps)


async def _stay(client: AsyncClient, known: Known, wrong: list[str]) -> None:
    try:
        fault = await read(client, known)
    except IntarsiaError as error:
        fault = f"{type(error).__name__}: {error}"
    if fault is not None:
        wrong.append(fault)


async def _leave(client: AsyncClient, known: Known, at_s: float, left_s: list[float], wrong: list[str]) -> None:
    async def read() -> None:
        async for _ in client.generate(known.prompt, known.sampling):
            pass

    task = asyncio.create_task(read())
    await asyncio.sleep(at_s - time.monotonic())
    if task.done():
        wrong.append(f"ended before it was left: {task.exception()!r}")
        return
    left_s.append(time.monotonic())
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class Came(NamedTuple):
    """What the clients saw."""

    most_open: int
    left_s: list[float]  # when, in order; by the machine's clock
    wrong: list[str]


async def _clients(address: str, stays: list[Known], leaves: list[Known], streams: int, seed: int) -> Came:
    rng = random.Random(seed)
    left_s: list[float] = []
    wrong: list[str] = []
    tasks: list[asyncio.Task[None]] = []
    most_open = 0
    all_there_s = time.monotonic() + WAVES * WAVE_EVERY_S + ARRIVING_S
    async with AsyncClient(address) as client:
        for _ in range(WAVES):
            for _ in range(streams // WAVES):
                if rng.random() < 0.5:
                    at_s = all_there_s + rng.uniform(0, LEAVING_S)
                    work = _leave(client, rng.choice(leaves), at_s, left_s, wrong)
                else:
                    work = _stay(client, rng.choice(stays), wrong)
                tasks.append(asyncio.create_task(work))
            await asyncio.sleep(WAVE_EVERY_S)
            most_open = max(most_open, sum(not task.done() for task in tasks))
        await asyncio.gather(*tasks)
    return Came(most_open, left_s, wrong)


def _run_clients(*about: Any) -> Came:
    return asyncio.run(_clients(*about))


async def run(streams: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with service(kv_cache_memory="32MiB", max_num_seqs=128) as served, AsyncClient(served.address) as client:
        stays = await answered(client, draw(rng, 40, *STAYING))
        leaves = draw(rng, 40, ENDLESS, ENDLESS)
        before = await served.engine.client.questions.load()
        watch = Watch(served)
        started_s = time.monotonic()
        about = served.address, stays, leaves, streams, rng.randrange(2**32)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
            came = await asyncio.get_running_loop().run_in_executor(clients, _run_clients, *about)
        while (load := await served.engine.client.questions.load()).running + load.waiting:
            await asyncio.sleep(0.01)
        await asyncio.sleep(10 * LOOK_EVERY_S)
        await watch.stop()
        freed = [watch.freed_s(before.aborted_requests + n + 1) - at_s for n, at_s in enumerate(came.left_s)]
        freed.sort()
        count = await served.engine.recount()
        step_s = watch.step_s()
        return {
            "seed": seed,
            "streams": streams,
            "most_open_at_once": came.most_open,
            "most_known_to_engine": max(load.running + load.waiting for _, load in watch.looks),
            "took_s": round(time.monotonic() - started_s, 1),
            "left": len(came.left_s),
            "aborted": load.aborted_requests - before.aborted_requests,
            "wrong": len(came.wrong),
            "all_blocks_free": count.all_free,
            "sessions_left": served.front_end.num_running,
            "disconnect_to_free_ms": {
                "p50": round(freed[len(freed) // 2] * 1e3, 1),
                "p99": round(freed[int(len(freed) * 0.99)] * 1e3, 1),
                "max": round(freed[-1] * 1e3, 1),
            },
            "usual_step_ms": round(step_s * 1e3, 1),
            "examples": came.wrong[:5],
        }


def is_fine(found: dict[str, Any]) -> bool:
    clean = found["all_blocks_free"] and not found["wrong"] and not found["sessions_left"]
    return clean and found["aborted"] == found["left"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, streams=1000)
