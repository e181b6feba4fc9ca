"""Play random scenarios of the real scheduler and cache manager under a virtual clock.

    python bench/simulate.py [--scenarios 100000] [--first-seed 0] [--processes N]
    python bench/simulate.py --seed 4711                  # one scenario again, with its traceback

Prints one JSON object: how many were played, what happened in them, how many violated an invariant, and virtual seconds
per real one (of one process). What is checked is told in `tests/simulation.py`.
"""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict

from intarsia.tests.simulation import Outcome, Scenario, Violation

BATCH = 500


def main() -> None:
    args = _arguments()
    if args.seed is not None:
        print(json.dumps(asdict(Scenario(args.seed).run())))
        return
    total, violations = Outcome(), []
    cpu_s = 0.0
    started = time.perf_counter()
    seeds = range(args.first_seed, args.first_seed + args.scenarios)
    with ProcessPoolExecutor(args.processes) as pool:
        batches = [seeds[n : n + BATCH] for n in range(0, len(seeds), BATCH)]
        for outcome, found, seconds in pool.map(_play, batches):
            total.add(outcome)
            violations += found
            cpu_s += seconds
    json.dump(
        {
            "benchmark": "simulate",
            "scenarios": args.scenarios,
            "first_seed": args.first_seed,
            "violations": len(violations),
            "violated": violations[:20],
            **asdict(total),
            "real_s": round(time.perf_counter() - started, 1),
            "processes": args.processes,
            "times_real_time": round(total.virtual_s / cpu_s, 1),
        },
        sys.stdout,
        indent=2,
    )
    print()
    sys.exit(1 if violations else 0)


def _play(seeds: range) -> tuple[Outcome, list[str], float]:
    total, violations = Outcome(), []
    started = time.process_time()
    for seed in seeds:
        try:
            total.add(Scenario(seed).run())
        except Violation as violation:
            violations.append(str(violation))
    return total, violations, time.process_time() - started


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scenarios", type=int, default=100_000)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)))
    return parser.parse_args()


if __name__ == "__main__":
    main()
