"""What a client who means ill does to the others: attacks from the network, beside 16 ordinary streams.

    python -m intarsia.tests.faults.attacks                                    all of them
    python -m intarsia.tests.faults.attacks --only template_loops,stop_ids     some; a part of a name is enough
    python -m intarsia.tests.faults.attacks --list
    python -m intarsia.tests.faults.attacks --python OTHER/.venv/bin/python    against another checkout's server

It starts `intarsia serve demo` with keys, learns what ordinary streams answer, and measures for each attack: the
longest silence of a stream and of /health, first without it and then with it; the front end's memory before, at most,
and 5 s after; whether each stream came whole and equal; and what the attackers were told. Attacks, ordinary users and
the probe are processes of their own. Then the checks: what one key may learn of another. Nothing but the network is
used, so that any version can be tried. Prints JSON; exits with 0 if every bound holds:

    silence at most 0.25 s more than without the attack    memory at most 64 MB more after it
    all streams complete and equal                         no internal error, no path or traceback told or logged
"""

import argparse
import contextlib
import json
import random
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

from . import attack_bodies, attack_heads, attack_holds  # noqa: F401 - they register what they have
from .attack_checks import CHECKS
from .attack_tools import ATTACKS, Attack, Attackers, Outcome, Play
from .guests import Guests, Probe, Seen
from .served import Gone, Served, rss_bytes, served

MOST_SILENCE_MORE_S = 0.25
MOST_MEMORY_MORE_BYTES = 64 * 10**6

SETTLE_S = 5.0
"""After an attack, before memory is looked at."""

LATE_S = 100.0
"""That an attack may take more than its time, before it is ended."""

LOOK_EVERY_S = 0.05

DIRTY_BYTES = 300 * 10**6
"""A server that has grown by more is replaced before the next attack."""

Found = dict[str, Any]


class Asked(NamedTuple):
    """How it is to be done."""

    python: str
    quiet_s: float
    seconds: float
    scale: float
    rounds: int
    most_bytes: int  # of the front end; with more, an attack is ended
    seed: int


class Period(NamedTuple):
    """What was seen in one stretch of time."""

    seen: Seen
    probe_s: float
    peak_bytes: int
    outcome: Outcome
    took_s: float


class Stage:
    """A server with its guests. A new one is cheap compared with a wrong figure."""

    def __init__(self, server: Served, guests: Guests, probe: Probe):
        self.server, self._guests, self._probe = server, guests, probe
        self.first_bytes = server.rss_bytes()

    def is_dirty(self) -> bool:
        return not self.server.is_running() or self.server.rss_bytes() > self.first_bytes + DIRTY_BYTES

    def undisturbed(self, seconds: float) -> Period:
        return self._period(lambda: time.sleep(seconds))

    def under(self, play: Play, asked: Asked, seconds: float) -> Period:
        attackers = Attackers(play, self.server.target, seconds, asked.scale)
        self._forget()
        return self._period(lambda: self._watch(attackers, asked, seconds))

    def stop(self) -> Seen:
        return self._guests.stop()

    def _forget(self) -> None:
        self._guests.seen()
        self._probe.longest_s()

    def _period(self, wait: Any) -> Period:
        started_s = time.monotonic()
        peak_bytes, outcome = wait() or (self.server.rss_bytes(), Outcome())
        took_s = time.monotonic() - started_s
        probe_s = self._probe.longest_s()
        return Period(self._guests.seen(), probe_s, peak_bytes, outcome, took_s)

    def _watch(self, attackers: Attackers, asked: Asked, seconds: float) -> tuple[int, Outcome]:
        """Memory at most, from the beginning of the attack to 5 s after its end."""
        peak_bytes, too_much, until_s = 0, "", time.monotonic() + seconds + LATE_S
        attackers.go()
        while not attackers.is_done() and not too_much and time.monotonic() < until_s:
            peak_bytes = max(peak_bytes, rss_bytes(self.server.pid))
            if peak_bytes > asked.most_bytes:
                too_much = f"ended at {peak_bytes / 1e9:.1f} GB of the front end"
            time.sleep(LOOK_EVERY_S)
        outcome = attackers.end()
        outcome.problems += [too_much] if too_much else []
        until_s = time.monotonic() + SETTLE_S
        while time.monotonic() < until_s:
            peak_bytes = max(peak_bytes, rss_bytes(self.server.pid))
            time.sleep(LOOK_EVERY_S)
        return peak_bytes, outcome


