"""Ten times as many requests as can be served, for two minutes.

    python -m intarsia.tests.faults.overload --factor 10 --seconds 120

First the peak: as many streams as there are seats, each after its end followed by another, for a minute until the
worker is warm, and then for the measure. Then requests come at ten times that rate, whether others are answered or not.
Goodput counts answers that are right, and complete within the time that a request may wait and be answered in; the peak
is measured once more when all is over, and the mean of both is what goodput is compared with, since a shared machine is
faster in one minute than in another. Memory is compared between the second quarter of the flood and the last. Prints
JSON; exits with 1 if goodput falls below nine tenths of the peak, a refusal is untyped or takes 50 ms, or memory grows
by more than 5 MB.
"""

import asyncio
import random
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from intarsia.deploy.client import AsyncClient
from intarsia.environment import resident_bytes
from intarsia.errors import IntarsiaError, Overloaded

from .processes import clients_apart, watch, watched
from .program import program
from .service import Known, answered, draw, read, service

SEATS = 16
MAX_WAIT_S = 4.0
WARM_UP_S = 60.0
FULL_S = 5.0
"""Until all seats are taken and as many answers end as begin."""

PEAK_S = 20.0
SAMPLE_EVERY_S = 1.0

MOST_REFUSAL_MS = 50.0
MOST_GROWTH_MB = 5.0

PATIENCE = 3.0
"""An answer is in time if it takes no longer than it may wait, and so many times what it takes at the peak."""


@dataclass(slots=True)
class Outcomes:
    """Of many requests."""

    done: list[tuple[float, float]] = field(default_factory=list)  # of right answers: when complete, and after how long
    refused_ms: list[float] = field(default_factory=list)
    hints_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)

    def answer_s(self) -> float:
        return statistics.median(took_s for _, took_s in self.done)


class Flood:
    """Requests that come whatever becomes of those before."""

    def __init__(self, client: AsyncClient, known: list[Known], rng: random.Random):
        self.outcomes = Outcomes()
        self._client, self._known, self._rng = client, known, rng
        self._tasks: set[asyncio.Task[None]] = set()

    def come(self) -> asyncio.Task[None]:
        task = asyncio.create_task(self._one(self._rng.choice(self._known)))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def end(self) -> None:
        await asyncio.gather(*self._tasks)

    async def _one(self, known: Known) -> None:
        outcomes, started_s = self.outcomes, time.monotonic()
        try:
            fault = await read(self._client, known)
        except Overloaded as refusal:
            outcomes.refused_ms.append((time.monotonic() - started_s) * 1e3)
            outcomes.hints_s.append(refusal.retry_after_s or 0.0)
            return
        except IntarsiaError as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            outcomes.wrong.append(fault)
            return
        now_s = time.monotonic()
        outcomes.done.append((now_s, now_s - started_s))


class Came(NamedTuple):
    """What the clients saw. Times by the machine's clock."""

    peak_rates: tuple[float, float]  # answers per second, before the flood and after it
    answer_s: float  # median at the peak
    started_s: float
    ended_s: float
    come: int
    flood: Outcomes


async def _clients(address: str, known: list[Known], factor: float, seconds: float, seed: int) -> Came:
    rng = random.Random(seed)
    async with AsyncClient(address) as client:

        async def peak_of(after_s: float) -> tuple[float, float]:
            """Answers per second, and how long one takes."""
            peak = Flood(client, known, rng)
            started_s = time.monotonic() + after_s
            ended_s = started_s + PEAK_S

            async def seat() -> None:
                while time.monotonic() < ended_s:
                    await peak.come()

            await asyncio.gather(*(seat() for _ in range(SEATS)))
            # While all seats were taken; afterwards the last ones only end.
            rate = sum(started_s < at_s <= ended_s for at_s, _ in peak.outcomes.done) / PEAK_S
            return rate, peak.outcomes.answer_s()

        peak_rate, answer_s = await peak_of(WARM_UP_S)
        flood = Flood(client, known, rng)
        started_s = next_s = time.monotonic()
        come = 0
        while (now_s := time.monotonic()) < started_s + seconds:
            while next_s <= now_s:
                flood.come()
                come += 1
                next_s += rng.expovariate(factor * peak_rate)
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        ended_s = time.monotonic()
        await flood.end()
        rate_afterwards, _ = await peak_of(FULL_S)
    return Came((peak_rate, rate_afterwards), answer_s, started_s, ended_s, come, flood.outcomes)


async def run(factor: float, seconds: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"max_num_seqs": SEATS, "max_wait_s": MAX_WAIT_S}
    async with service(**settings) as served:
        async with AsyncClient(served.address) as client:
            known = await answered(client, draw(rng, 60, 150, 250))

        async def memory_now() -> tuple[float, dict[str, int]]:
            held = {name: resident_bytes(pid) for name, pid in (await watched(served)).items()}
            return time.monotonic(), held

        with clients_apart() as clients:
            about = served.address, known, factor, seconds, rng.randrange(2**32)
            came, memory = await watch(clients, _clients, *about, sample=memory_now, every_s=SAMPLE_EVERY_S)
        flood = came.flood
        in_time = [at_s for at_s, took_s in flood.done if took_s <= MAX_WAIT_S + PATIENCE * came.answer_s]
        # While it lasts, from when the first of it are answered.
        good = sum(came.started_s + came.answer_s <= at_s <= came.ended_s for at_s in in_time)
        good_rate = good / (came.ended_s - came.started_s - came.answer_s)
        peak_rate = statistics.mean(came.peak_rates)
        refused = sorted(flood.refused_ms)

        def held_bytes(name: str, quarter: int) -> float:
            begin_s = came.started_s + quarter * seconds / 4
            return statistics.median(held[name] for at_s, held in memory if begin_s <= at_s <= begin_s + seconds / 4)

        return {
            "seed": seed,
            "seconds": seconds,
            "peak_answers_per_s": [round(rate, 2) for rate in came.peak_rates],
            "come_per_s": round(came.come / seconds, 1),
            "goodput_per_s": round(good_rate, 2),
            "goodput_share": round(good_rate / peak_rate, 3),
            "answers": len(flood.done),
            "answers_in_time": len(in_time),
            "answer_s": {
                "p50": round(flood.answer_s(), 2),
                "max": round(max(took_s for _, took_s in flood.done), 2),
            },
            "refused": len(refused),
            "refused_ms": {
                "p50": round(refused[len(refused) // 2], 1),
                "p99": round(refused[int(0.99 * len(refused))], 1),
                "max": round(refused[-1], 1),
            },
            "retry_after_s": {"p50": round(statistics.median(flood.hints_s), 1), "max": round(max(flood.hints_s), 1)},
            "wrong": len(flood.wrong),
            "growth_mb": {name: round((held_bytes(name, 3) - held_bytes(name, 1)) / 1e6, 1) for name in memory[0][1]},
            "all_blocks_free": (await served.engine.recount()).all_free,
            "examples": flood.wrong[:5],
        }


def is_fine(found: dict[str, Any]) -> bool:
    in_bounds = found["goodput_share"] >= 0.9 and found["refused_ms"]["max"] < MOST_REFUSAL_MS
    in_bounds &= all(each <= MOST_GROWTH_MB for each in found["growth_mb"].values())
    return in_bounds and not found["wrong"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, factor=10.0, seconds=120.0)
