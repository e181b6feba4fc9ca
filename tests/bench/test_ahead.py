"""The kernels compiled for a GPU that need not be there."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from intarsia.kernels.toolchain import triton as gpu

SCRIPT = Path(__file__).parents[2] / "bench" / "ahead.py"

pytestmark = pytest.mark.skipif(gpu.missing() is not None, reason=str(gpu.missing()))


IN_SHORT = ("attend", "product gemma", "mxfp4 of experts", "mamba-2 bf16", "gated delta", "mixer", "norm bf16")


def compiled(*only: str) -> dict[str, dict[str, Any]]:
    """Rows of the script by kernel; it fails where one spills that must not, or takes more memory than there is."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(SCRIPT), "--dtypes", "bf16", *(word for name in only for word in ("--only", name))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, cwd="/")
    rows = {row["kernel"]: row for row in map(json.loads, done.stdout.splitlines())}
    assert done.returncode == 0, [row for row in rows.values() if row["spilled_bytes"]] or done.stderr[-2000:]
    return rows


@pytest.mark.slow
def test_kernels_compile_for_hopper_without_spilling_and_multiply_its_way():
    rows = compiled(*IN_SHORT)
    assert len(rows) > 30
    prompts = [row for name, row in rows.items() if "attend" in name and "(prompt)" in name and "latent" not in name]
    assert prompts and all(row["products"] == ["HGMMA"] for row in prompts)
    singles = [row for name, row in rows.items() if "attend" in name and "(single" in name]
    assert singles and all(row["wide_loads"] > 0 for row in singles), "pages are read 16 bytes at a time"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_all_kernels_compile_for_hopper_without_spilling():
    assert len(compiled()) > 150