@contextlib.contextmanager
def stage(asked: Asked) -> Iterator[Stage]:
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(served(asked.python))
        guests = Guests(server.target, asked.seed)
        stack.callback(guests.close)
        probe = Probe(server.target)
        stack.callback(probe.close)
        guests.start()
        here = Stage(server, guests, probe)
        here.undisturbed(3.0)  # the first streams of a server are its slowest
        here.first_bytes = server.rss_bytes()
        yield here


class Stages:
    """The stage, anew when an attack has left it dirty."""

    def __init__(self, asked: Asked):
        self._asked = asked
        self._stack = contextlib.ExitStack()
        self._stage: Stage | None = None

    def clean(self) -> Stage:
        if self._stage is not None and self._stage.is_dirty():
            self.close()
        if self._stage is None:
            self._stage = self._stack.enter_context(stage(self._asked))
        return self._stage

    def close(self) -> None:
        self._stage = None
        self._stack.close()


def measured(stages: Stages, each: Attack, asked: Asked) -> Found:
    """Rounds of quiet and attack."""
    seconds = max(asked.seconds, each.least_s)
    before: list[Period] = []
    during: list[Period] = []
    here = stages.clean()
    logged = here.server.tracebacks()
    before_bytes = 0
    family_bytes = here.server.family_bytes()
    for _ in range(asked.rounds):
        here.undisturbed(0.1)
        without = here.under(each.control, asked, seconds) if each.control else here.undisturbed(asked.quiet_s)
        before.append(without)
        before_bytes = before_bytes or here.server.rss_bytes()
        during.append(here.under(each.play, asked, seconds))
        if not here.server.is_running():
            break
    after_bytes = here.server.rss_bytes()
    peak_bytes = max(p.peak_bytes for p in during)
    if peak_bytes - before_bytes > each.most_peak_bytes:
        during[-1].outcome.problems.append(f"{_mb(peak_bytes - before_bytes)} MB more while it lasted")
    return _judged(
        {
            "about": each.about,
            "stream_silence_s": _compared([p.seen.silence_s for p in before], [p.seen.silence_s for p in during]),
            "health_silence_s": _compared([p.probe_s for p in before], [p.probe_s for p in during]),
            "memory_mb": {
                "before": _mb(before_bytes),
                "peak": _mb(peak_bytes),
                "after": _mb(after_bytes),
                "more": _mb(after_bytes - before_bytes),
                "more_of_all_processes": _mb(here.server.family_bytes() - family_bytes),
            },
            "streams": _streams(before + during),
            "got": dict(sum((p.outcome.got for p in during), start=Outcome().got)),
            "problems": [problem for p in during for problem in p.outcome.problems][:10],
            "tracebacks": here.server.tracebacks() - logged,
            "is_running": here.server.is_running(),
            "took_s": [round(p.took_s, 1) for p in during],
            "own_lag_s": round(max(p.seen.own_lag_s for p in during), 3),
        }
    )


def _compared(before: list[float], during: list[float]) -> Found:
    """Medians over the rounds."""
    without, beside = statistics.median(before), statistics.median(during)
    return {"without": round(without, 3), "with": round(beside, 3), "more": round(beside - without, 3)}


def _streams(periods: list[Period]) -> Found:
    wrong = [each for p in periods for each in p.seen.wrong]
    failed = [each for p in periods for each in p.seen.failed]
    finished = sum(p.seen.finished for p in periods)
    return {"finished": finished, "wrong": len(wrong), "failed": len(failed), "examples": (wrong + failed)[:3]}


def _mb(count: float) -> int:
    return round(count / 1e6)


