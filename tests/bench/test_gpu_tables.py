"""Lines of the battery, as tables."""

import json
from pathlib import Path

from intarsia.bench.gpu.tables import tables

SCENE = {"part": "attention", "job": "attention", "case": "decode 64 x 4k"}
ROWS = [
    {"run": "a", **SCENE, "backend": "triton", "us": 400.0, "floor_us": 351.0},
    {"run": "b", **SCENE, "backend": "flash", "us": 361.0, "floor_us": 351.0},
    {"run": "b", **SCENE, "backend": "triton", "us": 375.0, "floor_us": 351.0},
    {"run": "b", **SCENE, "backend": "torch", "skipped": "it gathers all keys first"},
    {"run": "b", **SCENE, "ended": 1, "took_s": 2.0},
    {"run": "b", "part": "families", "job": "families", "case": "all", "family": "llama", "way": "recorded"},
    {"run": "b", "part": "families", "job": "families", "case": "all", "family": "qwen3", "way": "recorded"},
    {"run": "b", "part": "families", "job": "families", "case": "all", "family": "x", "way": "recorded", "wrong": "no"},
]


def test_the_latest_lines_of_a_case_become_a_row_and_what_is_wrong_is_told(tmp_path: Path):
    file = tmp_path / "battery.jsonl"
    file.write_text("\n".join(json.dumps(row) for row in ROWS))
    told = tables(file)
    assert "| decode 64 x 4k | 375.0 | 361.0 |  | 351.0 | 1.04 | 1.07 |" in told
    assert "400" not in told
    assert "| recorded | 2 of 3 |" in told
    assert told.splitlines()[-1].startswith("wrong: ")
