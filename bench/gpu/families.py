"""Tiny models of every family on the device, whose tokens are compared with those of transformers in float32.

What the tests do on a pretended device, with real kernels, streams and graphs. Families share processes, as many as
compile, since most of the time goes into compilers.
"""

import argparse
import asyncio
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from .device import Bench
from .lines import FAILED, WRONG, told
from .parts import Case, Row

PROMPTS = 3
TOKENS = 12
TINY_TOKENS = 4
MOST_S, REHEARSED_S = 120.0, 1800.0
"""For one family in a process of its own."""
REHEARSED = ("mistral",)

SMALL = {"max_prefill_chunk_tokens": 20, "max_num_batched_tokens": 32}
FIVES = {"block_size": 5}
"""So that each answer needs more blocks."""
SWAPPING = FIVES | {"swap_space": "64MiB", "max_prefill_chunk_tokens": 7, "enable_prefix_caching": False}
SOME = ("gemma3", "llama", "qwen3", "gpt_oss")
"""Families all of whose sums are in kernels of ours."""


@dataclass(frozen=True, slots=True)
class Way:
    """In which the same prompts are answered."""

    name: str
    settings: dict[str, Any]
    has_little_memory: bool = False  # so that requests give way to each other
    is_judged: bool = True  # else it is told how many tokens are those of float32
    only: tuple[str, ...] = ()  # families


WAYS = (
    Way("recorded", SMALL),
    Way("preempted", SMALL | FIVES, has_little_memory=True),
    Way("swapped", SMALL | SWAPPING, has_little_memory=True),
    Way("by Python", SMALL | {"enforce_eager": True}),
    Way("same bits", SMALL | {"same_bits": True}, only=SOME),
    Way("bfloat16", SMALL | {"dtype": "bfloat16"}, is_judged=False, only=(*SOME, "bamba", "qwen3_next")),
)


def cases(name: str, is_rehearsed: bool) -> list[Case]:
    return [Case("all families", _all)]


def _all(bench: Bench) -> Iterator[Row]:
    """Rows come as they are known: what is not done in time loses what it has not told yet."""
    from intarsia.tests.models import FAMILIES

    asked = REHEARSED if bench.is_rehearsed else tuple(FAMILIES)
    rows: queue.Queue[Row | None] = queue.Queue()
    with ThreadPoolExecutor(bench.processes) as pool:
        for family in asked:
            pool.submit(_in_process, family, bench.is_rehearsed, rows)
        for _ in asked:
            yield from iter(rows.get, None)


def _in_process(family: str, is_rehearsed: bool, rows: "queue.Queue[Row | None]") -> None:
    """A process for each family: what breaks the device there breaks it for no other. Ends with None."""
    command = [sys.executable, "-m", "intarsia.bench.gpu.families", family] + ["--rehearse"] * is_rehearsed
    # As many threads as processors in each of so many processes would wait for each other.
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment)
        timer = threading.Timer(REHEARSED_S if is_rehearsed else MOST_S, child.kill)
        timer.start()
        assert child.stdout is not None
        for line in child.stdout:
            if line.startswith("{"):
                rows.put(json.loads(line))
        code = child.wait()
        timer.cancel()
        errors.seek(0)
        if code != 0:
            last = " ".join(errors.read().strip().splitlines()[-3:])[-400:]
            rows.put({"family": family, FAILED: f"its process ended with {code}: {last}"})
    rows.put(None)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("family")
    parser.add_argument("--rehearse", action="store_true")
    args = parser.parse_args()
    if args.rehearse:
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported, which transformers does
    from intarsia.tests import models
    from intarsia.tests.pretended_cuda.scenes import oracle, scene_of

    with tempfile.TemporaryDirectory() as folder:
        path = models.make_checkpoint(args.family, Path(folder, args.family))
        scene = scene_of(args.family, path, PROMPTS, TINY_TOKENS if args.rehearse else TOKENS)
        expected = oracle(scene)
        if args.rehearse:
            from . import rehearsal

            rehearsal.install()  # before anything of ours that uses torch
        for way in WAYS:
            if not way.only or args.family in way.only:
                print(json.dumps({"family": args.family, "way": way.name} | _tried(way, scene, expected)), flush=True)


def _tried(way: Way, scene: Any, expected: list[list[int]]) -> Row:
    started = time.perf_counter()
    try:
        row = asyncio.run(_answered(way, scene, expected))
    except Exception as error:  # noqa: BLE001  one way fails, not those after it
        row = {FAILED: told(error)}
    return row | {"took_s": round(time.perf_counter() - started, 1)}


async def _answered(way: Way, scene: Any, expected: list[list[int]]) -> Row:
    from intarsia.controller.scheduling.step_times import StepTimes
    from intarsia.tests.least_memory import least_memory
    from intarsia.tests.local import LocalWorkers, complete, make_engine

    usual = {"kv_cache_memory": "4MiB", "dtype": "float32"}
    settings: dict[str, Any] = usual | way.settings
    if way.has_little_memory:
        longest = max(len(prompt) for prompt in scene.prompts) + scene.tokens
        settings["kv_cache_memory"] = least_memory(scene, settings["block_size"], longest)
    workers = LocalWorkers()
    engine = await make_engine(scene.path, workers, **settings)
    ask = partial(complete, engine, scene.prompts, scene.sampling, scene.images)
    # Else it is cheaper to compute such short requests anew than to copy their blocks.
    with mock.patch.object(StepTimes, "prefill_us", lambda self, tokens: 1e9):
        answers = [await ask(), await ask()]
    stats = engine.stats
    row: Row = {"not_recorded": workers.refusal, "preemptions": stats.preemptions, "swaps": stats.swaps}
    pairs = [
        (token, wanted)
        for each in answers
        for answer, right in zip(each, expected, strict=True)
        for token, wanted in zip(answer.token_ids, right, strict=False)
    ]
    as_expected = [[answer.token_ids for answer in each] == expected for each in answers]
    row["same_tokens"] = f"{sum(token == wanted for token, wanted in pairs)} of {len(pairs)}"
    if way.is_judged and not all(as_expected):
        row[WRONG] = f"tokens are not those of transformers, the first time or again: {as_expected}"
    if not engine.recount().all_free:
        row[WRONG] = "blocks are still held"
    return row


if __name__ == "__main__":
    main()
