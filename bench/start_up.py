"""From `intarsia serve demo` to the first whole answer over HTTP; two checkouts in turns, and where the time goes.

    python bench/start_up.py [--other CHECKOUT] [--rounds 10]

Each start is a cold one: what the run before left behind (a fork server of an older version lives on for 30 s) is ended
first, and waited for. Python may keep its bytecode, as an installed package does, and the first round is not counted.
Prints one JSON object: medians in seconds, of the ratios of neighbouring runs, and of one more start here the CPU
seconds of each process at the first answer, with when it was first seen and whose it is: Ray's, imports (the fork
server does nothing else until it forks; the front end mostly), or ours.
"""

import argparse
import contextlib
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent.parent
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
LOOK_EVERY_S = 0.05
GIVE_UP_AFTER_S = 90.0
MARK = "INTARSIA_BENCH_START_UP"
"""Environment variable: by it we know what we have started, on a machine that others use, too."""

ASKED = {"model": "demo", "prompt": "In the", "max_tokens": 16, "temperature": 0}
OWNERS = (
    ("fork_server", "imports"),
    ("/ray/", "ray"),
    ("ray::Dashboard", "ray"),
    ("ray::RuntimeEnv", "ray"),
    ("ray::IDLE", "ray"),
    ("ray::", "ray and imports: an actor"),
    ("serve demo", "imports and ours: the front end"),
)


def main() -> None:
    args = _arguments()
    sides = {"here": HERE} | ({"there": args.other.resolve()} if args.other else {})
    found: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds + 1):
        for name in sorted(sides, reverse=bool(number % 2)):
            took_s = start(sides[name])
            if number:  # the first is for bytecode and the disk
                found[name].append(took_s)
            print(f"round {number}, {name}: {took_s:.2f} s", file=sys.stderr, flush=True)
    told: dict[str, Any] = {name: _summary(each) for name, each in found.items()}
    if args.other:
        told["median_of_ratios"] = round(statistics.median(map(float.__truediv__, *found.values())), 3)
        told["ratio_of_medians"] = round(told["here"]["median_s"] / told["there"]["median_s"], 3)
    if args.profile:
        told["profile"] = profiled(HERE)
    json.dump({"benchmark": "start_up", "rounds": args.rounds, **told}, sys.stdout, indent=2)
    print()


def _summary(took_s: list[float]) -> dict[str, Any]:
    return {"median_s": round(statistics.median(took_s), 2), "all_s": [round(each, 2) for each in took_s]}


def start(checkout: Path, seen: "Seen | None" = None) -> float:
    """Seconds from the command to its first whole answer. It is stopped then, and nothing of it is left."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [checkout / ".venv/bin/intarsia", "serve", "demo", "--port", "0", "--grpc-port", "0"]
    environment[MARK] = str(os.getpid())  # all that this starts has it
    began_s = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as server:
        watchdog = threading.Timer(GIVE_UP_AFTER_S, server.kill)
        watchdog.start()
        try:
            watching = seen.watch(server.pid, began_s) if seen else contextlib.nullcontext()
            with watching:
                _answer(_url(server))
                took_s = time.monotonic() - began_s
        finally:
            server.send_signal(signal.SIGINT)
            server.wait()
            watchdog.cancel()
    _end_what_is_left()
    return took_s


def _url(server: "subprocess.Popen[str]") -> str:
    assert server.stdout is not None
    url = None
    for line in server.stdout:
        url = next(iter(re.findall(r"http://127\.0\.0\.1:\d+", line)), url)
        if line.startswith("ready"):
            assert url is not None
            return url
    sys.exit("the server has ended before it was ready")


def _answer(url: str) -> None:
    asked = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(ASKED).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(asked, timeout=60) as answer:
        assert json.load(answer)["choices"][0]["text"]


def _end_what_is_left() -> None:
    left = [pid for pid in _processes() if pid != os.getpid() and _is_of_ours(pid)]
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    while any(map(_is_of_ours, left)):
        time.sleep(LOOK_EVERY_S)


def _is_of_ours(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return f"{MARK}={os.getpid()}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
    return False


def profiled(checkout: Path) -> list[dict[str, Any]]:
    """A start's processes in their order."""
    seen = Seen()
    took_s = start(checkout, seen)
    return [{"first_answer_s": round(took_s, 2)}, *seen.told()]


class Seen:
    """Processes of a start: those that the command started, and the fork server with its workers."""

    def __init__(self) -> None:
        self._first_s: dict[int, float] = {}
        self._cpu_s: dict[int, float] = {}
        self._commands: dict[int, str] = {}

    @contextlib.contextmanager
    def watch(self, root: int, began_s: float):
        is_over = threading.Event()

        def look() -> None:
            while not is_over.wait(LOOK_EVERY_S):
                self._look(root, time.monotonic() - began_s)

        watching = threading.Thread(target=look, daemon=True)
        watching.start()
        try:
            yield
        finally:
            is_over.set()
            watching.join()

    def _look(self, root: int, now_s: float) -> None:
        for pid, cpu_s in _processes().items():
            if pid == root or _is_of_ours(pid):
                self._first_s.setdefault(pid, now_s)
                self._cpu_s[pid] = cpu_s
                self._commands[pid] = _command(pid) or self._commands.get(pid, "")

    def told(self) -> list[dict[str, Any]]:
        return [
            {
                "first_seen_s": round(self._first_s[pid], 2),
                "cpu_s": round(self._cpu_s[pid], 2),
                "whose": next((whose for part, whose in OWNERS if part in self._commands[pid]), "ours"),
                "command": self._commands[pid][:60].strip() + " ... " + self._commands[pid].strip()[-40:],
            }
            for pid in sorted(self._first_s, key=lambda pid: self._first_s[pid])
        ]


def _processes() -> dict[int, float]:
    """CPU seconds of each."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                found[int(entry.name)] = (int(fields[11]) + int(fields[12])) / TICKS_PER_S
    return found


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ")
    return ""


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="another checkout, with its .venv")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="of one more start here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
