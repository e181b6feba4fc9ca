"""Results as tables for people: `gpu_battery.py --tables battery.jsonl`. The latest line of each case counts."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .lines import BEGAN, ENDED, FAILED, LEFT_OUT, WRONG

Row = dict[str, Any]

BESIDE = {"products": ("rows", "tokens"), "packed": ("rows",), "families": ("way",)}
"""What else tells rows of a case apart, by part."""


def tables(path: Path) -> str:
    """Of all runs in a file, in Markdown."""
    rows = list(_latest(path))
    found = []
    for title, part, wanted, head, cells in TABLES:
        lines = [line for row in _grouped(rows, part, wanted) if (line := cells(row)) is not None]
        if lines:
            found += [
                f"\n**{title}**\n",
                markdown_row(head),
                markdown_row(["---"] * len(head)),
                *map(markdown_row, lines),
            ]
    bad = [row for row in rows if row.get(FAILED) or row.get(WRONG)]
    found += [f"\n{FAILED if row.get(FAILED) else WRONG}: {row}" for row in bad]
    return "\n".join(found)


def _latest(path: Path) -> Iterator[Row]:
    """A case that was measured again replaces what was told of it before."""
    kept: dict[tuple[Any, ...], list[Row]] = {}
    runs: dict[tuple[Any, ...], str] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        if {BEGAN, ENDED, LEFT_OUT} & row.keys() or "case" not in row:
            continue
        key = row["job"], row["case"]
        if runs.get(key) != row["run"]:
            kept[key], runs[key] = [], row["run"]
        kept[key].append(row)
    for group in kept.values():
        yield from group


def _grouped(rows: list[Row], part: str, wanted: str) -> Iterator[dict[str, Row]]:
    """Rows of a case that belong side by side, by what distinguishes them; `case` and `job` are in each."""
    groups: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        if row["part"] == part and wanted in row and "skipped" not in row:
            beside = tuple(row.get(name) for name in BESIDE.get(part, ()))
            groups.setdefault((row["job"], row["case"], *beside), {})[str(row[wanted])] = row
    yield from groups.values()


def markdown_row(cells: list[Any]) -> str:
    return "| " + " | ".join("" if cell is None else str(cell) for cell in cells) + " |"


def _any(group: dict[str, Row]) -> Row:
    return next(iter(group.values()))


def _us(group: dict[str, Row], *names: str, of: str = "us") -> Any:
    found = [group[name][of] for name in names if name in group and of in group[name]]
    return min(found) if found else None


def _ratio(a: Any, b: Any) -> str | None:
    return f"{a / b:.2f}" if a and b else None


def _ceiling(group: dict[str, Row]) -> list[Any] | None:
    row = _any(group)
    rates = {name: value for name, value in row.items() if name.endswith("_per_s")}
    return [row["case"], *(f"{value:,} {name.replace('_', ' ')}" for name, value in rates.items())] if rates else None


def _attention(group: dict[str, Row]) -> list[Any] | None:
    ours, flash = _us(group, "triton", "triton, frame"), _us(group, "flash", "flash, frame")
    if ours is None:
        return None
    plain = _us(group, "torch cuDNN", "torch flash", "torch")
    floor = _us(group, "triton", of="floor_us")
    return [_any(group)["case"], ours, flash, plain, floor, _ratio(ours, flash), _ratio(ours, floor)]


def _states(group: dict[str, Row]) -> list[Any] | None:
    ours, plain, floor = _us(group, "triton"), _us(group, "torch"), _us(group, "triton", of="floor_us")
    return [_any(group)["case"], ours, plain, floor, _ratio(ours, floor)] if ours else None


def _sampling(group: dict[str, Row]) -> list[Any]:
    cells = [(_us(group, name, of="kernel_us"), _us(group, name, of="kernels")) for name in ("triton", "torch")]
    return [_any(group)["case"], *cells[0], *cells[1]]


def _tokenwise(group: dict[str, Row]) -> list[Any] | None:
    chain = group.get("chain of a layer")
    return [chain["case"], chain["us"], chain["floor_us"], chain["times_floor"]] if chain and "us" in chain else None


def _products(group: dict[str, Row]) -> list[Any]:
    row = _any(group)
    size = f"{row['rows']} rows" if "rows" in row else f"{row['tokens']} tokens"
    theirs, ours = _us(group, "torch"), _us(group, "triton")
    return [row["case"], size, ours, theirs, row.get("floor_us"), _ratio(ours, theirs)]


def _packed(group: dict[str, Row]) -> list[Any]:
    row = _any(group)
    theirs, ours = _us(group, "torch"), _us(group, "triton")
    rates = [_us(group, way, of="gb_per_s") for way in ("triton", "torch")]
    return [row["case"], f"{row['rows']} rows", ours, theirs, *rates, _ratio(ours, theirs)]


def _steps(group: dict[str, Row]) -> list[Any]:
    row, launched = group.get("graphs") or _any(group), group.get("launched", {})
    cells = [row.get(name) for name in ("step_us", "floor_us", "times_floor", "tokens_per_s")]
    engine = row["job"].removeprefix("engine/")
    return [engine, row["case"].removeprefix("steps of "), *cells, launched.get("step_us")]


def _prompts(group: dict[str, Row]) -> list[Any]:
    row = _any(group)
    engine = row["job"].removeprefix("engine/")
    return [engine, row["tokens"], *(row.get(name) for name in ("first_token_ms", "tflop_per_s", "times_floor"))]


def _mixed(group: dict[str, Row]) -> list[Any]:
    row = _any(group)
    names = "tokens_of_a_step", "mixed_step_us", "floor_us", "tokens_per_s", "first_token_ms"
    return [row["job"].removeprefix("engine/"), *(row.get(name) for name in names)]


def _families(group: dict[str, Row]) -> list[Any] | None:
    rows = list(group.values())
    right = sum(not (row.get(WRONG) or row.get(FAILED)) for row in rows)
    return [rows[0].get("way"), f"{right} of {len(rows)}"]


Cells = Callable[[dict[str, Row]], list[Any] | None]

TABLES: list[tuple[str, str, str, list[str], Cells]] = [
    ("Ceilings", "ceilings", "us", ["what", "rate"], _ceiling),
    (
        "Attention, us of a layer",
        "attention",
        "backend",
        ["rows", "ours", "FlashAttention 3", "torch, dense", "floor", "ours / FA3", "ours / floor"],
        _attention,
    ),
    ("States, us of a layer", "states", "backend", ["rows", "ours", "plain torch", "floor", "ours / floor"], _states),
    (
        "Sampling, us of kernels",
        "sampling",
        "backend",
        ["rows x vocabulary", "ours", "launches", "torch", "launches"],
        _sampling,
    ),
    (
        "Norms, rotary positions and gate of a layer, us",
        "tokenwise",
        "operation",
        ["layer", "ours", "floor", "ours / floor"],
        _tokenwise,
    ),
    (
        "Products, us",
        "products",
        "way",
        ["weight", "of", "Triton", "torch", "floor", "Triton / torch"],
        _products,
    ),
    (
        "Products of weights in fewer bits, us, and GB/s of their bytes",
        "packed",
        "way",
        ["weight", "of", "Triton", "torch in 16 bits", "GB/s", "GB/s", "Triton / torch"],
        _packed,
    ),
    (
        "Decode steps, us",
        "engine",
        "how",
        ["model", "rows x tokens", "recorded", "floor", "/ floor", "tokens/s", "by Python"],
        _steps,
    ),
    (
        "Prompts",
        "engine",
        "first_token_ms",
        ["model", "tokens", "first token, ms", "TFLOP/s", "/ floor"],
        lambda group: None if "mixed_step_us" in _any(group) else _prompts(group),
    ),
    (
        "16 rows decode, 4 prompts of 2,048 come",
        "engine",
        "mixed_step_us",
        ["model", "tokens of a step", "step, us", "floor", "tokens/s", "first tokens, ms"],
        _mixed,
    ),
    ("Families whose tokens are those of transformers", "families", "family", ["way", "right"], _families),
]