def _judged(found: Found) -> Found:
    """With the bounds that do not hold, in words."""
    broken = [
        f"{what} silent for {found[name]['more']:g} s more"
        for what, name in (("a stream was", "stream_silence_s"), ("/health was", "health_silence_s"))
        if found[name]["more"] > MOST_SILENCE_MORE_S
    ]
    if found["memory_mb"]["more"] * 10**6 > MOST_MEMORY_MORE_BYTES:
        broken.append(f"{found['memory_mb']['more']} MB more after it")
    streams = found["streams"]
    if streams["wrong"] or streams["failed"]:
        broken.append(f"{streams['wrong']} streams wrong, {streams['failed']} failed")
    if not streams["finished"]:
        broken.append("no stream came to its end")
    if found["tracebacks"]:
        broken.append(f"{found['tracebacks']} tracebacks in the log")
    if not found["is_running"]:
        broken.append("the server has ended")
    return {"fine": not broken and not found["problems"], "broken": broken} | found


# -- the program -----------------------------------------------------------------------------------------------------


def run(names: list[str], checks: list[str], asked: Asked) -> Found:
    found: Found = {"seed": asked.seed, "scale": asked.scale, "rounds": asked.rounds, "attacks": {}, "checks": {}}
    stages = Stages(asked)
    try:
        for name in names:
            try:
                result = measured(stages, ATTACKS[name], asked)
            except (Gone, TimeoutError, RuntimeError) as error:
                stages.close()
                result = {"fine": False, "broken": [f"{type(error).__name__}: {error}"]}
            found["attacks"][name] = result
            _tell(name, result)
    finally:
        stages.close()
    if checks:
        with served(asked.python) as server:
            for name in checks:
                found["checks"][name] = result = _checked(name, server)
                _tell(name, result)
    every = [*found["attacks"].values(), *found["checks"].values()]
    found["fine"] = all(each["fine"] for each in every)
    return found


def _checked(name: str, server: Served) -> Found:
    logged = server.tracebacks()
    about = " ".join((CHECKS[name].__doc__ or "").split())
    try:
        result = CHECKS[name](server.target)
    except Exception as error:  # noqa: BLE001 - whatever a server may do to a client
        result = {"fine": False, "failed": f"{type(error).__name__}: {error}"[:500]}
    more = server.tracebacks() - logged
    return {"about": about} | result | {"tracebacks": more, "fine": result["fine"] and not more}


def _tell(name: str, result: Found) -> None:
    shown = {key: value for key, value in result.items() if key not in ("fine", "about")}
    print(f"{name}: {'fine' if result['fine'] else 'NOT FINE'} {shown}", file=sys.stderr, flush=True)


def _chosen(wanted: str, there: list[str]) -> list[str]:
    parts = [part for part in wanted.split(",") if part]
    exact = [name for name in there if name in parts]
    parts = [part for part in parts if part not in exact]
    return [name for name in there if name in exact or any(part in name for part in parts)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names or parts of them, with commas  [default: all]")
    parser.add_argument("--list", action="store_true", help="say what there is, and end")
    parser.add_argument("--python", default=sys.executable, help="interpreter of the checkout whose server it is")
    parser.add_argument("--seconds", type=float, default=10.0, help="of an attack, unless it needs more  [default: 10]")
    parser.add_argument("--quiet", type=float, default=10.0, help="seconds without it, before  [default: 10]")
    parser.add_argument("--rounds", type=int, default=1, help="of both; silences are medians over them  [default: 1]")
    parser.add_argument("--scale", type=float, default=1.0, help="of the sizes of the attacks  [default: 1]")
    parser.add_argument("--most-memory-gb", type=float, default=6.0, help="an attack is ended there  [default: 6]")
    parser.add_argument("--seed", type=int, default=None, help="[default: drawn]")
    args = parser.parse_args()
    if args.list:
        for name, each in ATTACKS.items():
            print(f"{name:26}{each.about}")
        for name, check in CHECKS.items():
            print(f"{name:26}{' '.join((check.__doc__ or '').split())}")
        return
    seed = random.randrange(2**32) if args.seed is None else args.seed
    asked = Asked(args.python, args.quiet, args.seconds, args.scale, args.rounds, int(args.most_memory_gb * 1e9), seed)
    every = [*ATTACKS, *CHECKS]
    names = _chosen(args.only, every) if args.only else every
    if not names:
        parser.error(f"--only {args.only}: there is none of that name; --list says what there is")
    found = run([n for n in names if n in ATTACKS], [n for n in names if n in CHECKS], asked)
    print(json.dumps(found, indent=2))
    sys.exit(0 if found["fine"] else 1)


if __name__ == "__main__":
    main()
