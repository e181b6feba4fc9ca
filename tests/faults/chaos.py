"""Kill and stop every kind of process under load, again and again.

    python -m intarsia.tests.faults.chaos --workers 50 --actors 5 --controllers 10 --stops 10 --front-ends 10
    python -m intarsia.tests.faults.chaos --dtype bfloat16    # whose sums have one order, so that no bit differs

32 gRPC streams run through a front end all the time, over two tensor-parallel workers. Each answer must be what it is
undisturbed, token by token, and none may fail. Prints JSON: for each kind of fault how often it was tried, how many
were recovered from, and how long streams were silent; exits with 1 if anything was lost.
"""

import asyncio
import contextlib
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from intarsia.deploy.client import AsyncClient
from intarsia.deploy.start.launch import find_engines
from intarsia.errors import IntarsiaError

from .processes import parent_of
from .program import program
from .service import Service, Traffic, answered, draw, service

STREAMS = 32
NAME = "chaos"

QUIET_S = 3.0
"""Of undisturbed streams after a recovery, at least, before the next fault."""

GLANCE_S = 0.5

GIVE_UP_S = 120.0
"""For streams to go on after a fault."""

STOP_S = 30.0
"""How long a process is stopped. It will be given up before."""


class Chaos:
    """The faults, one method each. All return how long it took until streams went on, in seconds."""

    def __init__(self, engine: Service, traffic: Traffic, rng: random.Random):
        self._service = engine
        self._traffic = traffic
        self._rng = rng
        self._to_wake: list[asyncio.Task[None]] = []

    async def workers(self) -> float:
        """The process that computes, of a random rank, is killed."""
        return await self._strike(await self._random_worker(), signal.SIGKILL)

    async def actors(self) -> float:
        """Ray's process of a random rank is killed, and with it the one that computes."""
        return await self._strike(self._rng.choice(_actors_called("WorkerActor")), signal.SIGKILL)

    async def controllers(self) -> float:
        return await self._strike(self._service.engine.controller_process_id, signal.SIGKILL)

    async def stops(self) -> float:
        """The process that computes is stopped for 30 seconds, unless it is ended before."""
        return await self._strike(await self._random_worker(), signal.SIGSTOP)

    async def controller_stops(self) -> float:
        return await self._strike(self._service.engine.controller_process_id, signal.SIGSTOP)

    async def front_ends(self) -> float:
        """Another front end is killed with eight streams of its own: how long until their blocks are free."""
        engines = await find_engines(NAME)
        host, port, secret = next(iter(engines.values()))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "intarsia.tests.faults.front_end",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
        )
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps([host, port, secret.hex()]).encode() + b"\n")
        address = (await process.stdout.readline()).decode().strip()
        begun = asyncio.Semaphore(0)

        async def stream(client: AsyncClient, n: int) -> None:
            known = draw(random.Random(n), 1, 600, 600)[0]
            with contextlib.suppress(IntarsiaError):
                async for _ in client.generate(known.prompt, known.sampling):
                    begun.release()

        async with AsyncClient(address) as client:
            tasks = [asyncio.create_task(stream(client, n)) for n in range(8)]
            for _ in range(8 * 3):
                await begun.acquire()
            before = await self._service.engine.client.questions.load()
            process.kill()
            killed_s = time.monotonic()
            while (await self._service.engine.client.questions.load()).aborted_requests < before.aborted_requests + 8:
                await asyncio.sleep(0.002)
                assert time.monotonic() - killed_s < GIVE_UP_S, "the dead front end still has requests"
            took_s = time.monotonic() - killed_s
            await asyncio.gather(*tasks)
        await process.wait()
        return took_s

    async def leave(self) -> None:
        await asyncio.gather(*self._to_wake)

    async def _random_worker(self) -> int:
        while True:
            with contextlib.suppress(IntarsiaError):
                return self._rng.choice(await self._service.engine.worker_process_ids())
            await asyncio.sleep(0.1)

    async def _strike(self, pid: int, number: signal.Signals) -> float:
        await asyncio.sleep(self._rng.uniform(0, 1))
        os.kill(pid, number)
        struck_s = time.monotonic()
        if number is signal.SIGSTOP:
            self._to_wake.append(asyncio.create_task(_wake_later(pid)))
        await asyncio.sleep(2 * GLANCE_S)  # what was on its way comes still, and is no sign of life
        while self._is_silent():
            await asyncio.sleep(0.05)
            if time.monotonic() - struck_s > GIVE_UP_S:
                return float("inf")
        await asyncio.sleep(QUIET_S)
        return self._traffic.recovered_s(struck_s)

    def _is_silent(self) -> bool:
        """Whether streams do not go on: a token of each, at the least, in the time of a glance."""
        since_s = time.monotonic() - GLANCE_S
        return sum(at > since_s for at in self._traffic.came_s[-STREAMS:]) < STREAMS


async def _wake_later(pid: int) -> None:
    await asyncio.sleep(STOP_S)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


def _actors_called(name: str) -> list[int]:
    """Processes of actors of this class, among those that we started."""
    found = []
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if (entry / "cmdline").read_bytes().startswith(f"ray::{name}".encode()) and _is_ours(int(entry.name)):
                found.append(int(entry.name))
    return found


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        pid = parent_of(pid)
    return False


def _summary(took_s: list[float]) -> dict[str, Any]:
    known = sorted(each for each in took_s if each != float("inf"))
    return {
        "tried": len(took_s),
        "recovered": len(known),
        "p50_s": round(statistics.median(known), 3) if known else None,
        "max_s": round(known[-1], 3) if known else None,
    }


async def run(seed: int, dtype: str, **counts: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with service(tensor_parallel_size=2, name=NAME, dtype=dtype) as served, AsyncClient(served.address) as client:
        known = await answered(client, draw(rng, 64, 60, 400))
        started_s = time.monotonic()
        traffic = Traffic(client, known, STREAMS, rng)
        chaos = Chaos(served, traffic, rng)
        await asyncio.sleep(QUIET_S)
        found: dict[str, Any] = {}
        for kind, count in counts.items():
            strike: Callable[[], Awaitable[float]] = getattr(chaos, kind)
            took_s = []
            for n in range(count):
                took_s.append(await strike())
                print(f"{kind} {n + 1}/{count}: {took_s[-1]:.2f} s", file=sys.stderr, flush=True)
            if took_s:
                found[kind] = _summary(took_s)
        await chaos.leave()
        await traffic.stop()
        count = await served.engine.recount()
        return {
            "seed": seed,
            "dtype": dtype,
            "streams": STREAMS,
            "took_s": round(time.monotonic() - started_s),
            "faults": found,
            "answers": traffic.finished,
            "failed": len(traffic.failed),
            "different": len(traffic.wrong),
            "all_blocks_free": count.all_free,
            "examples": (traffic.failed + traffic.wrong)[:5],
        }


def is_fine(found: dict[str, Any]) -> bool:
    recovered = all(each["recovered"] == each["tried"] for each in found["faults"].values())
    return recovered and not found["failed"] and not found["different"] and found["all_blocks_free"]


if __name__ == "__main__":
    kinds = {"workers": 50, "actors": 5, "controllers": 10, "stops": 10, "controller_stops": 3, "front_ends": 10}
    program(__doc__, run, is_fine, dtype="auto", **kinds)
