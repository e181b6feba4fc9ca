"""Ten times as many requests as can be served, for two minutes.

    python -m intarsia.tests.faults.overload --factor 10 --seconds 120

First the peak: as many streams as there are seats, each after its end followed by another. Then requests come at ten
times that rate, whether others are answered or not. Goodput counts answers that are right, and complete within the
time that a request may wait and be answered in. Prints JSON; exits with 1 if goodput falls below nine tenths of the
peak, or a refusal is untyped.
"""

import asyncio
import random
import statistics
import time
from typing import Any

from intarsia.deploy.client import AsyncClient
from intarsia.errors import IntarsiaError, Overloaded
from intarsia.workers.environment import resident_bytes

from .processes import watched
from .program import program
from .service import Known, answered, draw, read, service

SEATS = 16
MAX_WAIT_S = 4.0
PEAK_S = 20.0
SAMPLE_EVERY_S = 1.0


class Flood:
    """Requests that come at a steady rate, whatever becomes of them."""

    def __init__(self, client: AsyncClient, known: list[Known], rng: random.Random):
        self.done_s: list[float] = []  # when right answers were complete
        self.took_s: list[float] = []
        self.refused_ms: list[float] = []
        self.hints_s: list[float] = []
        self.wrong: list[str] = []
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
        started_s = time.monotonic()
        try:
            fault = await read(self._client, known)
        except Overloaded as refusal:
            self.refused_ms.append((time.monotonic() - started_s) * 1e3)
            self.hints_s.append(refusal.retry_after_s or 0.0)
            return
        except IntarsiaError as error:
            fault = f"{type(error).__name__}: {error}"
        if fault is not None:
            self.wrong.append(fault)
            return
        self.done_s.append(time.monotonic())
        self.took_s.append(time.monotonic() - started_s)


async def run(factor: float, seconds: float, seed: int) -> dict[str, Any]:
    rng = random.Random(seed)
    settings: dict[str, Any] = {"max_num_seqs": SEATS, "max_wait_s": MAX_WAIT_S}
    async with service(**settings) as served, AsyncClient(served.address) as client:
        known = await answered(client, draw(rng, 60, 150, 250))

        peak = Flood(client, known, rng)
        until_s = time.monotonic() + PEAK_S

        async def seat() -> None:
            while time.monotonic() < until_s:
                await peak.come()

        started_s = time.monotonic()
        await asyncio.gather(*(seat() for _ in range(SEATS)))
        peak_rate = len(peak.done_s) / (time.monotonic() - started_s)
        answer_s = statistics.median(peak.took_s)

        flood = Flood(client, known, rng)
        memory: list[dict[str, int]] = []
        started_s = next_s = sampled_s = time.monotonic()
        while (now_s := time.monotonic()) < started_s + seconds:
            while next_s <= now_s:
                flood.come()
                next_s += rng.expovariate(factor * peak_rate)
            if now_s >= sampled_s:
                sampled_s += SAMPLE_EVERY_S
                memory.append({name: resident_bytes(pid) for name, pid in (await watched(served)).items()})
            await asyncio.sleep(max(0.0, next_s - time.monotonic()))
        offered = len(flood.done_s) + len(flood.refused_ms) + len(flood._tasks)
        ended_s = time.monotonic()
        await flood.end()
        # While it lasts, from when seats are taken on.
        good = sum(started_s + answer_s <= at <= ended_s for at in flood.done_s) / (seconds - answer_s)
        refused = sorted(flood.refused_ms)
        in_time = sum(took <= MAX_WAIT_S + 3 * answer_s for took in flood.took_s)
        half = memory[len(memory) // 4 :]
        return {
            "seed": seed,
            "seconds": seconds,
            "peak_answers_per_s": round(peak_rate, 2),
            "offered_per_s": round(offered / seconds, 1),
            "goodput_per_s": round(good, 2),
            "goodput_share": round(good / peak_rate, 3),
            "answers": len(flood.done_s),
            "answers_in_time": in_time,
            "answer_s": {"p50": round(statistics.median(flood.took_s), 2), "max": round(max(flood.took_s), 2)},
            "refused": len(refused),
            "refused_ms": {
                "p50": round(refused[len(refused) // 2], 1),
                "p99": round(refused[int(0.99 * len(refused))], 1),
                "max": round(refused[-1], 1),
            },
            "retry_after_s": {"p50": round(statistics.median(flood.hints_s), 1), "max": round(max(flood.hints_s), 1)},
            "wrong": len(flood.wrong),
            "growth_mb": {
                name: round((half[-1][name] - half[0][name]) / 1e6, 1) for name in half[0] if name in half[-1]
            },
            "all_blocks_free": (await served.engine.recount()).all_free,
            "examples": flood.wrong[:5],
        }


def is_fine(found: dict[str, Any]) -> bool:
    return found["goodput_share"] >= 0.9 and not found["wrong"] and found["all_blocks_free"]


if __name__ == "__main__":
    program(__doc__, run, is_fine, factor=10.0, seconds=120.0)
