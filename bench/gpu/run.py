"""The command: a process for each job, in order, within the minutes there are."""

import argparse
import importlib.metadata
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from .lines import FAILED, LEFT_OUT, LOST, WRONG, Lines
from .parts import FIRST, JOBS, PARTS, SECOND, Job, jobs_of
from .tables import tables

GRACE_S = 90.0
"""A job may take longer than its share, while the others have not begun; then it is ended."""
MINUTES, REHEARSAL_MINUTES = 9.0, 60.0
MARGIN_S = 10.0
"""Before the end, for a process to be ended and the last lines to be written."""
LEAST_S = 5.0
"""A job that has less need not begin."""
MOST_RESTARTS = 8
PACKAGES = ("torch", "triton", "transformers", "numpy", "vllm", "vllm-flash-attn")


def run(description: str, site: Path) -> int:
    """site: a folder in which `intarsia` is found"""
    args = _arguments(description)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if args.tables:
        print(tables(args.tables))
        return 0
    jobs = jobs_of(args.parts)
    if args.only:
        jobs = [job for job in jobs if any(args.only in case.name for case in job.cases(args.rehearse))]
    if args.list:
        for job in jobs:
            for case in job.cases(args.rehearse):
                if args.only in case.name:
                    print(f"{job.id}: {case.name}")
        return 0
    started = time.time()
    lines = Lines(args.output.absolute(), f"{time.strftime('%Y-%m-%dT%H:%M:%S')}-{os.getpid()}")
    lines.add({"part": "about", "minutes": args.minutes, "parts": args.parts, "versions": _versions()})
    battery = Battery(lines, args, site, started + args.minutes * 60 - MARGIN_S)
    for n, job in enumerate(jobs):
        battery.run(job, jobs[n:])
    return battery.told()


def _arguments(description: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--output", type=Path, default=Path("gpu_battery.jsonl"), help="lines are appended")
    parser.add_argument("--parts", type=lambda text: text.split(","))
    parser.add_argument("--first", action="store_true", help=f"parts {', '.join(FIRST)}")
    parser.add_argument("--second", action="store_true", help=f"parts {', '.join(SECOND)}")
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--minutes", type=float, help=f"after which nothing runs any more; default {MINUTES:g}")
    parser.add_argument(
        "--processes", type=int, default=max(1, min(12, (os.cpu_count() or 2) - 2)), help="that compile"
    )
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tables", type=Path, metavar="FILE", help="print what a file holds as tables, and end")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    asked = [*(FIRST if args.first else ()), *(SECOND if args.second else ()), *(args.parts or ())]
    known = [*PARTS, *(job.id for job in JOBS if job.name)]
    if unknown := set(asked) - set(known):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}; choose from {', '.join(known)}")
    if args.minutes is None:
        args.minutes = REHEARSAL_MINUTES if args.rehearse else MINUTES
    args.parts = [part for part in known if part in asked] or list(PARTS)
    if not (args.rehearse or args.list or args.tables) and not _has_gpu():
        parser.error("there is no GPU here; --rehearse shows that the command works without one")
    return args


def _has_gpu() -> bool:
    """Asked in a process of its own, so that this one takes nothing of the device."""
    command = [sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"python": sys.version.split()[0]}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


class Battery:
    """Runs jobs one after the other, and knows until when."""

    def __init__(self, lines: Lines, args: argparse.Namespace, site: Path, until: float):
        """until: in seconds of `time.time`"""
        self._lines, self._args, self._site, self._until = lines, args, site, until

    def run(self, job: Job, left: list[Job]) -> None:
        """left: this job and those after it, which share what time there is"""
        now = time.time()
        seconds = (self._until - now) * job.share / sum(each.share for each in left)
        if self._until - now < LEAST_S:
            return self._leave_out(job, 0, "no time was left for this job")
        first, _ = self._lines.unfinished(job.id)
        for _ in range(MOST_RESTARTS):
            code, words = self._process(job, first, now + seconds)
            first, open_case = self._lines.unfinished(job.id)
            if code == 0:
                return None
            where = {"part": job.part, "job": job.id, "case": open_case or "-"}
            if code is None:
                self._lines.add({**where, LEFT_OUT: "it was still running when the job's time was over"})
                return self._leave_out(job, first, "no time was left")
            if open_case is not None:
                self._lines.add({**where, FAILED: f"its process ended with {code}: {words}"})
            elif code != LOST:
                self._lines.add({**where, FAILED: f"its process ended with {code} beside its cases: {words}"})
                return self._leave_out(job, first, "the job could not go on")
        return self._leave_out(job, first, f"its process ended {MOST_RESTARTS} times")

    def _process(self, job: Job, first: int, until: float) -> tuple[int | None, str]:
        """Runs the cases from `first` on. Returns its exit status, None if it took too long, and its last words."""
        args = self._args
        command = [sys.executable, "-m", "intarsia.bench.gpu.job", job.id, "--output", str(self._lines.path)]
        command += ["--run", self._lines._run, "--first", str(first), "--until", str(until), "--only", args.only]
        command += ["--parts", ",".join(args.parts), "--processes", str(args.processes)]
        command += ["--rehearse"] * args.rehearse
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, cwd=self._site, stderr=errors, start_new_session=True)
            try:
                child.wait(max(1.0, min(self._until, until + GRACE_S) - time.time()))
            except subprocess.TimeoutExpired:
                return None, ""
            finally:
                if child.poll() is None:  # also where a person breaks it off
                    os.killpg(child.pid, signal.SIGKILL)  # those that it started, too
                    child.wait()
            errors.seek(0)
            return child.returncode, " ".join(errors.read().strip().splitlines()[-3:])[-600:]

    def _leave_out(self, job: Job, first: int, why: str) -> None:
        for case in job.cases(self._args.rehearse)[first:]:
            if self._args.only in case.name:
                self._lines.add({"part": job.part, "job": job.id, "case": case.name, LEFT_OUT: why})

    def told(self) -> int:
        """Says how it went. 1 if something failed or is wrong."""
        rows = list(self._lines.of_run())
        counts: Counter[str] = Counter()
        for row in rows:
            for kind in (FAILED, LEFT_OUT, WRONG):
                if row.get(kind):
                    counts[kind] += 1
                    print(f"{kind}: {_place(row)}: {row[kind]}")
        print(f"{sum('ended' in row for row in rows)} cases, {dict(counts) or 'nothing failed'}: {self._lines.path}")
        return int(bool(counts[FAILED] or counts[WRONG]))


def _place(row: dict[str, Any]) -> str:
    return ", ".join(str(row[name]) for name in ("job", "case", "backend") if name in row)
