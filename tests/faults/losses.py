"""Processes that are killed many times in a row, at random moments, rebuilds included.

    python -m intarsia.tests.faults.losses --rounds 20

16 gRPC streams run over two tensor-parallel workers. In each round one kind of process (both workers, one of them, a
worker's actor, the controller, or all of them) is killed six times within two seconds, or so often that a kill comes as
soon as the engine is back. Each answer must be what it is undisturbed, token by token, and none may fail. Prints JSON;
exits with 1 if anything was lost.
"""

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from intarsia.deploy.client import AsyncClient

from .processes import parent_of
from .program import program
from .service import Service, Traffic, answered, draw, service

STREAMS = 16

KILLS = 6

WITHIN_S = 2.0

SETTLE_S = 1.0
"""Of streams that go on, before the next round."""

GIVE_UP_S = 100.0

KINDS = ("both workers", "one worker", "an actor", "the controller", "any")


class Targets:
    """The processes of an engine as they are at this moment, found without asking it."""

    def __init__(self, rng: random.Random):
        self._rng = rng

    def of(self, kind: str) -> list[int]:
        if kind == "any":
            kind = self._rng.choice(KINDS[:-1])
        if kind == "the controller":
            return self._called("ray::ControllerActor")
        if kind == "an actor":
            return self._rng.sample(actors, 1) if (actors := self._called("ray::WorkerActor")) else []
        workers = self._workers()
        return workers if kind == "both workers" else self._rng.sample(workers, min(1, len(workers)))

    def _called(self, name: str) -> list[int]:
        return [pid for pid, command in _processes() if command.startswith(name) and _is_ours(pid)]

    def _workers(self) -> list[int]:
        """Those that compute: children of fork servers, of actors that are ours."""
        mark = f"INTARSIA_RAY_OWNER={os.getpid()}.".encode()
        found = []
        for pid, command in _processes():
            with contextlib.suppress(OSError):
                if "fork_server" in command and "fork_server" in _command_of(parent_of(pid)):
                    found += [pid] if _has(pid, mark) else []
        return found


def _has(pid: int, mark: bytes) -> bool:
    return any(each.startswith(mark) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"))


def _processes() -> list[tuple[int, str]]:
    pids = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
    return [(pid, _command_of(pid)) for pid in pids]


def _command_of(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def _is_ours(pid: int) -> bool:
    while pid > 1:
        if pid == os.getpid():
            return True
        try:
            pid = parent_of(pid)
        except OSError:
            return False
    return False


async def _moments(rng: random.Random, traffic: Traffic, *, when_back: bool) -> AsyncIterator[None]:
    """When to kill: at random within two seconds, or each time that a token comes again."""
    if not when_back:
        began_s = time.monotonic()
        for at_s in sorted(rng.uniform(0, WITHIN_S) for _ in range(KILLS)):
            await asyncio.sleep(max(0.0, began_s + at_s - time.monotonic()))
            yield
        return
    for _ in range(KILLS):
        killed_s = time.monotonic()
        while not any(at > killed_s + 0.05 for at in traffic.came_s[-1:]):
            await asyncio.sleep(0.005)
            if time.monotonic() - killed_s > GIVE_UP_S:
                return
        yield


async def _round(
    rng: random.Random, traffic: Traffic, targets: Targets, kind: str, *, when_back: bool
) -> dict[str, Any]:
    killed = 0
    began_s = time.monotonic()
    async for _ in _moments(rng, traffic, when_back=when_back):
        for pid in targets.of(kind):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed += 1
    last_s = time.monotonic()
    await asyncio.sleep(0.2)  # what was on its way comes still
    calm_s = time.monotonic()
    while sum(at > calm_s for at in traffic.came_s[-4 * STREAMS :]) < 2 * STREAMS:
        await asyncio.sleep(0.05)
        if time.monotonic() - calm_s > GIVE_UP_S:
            break
    recovered_s = time.monotonic() - last_s
    await asyncio.sleep(SETTLE_S)
    return {
        "kind": kind,
        "when_back": when_back,
        "killed": killed,
        "within_s": round(last_s - began_s, 1),
        "recovered_after_s": round(recovered_s, 1),
        "failed": len(traffic.failed),
        "different": len(traffic.wrong),
    }


async def run(rounds: int, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    async with service(tensor_parallel_size=2) as served, AsyncClient(served.address) as client:
        known = await answered(client, draw(rng, 48, 60, 300))
        traffic = Traffic(client, known, STREAMS, rng)
        targets = Targets(rng)
        await asyncio.sleep(SETTLE_S)
        found = []
        for n in range(rounds):
            kind = KINDS[n % len(KINDS)]
            found.append(await _round(rng, traffic, targets, kind, when_back=n % 4 == 3))
            print(found[-1], file=sys.stderr, flush=True)
            if served.engine.client.connection.failure is not None:
                break
        return await _result(served, traffic, found, seed)


async def _result(served: Service, traffic: Traffic, found: list[dict[str, Any]], seed: int) -> dict[str, Any]:
    failure = served.engine.client.connection.failure
    if failure is None:
        await traffic.stop()
    return {
        "seed": seed,
        "rounds": len(found),
        "killed": sum(each["killed"] for each in found),
        "recovered_after_max_s": max(each["recovered_after_s"] for each in found),
        "answers": traffic.finished,
        "failed": len(traffic.failed),
        "different": len(traffic.wrong),
        "engine": str(failure) if failure else "is there",
        "all_blocks_free": failure is None and (await served.engine.recount()).all_free,
        "examples": (traffic.failed + traffic.wrong)[:5],
    }


def is_fine(found: dict[str, Any]) -> bool:
    return not found["failed"] and not found["different"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, rounds=20)
