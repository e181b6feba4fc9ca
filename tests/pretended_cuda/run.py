"""A family on a pretended CUDA device: what it answers, and what its steps cost there.

    python -m intarsia.tests.pretended_cuda.run gemma3 --json

Its own process, because torch is changed for good. Ends with 1 if tokens differ from those of the oracle, or if decode
steps are not recorded.
"""

import os

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # a real one would stand beside
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import argparse
import asyncio
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from intarsia.tests import models

ORACLE_TOKENS = 24


def main() -> int:
    asked = _arguments()
    prompts, images = models.prompts_of(asked.family)
    with tempfile.TemporaryDirectory() as folder:
        path = asked.model or models.make_checkpoint(asked.family, Path(folder, asked.family))
        expected = None if asked.model else _oracle(path, prompts, images, asked.tokens)
        answer = _pretend(path, prompts, images, asked)
    if expected is not None:
        answer["is_right"] = answer["tokens"] == expected and answer["again"] == expected
    print(json.dumps(answer) if asked.json else _told(answer))
    return int(not answer.get("is_right", True) or answer["refusal"] is not None)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=sorted(models.FAMILIES))
    parser.add_argument("--model", type=Path, help="its checkpoint, if there is one already; the tokens are not judged")
    parser.add_argument("--tokens", type=int, default=ORACLE_TOKENS, help="of each answer")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


def _oracle(path: Path, prompts: list[list[int]], images: list[list[bytes]], count: int) -> list[list[int]]:
    asked = zip(prompts, images, strict=True)
    return [models.greedy(models.load_oracle(path, pictures), prompt, count) for prompt, pictures in asked]


def _pretend(path: Path, prompts: list[list[int]], images: list[list[bytes]], asked: argparse.Namespace) -> Any:
    from . import runtime

    runtime.install()
    from . import engines  # modules of ours that use torch are imported from here on

    return asyncio.run(engines.run_family(path, prompts, images, asked.tokens, dtype=asked.dtype))


def _told(answer: dict[str, Any]) -> str:
    return "\n".join(f"{name}: {value}" for name, value in answer.items())


if __name__ == "__main__":
    sys.exit(main())
