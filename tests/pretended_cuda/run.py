"""A family on a pretended CUDA device: what it answers, and what its steps cost there.

    python -m intarsia.tests.pretended_cuda.run gemma3 --json
    python -m intarsia.tests.pretended_cuda.run gemma3 --ranks 2
    python -m intarsia.tests.pretended_cuda.run gemma3 --planted          mistakes, and how each of them is told

Its own process, because torch is changed for good. Ends with 1 if greedy tokens in float32 differ from those of the
oracle, or if decode steps are not recorded.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real one would stand beside
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import functools
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from intarsia.tests import models

from .child import ENDED
from .scenes import Scene, oracle, scene_of

TOKENS = 6


def main(arguments: list[str] | None = None) -> int:
    asked = _arguments(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = asked.model or models.make_checkpoint(asked.family, Path(folder, asked.family))
        scene = scene_of(asked.family, path, asked.prompts, asked.tokens)
        scene = replace(scene, ranks=asked.ranks, is_asked_again=not asked.once, meets_anew=asked.meet_anew)
        scene = replace(scene, is_varied=asked.varied)
        is_judged = asked.dtype == "float32" and not (asked.model or asked.planted is not None or asked.varied)
        expected = oracle(scene) if is_judged else None
        if asked.planted is None:
            answer = _run(scene, asked)
        else:
            answer = _planted(scene, asked)
    if expected is not None:
        answer["is_right"] = answer["tokens"] == expected and answer["again"] in (expected, [])
    print(json.dumps(answer) if asked.json else _told(answer))
    return int(not answer.get("is_right", True) or answer.get("refusal") is not None)


def runs() -> None:
    """One for each line of standard input, a list of arguments: each a fork of this process, which has imported what
    takes seconds."""
    _install()
    from . import engines, planted  # noqa: F401

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            _end(main(json.loads(line)))
        print(f"{ENDED}{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}", flush=True)


def _arguments(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="pretended_cuda.run", description="A family on a pretended CUDA device.")
    parser.add_argument("family", choices=sorted(models.FAMILIES))
    parser.add_argument("--model", type=Path, help="its checkpoint, if there is one; then tokens are not judged")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="of each answer")
    parser.add_argument("--prompts", type=int, default=3, help="how many of them")
    parser.add_argument("--ranks", type=int, default=1, help="each in a thread of this process")
    parser.add_argument("--varied", action="store_true", help="each of three answers is drawn in its own way")
    parser.add_argument("--once", action="store_true", help="else all is asked again, out of the prefix cache")
    parser.add_argument("--meet-anew", action="store_true", help="the ranks, before all is asked once more")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument(
        "--kv-cache-memory",
        default="4MiB",
        help="little of it makes requests give way to each other; empty: what is left",
    )
    parser.add_argument("--block-size", type=int)
    parser.add_argument("--swap", action="store_true", help="requests that give way wait in host memory")
    parser.add_argument("--same-bits", action="store_true", help="products in one order of sums")
    parser.add_argument("--packed-products", default="auto", help="what multiplies weights in fewer bits")
    parser.add_argument("--planted", nargs="*", help="try mistakes of planted.py, all or these, one by one")
    parser.add_argument("--names", action="store_true", help="with --planted: say only which mistakes would be tried")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args(arguments)


def _run(scene: Scene, asked: argparse.Namespace) -> dict[str, Any]:
    _install()
    from .engines import run_scene, swapping

    settings: dict[str, Any] = {"dtype": asked.dtype, "kv_cache_memory": asked.kv_cache_memory or None}
    settings |= {"same_bits": asked.same_bits, "packed_products": asked.packed_products}
    if asked.swap:
        settings |= swapping(asked.kv_cache_memory)
    if asked.block_size is not None:
        settings["block_size"] = asked.block_size
    return asyncio.run(run_scene(scene, **settings))


def _planted(scene: Scene, asked: argparse.Namespace) -> dict[str, Any]:
    _install()
    from .planted import shown_by, try_all

    return {"names": shown_by(scene)} if asked.names else try_all(scene, asked.kv_cache_memory, asked.planted)


@functools.cache
def _install() -> None:
    """Modules of ours that use torch are imported after this."""
    from . import runtime

    runtime.install()


def _told(answer: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in answer.items())


def _end(code: int) -> None:
    sys.stdout.flush()
    os._exit(code)  # torch, changed as it is, need not tidy up: once in many times it aborts there


if __name__ == "__main__":
    if sys.argv[1:] == ["--runs"]:
        runs()
    else:
        _end(main())
