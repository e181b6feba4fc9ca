"""One job in a process of its own: `run.py` starts it, and starts it anew behind a case that ended the process."""

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

from .lines import BEGAN, ENDED, FAILED, LEFT_OUT, LOST, Lines, told
from .parts import JOBS, Case, Job, jobs_of


def main() -> int:
    args = _arguments()
    if args.rehearse:
        from . import rehearsal

        rehearsal.install()  # before anything of ours that uses torch
    from .device import Bench

    if args.touch is not None:
        return _touch(args, Bench(args.rehearse, args.processes, args.parts, {}))
    lines = Lines(args.output, args.run)
    ceilings = {name: value for row in lines.of_run() if row["part"] == "ceilings" for name, value in row.items()}
    bench = Bench(args.rehearse, args.processes, args.parts, ceilings)
    job = next(job for job in JOBS if job.id == args.job)
    return _run(job, args, lines, bench)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("job")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--run")
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--until", type=float, default=float("inf"))
    parser.add_argument("--only", default="")
    parser.add_argument("--parts", type=lambda text: text.split(","), default=[])
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--touch", type=int, help="launch this share of all kernels once")
    return parser.parse_args()


def _run(job: Job, args: argparse.Namespace, lines: Lines, bench: Any) -> int:
    for number, case in enumerate(job.cases(args.rehearse)):
        if number < args.first or args.only not in case.name:
            continue
        where = {"part": job.part, "job": job.id, "case": case.name}
        if time.time() > args.until:
            lines.add({**where, LEFT_OUT: "the time of this job was over"})
            continue
        lines.add({**where, BEGAN: number})
        started = time.time()
        try:
            for row in case.run(bench):
                lines.add({**where, **row})
        except Exception as error:  # noqa: BLE001  one case is lost, not those after it
            lines.add({**where, FAILED: told(error)})
        lines.add({**where, ENDED: number, "took_s": round(time.time() - started, 2)})
        if not bench.is_alive():
            return LOST
        bench.tidy()
    return 0


def _touch(args: argparse.Namespace, bench: Any) -> int:
    """Launch every kernel of every `processes`-th case, so that a compiler has seen it. Failures are told later, where
    they are measured; but a rehearsal is there to find them."""
    failed = False
    for case in _touchable(args)[args.touch :: args.processes]:
        try:
            assert case.touch is not None
            case.touch(bench)
        except Exception as error:  # noqa: BLE001
            print(f"{case.name}: {told(error)}", file=sys.stderr)
            failed = True
        if not bench.is_alive():
            return LOST
        bench.tidy()
    return int(failed and args.rehearse)


def _touchable(args: argparse.Namespace) -> list[Case]:
    """Those that take long first. In a rehearsal one of each part."""
    found: dict[str, list[Case]] = {}
    for job in reversed(jobs_of(args.parts)):
        found.setdefault(job.part, []).extend(case for case in job.cases(args.rehearse) if case.touch)
    return [case for cases in found.values() for case in (cases[:1] if args.rehearse else cases)]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    if "--rehearse" in sys.argv:
        os._exit(code)  # torch, changed as it is, need not tidy up
    sys.exit(code)
