"""The kernels compiled for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from intarsia.kernels.toolchain import triton as gpu

SCRIPT = Path(__file__).parents[2] / "bench" / "ahead.py"

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


def test_kernels_compile_for_hopper_without_spilling_and_multiply_its_way():
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--dtypes", "bf16"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    rows = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, [row for row in rows.values() if row["spilled_bytes"]] or done.stderr[-2000:]
    assert len(rows) > 30
    prompts = [row for name, row in rows.items() if "attend" in name and "(prompt)" in name and "latent" not in name]
    assert prompts and all(row["products"] == ["HGMMA"] for row in prompts)
    singles = [row for name, row in rows.items() if "attend" in name and "(single" in name]
    assert singles and all(row["wide_loads"] > 0 for row in singles), "pages are read 16 bytes at a time"
