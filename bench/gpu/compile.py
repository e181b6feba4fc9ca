"""Every kernel compiled before anything is timed, in several processes, so that no later part waits for a compiler.

First what `ahead.py` lists, which real models launch; then the first launch of every case of the parts that follow,
which compiles the rest in just the form in which it is launched. Both fill Triton's cache on disk, where later
processes find it.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import islice

from .device import Bench
from .parts import Case, Row


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    return [Case("kernels of real models", _ahead), Case("first launches", _launches)]


def _ahead(bench: Bench) -> Iterator[Row]:
    """In a rehearsal for a GPU that is not there: the compiler needs none."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    capability = 10 * major + minor
    command = [sys.executable, "-m", "intarsia.bench.gpu.compile", str(capability), "--of", str(bench.processes)]
    command += ["--most", "1"] * bench.is_rehearsed
    yield _together(bench, [[*command, "--share", str(n)] for n in range(bench.processes)])


def _launches(bench: Bench) -> Iterator[Row]:
    command = [sys.executable, "-m", "intarsia.bench.gpu.job", "touch", "--processes", str(bench.processes)]
    command += ["--parts", ",".join(bench.parts)] + ["--rehearse"] * bench.is_rehearsed
    yield _together(bench, [[*command, "--touch", str(n)] for n in range(bench.processes)])


def _together(bench: Bench, commands: list[list[str]]) -> Row:
    """Their processes die with this one: they are of its group."""
    started = time.time()
    children = [
        subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=_environment()) for command in commands
    ]
    words = [child.communicate()[1] for child in children]
    row: Row = {"processes": len(children), "seconds": round(time.time() - started, 1)}
    notes = [line for text in words for line in text.splitlines() if line.strip()]
    if any(child.returncode for child in children):
        raise RuntimeError(f"exit codes {[child.returncode for child in children]}: {' | '.join(notes[-3:])}")
    return row | ({"notes": notes[:10]} if notes else {})


def _environment() -> dict[str, str]:
    """A pretended device has Triton interpreted; each child decides for itself."""
    import os

    return {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("capability", type=int)
    parser.add_argument("--share", type=int)
    parser.add_argument("--of", type=int)
    parser.add_argument("--most", type=int, help="of them")
    args = parser.parse_args()
    from intarsia.bench import ahead

    mine = islice(ahead.variants(["bf16"], args.capability), args.share, None, args.of)
    for variant in islice(mine, args.most):
        ahead.build(variant, args.capability)


if __name__ == "__main__":
    main()
