"""Predicts decode steps on an H100 without one, and holds the predictions against what one showed.

    python -m intarsia.bench.gpu.cost_model                          tables for people
    python -m intarsia.bench.gpu.cost_model --json                   all numbers, by step
    python -m intarsia.bench.gpu.cost_model --models llama-3.1-8b

Steps of the real shapes are traced on a device without memory (`traced.py`), each kernel is priced (`costs.py`), and a
step takes as long as its kernels one after another (`predicted.py`). Floors are the battery's own (`floors.py`).
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from .lines import short
from .models import MODELS
from .tables import markdown_row

if TYPE_CHECKING:
    from .predicted import Prediction


def main() -> int:
    parser = argparse.ArgumentParser(prog="cost_model", description="Decode steps on an H100, predicted.")
    parser.add_argument("--models", type=lambda text: text.split(","), default=list(MODELS))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    if unknown := [model for model in asked.models if model not in MODELS]:
        parser.error(f"there are no models {', '.join(unknown)}; choose from {', '.join(MODELS)}")
    from . import traced

    traced.install()
    from .predicted import attention, predictions  # and with it what uses torch

    found = [each for model in asked.models for each in predictions(model)]
    layers = attention()
    if asked.json:
        steps = [each._asdict() | {"times_floor": each.times_floor, "error": each.error} for each in found]
        print(json.dumps({"steps": steps, "attention_us": layers}))
    else:
        print("\n".join(_told(found, layers)))
    return 0


def _told(found: Sequence["Prediction"], layers: dict[str, tuple[float, float]]) -> Iterator[str]:
    from .predicted import ASKED

    head = ["model", "rows x tokens", "predicted, ms", "floor, ms", "/ floor", "allowed"]
    head += ["GB of weights", "of keys and values", "of states", "of others", "kernels", "unrecorded"]
    yield from _table("Predicted", head, [_prediction(each, ASKED) for each in found if each.measured_ms is None])
    head = ["model", "rows x tokens", "kernels", "predicted, ms", "measured, ms", "error"]
    yield from _table("Held against an H100", head, [_held(each) for each in found if each.measured_ms is not None])
    cells = [[name, short(ours), theirs, f"{ours / theirs - 1:+.0%}"] for name, (ours, theirs) in layers.items()]
    yield from _table("Attention of a layer", ["rows", "predicted, us", "measured, us", "error"], cells)


def _table(title: str, head: list[str], rows: Sequence[list[Any]]) -> Iterator[str]:
    yield from (f"\n**{title}**\n", markdown_row(head), markdown_row(["---"] * len(head)), *map(markdown_row, rows))


def _prediction(found: "Prediction", asked: dict[str, Any]) -> list[Any]:
    allowed = asked[found.step][1] if found.step in asked else None
    sizes = (f"{size:.2f}" for size in found.gigabytes.values())
    times = f"{found.times_floor:.2f}"
    cells = [found.model, found.step, f"{found.ms:.1f}", f"{found.floor_ms:.1f}", times, allowed]
    return [*cells, *sizes, found.kernels, found.unrecorded]


def _held(found: "Prediction") -> list[Any]:
    cells = [found.model, found.step, found.kernels, f"{found.ms:.1f}", found.measured_ms]
    return [*cells, f"{found.error:+.0%}" if found.error is not None else None]


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    os._exit(code)  # torch, changed as it is, need not tidy up
