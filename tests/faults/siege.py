"""Attackers in turns for a long time, and a worker killed every minute: ordinary streams must not notice.

    python -m intarsia.tests.faults.siege --minutes 120

16 ordinary streams of known answers over HTTP and gRPC, through a real `intarsia serve` with keys; beside them the
attacks of `attacks.py` that are named, one after another, for 20 s each, with 10 s between them; and every minute a
worker is killed. Memory is looked at all along, and at rest before each turn. Prints JSON; exits with 1 if a stream was
wrong or lost, if the log holds a traceback, if pages are held at the end, or if the front end grows: by more than
5 MB an hour in the second half, when that is half an hour or more, and else by more than 64 MB in all.
"""

import contextlib
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter
from typing import Any, NamedTuple

from intarsia.deploy.client import Client

from . import attack_bodies, attack_heads, attack_holds  # noqa: F401 - they register what they have
from .attack_tools import ATTACKS, Attackers
from .guests import Guests, Seen
from .program import program
from .served import Served, rss_bytes, served

USUAL = "small_headers,other_lists,unread_streams,half_bodies"

TURN_S = 20.0
REST_S = 10.0
KILL_EVERY_S = 60.0
LOOK_EVERY_S = 1.0

MOST_SLOPE_MB_PER_HOUR = 5.0
MOST_GROWTH_MB = 64.0
LONG_S = 1800.0
"""A shorter time has no slope worth the name."""

MOST_BYTES = 6_000_000_000


class Sample(NamedTuple):
    at_s: float
    front_end_mb: float


class Siege:
    """One server, its guests, and those who attack it."""

    def __init__(self, server: Served, guests: Guests, rng: random.Random):
        self.server = server
        self.total = Seen()
        self.got: dict[str, Counter[str]] = {}
        self.problems: list[str] = []
        self.kills = 0
        self.samples: list[Sample] = []  # all along
        self.at_rest: list[Sample] = []
        self._guests, self._rng = guests, rng
        self._started_s = time.monotonic()
        self._next_kill_s = self._started_s + KILL_EVERY_S

    def turn(self, name: str) -> None:
        """A rest, and an attack."""
        self._wait(REST_S)
        self.at_rest.append(self._sample())
        attackers = Attackers(ATTACKS[name].play, self.server.target, max(TURN_S, ATTACKS[name].least_s), 1.0)
        attackers.go()
        until_s = time.monotonic() + 10 * TURN_S
        while not attackers.is_done() and time.monotonic() < until_s and self._is_small():
            self._wait(LOOK_EVERY_S)
        outcome = attackers.end()
        self.got.setdefault(name, Counter()).update(outcome.got)
        self.problems += [f"{name}: {problem}" for problem in outcome.problems]
        self._add(self._guests.seen())

    def end(self) -> None:
        self._wait(REST_S)
        self.at_rest.append(self._sample())
        self._add(self._guests.stop())

    def _wait(self, seconds: float) -> None:
        """Meanwhile memory is noted, and a worker killed when it is time."""
        until_s = time.monotonic() + seconds
        while (now_s := time.monotonic()) < until_s:
            self.samples.append(self._sample())
            if now_s >= self._next_kill_s:
                self._next_kill_s += KILL_EVERY_S
                self._kill_a_worker()
            time.sleep(min(LOOK_EVERY_S, max(0.0, until_s - time.monotonic())))

    def _kill_a_worker(self) -> None:
        with contextlib.suppress(OSError):
            os.kill(self._rng.choice(self.server.worker_pids()), signal.SIGKILL)
            self.kills += 1

    def _sample(self) -> Sample:
        return Sample(time.monotonic() - self._started_s, rss_bytes(self.server.pid) / 1e6)

    def _is_small(self) -> bool:
        return self.server.is_running() and rss_bytes(self.server.pid) < MOST_BYTES

    def _add(self, seen: Seen) -> None:
        total = self.total
        total.finished += seen.finished
        total.wrong += seen.wrong
        total.failed += seen.failed
        total.silence_s = max(total.silence_s, seen.silence_s)


async def run(minutes: float, attacks: str, workers: int, seed: int, python: str) -> dict[str, Any]:
    names = attacks.split(",")
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(python, tensor_parallel_size=workers))
        guests = Guests(server.target, seed)
        stack.callback(guests.close)
        guests.start()
        siege = Siege(server, guests, random.Random(seed))
        until_s = time.monotonic() + 60 * minutes
        turns = 0
        while time.monotonic() < until_s and server.is_running():
            siege.turn(names[turns % len(names)])
            turns += 1
            latest = siege.at_rest[-1]
            print(f"{latest.at_s:.0f} s: {latest.front_end_mb:.0f} MB, {_losses(siege)}", file=sys.stderr, flush=True)
        siege.end()
        return {"seed": seed, "minutes": minutes, "workers": workers, "turns": turns} | _found(siege)


def _losses(siege: Siege) -> dict[str, int]:
    total = siege.total
    return {"finished": total.finished, "wrong": len(total.wrong), "failed": len(total.failed), "kills": siege.kills}


def _found(siege: Siege) -> dict[str, Any]:
    server, total, at_rest = siege.server, siege.total, siege.at_rest
    second_half = at_rest[len(at_rest) // 2 :]
    tenth = max(1, len(siege.samples) // 10)
    mb = [sample.front_end_mb for sample in siege.samples]
    return _losses(siege) | {
        "longest_silence_s": round(total.silence_s, 2),
        "front_end_mb_by_tenth": [round(statistics.median(mb[n : n + tenth])) for n in range(0, len(mb), tenth)],
        "front_end_mb_at_rest": [round(sample.front_end_mb, 1) for sample in at_rest],
        "front_end_mb_peak": round(max(mb)),
        "growth_mb": round(at_rest[-1].front_end_mb - at_rest[min(1, len(at_rest) - 1)].front_end_mb, 1),
        "second_half_s": round(second_half[-1].at_s - second_half[0].at_s),
        "second_half_mb_per_hour": _slope_mb_per_hour(second_half),
        "tracebacks": server.tracebacks(),
        "is_running": server.is_running(),
        "held_pages": _held_pages(server) if server.is_running() else None,
        "got": {name: dict(each) for name, each in siege.got.items()},
        "problems": siege.problems[:20],
        "examples": (total.wrong + total.failed)[:5],
    }


def _slope_mb_per_hour(samples: list[Sample]) -> float | None:
    if len(samples) < 3:
        return None
    line = statistics.linear_regression([s.at_s / 3600 for s in samples], [s.front_end_mb for s in samples])
    return round(line.slope, 1)


def _held_pages(server: Served) -> int:
    """When all have ended."""
    with Client(server.target.grpc, api_key=server.target.keys["bob"]) as client:
        until_s = time.monotonic() + 60
        while (load := client.load()).running + load.waiting and time.monotonic() < until_s:
            time.sleep(0.2)
        return client.cache_state().held_pages


def is_fine(found: dict[str, Any]) -> bool:
    lost = found["wrong"] or found["failed"] or not found["is_running"] or found["held_pages"]
    is_long = found["second_half_s"] >= LONG_S
    grew = found["second_half_mb_per_hour"] > MOST_SLOPE_MB_PER_HOUR if is_long else found["growth_mb"] > MOST_GROWTH_MB
    return not (lost or grew or found["tracebacks"] or found["problems"])


if __name__ == "__main__":
    program(__doc__, run, is_fine, minutes=10.0, attacks=USUAL, workers=1, python=sys.executable)
